"""The self-test on one rank: each check in turn, and after a failure in a world made anew."""

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
    """Run the self-test as one rank of whatever world the launcher's variables describe.

    Args:
        argv: Arguments of the program; None takes this process's own.

    Returns:
        The exit status: 1 where a check failed; where the results go into a file, where ranks were lost.
    """
    options = _parser().parse_args(argv)
    timeout = timedelta(seconds=options.timeout)

    def open_context() -> Context:
        guard = Guard(timeout=timeout, long_timeout=timeout)
        return init_context(guard=guard, kwargs_handlers=[InitProcessGroupKwargs(timeout=timeout)])

    report = Path(options.report) if options.report else None
    began = time.perf_counter()
    try:
        ctx = open_context()
    except Exception as error:  # noqa: BLE001 -- whatever goes wrong is what the test is for
        # No world: each rank says so by itself.
        if report is None:
            print(
                f"accelfn test: the ranks can't be set up: {text_of(error) or repr(error)}", file=sys.stderr
            )
        else:
            name = f"{JOINING} of rank {os.environ.get('RANK', '0')}"
            write_result(report, Result(name, "FAIL", time.perf_counter() - began, _said(error)))
        return 1
    speaks = ctx.is_local_main_process if report is not None else ctx.is_main_process
    place = (
        f"accelfn test: {ctx.num_processes} process(es) on {ctx.world.num_nodes} node(s), {ctx.device.type}"
    )

    def told(result: Result) -> None:
        if report is not None and speaks:
            write_result(report, result)

    chosen = [check for check in CHECKS if not options.only or check.name in options.only]
    results = run_checks(ctx, open_context, chosen, fault=options.fault, folder=options.folder, told=told)
    if report is not None:
        # A rank that is lost may still be there, and the launcher ends it only where another has failed. That
        # none is lost, only a check that comes after the failed ones can tell.
        is_lost = any(result.verdict == "not run" for result in results)
        return int(is_lost or bool(results and results[-1].verdict != "pass"))
    if speaks:
        print_results(results, place)
    return int(any(result.verdict != "pass" for result in results))


def run_checks(
    ctx: Context,
    open_context: Callable[[], Context],
    checks: Sequence[Check],
    *,
    fault: str = "",
    folder: str = "",
    told: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run checks, each after the other on all ranks, and close the context.

    What fails on one rank fails on all, and ends their world; the next check gets a new one.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The configured context.
        open_context: Makes another one like it.
        checks: What to run.
        fault: What is to go wrong on the last rank, or "".
        folder: For files; "": the system's own.
        told: Is given each result, and before that a ``"cut off"`` one when its check begins.

    Returns:
        What became of each check, as this rank sees it.
    """
    results: list[Result] = []
    now: Context | None = ctx
    lost = ""
    for check in checks:
        began = time.perf_counter()
        if now is None and not lost:
            try:
                now = open_context()
            except (AccelfnError, OSError) as error:
                lost = f"after the failure above the ranks did not meet again: {text_of(error)}"
        if now is None:
            results.append(Result(check.name, "not run", time.perf_counter() - began, lost))
            told(results[-1])
            continue
        told(Result(check.name, "cut off", 0.0, "the ranks ended during this check"))
        try:
            with failing_together(now, check.name):
                remark = check.run(Trial(ctx=now, fault=fault, folder=folder))
                wait_for_everyone(now)
            verdict = "pass"
        except Exception as error:  # noqa: BLE001 -- whatever goes wrong is what the test is for
            verdict, remark = "FAIL", _said(error)
            with contextlib.suppress(Exception):  # it has failed already
                close_context(now)
            now = None
        results.append(Result(check.name, verdict, time.perf_counter() - began, remark))
        told(results[-1])
    if now is not None:
        close_context(now)
    return results


def _said(error: Exception) -> str:
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
