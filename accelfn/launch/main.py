"""Entry point of the ``accelfn`` command. Imports nothing heavy, and only the command that is run."""

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

#: The commands: the module of each, and what it does. A module has ``make_parser()`` and ``run(options)``,
#: and ``read(argv)`` where more than the parser reads its arguments.
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "launch": ("launch", "start a training script on one or more processes"),
        "config": ("config_command", "create, show, update and import config files"),
        "env": ("env", "print system information for a bug report"),
        "test": ("self_test", "try the configured setup, and report what works"),
        "data-plan": ("data_plan", "draw which rank reads which samples"),
        "estimate-memory": ("estimate", "estimate how much memory a model takes"),
        "checkpoint": ("checkpoint", "verify, list, show, prune, convert checkpoints"),
        "plan-memory": ("plan_memory", "show where parts of a model would be placed"),
        "runs": ("runs", "list, show and draw runs that were logged"),
        "merge-weights": ("merge_weights", "merge FSDP's sharded weights into one file"),
        "to-fsdp2": ("to_fsdp2", "rewrite a configuration of FSDP for FSDP2"),
        "tpu-config": ("tpu_config", "run commands on every machine of a TPU"),
        "completion": ("completion", "complete commands and flags in a shell"),
    }
)
#: Exit status after the reader of a pipe has gone: 128 + SIGPIPE, what a shell reports of ``cat`` there.
_CLOSED_PIPE = 141
# Faults of the disk that are faults of a path that was given.
_OF_PATHS = (FileExistsError, FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``accelfn`` command.

    Args:
        argv: Arguments after the program's name; ``None`` takes this process's own.

    Returns:
        The exit status: that of the command; 2 after one sentence on what is wrong with the input; 1 where a
        checkpoint is damaged or a disk fails; 141 where nobody reads on what it prints, 1 where that can't be
        written, 130 after Ctrl-C. ``accelfn launch`` does not return: this process becomes the launch.
    """
    try:
        try:
            return _run(tuple(sys.argv[1:] if argv is None else argv))
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        status = _CLOSED_PIPE  # whoever reads has read enough, and nothing is wrong
    except OSError as error:
        if error.errno != errno.ENOSPC:  # of a module that a command imports, for example
            raise
        print(f"accelfn: error: what it prints can't be written: {error.strerror}.", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        return 130
    # Else Python tries once more when it ends, and complains.
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
            # Only the first word is ours; the rest belongs to the command, `--help` included.
            name = read_arguments(parser, arguments[:1]).command
            if name is None:
                parser.print_help(sys.stderr)
                return 2
            command, rest, prog = load_command(name), arguments[1:], f"{prog} {name}"
            if hasattr(command, "read"):
                options = command.read(rest)
            else:
                options = read_arguments(command.make_parser(), rest)
        except SystemExit as stop:  # of argparse: after the help, or one sentence on what is wrong
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
            raise  # of the output
        said = str(error) if error.filename is None else f"{error.filename}: {error.strerror}."
        print(f"{prog}: error: {said}", file=sys.stderr)
        return 2 if isinstance(error, _OF_PATHS) else 1
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
