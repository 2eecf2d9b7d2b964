"""Entry point of the ``accelfn`` command. Imports nothing heavy, so that it answers at once."""

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelfn import __version__
from accelfn.launch.checkpoint import run_checkpoint
from accelfn.launch.command import LaunchOptions, find_busy_port, format_plan, plan_launch, run_plan
from accelfn.launch.data_plan import run_data_plan
from accelfn.launch.estimate import run_estimate
from accelfn.launch.flags import parse_launch_options
from accelfn.launch.plan_memory import run_plan_memory
from accelfn.launch.runs import run_runs

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
        The exit status. ``accelfn launch`` does not return: the process becomes torchrun.

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


def _launch(argv: Sequence[str]) -> int:
    options, dry_run = parse_launch_options(argv)
    missing = _find_missing_script(options)
    if missing is not None:
        return _refuse(missing)
    plan = plan_launch(options, os.environ, _count_cores(), python=sys.executable)
    if dry_run:
        print(format_plan(plan))
        return 0
    port = find_busy_port(plan)
    if port is not None:
        return _refuse(
            f"port {port} of this machine is taken by another program. Give a free one with "
            "--main_process_port; on one machine, leave the flag out and any free port is used."
        )
    return run_plan(plan, os.environ)


def _refuse(reason: str) -> int:
    print(f"accelfn launch: error: {reason}", file=sys.stderr)
    return 2


def _find_missing_script(options: LaunchOptions) -> str | None:
    """Say what is wrong with the script's name, before torch is loaded once per process to find out."""
    if options.module:
        return None  # finding a module runs its parent packages, which is the script's own business
    if options.no_python:
        found = shutil.which(options.script) is not None
        return None if found else f"there is no program {options.script!r} to run. Check the path or PATH."
    if Path(options.script).is_file():
        return None
    return (
        f"there is no script {options.script!r} in {os.getcwd()!r}. Check the path; for a module use -m, "
        "for another program --no_python."
    )


def _count_cores() -> int:
    """Count the cores this process may use; a container or taskset can allow fewer than there are."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_COMMANDS = (
    _Command(name="launch", about="start a training script on one or more processes", run=_launch),
    _Command(name="data-plan", about="draw which rank reads which samples", run=run_data_plan),
    _Command(name="estimate-memory", about="say how much memory a model takes", run=run_estimate),
    _Command(
        name="checkpoint", about="verify, list, show, prune and convert checkpoints", run=run_checkpoint
    ),
    _Command(name="plan-memory", about="say where each part of a model would lie", run=run_plan_memory),
    _Command(name="runs", about="list, show and draw runs that were logged", run=run_runs),
)
