"""``accelfn test``: test the configured setup with checks whose results are known."""

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
from accelfn.launch.command_line import (
    FLAG_NOTE,
    CommandParser,
    add_launch_flags,
    normalize_flag,
    parse_flags,
)

_MODULE = "accelfn.launch.self_test_rank"
_WIDTH = 100

#: Names of all checks, in order.
CHECK_NAMES = (
    "ranks and settings",
    "collectives",
    "random states",
    "mesh",
    "loader, shuffled",
    "loader, even batches",
    "loader, resumed",
    "training, fp32",
    "training, as configured",
    "checkpoint round trip",
)

#: Faults to inject on the last rank, to see that they are detected.
FAULTS = ("settings", "value", "seed", "data", "model", "hang", "death")


def read(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments after ``test``; those of ``accelfn launch`` are in ``launch_flags``.

    Raises:
        ConfigurationError: A flag is unknown or invalid, or a script is given.
    """
    options, launch_flags = _own_parser().parse_known_args([normalize_flag(token) for token in argv])
    script = parse_flags(launch_flags).script
    if script is not None:
        raise ConfigurationError(
            f"accelfn test takes no script, got {script!r}. Pass only flags of accelfn launch."
        )
    if options.timeout <= 0:
        raise ConfigurationError(f"--timeout must be positive, got {options.timeout:g}.")
    return argparse.Namespace(**vars(options), launch_flags=launch_flags)


def run(options: argparse.Namespace) -> int:
    """Launch the self-test, and print the results.

    Returns:
        0 if all checks passed, 2 if the launch was refused, 128 and more after a signal, else 1.
    """
    with tempfile.TemporaryDirectory(prefix="accelfn-test-") as folder:
        report = Path(folder) / "results"
        status, stop = _launch(self_test_command(options, options.launch_flags, str(report)))
        results = read_results(report)
    if status == 2 and not results:
        return 2  # the launch has printed the error
    missing = [
        name for name in options.only or CHECK_NAMES if name not in {result.name for result in results}
    ]
    results += [Result(name, "not run", 0.0, "the ranks ended before this check") for name in missing]
    failed = status != 0 or any(result.verdict != "pass" for result in results)
    if options.json:
        rows = [result._asdict() for result in results]
        print(json.dumps({"passed": not failed, "status": status, "checks": rows}, indent=2))
    else:
        print_results(results, "accelfn test")
        sys.stdout.flush()
        if status != 0:
            print(f"accelfn test: the launch ended with status {status}.", file=sys.stderr)
    return 128 + stop if stop else int(failed)


def _launch(command: Sequence[str]) -> tuple[int, int]:
    """Run the launch until it ends, since only the launch can stop its ranks.

    Returns:
        Its exit status, and the signal that was forwarded to it or 0.
    """
    # In a new session, so that Ctrl-C reaches it only through the handler below. Warnings of torch's C++ code
    # would repeat the table.
    process = subprocess.Popen(
        command,
        env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )
    caught = [0]

    def forward(number: int, _: FrameType | None) -> None:
        caught.append(number)
        process.send_signal(number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, forward)
    return process.wait(), caught[-1]


def _end_with_parent() -> None:
    """Make Linux send SIGTERM to this process if its parent is killed."""
    set_death_signal = 1
    ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGTERM))


def self_test_command(
    options: argparse.Namespace, launch_flags: Sequence[str], report: str
) -> tuple[str, ...]:
    """Build the command that launches the self-test.

    Args:
        options: Options of ``accelfn test``.
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
    """Build the parser of the flags of ``accelfn test`` alone."""
    parser = CommandParser(
        prog="accelfn test",
        usage="accelfn test [--config_file FILE] [flags of accelfn launch]",
        description="Launch the self-test like a script, and print which checks pass.",
        epilog=f"All other flags are those of accelfn launch, such as --cpu --num_processes 2. {FLAG_NOTE}",
    )
    parser.add_argument("--config_file", metavar="FILE", help="config file to use instead of the default")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    add_check_flags(parser)
    return parser


def add_check_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that the ranks have too."""
    only = "run only this check; repeatable"
    folder = "directory for checkpoints, shared by all nodes"
    wait = "seconds for which ranks wait for each other (120)"
    fault = "inject a fault on the last rank, to see that it is detected"
    parser.add_argument(
        "--only", metavar="CHECK", action="append", default=[], choices=CHECK_NAMES, help=only
    )
    parser.add_argument("--folder", metavar="DIR", default="", help=folder)
    parser.add_argument("--timeout", metavar="S", type=float, default=120.0, help=wait)
    parser.add_argument("--fault", choices=FAULTS, default="", help=fault)


def make_parser() -> CommandParser:
    """Build the parser of the command, with the flags of ``accelfn launch``."""
    parser = _own_parser()
    add_launch_flags(parser)
    return parser


class Result(NamedTuple):
    """Result of a check.

    Attributes:
        name: Name of the check.
        verdict: ``"pass"``, ``"FAIL"``, ``"cut off"`` if the ranks ended during the check, or ``"not run"``
            if the ranks could not reconnect after a failure.
        seconds: Duration.
        remark: Details or the error.
    """

    name: str
    verdict: Literal["pass", "FAIL", "cut off", "not run"]
    seconds: float
    remark: str


def write_result(path: Path, result: Result) -> None:
    """Append a result to a file, so that it is kept if the ranks are killed."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def read_results(path: Path) -> list[Result]:
    """Read the results in a file, the last one of each check. The file may be missing."""
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    return [*{row.name: row for row in (Result(*json.loads(line)) for line in lines)}.values()]


def print_results(results: Sequence[Result], title: str) -> None:
    """Print a table of results, and the errors below it."""
    width = max([len(result.name) for result in results], default=0)
    print(title)
    by_remark: dict[str, list[str]] = {}  # of those that failed, printed below
    for name, verdict, seconds, remark in results:
        if verdict != "pass":
            by_remark.setdefault(remark, []).append(name)
            remark = ""
        print(f"  {verdict:<7}  {name:<{width}}  {seconds:6.2f} s  {remark}".rstrip())
    passed = sum(result.verdict == "pass" for result in results)
    total_s = sum(result.seconds for result in results)
    print(f"{passed} of {len(results)} checks passed in {total_s:.1f} s")
    for remark, names in by_remark.items():
        shown = names if len(names) < 5 else [*names[:3], f"and {len(names) - 3} more"]
        print(f"\n{', '.join(shown)}:")
        for line in remark.splitlines():
            print(textwrap.fill(line, _WIDTH, initial_indent="  ", subsequent_indent="  "))
