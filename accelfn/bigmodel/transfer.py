"""Transfer backends: a block's tensors, packed into one piece of memory, on their way to a device."""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from accelfn.bigmodel.assign import is_packable
from accelfn.bigmodel.devices import Place, check_device, is_simulated
from accelfn.bigmodel.weight_files import drop_pages, mapped_from, read_in

# What CUDA's allocator aligns to; kernels that read vectors of 16 bytes need no more.
_ALIGNMENT = 256


class Piece(NamedTuple):
    """Where a tensor lies in the memory of a block.

    Attributes:
        start: First byte.
        dtype: Of the tensor.
        shape: Of the tensor.
        stride: Of the tensor, in elements.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Packing(NamedTuple):
    """How tensors lie in one piece of memory.

    Attributes:
        num_bytes: Of the memory.
        pieces: In the order of the tensors.
    """

    num_bytes: int
    pieces: tuple[Piece, ...]


def plan_packing(tensors: Sequence[torch.Tensor]) -> Packing:
    """Pack tensors side by side, each aligned to 256 bytes.

    A tensor that fills its memory keeps its strides (channels last, say); another becomes contiguous.

    Args:
        tensors: Packable ones, of any device; only their shapes are read.
    """
    pieces: list[Piece] = []
    start = 0
    for tensor in tensors:
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride()) if is_dense(tensor) else _contiguous(shape)
        pieces.append(Piece(start, tensor.dtype, shape, stride))
        start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return Packing(start, tuple(pieces))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a piece of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def lasting_tensors() -> AbstractContextManager[Any]:
    """Let new tensors be usable in training later, also where the caller runs in inference mode.

    Elsewhere the mode isn't touched: torch's guard of it is an object, and one that a KeyboardInterrupt
    leaves behind would bring back an old state whenever it is collected, with gradients switched off.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def unpack(memory: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, ...]:
    """Return the tensors that lie in the memory. Each counts its own changes (``_version``).

    Args:
        memory: uint8, shape ``(packing.num_bytes,)``, on any device, a storage of its own.
        packing: Of the tensors.
    """
    storage, device = memory.untyped_storage(), memory.device
    # Views of `memory` would share one counter of changes; so would what is made in inference mode have none.
    with lasting_tensors():
        return tuple(
            [
                torch.empty(0, dtype=dtype, device=device).set_(
                    storage, start // dtype.itemsize, shape, stride
                )
                for start, dtype, shape, stride in packing.pieces
            ]
        )


def pack(tensors: Sequence[torch.Tensor], packing: Packing, memory: torch.Tensor) -> None:
    """Write the tensors' values into memory of the packing."""
    for view, tensor in zip(unpack(memory, packing), tensors, strict=True):
        view.copy_(tensor.detach())


def is_packed(tensors: Sequence[torch.Tensor], packing: Packing) -> bool:
    """Whether the tensors lie in memory as the packing says, and need no copy of their own for a transfer."""
    if not tensors:
        return False
    storage = tensors[0].untyped_storage()
    base = storage.data_ptr()
    return storage.nbytes() >= packing.num_bytes and all(
        tensor.data_ptr() == base + piece.start and tuple(tensor.stride()) == piece.stride
        for tensor, piece in zip(tensors, packing.pieces, strict=True)
        if tensor.nbytes
    )


T = TypeVar("T")

Arrival: TypeAlias = Callable[[], torch.Tensor]
"""Waits for a transfer, and gives the packed memory on the device: uint8, shape ``(num_bytes,)``.

Each thread that uses the block calls it, one at a time; all get the same memory.
"""


def let_pages_go(tensors: Sequence[torch.Tensor]) -> None:
    """Release the memory of those that are mapped from files.

    Not in a thread of its own: what a program writes to its weights once a pass is over could be lost.
    """
    # Of less than a page nothing can be given back.
    mapped = [one for one in tensors if one.nbytes >= mmap.PAGESIZE and mapped_from(one) is not None]
    if mapped:
        drop_pages(mapped)


def _nothing(tensors: Sequence[torch.Tensor]) -> None:
    """Let a block go: its memory is freed with the last reference to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How tensors come from where they lie at rest to where they are used.

    Attributes:
        device: Where they are used.
        begin: Starts a transfer of a block's tensors, laid out as the packing says, and returns at once; what
            it gives waits for the end. Called by one thread at a time.
        release: Told once the tensors of a block aren't needed any more, with those at rest.
        in_place: The tensors are used where they lie. Then ``begin`` only makes them ready, and nothing waits
            for it.
        needs_pinned: Transfers are faster from pinned memory.
    """

    device: torch.device
    begin: Callable[[Sequence[torch.Tensor], Packing], Arrival]
    release: Callable[[Sequence[torch.Tensor]], None] = _nothing
    in_place: bool = False
    needs_pinned: bool = False


class Worker:
    """A thread of one's own that is started when there is work, also in a process that was forked."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = 0
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run something after what was submitted before."""
        if self._threads is None or self._process != os.getpid():  # a fork leaves the thread behind
            self._threads = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._process = os.getpid()
        return self._threads.submit(work)


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


def pin(tensors: Iterable[torch.Tensor | None]) -> None:
    """Pack a block's tensors side by side in pinned memory. They stay the same objects.

    What is mapped from files stays there, and what another block has pinned already.
    """
    plain = list({id(one): one for one in tensors if one is not None and _can_be_pinned(one)}.values())
    if not plain:
        return
    packing = plan_packing(plain)
    memory = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=True)
    with torch.no_grad():
        pack([host.detach() for host in plain], packing, memory)
    for host, view in zip(plain, unpack(memory, packing), strict=True):
        host.data = view


def _can_be_pinned(host: torch.Tensor) -> bool:
    is_plain = is_packable(host) and not host.is_meta and host.device.type == "cpu" and host.numel() > 0
    return is_plain and mapped_from(host) is None and not host.is_pinned()
