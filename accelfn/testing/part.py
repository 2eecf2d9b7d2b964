"""A rank's part in a world that a test made: what ``with init_context(...)`` does in a program."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from accelfn.context import Context, announce_end, publish, start_watchdog
from accelfn.testing.faults import RankDeath

__all__ = ("taking_part",)


@contextmanager
def taking_part(ctx: Context, *, whole_process: bool) -> Generator[None]:
    """Report to the other ranks how this one ends: by an exception, or for good.

    Args:
        ctx: Of this rank.
        whole_process: Whether the rank is a process, and not a thread.
    """
    board, call_log, rank = ctx.collectives.board, ctx.collectives.call_log, ctx.rank
    end_watch = start_watchdog(board, rank, whole_process=whole_process) if ctx.guard.watchdog else None

    def leave_mesh(*, tell: bool) -> None:
        if ctx.mesh is not None:
            ctx.mesh.leave(tell=tell)

    try:
        yield
        ctx.world.background.settle()
    except RankDeath:  # no rank is notified
        leave_mesh(tell=False)
        raise
    except BaseException as error:
        publish(board, call_log, rank, error)
        leave_mesh(tell=False)
        raise
    else:
        leave_mesh(tell=True)
        announce_end(board, call_log, rank)
    finally:
        if end_watch is not None:
            end_watch()
