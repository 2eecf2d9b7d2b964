"""Saving in the background: a consistent copy in host memory, and a thread that writes it."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context, text_of
from accelfn.context.failure import MessageBoard
from accelfn.errors import CollectiveTimeoutError, RemoteRankError
from accelfn.tree.digest import split_flat

_ALIGNMENT = 64
_PIECE = 1 << 24


class SaveHandle:
    """A save that goes on in the background.

    ``result()`` waits for it. What went wrong is raised there. If a rank didn't ask, it is raised at the next
    save or load of the world, on all ranks; or when the context is closed.
    """

    def __init__(self, directory: Path, aside: Callable[[], AbstractContextManager[None]]) -> None:
        """Use ``save_state(..., asynchronous=True)`` instead."""
        self.directory = directory
        self._aside = aside
        self._done = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._was_told = False

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is committed, and return its path.

        Ranks: local; on every rank it is committed, or none.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            TimeoutError: It goes on.
            Exception: Whatever stopped it: :class:`~accelfn.errors.RemoteRankError` where that was on another
                rank.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return cast("Path", self._path)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as ``result`` does, and return what stopped the save, or None.

        Raises:
            TimeoutError: It goes on.
        """
        if not self._done.is_set():
            with self._aside():
                if not self._done.wait(timeout):
                    raise TimeoutError(f"save_state: the save to {self.directory} goes on after {timeout} s.")
        self._was_told = True
        return self._error

    def settle(self) -> None:
        """Wait, and raise what stopped the save unless somebody has been told already."""
        was_told = self._was_told
        error: Any = self.exception()
        if error is not None and not was_told:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"This stopped the save to {self.directory} in the background, whose result nobody asked "
                    "for. What was called now wasn't begun: call it again."
                )
            raise error

    def run(self, work: Callable[[], Path]) -> None:
        """Do the work and keep what came of it."""
        try:
            self._path = work()
        except BaseException as error:  # noqa: BLE001 -- it is raised where somebody asks
            self._error = error
        finally:
            self._done.set()


