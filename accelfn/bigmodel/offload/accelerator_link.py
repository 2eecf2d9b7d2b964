"""The link to an accelerator: pinned memory, and a side stream that copies while the device computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from accelfn.bigmodel.offload.link import Arrival, Link, Worker
from accelfn.bigmodel.offload.packing import Packing, is_packed, lasting_tensors, pack

__all__ = ("accelerator_link",)


class _Staged(NamedTuple):
    memory: torch.Tensor  # pinned, on the host
    free: Any  # event of the copy that reads it; it may be written again afterwards


def accelerator_link(device: torch.device, num_ahead: int) -> Link:
    """Copy blocks to an accelerator on a stream of its own, so that a copy runs while the device computes.

    A block that lies in pinned memory as it is packed (the stream lays blocks of the host's memory so) is one
    transfer. Others are packed into pinned memory by a thread first; the pool has as many pieces as transfers
    are underway.

    The memory on the device is bounded although the host runs ahead of the device: before a transfer begins,
    the host waits until the device is done with the block before the last one.

    Args:
        device: Of an accelerator that has streams: cuda (ROCm too), xpu, and others that torch.Stream serves.
        num_ahead: How many blocks are underway at most while one is used.
    """
    worker = Worker("accelfn-offload")
    side = torch.Stream(device=device)
    staged: deque[_Staged] = deque()
    done: deque[torch.Event] = deque()

    def wait_for_room() -> None:
        while len(done) > num_ahead:
            done.popleft().synchronize()

    def send(source: torch.Tensor, num_bytes: int) -> tuple[torch.Tensor, torch.Event]:
        with side, lasting_tensors():
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            memory.copy_(source, non_blocking=True)
            copied = torch.Event(device)
            copied.record(side)
        return memory, copied

    def arrived(memory: torch.Tensor, copied: torch.Event) -> torch.Tensor:
        using = torch.accelerator.current_stream(device)
        using.wait_event(copied)
        # The allocator must not give the memory to the side stream again while this stream computes with it.
        memory.record_stream(using)
        return memory

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        wait_for_room()
        if is_packed(hosts, packing) and hosts[0].is_pinned():
            whole = torch.empty(0, dtype=torch.uint8).set_(hosts[0].untyped_storage())
            memory, copied = send(whole[: packing.num_bytes], packing.num_bytes)
            return lambda: arrived(memory, copied)
        kept = tuple(hosts)
        sent: list[torch.Event] = []

        def stage() -> torch.Tensor:
            with lasting_tensors():
                pinned = _take(staged, packing.num_bytes, num_ahead + 1)
                pack(kept, packing, pinned)
                memory, copied = send(pinned[: packing.num_bytes], packing.num_bytes)
            staged.append(_Staged(pinned, copied))
            sent.append(copied)
            return memory

        future = worker.submit(stage)

        def arrive() -> torch.Tensor:
            return arrived(future.result(), sent[0])

        return arrive

    def release(hosts: Sequence[torch.Tensor]) -> None:
        event = torch.Event(device)
        event.record(torch.accelerator.current_stream(device))
        done.append(event)

    return Link(device=device, begin=begin, release=release, needs_pinned=True)


def _take(staged: deque[_Staged], num_bytes: int, most: int) -> torch.Tensor:
    """Take pinned memory that no copy reads any more, or make some while the pool is small."""
    if len(staged) >= most:
        oldest = staged.popleft()
        oldest.free.synchronize()
        if oldest.memory.numel() >= num_bytes:
            return oldest.memory
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
