"""Entry point of the ``accelfn`` command. Imports nothing heavy, so that it answers at once."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelfn import __version__
from accelfn.launch.arguments import CommandParser, CommandWords, describe_arguments, read_arguments
from accelfn.launch.checkpoint import checkpoint_parser, run_checkpoint
from accelfn.launch.completion import completion_parser, launch_words, run_completion, self_test_words
from accelfn.launch.config_command import config_parser, run_config
from accelfn.launch.data_plan import data_plan_parser, run_data_plan
from accelfn.launch.env import env_parser, run_env
from accelfn.launch.estimate import estimate_parser, run_estimate
from accelfn.launch.launch import run_launch
from accelfn.launch.merge_weights import merge_weights_parser, run_merge_weights
from accelfn.launch.output import (
    CLOSED_PIPE,
    OutputError,
    guarded_output,
    is_closed_pipe,
    open_missing_streams,
)
from accelfn.launch.plan_memory import plan_memory_parser, run_plan_memory
from accelfn.launch.runs import run_runs, runs_parser
from accelfn.launch.self_test import run_self_test
from accelfn.launch.to_fsdp2 import run_to_fsdp2, to_fsdp2_parser
from accelfn.launch.tpu_config import run_tpu_config, tpu_config_parser

__all__ = ("main",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    name: str
    about: str
    run: Callable[[Sequence[str]], int]
    words: Callable[[], CommandWords]


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
    open_missing_streams()
    try:
        with guarded_output(sys.stdout):
            return _run(arguments)
    except OutputError as error:
        if is_closed_pipe(error):
            return CLOSED_PIPE  # who reads has read enough, and nothing is wrong
        command = [word for word in arguments[:1] if not word.startswith("-")]
        print(f"{' '.join(('accelfn', *command))}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


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
    return run_completion(
        argv,
        CommandWords(
            flags=describe_arguments(_parser()).flags,
            commands={command.name: command.words() for command in _COMMANDS},
            about={command.name: command.about for command in _COMMANDS},
        ),
    )


def _words(parser: Callable[[], CommandParser]) -> Callable[[], CommandWords]:
    return lambda: describe_arguments(parser())


_COMMANDS = (
    _Command(
        name="launch",
        about="start a training script on one or more processes",
        run=run_launch,
        words=launch_words,
    ),
    _Command(
        name="config",
        about="write, show, renew and take over configurations",
        run=run_config,
        words=_words(config_parser),
    ),
    _Command(name="env", about="print what a report of a fault needs", run=run_env, words=_words(env_parser)),
    _Command(
        name="test",
        about="try the configured setup, and say what works",
        run=run_self_test,
        words=self_test_words,
    ),
    _Command(
        name="data-plan",
        about="draw which rank reads which samples",
        run=run_data_plan,
        words=_words(data_plan_parser),
    ),
    _Command(
        name="estimate-memory",
        about="say how much memory a model takes",
        run=run_estimate,
        words=_words(estimate_parser),
    ),
    _Command(
        name="checkpoint",
        about="verify, list, show, prune and convert checkpoints",
        run=run_checkpoint,
        words=_words(checkpoint_parser),
    ),
    _Command(
        name="plan-memory",
        about="say where each part of a model would lie",
        run=run_plan_memory,
        words=_words(plan_memory_parser),
    ),
    _Command(
        name="runs",
        about="list, show and draw runs that were logged",
        run=run_runs,
        words=_words(runs_parser),
    ),
    _Command(
        name="merge-weights",
        about="make one file of FSDP's sharded weights",
        run=run_merge_weights,
        words=_words(merge_weights_parser),
    ),
    _Command(
        name="to-fsdp2",
        about="rewrite a configuration of FSDP for FSDP2",
        run=run_to_fsdp2,
        words=_words(to_fsdp2_parser),
    ),
    _Command(
        name="tpu-config",
        about="run commands on every machine of a TPU",
        run=run_tpu_config,
        words=_words(tpu_config_parser),
    ),
    _Command(
        name="completion",
        about="complete commands and flags in a shell",
        run=_complete,
        words=_words(completion_parser),
    ),
)
