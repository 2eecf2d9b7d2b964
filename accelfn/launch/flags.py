"""The flags of ``accelfn launch``: a table, and how a command line is cut and read with it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from accelfn.launch.command import LaunchOptions

__all__ = ("Flag", "launch_parser", "parse_launch_options", "spell")


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag. Its name, without the dashes, is a field of :class:`LaunchOptions`, or ``dry_run``.

    Args:
        name: Long name with two dashes and underscores.
        about: Help text.
        kind: Type of the value; ``bool`` takes none.
        short: Second, one-letter name.
        metavar: What stands for the value in the help.
        choices: The values allowed; empty for any.
    """

    name: str
    about: str
    kind: type[bool] | type[int] | type[float] | type[str] = str
    short: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()


_FLAGS = (
    Flag(name="--num_processes", kind=int, metavar="N", about="processes on all machines together (1)"),
    Flag(name="--num_machines", kind=int, metavar="N", about="machines that take part (1)"),
    Flag(name="--machine_rank", kind=int, metavar="N", about="index of this machine, from 0"),
    Flag(name="--main_process_ip", metavar="HOST", about="address of machine 0"),
    Flag(
        name="--main_process_port",
        kind=int,
        metavar="PORT",
        about="port on machine 0 (29500; on one machine any free port)",
    ),
    Flag(
        name="--mixed_precision",
        choices=("no", "fp16", "bf16", "fp8"),
        about="precision of contexts that are not given one",
    ),
    Flag(
        name="--gradient_accumulation_steps",
        kind=int,
        metavar="N",
        about="accumulation of contexts that are not given one",
    ),
    Flag(name="--cpu", kind=bool, about="use the CPU even where there is an accelerator"),
    Flag(
        name="--debug",
        kind=bool,
        about="compare calls in full, not by fingerprint, before each operation across ranks",
    ),
    Flag(name="--module", short="-m", kind=bool, about="the script is a module, as in python -m"),
    Flag(name="--no_python", kind=bool, about="the script is a program of its own"),
    Flag(name="--max_restarts", kind=int, metavar="N", about="start all processes again N times (0)"),
    Flag(name="--monitor_interval", kind=float, metavar="SECONDS", about="time between looks at processes"),
    Flag(
        name="--rdzv_backend",
        choices=("static", "c10d"),
        about="how machines meet: by --machine_rank (static), or ranks are given out (c10d)",
    ),
    Flag(name="--rdzv_conf", metavar="K=V,...", about="further rendezvous options"),
    Flag(name="--log_dir", metavar="DIR", about="where output of the processes is kept"),
    Flag(
        name="--tee",
        short="-t",
        metavar="STREAMS",
        about="streams to show and keep; 3 is both (see torchrun)",
    ),
    Flag(name="--role", metavar="NAME", about="name of the processes in messages"),
    Flag(
        name="--num_cpu_threads_per_process",
        kind=int,
        metavar="N",
        about="OMP_NUM_THREADS (cores / processes if the variable is not set)",
    ),
    Flag(name="--dry_run", kind=bool, about="print the exact command and its variables, and stop"),
)


def launch_parser() -> argparse.ArgumentParser:
    """Build the parser of everything that stands before the script.

    Returns:
        A parser for the flags alone. Flags that are not given leave no attribute behind.
    """
    parser = argparse.ArgumentParser(
        prog="accelfn launch",
        usage="accelfn launch [flags] script [arguments of the script]",
        description="Start a training script on one or more processes, through torchrun.",
        epilog="In names of flags - and _ mean the same. Everything after the script belongs to the script.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for flag in _FLAGS:
        names = (flag.name,) if flag.short is None else (flag.short, flag.name)
        if flag.kind is bool:
            parser.add_argument(*names, action="store_true", help=flag.about)
        else:
            parser.add_argument(
                *names, type=flag.kind, metavar=flag.metavar, choices=flag.choices or None, help=flag.about
            )
    return parser


def parse_launch_options(argv: Sequence[str]) -> tuple[LaunchOptions, bool]:
    """Read the arguments of ``accelfn launch``. Effect: for ``--help`` and bad input it prints and exits.

    Args:
        argv: Arguments after ``launch``.

    Returns:
        The options, and whether ``--dry_run`` was given.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.

    >>> options, dry_run = parse_launch_options(["--num-processes", "2", "train.py", "--lr", "0.1"])
    >>> options.num_processes, options.script, options.script_args, dry_run
    (2, 'train.py', ('--lr', '0.1'), False)
    """
    parser = launch_parser()
    flags, rest = _split_at_script(argv)
    given = vars(parser.parse_args(flags))
    dry_run = bool(given.pop("dry_run", False))
    if not rest:
        parser.error("no script given. Name one: accelfn launch [flags] train.py")
    try:
        return LaunchOptions(script=rest[0], script_args=rest[1:], **given), dry_run
    except ValueError as error:
        parser.error(str(error))


def _split_at_script(argv: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Cut before the script, so that no parser ever sees the script's arguments.

    argparse could do it with ``nargs=REMAINDER``, but it would still match what comes after the script
    with our flags, and drop a ``--`` there.
    """
    takes_value = frozenset(
        name for flag in _FLAGS if flag.kind is not bool for name in (flag.name, flag.short) if name
    )
    flags: list[str] = []
    tokens = tuple(argv)
    position = 0
    while position < len(tokens) and tokens[position].startswith("-") and tokens[position] != "-":
        if tokens[position] == "--":
            return tuple(flags), tokens[position + 1 :]
        token = spell(tokens[position])
        flags.append(token)
        position += 1
        if token in takes_value and position < len(tokens):
            flags.append(tokens[position])
            position += 1
    return tuple(flags), tokens[position:]


def spell(token: str) -> str:
    """Spell a long flag's name with underscores; leave its value and short flags alone. Pure.

    >>> spell("--num-processes=a-b"), spell("-m")
    ('--num_processes=a-b', '-m')
    """
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
