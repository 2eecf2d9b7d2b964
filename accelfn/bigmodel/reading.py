"""Read tensors from files straight to their memory: in pieces, by a few threads, in bounded memory."""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from accelfn.bigmodel.weight_files import Stamp, Stored, advise_memory, open_unchanged
from accelfn.checkpoint.disk import REAL_DISK, naming, read_exactly
from accelfn.checkpoint.files import memory_of
from accelfn.errors import DamagedCheckpointError, MissingExtraError

PIECE_BYTES = 1 << 23
"""What a thread reads for an accelerator at a time."""

# More than one thread also on one core: while one waits for the disk, another one copies.
_MIN_THREADS, _MAX_THREADS = 2, 8
# Less isn't worth a thread.
_SMALL_BYTES = 1 << 20
# At a time: what the system has just cleared is still in the processor's cache when it is filled.
_STEP_BYTES = 1 << 20
# Linux has it since 5.14; older ones say that they don't know it.
_MADV_POPULATE_WRITE = 23


class Reading(NamedTuple):
    """A tensor to read.

    Attributes:
        source: Where it lies.
        target: Memory of its shape, on any device; what is read is cast to its dtype.
    """

    source: Stored
    target: torch.Tensor


class _Piece(NamedTuple):
    """Elements of a tensor that are read at a time.

    Attributes:
        path: Of the file.
        start: First byte in it.
        dtype: As they lie there.
        target: The elements, contiguous.
    """

    path: Path
    start: int
    dtype: torch.dtype
    target: torch.Tensor


