"""``accelfn test``: try the configured setup with small programs whose results are known."""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser, parse_flags, spell
from accelfn.launch.selftest.table import CHECK_NAMES, FAULTS, add_missing, print_results, read_results

_MODULE = "accelfn.launch.selftest"


def run_self_test(argv: Sequence[str]) -> int:
    """Run ``accelfn test``. Effect: launches the self-test, and prints its table.

    Args:
        argv: Arguments after ``test``.

    Returns:
        0 where every check has passed, 2 where the launch was refused, 128 and more after a signal, 1
        otherwise.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.
    """
    parser = self_test_parser()
    options, launch_flags = parser.parse_known_args([spell(token) for token in argv])
    try:
        launched = parse_flags(launch_flags)
    except ConfigurationError as error:
        parser.error(str(error))
    if launched.script is not None:
        parser.error(f"it takes no script, got {launched.script!r}. Give flags of accelfn launch only.")
    if options.timeout <= 0:
        parser.error(f"--timeout must be more than 0 seconds, got {options.timeout:g}.")
    with tempfile.TemporaryDirectory(prefix="accelfn-test-") as folder:
        report = Path(folder) / "results"
        command = self_test_command(options, launch_flags, str(report))
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


def self_test_parser() -> CommandParser:
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
