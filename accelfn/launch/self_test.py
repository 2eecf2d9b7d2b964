"""``accelfn test``: try the configured setup with small programs whose results are known."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser, add_launch_flags, parse_flags, spell

_MODULE = "accelfn.launch.self_test_rank"
_WIDTH = 100

#: Of all checks, in their order.
CHECK_NAMES = (
    "ranks and settings",
    "collectives",
    "objects across ranks",
    "process control",
    "trigger",
    "random states",
    "mesh",
    "loader, shuffled",
    "loader, even batches",
    "loader, split batches",
    "loader, dispatched",
    "loader, resumed",
    "training, fp32",
    "training, accumulation",
    "training, bf16",
    "training, as configured",
    "training, Accelerator",
    "checkpoint round trip",
)

#: Begins the name of the row of a rank that has not come so far as to be checked.
JOINING = "joining"

#: What can be made to go wrong on the last rank, to see that it is found.
FAULTS = ("settings", "value", "seed", "data", "model", "hang", "death")


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Read the arguments after ``test``: its own, and in ``launch_flags`` those of ``accelfn launch``.

    Raises:
        ConfigurationError: A flag is unknown or has a wrong value, or a script is given.
    """
    options, launch_flags = _own_parser().parse_known_args([spell(token) for token in argv])
    launched = parse_flags(launch_flags)
    if launched.script is not None:
        raise ConfigurationError(
            f"it takes no script, got {launched.script!r}. Give flags of accelfn launch only."
        )
    if options.timeout <= 0:
        raise ConfigurationError(f"--timeout must be more than 0 seconds, got {options.timeout:g}.")
    return argparse.Namespace(**vars(options), launch_flags=launch_flags)


def run(options: argparse.Namespace) -> int:
    """Run ``accelfn test``. Effect: launches the self-test, and prints its table.

    Returns:
        0 where every check has passed, 2 where the launch was refused, 128 and more after a signal, 1
        otherwise.
    """
    with tempfile.TemporaryDirectory(prefix="accelfn-test-") as folder:
        report = Path(folder) / "results"
        command = self_test_command(options, options.launch_flags, str(report))
        status, stop = _run(command)
        results = read_results(report)
        asked = [name for name in CHECK_NAMES if name in options.only] if options.only else CHECK_NAMES
        results = add_missing(results, asked) if results or status not in (0, 2) else ()
        failed = status != 0 or any(result.verdict != "pass" for result in results)
        if options.json:
            rows = [result._asdict() for result in results]
            print(json.dumps({"passed": not failed, "status": status, "checks": rows}, indent=2))
        elif results:
            print_results(results, "accelfn test")
    if status == 2 and not results:
        return 2  # of the launch, which has said why
    if status != 0 and not options.json:
        sys.stdout.flush()
        print(f"accelfn test: the launch ended with status {status}.", file=sys.stderr)
    return int(failed) if stop is None else 128 + stop


