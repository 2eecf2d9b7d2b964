"""Saving in the background: a consistent copy in host memory, and a thread that writes it."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context, Threads, text_of, wait_for_device
from accelfn.context.failure import MessageBoard
from accelfn.devices import device_type
from accelfn.errors import CollectiveTimeoutError, RemoteRankError
from accelfn.tree.digest import split_flat

_ALIGNMENT = 64
_PIECE = 1 << 24


class SaveHandle:
    """A save in the background.

    ``result()`` waits for it, and raises its error. If a rank doesn't call that, the error is raised by the
    next save or load of the world, on all ranks, or when the context is closed.
    """

    def __init__(self, directory: Path, threads: Threads) -> None:
        """Use ``save_state(..., asynchronous=True)`` instead."""
        self.directory = directory
        self._threads = threads
        self._done = threading.Event()
        self._path: Path | None = None
        self._error: BaseException | None = None
        self._is_reported = False

    def done(self) -> bool:
        """Return whether the save has ended, with or without an error."""
        if self._threads.reach is not None:  # so that a loop that asks lets the save go on
            self._threads.reach("look whether the save is done", RuntimeError)
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Path:
        """Wait until the checkpoint is committed, and return its path.

        Ranks: local; it is committed on all ranks or on none.

        Args:
            timeout: The longest time to wait, in seconds; None for as long as it takes.

        Raises:
            TimeoutError: The save is still running.
            Exception: The error that stopped it: :class:`~accelfn.errors.RemoteRankError` if that happened on
                another rank.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return cast("Path", self._path)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as ``result`` does, and return the error that stopped the save, or None.

        Raises:
            TimeoutError: The save is still running.
        """
        if not self._done.is_set() and not self._threads.wait(self._done.wait, timeout, "the save"):
            raise TimeoutError(
                f"save_state: the save to {self.directory} is still running after {timeout} s."
            )
        self._is_reported = True
        return self._error

    def settle(self) -> None:
        """Wait, and raise the error that stopped the save unless it has been reported already."""
        is_reported = self._is_reported
        error: Any = self.exception()
        if error is not None and not is_reported:
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(
                    f"This stopped the background save to {self.directory}, whose result() was not called. "
                    "The operation that was called now hasn't begun: call it again."
                )
            raise error

    def run(self, work: Callable[[], Path]) -> None:
        """Do the work, and keep its result or its error."""
        try:
            self._path = work()
        except BaseException as error:  # noqa: BLE001 -- result() raises it
            self._error = error
        finally:
            self._done.set()


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Return where each tensor begins in memory that holds them one after the other, and its size. Pure."""
    places: list[int] = []
    total = 0
    for tensor in tensors:
        places.append(total)
        total += -(-tensor.numel() * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return places, total


def views_in(memory: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in memory that :class:`HostMemory` has filled; ``like`` have their shapes. Pure."""
    return [
        memory[place : place + one.numel() * one.dtype.itemsize].view(one.dtype).view(one.shape)
        for place, one in zip(places_of(like)[0], like, strict=True)
    ]


class HostMemory:
    """Host memory for copies of tensors, which is reused by the next save.

    Attributes:
        used: The memory of the present copies: ``(n,)`` uint8.
    """

    def __init__(self) -> None:
        """Start without memory."""
        self.used: torch.Tensor = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._buffer: torch.Tensor | None = None
        self._layout: list[tuple[torch.Size, torch.dtype]] = []
        self._copies: list[torch.Tensor] = []

    def copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy tensors, each to contiguous memory on the host, over the copies of the previous call.

        Ranks: local. Returns when all copies are complete.
        """
        on_device = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if layout != self._layout:  # otherwise the memory and the views of the previous call fit
            self._layout, self._copies = [], []
            total = places_of(tensors)[1]
            buffer = self._buffer
            if buffer is None or buffer.numel() < total:
                self._buffer, self.used = None, self.used[:0].clone()  # free the old one first
                pin = any(device_type(device.type).pins_memory for device in on_device)
                buffer = self._buffer = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=pin)
            self.used = buffer[:total]
            self._layout, self._copies = layout, views_in(self.used, tensors)
        _copy_all(self._copies, tensors)
        for device in on_device:
            wait_for_device(device)
        return [*self._copies]


@torch.no_grad()
def _copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each tensor; on the host by several threads if it is much, which use the full bandwidth."""
    batches: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    room = 0
    for target, source in zip(targets, sources, strict=True):
        if source.device.type != "cpu":
            target.copy_(source, non_blocking=True)
            continue
        size = source.numel() * source.dtype.itemsize
        pieces = [(target, source)]
        if size > _PIECE and source.is_contiguous():
            length = _PIECE // source.dtype.itemsize
            pieces = [*zip(split_flat(target, length), split_flat(source, length), strict=True)]
        for piece in pieces:
            if room <= 0:
                batches.append(([], []))
                room = _PIECE
            batches[-1][0].append(piece[0])
            batches[-1][1].append(piece[1])
            room -= size // len(pieces)
    if len(batches) > 1:
        with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
            list(pool.map(_copy, batches))
    elif batches:
        _copy(batches[0])


@torch.no_grad()
def _copy(batch: tuple[list[torch.Tensor], list[torch.Tensor]]) -> None:
    # A call for each tensor costs more than to copy a small one.
    torch._foreach_copy_(*batch)  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


class _Saves:
    """The background save of a world, at most one at a time, and the memory for its copies."""

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
    """Wait for this world's background save, if one is running.

    Ranks: local.

    Raises:
        Exception: The background save's error, unless ``result()`` already raised it.
    """
    ctx.world.background.settle()


def copies_in_background(ctx: Context, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to host memory that the world keeps from save to save.

    Ranks: local.
    """
    return _saves_of(ctx).memory.copies(tensors)


def begin_background(ctx: Context, directory: Path, work: Callable[[], Path]) -> SaveHandle:
    """Start a save in a thread.

    Args:
        ctx: The world, which keeps the handle until the result of the save has been reported.
        directory: Named in messages.
        work: The save, which may use the copies of :func:`copies_in_background`.
    """
    threads = ctx.collectives.threads
    handle = _saves_of(ctx).handle = SaveHandle(directory, threads)
    try:
        threads.start("save", partial(handle.run, work))
    except RuntimeError:  # the system has no thread left; the other ranks' threads wait for this one's part
        handle.run(work)
    return handle


_LOOK_S = 0.005
# Stores of torch close the connection on a value of 8 MiB.
_MOST_CHARACTERS = 1 << 19


class Phases(Protocol):
    """Barriers between the phases of a save, over collectives or the message board."""

    def gather(self, phase: str, text: str, error: Exception | None = None) -> list[str]:
        """End a phase on all ranks; return the texts of all ranks on rank 0, at least its own on others.

        Raises:
            Exception: ``error`` itself, on the ranks that passed one.
            RemoteRankError: Another rank passed one.
        """
        ...


class CollectivePhases(NamedTuple):
    """Phases that end with a collective. Every rank of ``ctx`` goes through the same ones."""

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
    """Phases over the message board, from any thread: rank 0 reads all ranks' posts, and posts its own text.

    What is posted doesn't grow with the number of ranks, and a long text is posted in pieces.

    Attributes:
        board: Of the world.
        rank: This rank.
        size: Of the world.
        operation: Named in errors.
        threads: Of this rank.
        number: Identifies this save among those of the world.
        patience_s: How long a rank waits for other ranks in a phase.
        is_hopeless: Returns the reason why waiting for other ranks is pointless, or None.
    """

    board: MessageBoard
    rank: int
    size: int
    operation: str
    threads: Threads
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
        # All saves use the same keys: one is overwritten only after all ranks have left the phase, as their
        # posts in a later phase show.
        if self.rank:
            self._post(phase, self.rank, failed, text)
        # Wait for all ranks before raising: a rank that raises may remove a directory that others write to.
        texts: list[str] = [text]
        first: Any = None if failed is None else [self.rank, *failed]
        try:
            if self.rank == 0:
                for rank in range(1, self.size):
                    failed, other = self._wait_for(phase, rank)
                    texts.append(other)
                    first = first or (None if failed is None else [rank, *failed])
                self._post(phase, "all", first, text)
            else:
                first, texts[0] = self._wait_for(phase, "all")
        except Exception:
            if error is None:
                raise
        if error is not None:
            raise error
        if first is not None:
            raise RemoteRankError(first[0], first[1], first[2], self.operation)
        return texts

    def _post(self, phase: str, of: int | str, failed: list[Any] | None, text: str) -> None:
        pieces = [text[start : start + _MOST_CHARACTERS] for start in range(0, len(text), _MOST_CHARACTERS)]
        for number, piece in enumerate(pieces):
            self.board.post(f"{self._key(phase, of)}/{number}", piece)
        self.board.post(self._key(phase, of), json.dumps([self.number, failed, len(pieces)]))

    def _key(self, phase: str, of: int | str) -> str:
        return f"save/{phase}/{of}"

    def _wait_for(self, phase: str, of: int | str) -> tuple[list[Any] | None, str]:
        """Wait for the post of a rank in a phase, or for what rank 0 posts when all ranks have posted."""
        failed: list[Any] | None = None
        count = 0
        reason: Exception | None = None

        def look(seconds: float) -> bool:
            nonlocal failed, count, reason
            reason = self.is_hopeless()  # before reading: a rank that has ended may have posted first
            posted = self.board.read(self._key(phase, of))
            number, failed, count = json.loads(posted) if posted else ("", None, 0)
            if number == self.number:
                reason = None
                return True
            if reason is None:
                time.sleep(min(seconds, _LOOK_S))
            return reason is not None

        whom = "all ranks" if of == "all" else f"rank {of}"
        if not self.threads.wait(look, self.patience_s, f"{whom}, {phase}"):
            raise CollectiveTimeoutError(
                f"{self.operation}: rank {self.rank} has waited {self.patience_s:.0f} s for {whom} to "
                f"end the phase {phase!r} of a background save. Check whether it hangs, or its disk does."
            )
        if reason is not None:
            raise reason
        pieces = [self.board.read(f"{self._key(phase, of)}/{number}") for number in range(count)]
        if None in pieces:  # the host of the board has ended
            raise self.is_hopeless() or CollectiveTimeoutError(
                f"{self.operation}: what {whom} posted in the phase {phase!r} of a background save can't be "
                "read any more. Look at the output of the other ranks."
            )
        return failed, "".join(cast("list[str]", pieces))


@contextmanager
def paused_collection() -> Generator[None, None, None]:
    """Pause Python's cyclic garbage collector in a ``with`` block or a function, on the main thread.

    A tree of 40,000 leaves creates about a million small objects, none of which is garbage, and scanning them
    would take longer than everything else. The collector is the whole process's: another thread, such as that
    of a background save, leaves it to the program.
    """
    if not gc.isenabled() or threading.current_thread() is not threading.main_thread():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
