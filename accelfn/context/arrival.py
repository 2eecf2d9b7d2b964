"""How the ranks of a world find each other: a store at an address, in which all say that they are there."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import (
    PrefixStore,
    Store,
    TCPStore,
)  # torch.distributed re-exports them untyped
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from accelfn.context.environment import EnvironmentPlan

__all__ = ("address_of", "arrive")

# Ranks come at different times. When it takes longer than this, somebody may be looking at the terminal.
_QUIET_S = 5.0


def address_of(place: EnvironmentPlan, init_method: str | None = None) -> str:
    """Return the address of the store in which the ranks of ``place`` find each other. Pure."""
    if init_method is not None:
        return init_method
    # torchrun's agent hosts the store, which env:// knows how to find; others get the address in the call.
    return "env://" if place.launcher == "torchrun" else f"tcp://{_host_and_port(place)}"


def arrive(
    place: EnvironmentPlan, timeout: timedelta, patience: timedelta, init_method: str | None = None
) -> Store:
    """Wait until all ranks are there. What takes long is reported on stderr.

    Ranks: every rank of ``place``.

    Args:
        place: This rank.
        timeout: Of the store, once all are there.
        patience: How long to wait for them.
        init_method: Address that the user has given.

    Returns:
        A part of the store that no earlier world of this launch has written to: torchrun's outlives a world,
        and gloo would find the addresses of the last one in it.

    Raises:
        RuntimeError: Rank 0 can't be reached, or others did not come in time.
    """
    rank, size, where = place.rank, place.size, address_of(place, init_method)
    end = time.monotonic() + patience.total_seconds()
    if where == f"tcp://{_host_and_port(place)}":
        # Without waiting for the others, which would say nothing of how many there are.
        with _telling(f"rank 0 of {size} ranks at {_host_and_port(place)}, as rank {rank}"):
            store: Store = TCPStore(
                place.master_addr or "127.0.0.1",
                place.master_port or 0,
                None,
                rank == 0,
                patience,
                wait_for_workers=False,
                multi_tenant=True,
            )
    else:
        with _telling(f"other ranks of {size} at {where}, as rank {rank}"):
            store = next(rendezvous(where, rank, size, timeout=patience))[0]
    store.set_timeout(timeout)
    part = PrefixStore(f"accelfn/world/{store.add(f'accelfn/joined/{rank}', 1)}", store)
    if part.add("number here", 1) == size:
        part.set("all here", "")
    if not _are_all_here(part, size, min(end, time.monotonic() + _QUIET_S)):
        if place.local_rank == 0:  # one rank of a machine says it for all
            _tell(f"{size - part.add('number here', 0)} of {size} ranks at {where.removeprefix('tcp://')}")
        if not _are_all_here(part, size, end):
            missing = size - part.add("number here", 0)
            raise RuntimeError(
                f"{missing} of {size} ranks did not come within {patience.total_seconds():.0f} s. Start "
                "them, or look at their output."
            )
    return part


def _are_all_here(part: Store, size: int, end: float) -> bool:
    """Wait until all are, or the monotonic clock says ``end``."""
    # Asked for again and again, 500 times a second by all together: where its own wait comes to an end, torch
    # fills the terminal.
    while not part.check(["all here"]):
        if time.monotonic() >= end:
            return False
        time.sleep(min(0.2, size / 500))
    return True


@contextmanager
def _telling(what: str) -> Generator[None, None, None]:
    """Print what is waited for if the block takes long."""
    timer = threading.Timer(_QUIET_S, _tell, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _tell(what: str) -> None:
    print(f"accelfn: waiting for {what} ...", file=sys.stderr, flush=True)


def _host_and_port(place: EnvironmentPlan) -> str:
    host = place.master_addr or "127.0.0.1"
    if ":" in host and not host.startswith("["):  # IPv6
        host = f"[{host}]"
    return f"{host}:{place.master_port}"
