"""The links that exist: within the host's memory, from mapped files, and to an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import cache

import torch

from accelfn.bigmodel.load.mapped import mapped_from, read_in
from accelfn.bigmodel.offload.accelerator_link import accelerator_link
from accelfn.bigmodel.offload.link import Arrival, Link, Worker
from accelfn.bigmodel.offload.packing import Packing, lasting_tensors, pack
from accelfn.bigmodel.places import Place, check_device, is_simulated

__all__ = ("mapped_link", "open_link", "thread_link")

# A thread is told and heard in about 50 us; a copy of less than this takes no longer.
_INLINE_BYTES = 1 << 18


def open_link(place: Place, num_ahead: int) -> Link:
    """Return the link to a place.

    Args:
        place: Where tensors are used: an accelerator, a simulated device, or the CPU itself (where tensors
            that are mapped from files are used as they are).
        num_ahead: How many blocks are underway at most while one is used.

    Raises:
        ValueError: This machine has no such device.
    """
    device = check_device(place, "execution_device")
    if is_simulated(place):
        return thread_link()
    return mapped_link() if place == "cpu" else accelerator_link(device, num_ahead)


def thread_link() -> Link:
    """Copy each block into fresh memory of the host, in a thread: what simulated devices use."""
    worker = Worker("accelfn-offload")

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        def carry() -> torch.Tensor:
            with lasting_tensors():
                memory = torch.empty(packing.num_bytes, dtype=torch.uint8)
                pack(hosts, packing, memory)
            return memory

        if packing.num_bytes <= _INLINE_BYTES:
            memory = carry()
            return lambda: memory
        future = worker.submit(carry)

        @cache
        def arrive() -> torch.Tensor:
            # On a busy machine the thread may not have begun, and this one needn't wait until it is woken.
            return carry() if future.cancel() else future.result()

        return arrive

    return Link(device=torch.device("cpu"), begin=begin)


def mapped_link() -> Link:
    """Use weights where they are mapped: a thread brings them into memory."""
    worker = Worker("accelfn-read-ahead")
    nothing = torch.empty(0, dtype=torch.uint8)
    pending: dict[int, Future[None]] = {}  # by the address of a block's first tensor

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        mapped = tuple(host for host in hosts if mapped_from(host) is not None)
        if mapped:
            pending[mapped[0].data_ptr()] = worker.submit(lambda: read_in(mapped))
        return lambda: nothing

    def release(hosts: Sequence[torch.Tensor]) -> None:
        for future in [pending.pop(host.data_ptr()) for host in hosts if host.data_ptr() in pending]:
            if not future.cancel():  # it would bring them after they were let go
                wait([future])

    return Link(device=torch.device("cpu"), begin=begin, release=release, in_place=True)
