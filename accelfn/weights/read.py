"""Read stored tensors into allocated memory, in pieces, by a few threads."""

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
from typing import Any, NamedTuple

import torch

from accelfn.devices import device_type
from accelfn.errors import DamagedCheckpointError, MissingExtraError
from accelfn.storage.disk import Disk, naming, read_exactly
from accelfn.weights.stored import PIECE_BYTES, FileId, Stored, advise_memory, opened_unchanged
from accelfn.weights.write import memory_of

# At least two threads, also on one core: while one waits for the disk, another one copies.
_MIN_THREADS, _MAX_THREADS = 2, 8
# Read at a time into host memory: pages that the kernel has just cleared are still in the CPU's cache.
_STEP_BYTES = 1 << 20
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; older kernels return an error


class Reading(NamedTuple):
    """A tensor to read.

    Attributes:
        source: The stored tensor.
        target: Memory of its shape, on any device; values are cast to its dtype.
    """

    source: Stored
    target: torch.Tensor


def read_tensors(
    readings: Sequence[Reading],
    file_ids: Mapping[Path, FileId],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Read tensors into allocated memory.

    Values that need no cast are read directly into host memory. Others pass through a buffer in each of at
    most eight threads: 1 MiB for casts on the host; ``PIECE_BYTES``, pinned, for an accelerator, which casts
    itself.

    Effect: on the targets, also if reading fails. Ranks: local.

    Args:
        readings: In file order, for sequential reads.
        file_ids: Identities of the files when their headers were read.
        advance: Called in this thread with the number of bytes read.

    Raises:
        DamagedCheckpointError: A file was modified.
        OSError: A file can't be read.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(_MAX_THREADS, max(_MIN_THREADS, cores))
    with ExitStack() as closing, torch.no_grad():
        files = {
            path: closing.enter_context(opened_unchanged(path, file_ids))
            for path in dict.fromkeys(reading.source.path for reading in readings)
        }
        reader = _Reader(files)
        if not all(disk.parallel_reads for disk, _ in files.values()):
            threads = 1
        pool = closing.enter_context(ThreadPoolExecutor(threads, "accelfn-load"))
        closing.callback(pool.shutdown, cancel_futures=True)
        pieces = [(piece, pool.submit(reader.read, *piece)) for piece in _pieces(readings)]
        for (source, target), done in pieces:
            done.result()
            advance(target.numel() * source.dtype.itemsize)
        # Last, since each of them needs a temporary tensor.
        for source, target in readings:
            if not _is_read_in_pieces(source, target):
                value = torch.empty(source.shape, dtype=source.dtype)
                if source.elements is None:
                    reader.fill(source, value)
                target.copy_(value if source.elements is None else source.elements())
                advance(source.num_bytes)


def _is_read_in_pieces(source: Stored, target: torch.Tensor) -> bool:
    return source.elements is None and target.is_contiguous()


def _pieces(readings: Sequence[Reading]) -> Iterator[Reading]:
    for source, target in readings:
        if _is_read_in_pieces(source, target):
            yield from _split(source, target.detach().view(-1), PIECE_BYTES)


def _split(source: Stored, flat: torch.Tensor, num_bytes: int) -> Iterator[Reading]:
    size = source.dtype.itemsize
    for first in range(0, flat.numel(), num_bytes // size):
        part = source._replace(start=source.start + first * size)
        yield Reading(part, flat[first : first + num_bytes // size])


class _Reader(threading.local):
    """Reads from open files, with buffers per thread."""

    def __init__(self, files: Mapping[Path, tuple[Disk, int]]) -> None:
        self._files = files
        self._advise: Any = advise_memory() if sys.platform == "linux" else None
        self._buffer: torch.Tensor | None = None

    def read(self, source: Stored, target: torch.Tensor) -> None:
        """Read a piece."""
        disk, descriptor = self._files[source.path]
        disk.start_reading(descriptor, source.start, target.numel() * source.dtype.itemsize)
        if target.device.type != "cpu":
            self._read_staged(source, target)
            return
        for part, memory in _split(source, target, _STEP_BYTES):
            self._populate(memory)
            if memory.dtype == part.dtype:
                self.fill(part, memory)
            else:
                self._read_staged(part, memory)

    def fill(self, source: Stored, memory: torch.Tensor) -> None:
        """Read bytes into host memory."""
        with naming(str(source.path)):
            disk, descriptor = self._files[source.path]
            is_complete = read_exactly(disk, descriptor, memory_of(memory), source.start)
        if not is_complete:
            raise DamagedCheckpointError(
                f"{source.path} was truncated while it was read. Load again.", source.path.name
            )

    def _read_staged(self, source: Stored, target: torch.Tensor) -> None:
        with torch.no_grad():
            num_bytes = target.numel() * source.dtype.itemsize
            if self._buffer is None or self._buffer.numel() < num_bytes:
                can_pin = device_type(target.device.type).pins_memory
                size = PIECE_BYTES if can_pin else num_bytes
                self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=can_pin)
            staged = self._buffer[:num_bytes]
            self.fill(source, staged)
            typed = staged.view(source.dtype)
            if target.device.type != "cpu" and target.dtype != source.dtype:
                typed = typed.to(target.device)  # casts faster there, without another buffer on the host
            target.copy_(typed)  # returns when the buffer may be reused

    def _populate(self, memory: torch.Tensor) -> None:
        """Let the kernel allocate the pages of new memory at once, instead of at each first write."""
        size = memory.numel() * memory.itemsize
        if self._advise is not None and size > mmap.PAGESIZE:
            start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            self._advise(start, memory.data_ptr() + size - start, _MADV_POPULATE_WRITE)


@contextmanager
def progress_bar(what: str, total: int, progress: bool | None) -> Generator[Callable[[int], None]]:
    """Show a progress bar, and yield a function that advances it by a number of bytes.

    Args:
        what: The label of the bar.
        total: Bytes.
        progress: Whether to show the bar. None: if tqdm is installed and standard error is a terminal.
            Without standard error, as under ``pythonw``, there is no bar.

    Raises:
        MissingExtraError: ``progress`` is true and tqdm isn't installed.
    """
    has_tqdm = importlib.util.find_spec("tqdm") is not None
    if progress and not has_tqdm:
        raise MissingExtraError("progress=True needs tqdm: pip install 'accelfn[bigmodel]'.")
    stderr: Any = sys.stderr  # None in a process without one
    if stderr is None or not (stderr.isatty() and has_tqdm if progress is None else progress):
        yield lambda _: None
        return
    tqdm: Any = importlib.import_module("tqdm").tqdm
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
