"""torch's profiler with one trace per rank."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from accelfn.comm import Call, agree, catch
from accelfn.config import ProfileKwargs
from accelfn.context import Context, takes_context
from accelfn.errors import ConfigurationError, NotAvailableError


@takes_context
@contextmanager
def profile(
    ctx: Context, profile_handler: ProfileKwargs | None = None
) -> Generator[torch.profiler.profile, None, None]:
    """Run a block under torch's profiler.

    With ``output_trace_dir``, each rank writes a Chrome trace ``profile_{rank}.json``, and the ranks
    synchronize at the end. With a schedule, the file contains the last recorded cycle. If the block raises,
    the trace is written without synchronization.

    Ranks: every rank of ``ctx`` if traces are written, otherwise any.

    Args:
        ctx: The context, with ``ProfileKwargs`` in its ``kwargs_handlers``.
        profile_handler: Replaces those of the context.

    Yields:
        The profiler. With a schedule, call its ``step()`` after each step.

    Raises:
        NotAvailableError: Ranks are threads, or an activity isn't supported here.
        ConfigurationError: ``on_trace_ready`` has already exported the trace.
        OSError: A trace can't be written (``RemoteRankError`` on the other ranks).

    >>> with profile(Context()) as profiler:
    ...     total = torch.ones(8).sum()
    >>> any("sum" in event.key for event in profiler.key_averages())
    True
    """
    if ctx.num_processes > 1 and not dist.is_initialized():
        raise NotAvailableError(
            "profile: these ranks are threads, but torch has one profiler per process. Profile processes, "
            "such "
            'as run_ranks(..., on="processes"), or a single rank.'
        )
    options = ctx.profiling if profile_handler is None else profile_handler
    if options.output_trace_dir is None:
        with options.build() as profiler:
            yield profiler
        return
    path = Path(options.output_trace_dir) / f"profile_{ctx.rank}.json"
    results: list[tuple[Path | None, Exception | None]] = []  # raised after the block, not during a step

    def on_ready(profiler: torch.profiler.profile) -> None:
        if options.on_trace_ready is not None:
            options.on_trace_ready(profiler)
        results.append(catch(lambda: _write(profiler, path)))

    with dataclasses.replace(options, on_trace_ready=on_ready).build() as profiler:
        yield profiler
    error = next((error for _, error in results if error is not None), None)
    if ctx.num_processes > 1:
        agree(ctx, Call("profile", takes_long=True), None, error)
    elif error is not None:
        raise error
    if not results:
        warnings.warn(
            f"profile: nothing was recorded, so {path} was not written. The schedule "
            f"{dict(options.schedule_option or {})} never came to its active steps: call profiler.step() "
            "after each step, and run enough of them.",
            stacklevel=3,
        )


def _write(profiler: torch.profiler.profile, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        cast("Any", profiler).export_chrome_trace(str(path))
    except RuntimeError as error:
        if "already saved" not in str(error):
            raise
        raise ConfigurationError(
            f"profile: can't write {path}, because on_trace_ready has already exported the trace, and torch "
            "exports each one once. Remove the export there, or output_trace_dir."
        ) from error
    if not path.is_file():  # torch only logs the error
        raise OSError(f"profile: torch could not write {path}. Pass a writable directory.")
    return path
