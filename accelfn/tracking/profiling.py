"""See where the time goes: torch's profiler, and a trace of each rank."""

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
from accelfn.context import Context, check_context
from accelfn.context.config import ProfileKwargs
from accelfn.errors import ConfigurationError, NotAvailableError


@contextmanager
def profile(
    ctx: Context, profile_handler: ProfileKwargs | None = None
) -> Generator[torch.profiler.profile, None, None]:
    """Run a block under torch's profiler.

    With ``output_trace_dir`` each rank writes ``profile_{rank}.json`` there, a Chrome trace, and the ranks
    wait for each other at the end. With a schedule the file holds the latest cycle that was recorded. A block
    that raises leaves its trace as well; then nobody is waited for.

    Ranks: every rank of ``ctx`` where traces are written, otherwise any.

    Args:
        ctx: The world, and the ``ProfileKwargs`` of its ``kwargs_handlers``.
        profile_handler: Used instead of the context's.

    Yields:
        The profiler; call its ``step()`` after each step where there is a schedule.

    Raises:
        NotAvailableError: Ranks are threads, or an activity can't be watched here.
        ConfigurationError: ``on_trace_ready`` has written the trace somewhere else.
        OSError: A trace can't be written (``RemoteRankError`` on the other ranks).

    >>> with profile(Context()) as profiler:
    ...     total = torch.ones(8).sum()
    >>> any("sum" in event.key for event in profiler.key_averages())
    True
    """
    check_context("profile", ctx)
    if ctx.num_processes > 1 and not dist.is_initialized():
        raise NotAvailableError(
            "profile: these ranks are threads of one process, and torch has one profiler for all of them. "
            'Profile processes, such as run_ranks(..., on="processes"), or a world of one.'
        )
    options = ctx.profiling if profile_handler is None else profile_handler
    if options.output_trace_dir is None:
        with options.build() as profiler:
            yield profiler
        return
    path = Path(options.output_trace_dir) / f"profile_{ctx.rank}.json"
    problems: list[Exception] = []  # raised when the block is over: not amid a step
    written: list[Path] = []

    def ready(profiler: torch.profiler.profile) -> None:
        if options.on_trace_ready is not None:
            options.on_trace_ready(profiler)
        done, error = catch(lambda: _write(profiler, path))
        if error is not None:
            problems.append(error)
        elif done is not None:
            written.append(done)

    with dataclasses.replace(options, on_trace_ready=ready).build() as profiler:
        yield profiler
    error = problems[0] if problems else None
    if ctx.num_processes > 1:
        agree(ctx, Call("profile", takes_long=True), None, error)
    elif error is not None:
        raise error
    if not written:
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
            f"profile: on_trace_ready has written the trace already, and torch gives each one away once, so "
            f"{path} can't be written. Leave out the export there, or output_trace_dir."
        ) from error
    if not path.is_file():  # torch only logs that it couldn't
        raise OSError(f"profile: torch could not write {path}. Pass a directory that can be written to.")
    return path
