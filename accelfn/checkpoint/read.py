"""Read tensors from the files of a checkpoint, and verify them."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

import torch

from accelfn.checkpoint.manifest import Manifest, Piece, StoredFile, leaf_path
from accelfn.context import device_module
from accelfn.errors import DamagedCheckpointError
from accelfn.storage.disk import Disk, Folder, naming, open_regular, read_exactly
from accelfn.weights.dtypes import SAME_SIZE, dtype_from_name, stored_form
from accelfn.weights.header import Entry, check_length, check_safetensors_header
from accelfn.weights.write import CHUNK_BYTES, memory_of

# Bytes read at a time.
_READ_BYTES = 1 << 20
# The least work for a thread; less is done without one.
_BATCH_BYTES = 1 << 22
_MAX_THREADS = 4


class TensorFile(NamedTuple):
    """An open file of tensors whose header has been verified."""

    name: str
    path: str
    descriptor: int
    entries: Mapping[str, Entry]


class Box(NamedTuple):
    """A part of a piece to read.

    Attributes:
        name: Of the tensor, for errors.
        dtype: As torch names it.
        piece: The stored piece.
        offset: Of the box in the piece, by dimension; None for the piece as a whole.
        shape: Of the box; None for the piece as a whole.
    """

    name: str
    dtype: str
    piece: Piece
    offset: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None


def expected_entries(manifest: Manifest) -> dict[str, dict[str, Box]]:
    """Return the entries that a manifest describes, by file and key. Pure."""
    by_file: dict[str, dict[str, Box]] = {name: {} for name in manifest.files}
    for name, one in manifest.tensors.items():
        for piece in one.pieces:
            by_file[piece.file][piece.key] = Box(name, one.dtype, piece)
    return by_file


@contextmanager
def open_tensor_file(
    disk: Disk, folder: Folder, name: str, stored: StoredFile, expected: Mapping[str, Box]
) -> Generator[TensorFile, None, None]:
    """Open a file of a checkpoint, and verify its header against the manifest.

    Args:
        disk: To read from.
        folder: The checkpoint.
        name: Of the file.
        stored: The file in the manifest.
        expected: The file's entries in the manifest, from ``expected_entries``.

    Raises:
        DamagedCheckpointError: The file is missing, isn't a plain file, has another length, or its header
            isn't what was written or not what the manifest says.
        OSError: It can't be read.
    """
    path = os.path.join(folder.path, name)
    try:
        descriptor, size = open_regular(disk, folder, name)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(
            f"{path} is missing, and the manifest names it. Take another copy, or an older checkpoint.", name
        ) from error
    try:
        if size != stored.size:
            _damaged(path, name, f"it has {size} bytes, and {stored.size} were written")
        with naming(path):
            start = bytearray(min(size, 8))
            whole = read_exactly(disk, descriptor, memoryview(start), 0)
            head = bytearray(check_length(bytes(start), size, path))
            whole = whole and read_exactly(disk, descriptor, memoryview(head), 0)
        if not whole or zlib.crc32(head) != stored.header_crc32:
            _damaged(path, name, "its header isn't what was written")
        entries = check_safetensors_header(bytes(head), size, path).entries
        odd = entries.keys() ^ expected.keys()
        if odd:
            listed = ", ".join(map(repr, sorted(odd)[:5]))
            _damaged(path, name, f"it hasn't the tensors that the manifest says: {listed}")
        for key, (tensor, dtype, piece, *_) in expected.items():
            entry = entries[key]
            try:
                form = stored_form(dtype_from_name(dtype), piece.shape)
            except ValueError:  # this torch has no such dtype
                form = None
            if form != entry[:2] or len(piece.crc32) != -(-(entry.stop - entry.start) // CHUNK_BYTES):
                _damaged(
                    path,
                    name,
                    f"tensor {leaf_path(tensor)!r} is {entry.dtype} {list(entry.shape)} in it, and {dtype} "
                    f"{list(piece.shape)} with {len(piece.crc32)} checksums in the manifest",
                )
        yield TensorFile(name, path, descriptor, entries)
    finally:
        disk.close(descriptor)


def _damaged(path: str, name: str, why: str) -> NoReturn:
    raise DamagedCheckpointError(
        f"{path} is damaged: {why}. Take another copy, or an older checkpoint.", name
    )


def read_boxes(
    disk: Disk,
    folder: Folder,
    manifest: Manifest,
    boxes: Sequence[Box],
    targets: Sequence[torch.Tensor | None],
) -> None:
    """Read parts of a checkpoint into memory, and verify them.

    Only the chunks are read that contain bytes of a box's rows. Each thread holds at most a megabyte besides
    the targets.

    Args:
        disk: To read from.
        folder: The checkpoint.
        manifest: Of the checkpoint.
        boxes: What to read, in any order, each within its piece.
        targets: Dense memory for each box, of its shape and dtype, on any device; None to only verify it.

    Raises:
        DamagedCheckpointError: A file is missing or isn't what was written; with the file and the tensor.
            Some of the targets may have been written.
        OSError: A file can't be read.
    """
    for device in {one.device for one in targets if one is not None and one.device.type != "cpu"}:
        # Threads copy outside of the program's stream, which may still use the memory.
        device_module(device.type).synchronize(device)
    by_file: dict[str, list[int]] = {}
    for index, box in enumerate(boxes):
        by_file.setdefault(box.piece.file, []).append(index)
    expected = expected_entries(manifest)
    for name in sorted(by_file):
        with open_tensor_file(disk, folder, name, manifest.files[name], expected[name]) as file:
            # In the order of the file, which is that of the disk.
            indices = sorted(by_file[name], key=lambda index: file.entries[boxes[index].piece.key].start)
            chunks: list[_Chunk] = []
            for index in indices:
                box, target = boxes[index], targets[index]
                entry = file.entries[box.piece.key]
                start, stop = 0, entry.stop - entry.start
                if box.shape and stop:
                    row_bytes = stop // box.piece.shape[0]
                    start = box.offset[0] * row_bytes if box.offset else 0
                    stop = start + box.shape[0] * row_bytes
                memory = memoryview(b"")
                if target is not None:
                    target = target.detach().view(SAME_SIZE[target.dtype.itemsize])
                    is_rows = not box.shape or box.shape[1:] == box.piece.shape[1:]
                    if is_rows and target.device.type == "cpu" and target.is_contiguous():
                        memory, target = memory_of(target), None
                chunks += _chunks(box, entry, start, stop, memory, target)
            _read_chunks(disk, file, chunks)


def verify_tensor_file(
    disk: Disk, folder: Folder, name: str, stored: StoredFile, expected: Mapping[str, Box]
) -> None:
    """Read a whole file and check every byte of it, with little memory.

    Args:
        disk: To read from.
        folder: The checkpoint.
        name: Of the file.
        stored: The file in the manifest.
        expected: Its entries in the manifest.

    Raises:
        DamagedCheckpointError: A byte isn't what was written; with the file and the tensor.
        OSError: The file can't be read.
    """
    with open_tensor_file(disk, folder, name, stored, expected) as file:
        chunks: list[_Chunk] = []
        for key, entry in file.entries.items():
            if key in expected:
                chunks += _chunks(expected[key], entry, 0, entry.stop - entry.start, memoryview(b""), None)
        _read_chunks(disk, file, chunks)


class _Chunk(NamedTuple):
    """A chunk to read and verify, and the memory for those of its bytes that are wanted."""

    box: Box
    number: int
    start: int  # in the entry's bytes, as all offsets here
    stop: int
    memory: memoryview  # for the bytes from ``first`` on, in their order; empty if there is no such memory
    first: int
    target: torch.Tensor | None  # for the elements of the box, in any other memory


def _chunks(
    box: Box, entry: Entry, start: int, stop: int, memory: memoryview, target: torch.Tensor | None
) -> Iterator[_Chunk]:
    """Return the chunks that contain the bytes ``start`` to ``stop`` of an entry."""
    size = entry.stop - entry.start
    for number in range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)):
        place = number * CHUNK_BYTES
        yield _Chunk(box, number, place, min(place + CHUNK_BYTES, size), memory, start, target)


def copy_elements(
    target: torch.Tensor,
    offset: Sequence[int],
    shape: Sequence[int],
    start: int,
    elements: torch.Tensor,
) -> None:
    """Copy some elements of a piece, in their order, to where a box of the piece has them.

    Args:
        target: The box.
        offset: Of the box in the piece.
        shape: Of the piece.
        start: Number of the first element in the piece.
        elements: Those from there on.

    >>> target = torch.zeros(2, 2)
    >>> copy_elements(target, (0, 1), (2, 3), 1, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> target
    tensor([[1., 2.],
            [4., 0.]])
    """
    if not shape:
        target.copy_(elements[0])
        return
    size = math.prod(shape[1:])
    columns = tuple(slice(at, at + width) for at, width in zip(offset[1:], target.shape[1:], strict=True))
    done = 0
    while done < len(elements):
        row, column = divmod(start + done, size)
        num_rows = 0 if column else (len(elements) - done) // size
        count = num_rows * size or min(size - column, len(elements) - done)
        part = elements[done : done + count]
        low, high = max(row, offset[0]), min(row + max(num_rows, 1), offset[0] + target.shape[0])
        if low < high and num_rows:
            rows = part.view(num_rows, *shape[1:])[(slice(low - row, high - row), *columns)]
            target[low - offset[0] : high - offset[0]].copy_(rows)
        elif low < high:
            copy_elements(target[row - offset[0]], offset[1:], shape[1:], column, part)
        done += count


def _read_chunks(disk: Disk, file: TensorFile, chunks: Sequence[_Chunk]) -> None:
    """Read and verify chunks of one file, in several threads if there are many bytes."""
    batches: list[list[_Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        if size >= _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(chunk)
        size += chunk.stop - chunk.start
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(batches))
    if threads == 1 or not disk.parallel_reads:
        for batch in batches:
            _read_batch(disk, file, batch)
        return
    with ThreadPoolExecutor(threads, "accelfn-read") as pool:
        waiting = [pool.submit(_read_batch, disk, file, batch) for batch in batches]
        try:
            for one in waiting:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _read_batch(disk: Disk, file: TensorFile, batch: Sequence[_Chunk]) -> None:
    spare = memoryview(b"")
    with naming(file.path):
        for box, number, start, stop, memory, first, target in batch:
            offset = file.entries[box.piece.key].start
            crc32 = 0
            for place in range(start, stop, _READ_BYTES):
                end = min(place + _READ_BYTES, stop)
                low, high = max(place, first), min(end, first + len(memory))
                if (low, high) == (place, end):
                    part = memory[place - first : end - first]
                else:
                    spare = spare or memoryview(bytearray(_READ_BYTES))
                    part = spare[: end - place]
                if not read_exactly(disk, file.descriptor, part, offset + place):
                    _damaged(file.path, file.name, "it became shorter while it was read")
                crc32 = zlib.crc32(part, crc32)
                if place <= low < high <= end and high - low < end - place:
                    memory[low - first : high - first] = part[low - place : high - place]
                if target is not None:
                    elements = torch.frombuffer(part, dtype=target.dtype)
                    shape = box.piece.shape
                    copy_elements(
                        target, box.offset or [0] * len(shape), shape, place // target.itemsize, elements
                    )
            if crc32 != box.piece.crc32[number]:
                _damaged(
                    file.path,
                    file.name,
                    f"bytes {start} to {stop} of tensor {leaf_path(box.name)!r} aren't what was written",
                )


def checksums(disk: Disk, descriptor: int, size: int) -> tuple[int, ...] | None:
    """Return the checksum of each chunk of a file; None where it ends before ``size``."""
    sums: list[int] = []
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    for place in range(0, size, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, size - place)]
        if not read_exactly(disk, descriptor, part, place):
            return None
        if place % CHUNK_BYTES == 0:
            sums.append(0)
        sums[-1] = zlib.crc32(part, sums[-1])
    return tuple(sums)