class HostMemory:
    """Memory for copies of tensors, which is kept from one save to the next."""

    def __init__(self) -> None:
        """Begin with none."""
        self._buffer: torch.Tensor | None = None

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, each to contiguous memory on the host. The copies of the call before are gone.

        Ranks: local. Returns when all copies are complete.
        """
        sizes = [tensor.numel() * tensor.dtype.itemsize for tensor in tensors]
        places: list[int] = []
        total = 0
        for size in sizes:
            places.append(total)
            total += -(-size // _ALIGNMENT) * _ALIGNMENT
        on_device = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        buffer = self._buffer
        if buffer is None or buffer.numel() < total:
            self._buffer = None  # let go of the old one first
            pin = any(device.type == "cuda" for device in on_device)
            buffer = self._buffer = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=pin)
        copies = [
            buffer[place : place + size].view(tensor.dtype).view(tensor.shape)
            for place, size, tensor in zip(places, sizes, tensors, strict=True)
        ]
        _copy_all(copies, [tensor.detach() for tensor in tensors])
        for device in on_device:
            torch.get_device_module(device.type).synchronize(device)
        return copies


def _copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each tensor; those of the host in pieces by several threads, since one doesn't fill the bus."""
    pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
    for target, source in zip(targets, sources, strict=True):
        if source.device.type != "cpu":
            target.copy_(source, non_blocking=True)
        elif source.is_contiguous() and source.numel():
            size = max(1, _PIECE // source.dtype.itemsize)
            pieces += zip(split_flat(target, size), split_flat(source, size), strict=True)
        else:
            target.copy_(source)
    if not pieces:
        return
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        list(pool.map(_copy, pieces))


def _copy(piece: tuple[torch.Tensor, torch.Tensor]) -> None:
    piece[0].copy_(piece[1])


class _Saves:
    """The save in the background of a world, of which there is one at most, and the memory of its copies."""

    def __init__(self) -> None:
        self.memory = HostMemory()
        self.handle: SaveHandle | None = None

    def settle(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None:
            handle.settle()


def _saves_of(ctx: Context) -> _Saves:
    background = ctx.world.background
    if not isinstance(background.task, _Saves):
        background.task = _Saves()
    return background.task


def finish_background(ctx: Context) -> None:
    """Wait for the save that is under way in the background of this world, if there is one.

    Ranks: local.

    Raises:
        Exception: The background save's error, unless ``result()`` already raised it.
    """
    ctx.world.background.settle()


def copies_in_background(ctx: Context, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host memory that the world keeps for it.

    Ranks: local.
    """
    return _saves_of(ctx).memory.copies(tensors)


def begin_background(ctx: Context, directory: Path, work: Callable[[], Path]) -> SaveHandle:
    """Begin to save in a thread.

    Args:
        ctx: The world, with which the handle is kept until somebody was told how the save ended.
        directory: For messages.
        work: The save, which may use the copies of :func:`copies_in_background`.
    """
    handle = _saves_of(ctx).handle = SaveHandle(directory, ctx.collectives.while_blocked)
    # No daemon: the interpreter waits at its end for a thread that isn't, so a commit under way is completed.
    threading.Thread(target=handle.run, args=(work,), name="accelfn-save").start()
    return handle


_LOOK_S = 0.005


class Phases(Protocol):
    """What a save asks of the other ranks."""

    def gather(self, phase: str, text: str, error: Exception | None = None) -> list[str]:
        """End a phase: tell the other ranks what came of it, and return what they tell.

        Raises:
            Exception: ``error`` itself, on the ranks that gave one.
            RemoteRankError: Another rank gave one.
        """
        ...


class CollectivePhases(NamedTuple):
    """Phases as operations across ranks. Every rank of ``ctx`` goes through the same ones."""

    ctx: Context
    operation: str

    def gather(self, phase: str, text: str, error: Exception | None = None) -> list[str]:
        """End a phase."""
        if self.ctx.num_processes == 1:
            if error is not None:
                raise error
            return [text]
        call = Call(self.operation, phase, takes_long=True)
        return [blob.decode() for blob in gather_bytes(self.ctx, call, text.encode(), error)]


class BoardPhases(NamedTuple):
    """Phases by word on the board, from any thread: rank 0 reads what all have posted, and posts it for all.

    Attributes:
        board: Of the world.
        rank: This rank.
        size: Of the world.
        operation: Named in errors.
        number: Tells this save from others of the world.
        patience_s: How long a rank waits for the others in a phase.
        is_hopeless: Says why no other rank can be waited for any more, or None.
    """

    board: MessageBoard
    rank: int
    size: int
    operation: str
    number: str
    patience_s: float
    is_hopeless: Callable[[], Exception | None]

    def gather(self, phase: str, text: str, error: Exception | None = None) -> list[str]:
        """End a phase."""
        if self.size == 1:
            if error is not None:
                raise error
            return [text]
        failed = None if error is None else [type(error).__name__, text_of(error)]
        # A key serves every save: it is only written over when all ranks have left the phase behind, which
        # they have posted in a later one.
        self.board.post(self._key(phase, self.rank), json.dumps([self.number, [failed, text]]))
        # All ranks are waited for before anything is raised: a rank that raises may remove what others still
        # write to.
        every: list[Any] = []
        try:
            if self.rank == 0:
                every = [[failed, text], *(self._wait_for(phase, rank) for rank in range(1, self.size))]
                self.board.post(self._key(phase, "all"), json.dumps([self.number, every]))
            else:
                every = self._wait_for(phase, "all")
        except Exception:
            if error is None:
                raise
        if error is not None:
            raise error
        for rank, (failed, _) in enumerate(every):
            if failed is not None:
                raise RemoteRankError(rank, failed[0], failed[1], self.operation)
        return [text for _, text in every]

    def _key(self, phase: str, of: int | str) -> str:
        return f"save/{phase}/{of}"

    def _wait_for(self, phase: str, of: int | str) -> Any:
        """Wait for what a rank says of a phase, its error or what came of it; or rank 0 of all ranks."""
        end = time.monotonic() + self.patience_s
        while True:
            reason = self.is_hopeless()  # asked first: who has ended may have posted before
            posted = self.board.read(self._key(phase, of))
            number, found = json.loads(posted) if posted else ("", None)
            if number == self.number:
                return found
            if reason is not None:
                raise reason
            if time.monotonic() > end:
                whom = "all ranks" if of == "all" else f"rank {of}"
                raise CollectiveTimeoutError(
                    f"{self.operation}: rank {self.rank} has waited {self.patience_s:.0f} s for {whom} to "
                    f"end the phase {phase!r} of a save in the background. Look at what it does."
                )
            time.sleep(_LOOK_S)


@contextmanager
def paused_collection() -> Generator[None, None, None]:
    """Pause Python's cyclic garbage collector in a ``with`` block or a function.

    A tree of 40,000 leaves makes some million small objects, none of which is garbage; looking through them
    takes the collector longer than all the rest takes. Where several threads pause it, it runs again as soon
    as the first of them is through, which costs time and nothing else.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
