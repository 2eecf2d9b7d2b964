"""``accelfn tpu-config``: run shell commands on every machine of a TPU with gcloud."""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.config_file import find_config_file, read_text
from accelfn.launch.documents import read_tree

# A directory without user files that could shadow an installed package.
_DIRECTORY = "/usr/share"


def tpu_command(
    name: str,
    commands: Sequence[str],
    *,
    zone: str | None = None,
    alpha: bool = False,
    install: str | None = None,
) -> tuple[str, ...]:
    """Build the gcloud command that runs shell commands on all machines of a TPU. Pure.

    Args:
        name: Name of the TPU.
        commands: Commands to run in order.
        zone: Zone of the TPU; None for gcloud's default.
        alpha: Use gcloud's alpha commands.
        install: Version of accelfn to install first, or ``"latest"``; None to install nothing.

    >>> tpu_command("my-tpu", ["python -V"], zone="us-central1-a")[-3:]
    ('--command=cd /usr/share; python -V', '--worker=all', '--zone=us-central1-a')
    """
    package = "-U accelfn" if install == "latest" else shlex.quote(f"accelfn=={install}")
    first = () if install is None else (f"pip install {package}",)
    joined = "; ".join((f"cd {_DIRECTORY}", *first, *commands))
    return (
        *("gcloud", *(("alpha",) if alpha else ()), "compute", "tpus", "tpu-vm", "ssh", name),
        *(f"--command={joined}", "--worker=all"),
        *((f"--zone={zone}",) if zone is not None else ()),
    )


def run(options: argparse.Namespace) -> int:
    """Print the gcloud command, and run it unless ``--debug`` is given.

    Returns:
        The exit status of gcloud.
    """
    config = _read_tpu_section(options.config_file)
    name = options.tpu_name or config.get("name")
    zone = options.tpu_zone or config.get("zone")
    commands = _commands(options, config)
    if not name:
        raise ConfigurationError("no TPU given. Pass --tpu_name, or a --config_file that sets it.")
    if not commands:
        raise ConfigurationError(
            "no command given. Pass --command, --command_file, or a --config_file with commands."
        )
    install = options.accelfn_version if options.install_accelfn else None
    command = tpu_command(name, commands, zone=zone, alpha=options.use_alpha, install=install)
    print(shlex.join(command), flush=True)
    if options.debug:
        return 0
    gcloud = shutil.which(command[0])
    if gcloud is None:
        raise ConfigurationError(
            "gcloud is not on the PATH. Install the Google Cloud CLI, or print the command with --debug and "
            "run it elsewhere."
        )
    return subprocess.call([gcloud, *command[1:]])


def _read_tpu_section(given: str | None) -> dict[str, Any]:
    """Read the TPU options of a config file of accelfn or Accelerate."""
    path, is_requested = find_config_file(given, os.environ, sys.platform, os.path.expanduser("~"))
    if not is_requested and not os.path.exists(path):
        return {}
    tree = read_tree(read_text(path), path, typed=True)
    section = tree.get("tpu_options")
    nested: Mapping[str, Any] = cast("Mapping[str, Any]", section) if isinstance(section, dict) else {}
    names = {"name": "tpu_name", "zone": "tpu_zone", "commands": "commands", "command_file": "command_file"}
    return {short: nested.get(short, tree.get(long)) for short, long in names.items()}


def _commands(options: argparse.Namespace, config: Mapping[str, Any]) -> list[str]:
    """List the commands of the flags, or else of the config file; a command file precedes single commands."""
    commands: list[str] = [word for words in options.command for word in words]
    file = options.command_file or (None if commands else config.get("command_file"))
    lines: list[str] = []
    if file:
        path = Path(str(file)).expanduser()
        if not path.is_file():
            raise ConfigurationError(f"no command file {str(file)!r}. Check --command_file.")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    elif not commands:
        given: object = config.get("commands") or []
        commands = [given] if isinstance(given, str) else [str(part) for part in cast("Sequence[Any]", given)]
    return [line for line in (*lines, *commands) if line and not line.startswith("#")]


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn tpu-config",
        description="Run shell commands on every machine of a TPU with gcloud.",
    )
    parser.add_argument("--config_file", metavar="FILE", help="config file to use instead of the default")
    parser.add_argument("--tpu_name", metavar="NAME", help="name of the TPU")
    parser.add_argument("--tpu_zone", metavar="ZONE", help="zone of the TPU (gcloud's default)")
    parser.add_argument("--use_alpha", action="store_true", help="use gcloud alpha")
    parser.add_argument("--command_file", metavar="FILE", help="file of shell commands, one per line")
    parser.add_argument(
        "--command",
        metavar="COMMAND",
        nargs="+",
        action="append",
        default=[],
        help="shell command; repeatable",
    )
    parser.add_argument("--install_accelfn", action="store_true", help="install accelfn first")
    parser.add_argument(
        "--accelfn_version",
        metavar="VERSION",
        default="latest",
        help="version of accelfn to install (latest)",
    )
    parser.add_argument("--debug", action="store_true", help="print the gcloud command without running it")
    return parser
