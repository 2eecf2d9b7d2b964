"""Entry point of the ``accelfn`` command. Imports nothing heavy, so that it answers at once."""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from accelfn import __version__
from accelfn.launch.checkpoint import run_checkpoint
from accelfn.launch.completion import run_completion
from accelfn.launch.config_command import run_config
from accelfn.launch.data_plan import run_data_plan
from accelfn.launch.env import run_env
from accelfn.launch.estimate import run_estimate
from accelfn.launch.launch import run_launch
from accelfn.launch.merge_weights import run_merge_weights
from accelfn.launch.plan_memory import run_plan_memory
from accelfn.launch.runs import run_runs
from accelfn.launch.self_test import run_self_test
from accelfn.launch.to_fsdp2 import run_to_fsdp2
from accelfn.launch.tpu_config import run_tpu_config

__all__ = ("main",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    name: str
    about: str
    run: Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one ``accelfn`` command.

    Args:
        argv: Arguments after the program's name; ``None`` takes this process's own.

    Returns:
        The exit status. ``accelfn launch`` of one process does not return: this one becomes the script.

    Raises:
        SystemExit: 0 after ``--help`` or ``--version``; 2 after one sentence on what is wrong.
    """
    arguments = tuple(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    # Only the first word is ours; the rest belongs to the command, `--help` included.
    name = parser.parse_args(arguments[:1]).command
    if name is None:
        parser.print_help(sys.stderr)
        return 2
    command = next(command for command in _COMMANDS if command.name == name)
    return command.run(arguments[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelfn",
        usage="accelfn [--help] [--version] command ...",
        description="Distributed PyTorch training as plain functions.",
        epilog="Commands:\n" + "\n".join(f"  {command.name:<17}{command.about}" for command in _COMMANDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"accelfn {__version__}")
    parser.add_argument(
        "command", nargs="?", choices=tuple(command.name for command in _COMMANDS), help=argparse.SUPPRESS
    )
    return parser


def _complete(argv: Sequence[str]) -> int:
    return run_completion(argv, tuple(command.name for command in _COMMANDS))


_COMMANDS = (
    _Command(name="launch", about="start a training script on one or more processes", run=run_launch),
    _Command(name="config", about="write, show, renew and take over configurations", run=run_config),
    _Command(name="env", about="print what a report of a fault needs", run=run_env),
    _Command(name="test", about="try the configured setup, and say what works", run=run_self_test),
    _Command(name="data-plan", about="draw which rank reads which samples", run=run_data_plan),
    _Command(name="estimate-memory", about="say how much memory a model takes", run=run_estimate),
    _Command(
        name="checkpoint", about="verify, list, show, prune and convert checkpoints", run=run_checkpoint
    ),
    _Command(name="plan-memory", about="say where each part of a model would lie", run=run_plan_memory),
    _Command(name="runs", about="list, show and draw runs that were logged", run=run_runs),
    _Command(name="merge-weights", about="make one file of FSDP's sharded weights", run=run_merge_weights),
    _Command(name="to-fsdp2", about="rewrite a configuration of FSDP for FSDP2", run=run_to_fsdp2),
    _Command(name="tpu-config", about="run commands on every machine of a TPU", run=run_tpu_config),
    _Command(name="completion", about="complete commands and flags in a shell", run=_complete),
)
