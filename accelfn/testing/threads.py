"""Run a function once per rank, each rank a thread: in memory, or each with a real gloo group of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed re-exports it untyped

from accelfn.context import (
    CallLog,
    Collectives,
    Context,
    World,
    make_gloo_group,
    process_group_collectives,
    store_board,
)
from accelfn.errors import CollectiveTimeoutError
from accelfn.testing.faults import Fault, RankDeath, inject
from accelfn.testing.memory import memory_collectives, memory_world
from accelfn.testing.outcome import Outcome, conclude
from accelfn.testing.part import taking_part
from accelfn.testing.rendezvous import Rendezvous

__all__ = ("run_on_gloo_threads", "run_on_memory")

T = TypeVar("T")
Configure = Callable[[Context], Context]

# Threads that wait in a rendezvous notice at once; one that computes gets this much longer before the world
# is given up.
_GRACE_S = 5.0


def run_on_memory(
    fn: Callable[[Context], T],
    size: int,
    configure: Configure,
    timeout_s: float | None,
    faults: Sequence[Fault],
    num_nodes: int,
) -> list[T]:
    """Run ``fn`` on threads that meet in memory."""
    rendezvous = Rendezvous(size)

    def enter(rank: int) -> tuple[World, Collectives]:
        rendezvous.enter(rank)
        return memory_world(rank, size, num_nodes), memory_collectives(rendezvous, rank, size, CallLog())

    return _run(fn, size, configure, timeout_s, faults, "memory", rendezvous.open, enter, rendezvous.leave)


def run_on_gloo_threads(
    fn: Callable[[Context], T],
    size: int,
    configure: Configure,
    timeout_s: float | None,
    faults: Sequence[Fault],
    num_nodes: int,
) -> list[T]:
    """Run ``fn`` on threads that each have a real gloo group over one in-process store."""
    store = cast("Any", dist).HashStore()  # documented, but not exported to checkers
    groups: list[dist.ProcessGroup | None] = [None] * size

    def enter(rank: int) -> tuple[World, Collectives]:
        groups[rank] = group = make_gloo_group(store, rank, size, timedelta(minutes=5), "lo")
        parts = PrefixStore("parts", store)
        collectives = process_group_collectives(
            group, rank, size, board=store_board(store), store=parts, interface="lo"
        )
        collectives.barrier()  # nobody may leave while others still connect to it
        return memory_world(rank, size, num_nodes, "gloo"), collectives

    def leave(rank: int, how: str) -> None:
        del how
        groups[rank] = None  # the last reference: peers that wait for this rank see a closed connection

    return _run(fn, size, configure, timeout_s, faults, "gloo threads", lambda: None, enter, leave)


def _run(
    fn: Callable[[Context], T],
    size: int,
    configure: Configure,
    timeout_s: float | None,
    faults: Sequence[Fault],
    where: str,
    started: Callable[[], None],
    enter: Callable[[int], tuple[World, Collectives]],
    leave: Callable[[int, str], None],
) -> list[T]:
    outcomes: list[Outcome | None] = [None] * size

    def die() -> None:
        raise RankDeath

    def work(rank: int) -> None:
        how = "returned"
        try:
            world, collectives = enter(rank)
            ctx = configure(Context(world=world, collectives=inject(collectives, rank, size, faults, die)))
            with taking_part(ctx, whole_process=False):
                outcomes[rank] = Outcome(value=fn(ctx))
        except RankDeath:
            how = "died"
            outcomes[rank] = Outcome()
        except BaseException as raised:  # noqa: BLE001 -- SystemExit and KeyboardInterrupt of one rank are its outcome too
            how = "failed"
            outcomes[rank] = Outcome(error=raised)
        finally:
            leave(rank, how)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank} of {size}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    started()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s + _GRACE_S
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    ended = [one or _unended(rank, timeout_s) for rank, one in enumerate(outcomes)]
    return conclude(ended, where)


def _unended(rank: int, timeout_s: float | None) -> Outcome:
    return Outcome(
        error=CollectiveTimeoutError(
            f"rank {rank} did not end within {timeout_s} s, and is not waiting in a collective. "
            "Give run_ranks a longer timeout_s, or look for what it computes for ever."
        ),
        ended=False,
    )
