"""How the ranks of a world find each other: through a key-value store at a common address."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore  # torch.distributed's are untyped
from torch.distributed import DistNetworkError
from torch.distributed.rendezvous import rendezvous  # pyright: ignore[reportUnknownVariableType]

from accelfn.context.environment import EnvironmentPlan

_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_STORE_TIMEOUT = timedelta(minutes=5)
_BACKLOG = 4096  # all ranks connect at once

# Ranks start at different times; only longer waits are reported.
_QUIET_S = 5.0


def address_of(place: EnvironmentPlan, init_method: str | None = None) -> str:
    """Return the address of the store of the ranks of ``place``. Pure."""
    if init_method is not None:
        return init_method
    if place.launcher == "xla":
        return "xla://"  # torch_xla knows the address of its first process
    # env:// finds the store that torchrun's agent hosts.
    return "env://" if place.launcher == "torchrun" else f"tcp://{_host_and_port(place)}"


def serve_store(
    host: str, port: int, timeout: timedelta = _STORE_TIMEOUT, *, multi_tenant: bool = False
) -> TCPStore:
    """Serve a store: at a loopback address to this machine alone, else on all its interfaces.

    Args:
        host: Name or address by which the ranks reach it.
        port: 0 for any free one.
        timeout: Of its operations.
        multi_tenant: Share the store that this process already serves at the port, if it does.

    Raises:
        RuntimeError: The port is in use.
    """
    options: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": multi_tenant}
    if host in _LOOPBACK:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = "127.0.0.1" if host == "localhost" else host.strip("[]")
        # Where it is taken, torch shares this process's store, or says so.
        with contextlib.suppress(OSError):
            listener = socket.create_server((address, port), family=family, backlog=_BACKLOG)
            port = listener.getsockname()[1]
            options["master_listen_fd"] = listener.detach()
    return TCPStore(host, port, None, True, timeout, **options)


def join_store(
    place: EnvironmentPlan, timeout: timedelta, patience: timedelta, init_method: str | None = None
) -> Store:
    """Connect to the store and wait until all ranks have. Long waits are reported on stderr.

    Ranks: every rank of ``place``.

    Args:
        place: This rank.
        timeout: Of the store's operations afterwards.
        patience: How long to wait for the other ranks.
        init_method: The user's address, if there is one.

    Returns:
        The store under a prefix that no earlier world of this launch has used: torchrun's store outlives a
        world, and gloo would find the addresses of the previous one in it.

    Raises:
        RuntimeError: Rank 0 can't be reached, or other ranks did not connect in time.
    """
    end = time.monotonic() + patience.total_seconds()
    while True:
        store = _connect(place, patience, init_method)
        store.set_timeout(timeout)
        try:
            return _meet(place, store, end, patience, address_of(place, init_method))
        except DistNetworkError:
            if place.rank == 0 or time.monotonic() >= end:
                raise
            time.sleep(0.05)  # it was the store of the world before this one, which rank 0 has just ended


def _connect(place: EnvironmentPlan, patience: timedelta, init_method: str | None) -> Store:
    """Connect to the store, without waiting for other ranks than the one that serves it."""
    rank, size, where = place.rank, place.size, address_of(place, init_method)
    if where != f"tcp://{_host_and_port(place)}":
        with _announce_if_slow(f"other ranks of {size} at {where}, as rank {rank}"):
            return next(rendezvous(where, rank, size, timeout=patience))[0]
    with _announce_if_slow(f"rank 0 of {size} ranks at {_host_and_port(place)}, as rank {rank}"):
        host, port = place.master_addr or "127.0.0.1", place.master_port or 0
        if place.nodes_known and place.local_size == size and host not in _LOOPBACK:
            host = "127.0.0.1"  # all ranks are here, whatever name the machine has in its network
        if rank == 0:
            return serve_store(host, port, patience, multi_tenant=True)
        return TCPStore(host, port, None, False, patience, wait_for_workers=False)


def _meet(place: EnvironmentPlan, store: Store, end: float, patience: timedelta, where: str) -> Store:
    """Wait until all ranks have connected, and return the store for this world."""
    rank, size = place.rank, place.size
    part = PrefixStore(f"accelfn/world/{store.add(f'accelfn/joined/{rank}', 1)}", store)
    if part.add("number here", 1) == size:
        part.set("all here", "")
    if not _wait_for_all(part, size, min(end, time.monotonic() + _QUIET_S)):
        if place.local_rank == 0:  # one rank per machine reports it
            _announce(
                f"{size - part.add('number here', 0)} of {size} ranks at {where.removeprefix('tcp://')}"
            )
        if not _wait_for_all(part, size, end):
            missing = size - part.add("number here", 0)
            raise RuntimeError(
                f"{missing} of {size} ranks did not connect within {patience.total_seconds():.0f} s. Start "
                "them, or look at their output."
            )
    return part


def _wait_for_all(part: Store, size: int, end: float) -> bool:
    """Return whether all ranks connect before ``end`` of the monotonic clock."""
    # Polled, 500 times a second by all ranks together and at last once by each: torch's own wait logs a stack
    # trace when it times out.
    start = time.monotonic()
    while not part.check(["all here"]):
        now = time.monotonic()
        if now >= end:
            return False
        time.sleep(min(max(min(0.2, size / 500), (now - start) / 10), 1.0, end - now))
    return True


@contextmanager
def _announce_if_slow(what: str) -> Generator[None, None, None]:
    """Report what this rank waits for if the block takes long."""
    timer = threading.Timer(_QUIET_S, _announce, (what,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _announce(what: str) -> None:
    print(f"accelfn: waiting for {what} ...", file=sys.stderr, flush=True)


def _host_and_port(place: EnvironmentPlan) -> str:
    host = place.master_addr or "127.0.0.1"
    if ":" in host and not host.startswith("["):  # IPv6
        host = f"[{host}]"
    return f"{host}:{place.master_port}"
