"""The end of a context: exactly what ``init_context`` did is undone."""

from __future__ import annotations

import atexit
import sys
import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from accelfn.context.failure import announce_end
from accelfn.context.process_group import is_registered

if TYPE_CHECKING:
    from accelfn.context.context import Context

__all__ = ("close",)

_LET_GO_S = 0.02
# Ranks that wait in an operation look at the board several times in that time.
_HOST_S = 1.5


def close(ctx: Context) -> None:
    """Undo what ``init_context`` did for ``ctx``; see :func:`accelfn.close_context`.

    Ranks: every rank of ``ctx``.
    """
    made = ctx.world.made
    if made.opened:
        if ctx.mesh is not None and not ctx.collectives.call_log.closed:
            ctx.mesh.leave(tell=True)
        _leave(ctx)
    side_group = None if made.side_group is None else made.side_group()
    if side_group is not None and is_registered(side_group):
        dist.destroy_process_group(side_group)
    if made.opened and ctx.world.keeper is not None:
        ctx.world.keeper.let_go()
    # Another group may be the default one by now, if this context was closed before: it isn't ours to
    # destroy.
    group = ctx.world.group_ref
    if not made.group or group is None or group() is None or group() is not _default_group():
        return
    dist.destroy_process_group()
    if group() is not None:
        # A wrapped model still holds it, and with it threads that may be about to release a last tensor,
        # for which they need the interpreter: one left waiting when that ends aborts the process.
        time.sleep(_LET_GO_S)
    if made.excepthooks is not None and sys.excepthook is made.excepthooks[1]:
        sys.excepthook = made.excepthooks[0]
    if made.previous_device is not None:
        torch.accelerator.set_device_index(made.previous_device)


def _leave(ctx: Context) -> None:
    """Announce that this rank takes part in no further operation, and release what that needed."""
    made, board, call_log = ctx.world.made, ctx.collectives.board, ctx.collectives.call_log
    if call_log.closed:
        return
    call_log.closed = True
    if made.end_watch is not None:
        made.end_watch()
    if made.at_exit is not None:
        atexit.unregister(made.at_exit)
    if ctx.world.size > 1:
        announce_end(board, call_log, ctx.rank)
        board.post(f"gone/{ctx.rank}", "yes")
        if made.hosts_store:  # others may still have to read what this rank has posted
            end = time.monotonic() + _HOST_S
            waiting = set(range(ctx.world.size))
            while waiting and time.monotonic() < end:
                waiting = {rank for rank in waiting if not board.read(f"gone/{rank}")}
                time.sleep(_LET_GO_S if waiting else 0.0)
    board.close()


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
