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

from accelfn.bigmodel.weight_files import FileId, Stored, advise_memory, open_unchanged
from accelfn.checkpoint.disk import REAL_DISK, naming, read_exactly
from accelfn.checkpoint.files import memory_of
from accelfn.errors import DamagedCheckpointError, MissingExtraError

PIECE_BYTES = 1 << 23
"""What a thread reads for an accelerator at a time."""

# More than one thread also on one core: while one waits for the disk, another one copies.
_MIN_THREADS, _MAX_THREADS = 2, 8
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


def read_tensors(
    readings: Sequence[Reading],
    file_ids: Mapping[Path, FileId],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Read tensors into memory that they have already.

    Bytes that need no other dtype go from the system straight into the memory of the host. Others pass
    through a buffer of each of at most eight threads: of 1 MiB where they are cast for the host, and of
    ``PIECE_BYTES``, pinned, where they go to an accelerator; there they are cast, too.

    Effect: on the targets, also where it fails. Ranks: local.

    Args:
        readings: In the order of the files, if disks shall be fast.
        file_ids: Of the files, as they were when their headers were read.
        advance: Called in this thread with bytes of the files that are done.

    Raises:
        DamagedCheckpointError: A file isn't what it was.
        OSError: It can't be read.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(_MAX_THREADS, max(_MIN_THREADS, cores)) if REAL_DISK.parallel_reads else 1
    with ExitStack() as closing, torch.no_grad():
        files = {
            path: closing.enter_context(open_unchanged(path, file_ids))
            for path in dict.fromkeys(one.source.path for one in readings)
        }
        reader = _Reader(files)
        pool = closing.enter_context(ThreadPoolExecutor(threads, "accelfn-load"))
        closing.callback(pool.shutdown, cancel_futures=True)
        pieces = [(piece, pool.submit(reader.read, *piece)) for piece in _pieces(readings)]
        for (source, target), done in pieces:
            done.result()
            advance(target.numel() * source.dtype.itemsize)
        # Last, since each of them takes memory of its own size.
        for source, target in readings:
            if not _goes_in_pieces(source, target):
                value = torch.empty(source.shape, dtype=source.dtype)
                if source.elements is None:
                    reader.fill(source, value)
                target.copy_(value if source.elements is None else source.elements())
                advance(source.num_bytes)


def _goes_in_pieces(source: Stored, target: torch.Tensor) -> bool:
    return source.elements is None and target.is_contiguous()


def _pieces(readings: Sequence[Reading]) -> Iterator[Reading]:
    """Return what is read at a time: contiguous parts of the tensors."""
    for source, target in readings:
        if _goes_in_pieces(source, target):
            yield from _parts(source, target.detach().view(-1), PIECE_BYTES)


def _parts(source: Stored, flat: torch.Tensor, num_bytes: int) -> Iterator[Reading]:
    size = source.dtype.itemsize
    for first in range(0, flat.numel(), num_bytes // size):
        part = source._replace(start=source.start + first * size)
        yield Reading(part, flat[first : first + num_bytes // size])


class _Reader(threading.local):
    """Reads from open files. Each thread has buffers of its own, made when they are needed first."""

    def __init__(self, files: Mapping[Path, BinaryIO]) -> None:
        self._files = files
        self._advise: Any = advise_memory() if sys.platform == "linux" else None
        self._buffer: torch.Tensor | None = None

    def read(self, source: Stored, target: torch.Tensor) -> None:
        """Read a piece."""
        if target.device.type != "cpu":
            self._read_staged(source, target)
            return
        for part, memory in _parts(source, target, _STEP_BYTES):
            self._prepare(memory)
            if memory.dtype == part.dtype:
                self.fill(part, memory)
            else:
                self._read_staged(part, memory)

    def fill(self, source: Stored, memory: torch.Tensor) -> None:
        """Read bytes into memory of the host."""
        with naming(str(source.path)):
            file = self._files[source.path].fileno()
            whole = read_exactly(REAL_DISK, file, memory_of(memory), source.start)
        if not whole:
            raise DamagedCheckpointError(
                f"{source.path} was cut off while it was read. Load again.", source.path.name
            )

    def _read_staged(self, source: Stored, target: torch.Tensor) -> None:
        with torch.no_grad():
            num_bytes = target.numel() * source.dtype.itemsize
            if self._buffer is None or self._buffer.numel() < num_bytes:
                can_pin = target.device.type not in ("cpu", "mps")
                size = PIECE_BYTES if can_pin else num_bytes
                self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=can_pin)
            staged = self._buffer[:num_bytes]
            self.fill(source, staged)
            typed = staged.view(source.dtype)
            if target.device.type != "cpu" and target.dtype != source.dtype:
                typed = typed.to(target.device)  # it casts faster, and a cast on the host takes more memory
            target.copy_(typed)  # returns when the buffer is free again

    def _prepare(self, memory: torch.Tensor) -> None:
        """Let the system make new memory real in one go, which it otherwise does page by page."""
        size = memory.numel() * memory.itemsize
        if self._advise is not None and size > mmap.PAGESIZE:
            start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            self._advise(start, memory.data_ptr() + size - start, _MADV_POPULATE_WRITE)


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
