"""Launchers, and the parts of Accelerate's command line that programs import."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import accelfn.launch.functions as functions
from accelfn.compat.alias import child_variables
from accelfn.compat.helpers import patch_environment
from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser, add_launch_flags, parse_flags
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_command import default_values
from accelfn.launch.config_file import default_path, find_config_file, format_config
from accelfn.launch.launch import load_config
from accelfn.launch.machine import read_machine
from accelfn.launch.options import OPTIONS, read_value
from accelfn.launch.output import write_text
from accelfn.launch.plan_commands import flags_of

default_config_file: str = str(default_path(os.environ, sys.platform, str(Path.home())))


class LaunchValues(argparse.Namespace):
    """The values of a configuration of launches, by name."""

    def to_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))


def load_config_from_file(config_file: str | None) -> LaunchValues:
    """Read a configuration of ``accelfn config`` or ``accelerate config``.

    Raises:
        ConfigurationError: The file doesn't exist, or its content is invalid.
    """
    file = load_config(config_file, os.environ)
    return LaunchValues(**({} if file is None else file.values))


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Write a configuration for all devices of this machine, as ``accelfn config default`` does.

    Args:
        mixed_precision: ``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``.
        save_location: The file; by default the one that ``accelfn launch`` reads.

    Returns:
        Its path; False, after a line that says so, if it exists already: then it stays as it is.

    Raises:
        ConfigurationError: The precision is unknown.
    """
    given = None if save_location is None else str(save_location)
    path = Path(find_config_file(given, os.environ, sys.platform, str(Path.home()))[0])
    if path.exists():
        print(f"{path} exists, and stays as it is. To change it: accelfn config.")
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    values = default_values(read_machine(os.environ), mixed_precision.lower())
    write_text(str(path), format_config(LaunchConfig(**values), str(path), frozenset(values)))
    return path


def launch_main() -> None:
    """Run ``accelfn launch --compat`` with this process's arguments."""
    from accelfn.launch.main import main

    sys.exit(main(["launch", "--compat", *sys.argv[1:]]))


class LaunchParser(CommandParser):
    """The parser of ``accelfn launch``, whose result has Accelerate's names.

    Each option is an attribute, None if it isn't given; so are ``config_file``, ``training_script`` and
    ``training_script_args``.
    """

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line up to its script; what follows is the script's."""
        found = argparse.Namespace() if namespace is None else namespace
        try:
            parsed = parse_flags(sys.argv[1:] if args is None else args)
            for name, option in OPTIONS.items():
                given = parsed.flags.get(name)
                setattr(found, name, None if given is None else read_value(option, given.text))
        except (ConfigurationError, ValueError) as error:
            self.error(str(error))
        if "help" in parsed.actions:
            self.print_help()
            self.exit()
        found.config_file = parsed.actions.get("config_file")
        if parsed.script is None:
            self.error("no script given.")
        found.training_script = parsed.script
        found.training_script_args = [*parsed.script_args]
        return found, []


def launch_command_parser() -> LaunchParser:
    """Build the parser of a launch, for :func:`launch_command`."""
    parser = LaunchParser(
        prog="accelfn launch",
        usage="accelfn launch [flags] script [arguments of the script]",
        description="Start a script on one or more processes and machines.",
        add_help=False,
    )
    add_launch_flags(parser)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run a script by ``accelfn launch --compat``, and wait for its end.

    Args:
        args: What the parser has returned. Its attributes may have been changed.

    Raises:
        SystemExit: The launch has failed; with its status.
    """
    given = getattr(args, "config_file", None)
    file = () if given is None else (f"--config_file={given}",)
    flags = (*file, *flags_of({**vars(args), "compat": True}))
    command = [sys.executable, "-m", "accelfn", "launch", *flags, "--", args.training_script]
    child = subprocess.Popen([*command, *map(str, args.training_script_args)])
    while child.poll() is None:
        with contextlib.suppress(KeyboardInterrupt):  # the launch gets it too, and ends its ranks
            child.wait()
    if child.returncode:
        raise SystemExit(child.returncode)


def _with_alias(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Return a launcher whose ranks import accelfn under Accelerate's name too."""

    @functools.wraps(launcher)
    def launch(*args: Any, **kwargs: Any) -> Any:
        with patch_environment(**child_variables(os.environ)):
            return launcher(*args, **kwargs)

    return launch


notebook_launcher: Callable[..., Any] = _with_alias(functions.notebook_launcher)
debug_launcher: Callable[..., Any] = _with_alias(functions.debug_launcher)
