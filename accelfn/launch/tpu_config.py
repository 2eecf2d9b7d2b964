"""``accelfn tpu-config``: run shell commands on every machine of a TPU with gcloud."""

import argparse
import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.launch import load_config

# A directory without user files that could shadow an installed package.
_DIRECTORY = "/usr/share"


def tpu_command(
    name: str, commands: Sequence[str], *, zone: str | None = None, alpha: bool = False
) -> tuple[str, ...]:
    """Build the gcloud command that runs shell commands on all machines of a TPU. Pure.

    Args:
        name: Name of the TPU.
        commands: Commands to run in order.
        zone: Zone of the TPU; None for gcloud's default.
        alpha: Use gcloud's alpha commands.

    >>> tpu_command("my-tpu", ["python -V"], zone="us-central1-a")[-3:]
    ('--command=cd /usr/share; python -V', '--worker=all', '--zone=us-central1-a')
    """
    joined = "; ".join((f"cd {_DIRECTORY}", *commands))
    program = ("gcloud", *(("alpha",) if alpha else ()), "compute", "tpus", "tpu-vm", "ssh", name)
    return (*program, f"--command={joined}", "--worker=all", *((f"--zone={zone}",) if zone else ()))


def run(options: argparse.Namespace) -> int:
    """Print the gcloud command, and run it unless ``--debug`` is given.

    Returns:
        The exit status of gcloud.
    """
    file = load_config(options.config_file, os.environ)
    config: Mapping[str, Any] = {} if file is None else file.values
    name = options.tpu_name or config.get("tpu_name")
    commands = _commands(options, config)
    if not name:
        raise ConfigurationError("no TPU given. Pass --tpu_name, or a --config_file that sets it.")
    if not commands:
        raise ConfigurationError(
            "no command given. Pass --command, --command_file, or a --config_file with commands."
        )
    if options.install_accelfn:
        version = options.accelfn_version
        package = "-U accelfn" if version == "latest" else shlex.quote(f"accelfn=={version}")
        commands.insert(0, f"pip install {package}")
    zone: Any = options.tpu_zone or config.get("tpu_zone")
    command = tpu_command(str(name), commands, zone=zone, alpha=options.use_alpha)
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


def _commands(options: argparse.Namespace, config: Mapping[str, Any]) -> list[str]:
    """List the commands of the flags, or else of the config file; a command file precedes single commands."""
    commands: list[str] = [word for words in options.command for word in words]
    file: str | None = options.command_file or (None if commands else config.get("command_file"))
    if file is None and not commands:
        commands = [*config.get("commands", ())]
    if file is not None:
        path = Path(file).expanduser()
        if not path.is_file():
            raise ConfigurationError(f"no command file {file!r}. Check --command_file.")
        commands = [*path.read_text(encoding="utf-8").splitlines(), *commands]
    return [line.strip() for line in commands if line.strip() and not line.strip().startswith("#")]


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn tpu-config", description="Run shell commands on every machine of a TPU with gcloud."
    )
    add = parser.add_argument
    add("--config_file", metavar="FILE", help="config file to use instead of the default")
    add("--tpu_name", metavar="NAME", help="name of the TPU")
    add("--tpu_zone", metavar="ZONE", help="zone of the TPU (gcloud's default)")
    add("--use_alpha", action="store_true", help="use gcloud alpha")
    add("--command_file", metavar="FILE", help="file of shell commands, one per line")
    repeated: Any = {"nargs": "+", "action": "append", "default": []}
    add("--command", metavar="COMMAND", help="shell command; repeatable", **repeated)
    add("--install_accelfn", action="store_true", help="install accelfn first")
    add("--accelfn_version", metavar="VERSION", default="latest", help="version to install (latest)")
    add("--debug", action="store_true", help="print the gcloud command without running it")
    return parser
