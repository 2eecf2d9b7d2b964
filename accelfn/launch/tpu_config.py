"""``accelfn tpu-config``: run commands on every machine of a TPU, through gcloud."""

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
from accelfn.launch.config.files import find_config_file, read_text, read_tree
from accelfn.launch.config.secrets import hide_in_words

# A directory of every machine in which nothing of the user's hides an installed package.
_WHERE = "/usr/share"


def tpu_command(
    name: str,
    commands: Sequence[str],
    *,
    zone: str | None = None,
    alpha: bool = False,
    install: str | None = None,
) -> tuple[str, ...]:
    """Write the gcloud command that runs shell commands on all machines of a TPU. Pure.

    Args:
        name: Of the TPU.
        commands: To run, one after the other.
        zone: Of the TPU; None: the one that gcloud is set to.
        alpha: Use gcloud's alpha commands.
        install: Install accelfn first: ``"latest"`` or a version. None: don't.

    >>> tpu_command("my-tpu", ["python -V"], zone="us-central1-a")[-3:]
    ('--command=cd /usr/share; python -V', '--worker=all', '--zone=us-central1-a')
    """
    wanted = "-U accelfn" if install == "latest" else shlex.quote(f"accelfn=={install}")
    first = () if install is None else (f"pip install {wanted}",)
    joined = "; ".join((f"cd {_WHERE}", *first, *commands))
    return (
        *("gcloud", *(("alpha",) if alpha else ()), "compute", "tpus", "tpu-vm", "ssh", name),
        *(f"--command={joined}", "--worker=all"),
        *((f"--zone={zone}",) if zone is not None else ()),
    )


def run(options: argparse.Namespace) -> int:
    """Run ``accelfn tpu-config``. Effect: prints the gcloud command, and runs it without ``--debug``.

    Returns:
        The exit status: that of gcloud; 2 for bad input.
    """
    told = _configured(options.config_file)
    name = options.tpu_name or told.get("name")
    zone = options.tpu_zone or told.get("zone")
    commands = _commands(options, told)
    if not name:
        raise ConfigurationError("no TPU is named. Give --tpu_name, or a --config_file with a name in it.")
    if not commands:
        raise ConfigurationError(
            "there is nothing to run. Give --command, --command_file, or a --config_file with commands."
        )
    install = options.accelfn_version if options.install_accelfn else None
    command = tpu_command(name, commands, zone=zone, alpha=options.use_alpha, install=install)
    if options.debug:
        print(shlex.join(command))
        return 0
    print(shlex.join(hide_in_words(command)), flush=True)  # a log may keep it
    gcloud = shutil.which(command[0])
    if gcloud is None:
        raise ConfigurationError(
            "gcloud isn't on the PATH, and it is what reaches a TPU. Install the Google Cloud CLI, or print "
            "the command with --debug and run it elsewhere."
        )
    return subprocess.call([gcloud, *command[1:]])


def _configured(given: str | None) -> dict[str, Any]:
    """Read what a configuration says of the TPU, in accelfn's or in Accelerate's layout."""
    path, is_asked = find_config_file(given, os.environ, sys.platform, os.path.expanduser("~"))
    if not is_asked and not os.path.exists(path):
        return {}
    tree = read_tree(read_text(path), path, typed=True)
    section = tree.get("tpu_options")
    own: Mapping[str, Any] = cast("Mapping[str, Any]", section) if isinstance(section, dict) else {}
    names = {"name": "tpu_name", "zone": "tpu_zone", "commands": "commands", "command_file": "command_file"}
    return {short: own.get(short, tree.get(long)) for short, long in names.items()}


def _commands(options: argparse.Namespace, told: Mapping[str, Any]) -> list[str]:
    """Choose what to run: the flags', else the configuration's; a file before single commands."""
    of_flags: list[str] = [word for words in options.command for word in words]
    file = options.command_file or (None if of_flags else told.get("command_file"))
    lines: list[str] = []
    if file:
        path = Path(str(file)).expanduser()
        if not path.is_file():
            raise ConfigurationError(f"there is no file of commands {str(file)!r}. Check --command_file.")
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    elif not of_flags:
        given: object = told.get("commands") or []
        of_flags = [given] if isinstance(given, str) else [str(one) for one in cast("Sequence[Any]", given)]
    return [line for line in (*lines, *of_flags) if line and not line.startswith("#")]


def make_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn tpu-config",
        description="Run commands on every machine of a TPU, through gcloud.",
    )
    parser.add_argument("--config_file", metavar="FILE", help="configuration to read (the default one)")
    parser.add_argument("--tpu_name", metavar="NAME", help="of the TPU")
    parser.add_argument("--tpu_zone", metavar="ZONE", help="of the TPU (the one that gcloud is set to)")
    parser.add_argument("--use_alpha", action="store_true", help="gcloud alpha")
    parser.add_argument("--command_file", metavar="FILE", help="shell commands, one a line")
    parser.add_argument(
        "--command", metavar="COMMAND", nargs="+", action="append", default=[], help="may be repeated"
    )
    parser.add_argument("--install_accelfn", action="store_true", help="install accelfn there first")
    parser.add_argument(
        "--accelfn_version", metavar="VERSION", default="latest", help="a version, or latest (latest)"
    )
    parser.add_argument("--debug", action="store_true", help="only print the gcloud command")
    return parser
