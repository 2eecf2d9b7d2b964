"""``launch_processes``: a function on several fresh ranks of this machine, in one call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, TypeVar

from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions
from accelfn.launch.launchers.arguments import (
    check_call,
    check_environment,
    check_options,
    check_seconds,
    check_whole,
)
from accelfn.launch.launchers.job import launch_folder, write_job
from accelfn.launch.launchers.local import run_locally
from accelfn.testing.outcome import conclude

__all__ = ("launch_processes", "rank_threads")

T = TypeVar("T")


def launch_processes(
    fn: Callable[Concatenate[Context, ...], T],
    num_processes: int,
    args: Sequence[Any] = (),
    *,
    timeout_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Unpack[ContextOptions],
) -> list[T]:
    """Run ``fn(ctx, *args)`` on each of ``num_processes`` fresh processes, and return what each returned.

    Each process starts anew, as ``python`` would, and makes its own context. So it does not matter whether
    this process has touched an accelerator, has threads, or runs a notebook; and what ``fn`` changes in its
    process, this one does not see. The ranks end with this call, or when this process ends, however it ends.
    Nothing changes here: no variable is set, no process group made.

    A function that a notebook or a script defines itself, or that stands inside of another one, takes
    cloudpickle (``accelfn[notebook]``). Modules must be importable; the ranks search where this process does.

    Ranks: local; the calling process is none of the ranks.

    Args:
        fn: What every rank runs, with its context before the arguments.
        num_processes: Number of ranks, at least 1.
        args: Further arguments, the same for all; they are copied.
        timeout_s: How long the ranks may take in all, their start included; None: for ever.
        environment: Variables to set in the ranks.
        **options: Keyword arguments of :func:`accelfn.init_context`, for every rank's context.

    Returns:
        What ``fn`` returned, by rank; tensors come back on the CPU.

    Raises:
        Exception: What a rank raised: of several, the one that was the cause of the others, with a note that
            names its rank. Its cause is the traceback of the rank.
        MissingRankError: A rank died.
        CollectiveTimeoutError: The ranks did not end in time.
        MissingExtraError: ``fn`` can be sent by cloudpickle only, which isn't installed.
        TypeError: ``fn``, an argument or a result can't be sent to another process; what holds a
            context or an ``Accelerator`` is refused. Or an argument of this function is of the wrong kind.
        ValueError: ``num_processes`` is less than 1, or ``timeout_s`` not more than 0.
    """
    check_call("launch_processes", fn, args)
    num_processes = check_whole("launch_processes", "num_processes", num_processes, 1)
    if timeout_s is not None:
        check_seconds("launch_processes", "timeout_s", timeout_s)
    given = check_environment("launch_processes", environment)
    check_options("launch_processes", options, ContextOptions.__annotations__)
    with launch_folder() as place:
        variables = {**rank_threads(num_processes), **given}
        write_job(place, "launch_processes", fn, args, options, variables)
        outcomes = run_locally("launch_processes", place, num_processes, timeout_s=timeout_s)
        return conclude(outcomes, "fresh processes")


def rank_threads(num_processes: int) -> dict[str, str]:
    """Share the cores of this machine, where nobody has said how many threads a rank shall have."""
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return {"OMP_NUM_THREADS": str(max(1, cores // num_processes))}