def read_tensors(
    readings: Sequence[Reading],
    stamps: Mapping[Path, Stamp],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Read tensors into memory that they have already.

    Bytes that need no other dtype go from the system straight into the memory of the host. Others pass
    through a buffer of each of at most eight threads: of 1 MiB where they are cast for the host, and of
    ``PIECE_BYTES``, pinned, where they go to an accelerator; there they are cast, too.

    Effect: on the targets, also where it fails. Ranks: local.

    Args:
        readings: In the order of the files, if disks shall be fast.
        stamps: Of the files, as they were when their heads were read.
        advance: Called in this thread with bytes of the files that are done.

    Raises:
        DamagedCheckpointError: A file isn't what it was.
        OSError: It can't be read.
    """
    with ExitStack() as closing, torch.no_grad():
        files = {
            path: closing.enter_context(open_unchanged(path, stamps))
            for path in dict.fromkeys(one.source.path for one in readings)
        }
        buffers = _Buffers()
        total = sum(one.source.num_bytes for one in readings)
        if total <= _SMALL_BYTES or not REAL_DISK.parallel_reads:
            for piece in _pieces(readings):
                _read(files, buffers, piece)
                advance(piece.target.numel() * piece.dtype.itemsize)
        else:
            _read_by_threads(files, buffers, readings, advance)
        # Last, since each of them takes memory of its own size.
        for one in readings:
            if not _goes_in_pieces(one):
                _read_whole(files, one)
                advance(one.source.num_bytes)


def _read_by_threads(
    files: Mapping[Path, BinaryIO],
    buffers: _Buffers,
    readings: Sequence[Reading],
    advance: Callable[[int], None],
) -> None:
    threads = min(_MAX_THREADS, max(_MIN_THREADS, _cores()))
    with ThreadPoolExecutor(threads, "accelfn-load") as pool:
        waiting = [(piece, pool.submit(_read, files, buffers, piece)) for piece in _pieces(readings)]
        try:
            for piece, one in waiting:
                one.result()
                advance(piece.target.numel() * piece.dtype.itemsize)
        finally:
            pool.shutdown(cancel_futures=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _goes_in_pieces(one: Reading) -> bool:
    return one.source.elements is None and one.target.is_contiguous()


def _pieces(readings: Sequence[Reading]) -> Iterator[_Piece]:
    for one in readings:
        if not _goes_in_pieces(one):
            continue
        source, flat = one.source, one.target.detach().view(-1)
        step = PIECE_BYTES // source.dtype.itemsize
        for first in range(0, flat.numel(), step):
            start = source.start + first * source.dtype.itemsize
            yield _Piece(source.path, start, source.dtype, flat[first : first + step])


class _Buffers(threading.local):
    """What each thread has for itself: buffers, ordinary and pinned, made when they are needed first."""

    def __init__(self) -> None:
        self._advise: Any = advise_memory() if sys.platform == "linux" else None
        self.ordinary: torch.Tensor | None = None
        self.pinned: torch.Tensor | None = None

    def prepare(self, memory: torch.Tensor) -> None:
        """Let the system make new memory real in one go, which it otherwise does page by page."""
        size = memory.numel() * memory.itemsize
        if self._advise is not None and size > mmap.PAGESIZE:
            start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            self._advise(start, memory.data_ptr() + size - start, _MADV_POPULATE_WRITE)

    def take(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return bytes to read into, before they go to a device, or are cast for it."""
        if _can_pin(device):
            if self.pinned is None:
                self.pinned = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            return self.pinned[:num_bytes]
        if self.ordinary is None or self.ordinary.numel() < num_bytes:
            self.ordinary = torch.empty(num_bytes, dtype=torch.uint8)
        return self.ordinary[:num_bytes]


def _read(files: Mapping[Path, BinaryIO], buffers: _Buffers, piece: _Piece) -> None:
    path, start, dtype, target = piece
    if target.device.type != "cpu":
        _read_staged(files, buffers, piece)
        return
    count = _STEP_BYTES // dtype.itemsize
    for first in range(0, target.numel(), count):
        part = target[first : first + count]
        buffers.prepare(part)
        if target.dtype == dtype:
            _fill(files, path, start + first * dtype.itemsize, part)
        else:
            _read_staged(files, buffers, _Piece(path, start + first * dtype.itemsize, dtype, part))


def _read_staged(files: Mapping[Path, BinaryIO], buffers: _Buffers, piece: _Piece) -> None:
    path, start, dtype, target = piece
    with torch.no_grad():
        staged = buffers.take(target.numel() * dtype.itemsize, target.device)
        _fill(files, path, start, staged)
        typed = staged.view(dtype)
        if target.device.type != "cpu" and target.dtype != dtype:
            typed = typed.to(target.device)  # it casts faster, and a cast on the host takes more memory there
        target.copy_(typed)  # returns when the buffer is free again


def _can_pin(device: torch.device) -> bool:
    return device.type not in ("cpu", "mps")


def _fill(files: Mapping[Path, BinaryIO], path: Path, start: int, target: torch.Tensor) -> None:
    with naming(str(path)):
        whole = read_exactly(REAL_DISK, files[path].fileno(), memory_of(target), start)
    if not whole:
        raise DamagedCheckpointError(f"{path} was cut off while it was read. Load again.", path.name)


def _read_whole(files: Mapping[Path, BinaryIO], one: Reading) -> None:
    """Read a tensor that doesn't lie contiguous in the file, or in memory."""
    if one.source.elements is not None:
        value = one.source.elements()
    else:
        value = torch.empty(one.source.shape, dtype=one.source.dtype)
        _fill(files, one.source.path, one.source.start, value)
    one.target.copy_(value)


@contextmanager
def showing(what: str, total: int, progress: bool | None) -> Generator[Callable[[int], None]]:
    """Show how many bytes are done, and give what is to be called with them.

    Args:
        what: Stands before the bar.
        total: Bytes.
        progress: Whether to show a bar. None: if tqdm is installed, and somebody may be looking (standard
            error is a terminal). Without standard error, as under ``pythonw``, there is none.

    Raises:
        MissingExtraError: A bar is wanted, and tqdm isn't installed.
    """
    has_tqdm = importlib.util.find_spec("tqdm") is not None
    if progress and not has_tqdm:
        raise MissingExtraError("progress=True needs tqdm: pip install 'accelfn[bigmodel]'.")
    error: Any = sys.stderr  # None where a process has none
    if error is None or not (error.isatty() and has_tqdm if progress is None else progress):
        yield lambda _: None
        return
    tqdm: Any = importlib.import_module("tqdm").tqdm
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
