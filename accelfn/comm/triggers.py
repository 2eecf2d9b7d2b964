"""A flag that any rank can set and all ranks see: "stop, my loss is not a number"."""

from __future__ import annotations

from typing import NamedTuple

import torch

from accelfn.comm.agreement import Call, agree
from accelfn.context import Context, check_context

__all__ = ("TriggerState", "check_trigger", "set_trigger")


class TriggerState(NamedTuple):
    """Whether this rank has set the flag since the last check."""

    is_set: bool = False


def set_trigger(state: TriggerState) -> TriggerState:
    """Set the flag on this rank. Ranks: any; the others learn of it at the next :func:`check_trigger`."""
    del state
    return TriggerState(is_set=True)


def check_trigger(ctx: Context, state: TriggerState) -> tuple[TriggerState, bool]:
    """Ask whether any rank has set the flag, and clear it if so.

    Ranks: every rank of ``ctx``.

    Returns:
        The next state, and the answer, which is the same on every rank.

    >>> state, stop = check_trigger(Context(), set_trigger(TriggerState()))
    >>> state.is_set, stop
    (False, True)
    """
    check_context("check_trigger", ctx)
    rows = [torch.tensor([state.is_set], dtype=torch.uint8)]
    if ctx.world.size > 1:
        rows = agree(ctx, Call("check_trigger"), rows[0])
    fired = any(bool(row[0]) for row in rows)
    return (TriggerState() if fired else state), fired
