"""Entry point of the ``accelfn`` command. Imports nothing heavy, so that it answers at once."""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelfn import __version__
from accelfn.launch.checkpoint import checkpoint_parser, run_checkpoint
from accelfn.launch.command_line import CommandParser, add_launch_flags, launch_parser, read_arguments
from accelfn.launch.config_command import config_parser, run_config
from accelfn.launch.data_plan import data_plan_parser, run_data_plan
from accelfn.launch.env import env_parser, run_env
from accelfn.launch.estimate import estimate_parser, run_estimate
from accelfn.launch.launch import run_launch
from accelfn.launch.merge_weights import merge_weights_parser, run_merge_weights
from accelfn.launch.plan_memory import plan_memory_parser, run_plan_memory
from accelfn.launch.runs import run_runs, runs_parser
from accelfn.launch.self_test import run_self_test, self_test_parser
from accelfn.launch.to_fsdp2 import run_to_fsdp2, to_fsdp2_parser
from accelfn.launch.tpu_config import run_tpu_config, tpu_config_parser

#: Exit status after the reader of a pipe has gone: 128 + SIGPIPE, what a shell reports of ``cat`` there.
_CLOSED_PIPE = 141


@dataclass(frozen=True, slots=True)
class _Command:
    name: str
    about: str
    run: Callable[[Sequence[str]], int]
    parser: Callable[[], CommandParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``accelfn`` command.

    Args:
        argv: Arguments after the program's name; ``None`` takes this process's own.

    Returns:
        The exit status: that of the command; 141 where nobody reads on what it prints, 1 where that can't be
        written, 130 after Ctrl-C. ``accelfn launch`` of one process does not return: this one becomes the
        script.

    Raises:
        SystemExit: 0 after ``--help`` or ``--version``; 2 after one sentence on what is wrong.
    """
    arguments = tuple(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(arguments)
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


def _run(arguments: Sequence[str]) -> int:
    parser = _parser()
    # Only the first word is ours; the rest belongs to the command, `--help` included.
    name = read_arguments(parser, arguments[:1]).command
    if name is None:
        parser.print_help(sys.stderr)
        return 2
    command = next(command for command in _COMMANDS if command.name == name)
    return command.run(arguments[1:])


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="accelfn",
        usage="accelfn [--help] [--version] command ...",
        description="Distributed PyTorch training as plain functions.",
        epilog="Commands:\n" + "\n".join(f"  {command.name:<17}{command.about}" for command in _COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"accelfn {__version__}")
    parser.add_argument(
        "command", nargs="?", choices=tuple(command.name for command in _COMMANDS), help=argparse.SUPPRESS
    )
    return parser


def _complete(argv: Sequence[str]) -> int:
    """Print the script by which one shell completes commands and flags."""
    options = read_arguments(_completion_parser(), argv)
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError:
        missing = "it needs shtab, which is not installed. Run: pip install 'accelfn[cli]'"
        print(f"accelfn completion: error: {missing}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="accelfn")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers()
    for command in _COMMANDS:
        commands.add_parser(command.name, help=command.about)
        commands.choices[command.name] = command.parser()
    print(shtab.complete(parser, options.shell))
    return 0


def _completion_parser() -> CommandParser:
    parser = CommandParser(
        prog="accelfn completion",
        description="Print a script by which a shell completes the accelfn command.",
        epilog='bash: eval "$(accelfn completion bash)" in ~/.bashrc. zsh: the same, after compinit, in '
        "~/.zshrc. fish: accelfn completion fish > ~/.config/fish/completions/accelfn.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="for which shell")
    return parser


def _parser_of_test() -> CommandParser:
    """Describe the arguments of ``accelfn test``: its own flags and those of ``accelfn launch``."""
    parser = self_test_parser()
    add_launch_flags(parser)
    return parser


_COMMANDS = (
    _Command("launch", "start a training script on one or more processes", run_launch, launch_parser),
    _Command("config", "create, show, update and import config files", run_config, config_parser),
    _Command("env", "print system information for a bug report", run_env, env_parser),
    _Command("test", "try the configured setup, and report what works", run_self_test, _parser_of_test),
    _Command("data-plan", "draw which rank reads which samples", run_data_plan, data_plan_parser),
    _Command("estimate-memory", "estimate how much memory a model takes", run_estimate, estimate_parser),
    _Command(
        "checkpoint", "verify, list, show, prune, convert checkpoints", run_checkpoint, checkpoint_parser
    ),
    _Command(
        "plan-memory", "show where parts of a model would be placed", run_plan_memory, plan_memory_parser
    ),
    _Command("runs", "list, show and draw runs that were logged", run_runs, runs_parser),
    _Command(
        "merge-weights", "merge FSDP's sharded weights into one file", run_merge_weights, merge_weights_parser
    ),
    _Command("to-fsdp2", "rewrite a configuration of FSDP for FSDP2", run_to_fsdp2, to_fsdp2_parser),
    _Command("tpu-config", "run commands on every machine of a TPU", run_tpu_config, tpu_config_parser),
    _Command("completion", "complete commands and flags in a shell", _complete, _completion_parser),
)
