"""Run the self-test on one rank: all checks in order, with a new world after a failure."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from accelfn.comm import failing_together, wait_for_everyone
from accelfn.context import Context, close_context, init_context, text_of
from accelfn.context.config import Guard, InitProcessGroupKwargs
from accelfn.errors import AccelfnError, RemoteRankError
from accelfn.launch.self_test import FAULTS, JOINING, Result, print_results, write_result
from accelfn.launch.self_test_checks import CHECKS, Check, Trial


def main(argv: Sequence[str] | None = None) -> int:
    """Run the self-test as one rank of the world that the environment variables describe.

    Args:
        argv: Arguments of the program; None for those of this process.

    Returns:
        The exit status: 1 if a check failed. With ``--report``, only if ranks may be lost.
    """
    options = _parser().parse_args(argv)
    timeout = timedelta(seconds=options.timeout)

    def open_context() -> Context:
        guard = Guard(timeout=timeout, long_timeout=timeout)
        return init_context(guard=guard, kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])

    report = Path(options.report) if options.report else None
    start_s = time.perf_counter()
    try:
        ctx = open_context()
    except Exception as error:  # noqa: BLE001 -- any error is a result of the test
        # Without a world, each rank reports by itself.
        if report is None:
            print(
                f"accelfn test: the ranks can't be set up: {text_of(error) or repr(error)}", file=sys.stderr
            )
        else:
            name = f"{JOINING} of rank {os.environ.get('RANK', '0')}"
            write_result(report, Result(name, "FAIL", time.perf_counter() - start_s, _describe(error)))
        return 1
    reports = ctx.is_local_main_process if report is not None else ctx.is_main_process
    title = (
        f"accelfn test: {ctx.num_processes} process(es) on {ctx.world.num_nodes} node(s), {ctx.device.type}"
    )

    def on_result(result: Result) -> None:
        if report is not None and reports:
            write_result(report, result)

    checks = [check for check in CHECKS if not options.only or check.name in options.only]
    results = run_checks(
        ctx, open_context, checks, fault=options.fault, folder=options.folder, on_result=on_result
    )
    if report is not None:
        # The launcher stops a rank that hangs only if another one fails. A check that passes after a failure
        # shows that no rank hangs.
        is_lost = any(result.verdict == "not run" for result in results)
        return int(is_lost or bool(results and results[-1].verdict != "pass"))
    if reports:
        print_results(results, title)
    return int(any(result.verdict != "pass" for result in results))


def run_checks(
    ctx: Context,
    open_context: Callable[[], Context],
    checks: Sequence[Check],
    *,
    fault: str = "",
    folder: str = "",
    on_result: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run checks in order on all ranks, and close the context.

    A check that fails on one rank fails on all, and closes their world. The next check gets a new one.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The configured context.
        open_context: Opens a context with the same configuration.
        checks: The checks.
        fault: Fault to inject on the last rank, or "".
        folder: Directory for files; "" for a temporary one.
        on_result: Called with each result, and with ``"cut off"`` when a check starts.

    Returns:
        The results on this rank.
    """
    results: list[Result] = []
    current: Context | None = ctx
    reason = ""
    for check in checks:
        start_s = time.perf_counter()
        if current is None and not reason:
            try:
                current = open_context()
            except (AccelfnError, OSError) as error:
                reason = f"the ranks could not reconnect after the failure above: {text_of(error)}"
        if current is None:
            results.append(Result(check.name, "not run", time.perf_counter() - start_s, reason))
            on_result(results[-1])
            continue
        on_result(Result(check.name, "cut off", 0.0, "the ranks ended during this check"))
        try:
            with failing_together(current, check.name):
                remark = check.run(Trial(ctx=current, fault=fault, folder=folder))
                wait_for_everyone(current)
            verdict = "pass"
        except Exception as error:  # noqa: BLE001 -- any error is a result of the test
            verdict, remark = "FAIL", _describe(error)
            with contextlib.suppress(Exception):  # the check has failed already
                close_context(current)
            current = None
        results.append(Result(check.name, verdict, time.perf_counter() - start_s, remark))
        on_result(results[-1])
    if current is not None:
        close_context(current)
    return results


def _describe(error: Exception) -> str:
    if isinstance(error, RemoteRankError):
        return f"rank {error.rank}: {error.cause}: {error.message}"
    name = type(error).__name__
    text = text_of(error)
    return text if text and isinstance(error, AssertionError) else f"{name}: {text}" if text else name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m accelfn.launch.self_test_rank", allow_abbrev=False)
    names = tuple(check.name for check in CHECKS)
    parser.add_argument("--only", action="append", default=[], choices=names, metavar="CHECK")
    parser.add_argument("--fault", default="", choices=("", *FAULTS))
    parser.add_argument("--folder", default="")
    parser.add_argument("--report", default="")
    parser.add_argument("--timeout", type=float, default=120.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
