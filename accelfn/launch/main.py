"""Entry point of the ``accelfn`` command. Imports only the module of the command that runs."""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from accelfn import __version__
from accelfn.errors import AccelfnError, DamagedCheckpointError
from accelfn.launch.command_line import CommandParser, read_arguments

#: The module and the help of each command. A module defines ``make_parser()`` and ``run(options)``, and
#: ``read(argv)`` if its arguments need more than the parser.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "launch": ("launch", "start a training script on one or more processes"),
        "config": ("config_command", "create, show, update and import config files"),
        "env": ("env", "print system information for a bug report"),
        "test": ("self_test", "test the configured setup"),
        "estimate-memory": ("estimate", "estimate the memory that a model needs"),
        "checkpoint": ("checkpoint", "verify, list, show, prune and convert checkpoints"),
        "plan-memory": ("plan_memory", "show on which device each part of a model fits"),
        "runs": ("runs", "list and show logged runs"),
        "merge-weights": ("merge_weights", "merge the sharded weights of FSDP into one file"),
        "to-fsdp2": ("to_fsdp2", "convert a config file from FSDP to FSDP2"),
        "tpu-config": ("tpu_config", "run shell commands on every machine of a TPU"),
        "completion": ("completion", "print a shell completion script"),
    }
)
# 128 + SIGPIPE, the status of other programs whose output is no longer read.
_CLOSED_PIPE = 141
# Errors caused by a wrong path argument.
_PATH_ERRORS = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``accelfn`` command.

    Args:
        argv: Arguments after the program's name; ``None`` for those of this process.

    Returns:
        The exit status of the command: 2 for invalid input, 1 for a damaged checkpoint, a failed disk or
        output that can't be written, 141 for a closed output pipe, 130 after Ctrl-C. ``accelfn launch`` does
        not return: the launched program replaces this process.
    """
    try:
        try:
            return _run(tuple(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        status = _CLOSED_PIPE  # the reader has read enough; no error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"accelfn: error: can't write the output: {error.strerror}.", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        return 130
    # Otherwise Python flushes again at exit and prints another error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return status


def load_command(name: str) -> Any:
    """Import the module of a command."""
    return importlib.import_module(f"accelfn.launch.{COMMANDS[name][0]}")


def _run(arguments: Sequence[str]) -> int:
    parser = _make_parser()
    prog = parser.prog
    try:
        try:
            # The rest belongs to the command, including `--help`.
            name = read_arguments(parser, arguments[:1]).command
            if name is None:
                parser.print_help(sys.stderr)
                return 2
            command, rest, prog = load_command(name), arguments[1:], f"{prog} {name}"
            if hasattr(command, "read"):
                options = command.read(rest)
            else:
                options = read_arguments(command.make_parser(), rest)
        except SystemExit as stop:  # from argparse, after the help or an error
            return int(stop.code or 0)
        prog = " ".join(filter(None, (prog, getattr(options, "action", None))))
        return command.run(options)
    except DamagedCheckpointError as error:
        print(f"{prog}: damaged: {error}", file=sys.stderr)
        return 1
    except (AccelfnError, ValueError, TypeError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
    except OSError as error:
        if error.filename is None and error.errno in (errno.EPIPE, errno.ENOSPC):
            raise  # writing the output failed
        message = str(error) if error.filename is None else f"{error.filename}: {error.strerror}."
        print(f"{prog}: error: {message}", file=sys.stderr)
        return 2 if isinstance(error, _PATH_ERRORS) else 1
    return 2


def _make_parser() -> CommandParser:
    parser = CommandParser(
        prog="accelfn",
        usage="accelfn [--help] [--version] command ...",
        description="Distributed PyTorch training as plain functions.",
        epilog="Commands:\n" + "\n".join(f"  {name:<17}{about}" for name, (_, about) in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"accelfn {__version__}")
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), help=argparse.SUPPRESS)
    return parser