def _run(command: Sequence[str]) -> tuple[int, int | None]:
    """Run the launch, and stay until it has ended: it alone knows how to end its ranks.

    Returns:
        Its exit status, and the first signal that came to stop it.
    """
    # A session of its own: Ctrl-C in a terminal must reach it once, and from here. Of torch's C++ part errors
    # will do: what it warns of, the table says.
    process = subprocess.Popen(
        command,
        env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    caught: list[int] = []

    def pass_on(number: int, _: FrameType | None) -> None:
        caught.append(number)
        process.send_signal(number)

    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    kept = {
        number: signal.signal(number, pass_on)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup has it
    }
    try:
        return process.wait(), caught[0] if caught else None
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _end_with_parent() -> None:
    """Have the system send this process SIGTERM if its parent is killed."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGTERM))


def self_test_command(
    options: argparse.Namespace, launch_flags: Sequence[str], report: str
) -> tuple[str, ...]:
    """Write the command that launches the self-test. Pure.

    Args:
        options: Of ``accelfn test``.
        launch_flags: Flags for ``accelfn launch``.
        report: File for the results.
    """
    return (
        *(sys.executable, "-m", "accelfn", "launch"),
        *(("--config_file", options.config_file) if options.config_file is not None else ()),
        *launch_flags,
        *("-m", _MODULE, "--report", report, "--timeout", f"{options.timeout:g}"),
        *(("--fault", options.fault) if options.fault else ()),
        *(("--folder", os.path.abspath(options.folder)) if options.folder else ()),
        *(part for name in options.only for part in ("--only", name)),
    )


def _own_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn test",
        usage="accelfn test [--config_file FILE] [flags of accelfn launch]",
        description="Launch the self-test as a script would be launched, and print what works.",
        epilog="All other flags are those of accelfn launch, such as --cpu --num_processes 2. In names of "
        "flags - and _ mean the same.",
    )
    parser.add_argument("--config_file", metavar="FILE", help="configuration to test (the default one)")
    parser.add_argument(
        "--only",
        metavar="CHECK",
        action="append",
        default=[],
        choices=CHECK_NAMES,
        help="run this check alone; may be repeated",
    )
    parser.add_argument(
        "--folder", metavar="DIR", default="", help="for checkpoints; all nodes must share it"
    )
    parser.add_argument(
        "--timeout",
        metavar="S",
        type=float,
        default=120.0,
        help="seconds that ranks wait for each other (120)",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument(
        "--fault",
        choices=FAULTS,
        default="",
        help="break something on the last rank, to see that it is found",
    )
    return parser


def make_parser() -> CommandParser:
    """Describe the arguments of the command: its own, and those of ``accelfn launch``."""
    parser = _own_parser()
    add_launch_flags(parser)
    return parser


class Result(NamedTuple):
    """What became of a check.

    Attributes:
        name: Of the check.
        verdict: ``"pass"``, ``"FAIL"``, or ``"cut off"``: it had begun when the ranks ended,
            or ``"not run"``: after a failure the ranks did not meet again.
        seconds: That it took.
        remark: What there is to say.
    """

    name: str
    verdict: Literal["pass", "FAIL", "cut off", "not run"]
    seconds: float
    remark: str


def write_result(path: Path, result: Result) -> None:
    """Add a line to a file of results. It is read also when the ranks come to a sudden end."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def read_results(path: Path) -> tuple[Result, ...]:
    """Read a file of results; of several lines on one check the last counts.

    Args:
        path: That ranks have written; it may be missing.
    """
    if not path.exists():
        return ()
    rows = [Result(*json.loads(line)) for line in path.read_text("utf-8").splitlines()]
    return tuple({row.name: row for row in rows}.values())


def add_missing(results: Sequence[Result], asked: Sequence[str]) -> tuple[Result, ...]:
    """Add a row for each check that the ranks have not come to. Pure.

    >>> found = add_missing([Result("trigger", "pass", 0.0, "")], ["trigger", "collectives"])
    >>> found[1].verdict, found[1].name
    ('not run', 'collectives')
    """
    why = "the ranks had ended before"
    there = {result.name for result in results}
    missing = (Result(name, "not run", 0.0, why) for name in asked if name not in there)
    return (*results, *missing)


def print_results(results: Sequence[Result], title: str) -> None:
    """Print a table.

    Args:
        results: In their order.
        title: Of the whole.
    """
    failed = [result for result in results if result.verdict != "pass"]
    total_s = sum(result.seconds for result in results)
    verdict = f"{len(results) - len(failed)} of {len(results)} checks passed in {total_s:.1f} s"
    width = max([len(result.name) for result in results], default=0)
    print(title)
    for result in results:
        # What failed is told below in full.
        remark = result.remark if result.verdict == "pass" else ""
        line = f"  {result.verdict:<7}  {result.name:<{width}}  {result.seconds:6.2f} s  {remark}"
        print(line.rstrip())
    print(verdict)
    by_remark: dict[str, list[str]] = {}
    for result in failed:
        by_remark.setdefault(result.remark, []).append(result.name)
    for remark, names in by_remark.items():
        shown = names if len(names) < 5 else [*names[:3], f"and {len(names) - 3} more"]
        print(f"\n{', '.join(shown)}:")
        print(_wrapped(remark))


def _wrapped(message: str) -> str:
    lines = [textwrap.wrap(line, _WIDTH - 2) or [""] for line in message.splitlines()]
    return textwrap.indent("\n".join(part for line in lines for part in line), "  ")
