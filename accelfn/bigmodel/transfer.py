"""Transfer backends: a block's tensors are packed into one piece of memory and copied to a device."""

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

from accelfn.weights.assign import is_packable
from accelfn.weights.places import Place, check_device, is_simulated
from accelfn.weights.stored import drop_pages, mapped_from, read_in

# As CUDA's allocator; kernels with 16-byte vector loads need no more.
_ALIGNMENT = 256


class Piece(NamedTuple):
    """A tensor in the memory of a block.

    Attributes:
        start: Offset of its first byte.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides, in elements.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Packing(NamedTuple):
    """The layout of tensors in one piece of memory.

    Attributes:
        num_bytes: Size of the memory.
        pieces: One for each tensor, in order.
    """

    num_bytes: int
    pieces: tuple[Piece, ...]


def plan_packing(tensors: Sequence[torch.Tensor]) -> Packing:
    """Plan to pack tensors side by side, each aligned to 256 bytes.

    A dense tensor keeps its strides, such as those of channels last; others become contiguous.

    Args:
        tensors: Packable tensors on any device; only their shapes are read.
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
    """Check whether the elements fill their memory without gaps or overlaps."""
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
    """Return a context that disables inference mode, so that new tensors can be used in training later.

    Outside of inference mode it does nothing, since a guard object that a KeyboardInterrupt leaves behind
    would restore an old state, with gradients disabled, whenever it is collected.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def unpack(memory: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, ...]:
    """Return the tensors in the memory, each with its own version counter.

    Args:
        memory: uint8, shape ``(packing.num_bytes,)``, on any device, with its own storage.
        packing: The layout of the tensors.
    """
    storage, device = memory.untyped_storage(), memory.device
    # Views of `memory` would share a version counter, and inference tensors have none.
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
    """Copy the tensors' values to memory with this layout."""
    for view, tensor in zip(unpack(memory, packing), tensors, strict=True):
        view.copy_(tensor.detach())


def is_packed(tensors: Sequence[torch.Tensor], packing: Packing) -> bool:
    """Check whether the tensors have this layout in memory already, and can be transferred directly."""
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
"""Waits for a transfer, and returns the packed memory on the device: uint8, shape ``(num_bytes,)``.

Each thread that uses the block calls it, one at a time; all get the same memory.
"""


def release_pages(tensors: Sequence[torch.Tensor]) -> None:
    """Release the memory of tensors that are mapped from files.

    Not in another thread, where it could drop what the program writes to its weights after a pass.
    """
    # At least a page, since less can't be released.
    large = [tensor for tensor in tensors if tensor.nbytes >= mmap.PAGESIZE]
    mapped = [tensor for tensor in large if mapped_from(tensor) is not None]
    if mapped:
        drop_pages(mapped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The transfer backend of a device.

    Attributes:
        device: Where tensors are used.
        begin: Starts to transfer a block's tensors in the given layout, and returns a function that waits for
            the end. Called by one thread at a time.
        release: Called with the stored tensors when the block isn't needed any more. The memory on the device
            is freed with the last reference to it.
        in_place: Whether tensors are used where they are stored; ``begin`` then only reads them ahead.
        needs_pinned: Whether transfers are faster from pinned memory.
    """

    device: torch.device
    begin: Callable[[Sequence[torch.Tensor], Packing], Arrival]
    release: Callable[[Sequence[torch.Tensor]], None] = lambda _: None
    in_place: bool = False
    needs_pinned: bool = False


class Worker:
    """A thread that is started when there is work, also after a fork."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._process = 0
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run a function after those that were submitted before."""
        if self._threads is None or self._process != os.getpid():  # threads don't survive a fork
            self._threads = ThreadPoolExecutor(1, thread_name_prefix=self._name)
            self._process = os.getpid()
        return self._threads.submit(work)


class _Staged(NamedTuple):
    memory: torch.Tensor  # pinned, on the host
    copied: Any  # event after which it may be reused


def accelerator_link(device: torch.device, num_ahead: int) -> Link:
    """Copy blocks to an accelerator on a side stream, so that copies overlap with computation.

    A block that is packed in pinned memory (see :func:`pin`) is one transfer. Others are first packed into
    pinned memory by a thread, from a pool with as many buffers as transfers in flight.

    Memory on the device is bounded although the host runs ahead of it: before a transfer starts, the host
    waits until the device has finished with the block before the last one.

    Args:
        device: An accelerator that ``torch.Stream`` supports: cuda (also ROCm), xpu and others.
        num_ahead: How many blocks are in flight while one is used.
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
        # The allocator must not return the memory to the side stream while this stream computes with it.
        memory.record_stream(using)
        return memory

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        wait_for_room()
        if is_packed(hosts, packing) and hosts[0].is_pinned():
            source = torch.empty(0, dtype=torch.uint8).set_(hosts[0].untyped_storage())
            memory, copied = send(source[: packing.num_bytes], packing.num_bytes)
            return lambda: arrived(memory, copied)
        tensors = tuple(hosts)
        sent: list[torch.Event] = []

        def stage() -> torch.Tensor:
            with lasting_tensors():
                pinned = _take(staged, packing.num_bytes, num_ahead + 1)
                pack(tensors, packing, pinned)
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
    """Return the oldest pinned buffer once its copy has ended, or a new one while the pool is small."""
    if len(staged) >= most:
        oldest = staged.popleft()
        oldest.copied.synchronize()
        if oldest.memory.numel() >= num_bytes:
            return oldest.memory
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


# Handing work to a thread takes about 50 us; copies of less than this take no longer.
_INLINE_BYTES = 1 << 18


def open_link(place: Place, num_ahead: int) -> Link:
    """Return the transfer backend of a place.

    Args:
        place: Where tensors are used: an accelerator, a simulated device, or the CPU, which uses mapped
            tensors in place.
        num_ahead: How many blocks are in flight while one is used.

    Raises:
        ValueError: This machine has no such device.
    """
    device = check_device(place, "execution_device")
    if is_simulated(place):
        return thread_link()
    return mapped_link() if place == "cpu" else accelerator_link(device, num_ahead)


def thread_link() -> Link:
    """Copy each block to new host memory in a thread, for simulated devices."""
    worker = Worker("accelfn-offload")

    def begin(hosts: Sequence[torch.Tensor], packing: Packing) -> Arrival:
        def copy() -> torch.Tensor:
            with lasting_tensors():
                memory = torch.empty(packing.num_bytes, dtype=torch.uint8)
                pack(hosts, packing, memory)
            return memory

        if packing.num_bytes <= _INLINE_BYTES:
            memory = copy()
            return lambda: memory
        future = worker.submit(copy)

        @cache
        def arrive() -> torch.Tensor:
            # On a busy machine the thread may not have started, and copying here is faster than waiting.
            return copy() if future.cancel() else future.result()

        return arrive

    return Link(device=torch.device("cpu"), begin=begin)


def mapped_link() -> Link:
    """Use mapped weights in place: a thread reads them ahead."""
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
            if not future.cancel():  # it would read them after they were released
                wait([future])

    return Link(device=torch.device("cpu"), begin=begin, release=release, in_place=True)


def pin(tensors: Iterable[torch.Tensor | None]) -> None:
    """Move a block's tensors to one piece of pinned memory. They stay the same objects.

    Mapped tensors, and those that another block has pinned, aren't moved.
    """
    hosts = [host for host in tensors if host is not None and _can_be_pinned(host)]
    plain = list({id(host): host for host in hosts}.values())
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
