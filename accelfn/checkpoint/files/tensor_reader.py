"""Read tensors of a checkpoint, verified.

Each slice is hashed while it is in the processor's cache, and a tensor is given out only when all the chunks
that it took bytes from are as they were written.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, NoReturn, cast

import torch

from accelfn.checkpoint.files.disk import Disk, Folder, naming, open_regular, read_exactly
from accelfn.checkpoint.files.header import Entry, check_length, check_safetensors_header
from accelfn.checkpoint.files.manifest import CHUNK_BYTES, Manifest, Piece, StoredFile, leaf_path
from accelfn.checkpoint.files.stored_dtype import dtype_from_name, stored_form
from accelfn.checkpoint.files.tensor_file import memory_of
from accelfn.errors import DamagedCheckpointError

__all__ = (
    "Box",
    "Expected",
    "Read",
    "TensorFile",
    "expected_entries",
    "open_tensor_file",
    "plan_reads",
    "read_boxes",
    "verify_tensor_file",
)

# At a time: what a thread has just read is still in its cache when it is hashed.
_READ_BYTES = 1 << 20
# Work for a thread at least; less is done without one.
_BATCH_BYTES = 1 << 22
_MAX_THREADS = 4


class TensorFile(NamedTuple):
    """A file of tensors that is open, and whose header is what was written.

    Attributes:
        name: In the checkpoint.
        path: For errors.
        descriptor: To read from; close it with ``disk.close``.
        entries: By key.
    """

    name: str
    path: str
    descriptor: int
    entries: Mapping[str, Entry]


class Expected(NamedTuple):
    """What a manifest says of an entry.

    Attributes:
        tensor: Name of the tensor that it is a piece of.
        dtype: As torch names it.
        piece: Its box and checksums.
    """

    tensor: str
    dtype: str
    piece: Piece


class Box(NamedTuple):
    """A part of a piece to read.

    Attributes:
        name: Of the tensor, for errors.
        dtype: As torch names it.
        piece: What lies on the disk.
        offset: Of the box in the piece, by dimension; None for the piece as a whole.
        shape: Of the box; None for the piece as a whole.
        into: A contiguous tensor on the CPU, of this dtype and shape, to read into; None makes a new one.
            It must be one that nobody uses yet, since it gets its bytes before they are verified.
    """

    name: str
    dtype: str
    piece: Piece
    offset: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    into: torch.Tensor | None = None


def expected_entries(manifest: Manifest) -> dict[str, dict[str, Expected]]:
    """Return what a manifest says of each entry, by file and key. Pure."""
    by_file: dict[str, dict[str, Expected]] = {name: {} for name in manifest.files}
    for tensor, one in manifest.tensors.items():
        for piece in one.pieces:
            by_file[piece.file][piece.key] = Expected(tensor, one.dtype, piece)
    return by_file


def open_tensor_file(
    disk: Disk, folder: Folder, name: str, stored: StoredFile, expected: Mapping[str, Expected]
) -> TensorFile:
    """Open a file of a checkpoint, and check that its header is what was written and what the manifest says.

    Args:
        disk: To read from.
        folder: The checkpoint.
        name: Of the file.
        stored: What the manifest says of the file.
        expected: What it says of the file's entries, of ``expected_entries``.

    Raises:
        DamagedCheckpointError: The file is missing, isn't a plain file, has another length, or its header
            isn't what was written or not what the manifest says.
        OSError: It can't be read.
    """
    path = os.path.join(folder.path, name)
    try:
        descriptor, size = open_regular(disk, folder, name)
    except FileNotFoundError as error:
        advice = "Take another copy, or an older checkpoint."
        if stored.node is not None:
            advice = f"It was written to the disk of node {stored.node}: copy it from there."
        raise DamagedCheckpointError(
            f"{path} is missing, and the manifest names it. {advice}", name
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
        # Of another node's file, a node's manifest names only what this node hasn't itself.
        odd = entries.keys() ^ expected.keys() if stored.node is None else expected.keys() - entries.keys()
        if odd:
            listed = ", ".join(map(repr, sorted(odd)[:5]))
            _damaged(path, name, f"it hasn't the tensors that the manifest says: {listed}")
        _check_entries(path, name, entries, expected)
    except BaseException:
        disk.close(descriptor)
        raise
    return TensorFile(name, path, descriptor, entries)


def _check_entries(
    path: str, name: str, entries: Mapping[str, Entry], expected: Mapping[str, Expected]
) -> None:
    for key, (stored, dtype, piece) in expected.items():
        entry, tensor = entries[key], leaf_path(stored)
        try:
            form = stored_form(dtype_from_name(dtype), piece.shape)
        except ValueError as error:
            raise DamagedCheckpointError(
                f"{path}: tensor {tensor!r} has a dtype that this torch doesn't know, {dtype!r}.",
                name,
            ) from error
        if form != (entry.dtype, entry.shape):
            _damaged(
                path,
                name,
                f"tensor {tensor!r} is {entry.dtype} {list(entry.shape)} in it, and {form[0]} "
                f"{list(form[1])} in the manifest",
            )
        if len(piece.crc32) != -(-(entry.stop - entry.start) // CHUNK_BYTES):
            _damaged(path, name, f"the manifest has {len(piece.crc32)} checksums of tensor {tensor!r}")


def _damaged(path: str, name: str, why: str) -> NoReturn:
    raise DamagedCheckpointError(
        f"{path} is damaged: {why}. Take another copy, or an older checkpoint.", name
    )


class Read(NamedTuple):
    """A chunk to read and verify, as bytes of an entry: all of it is read, and a part of it is wanted."""

    number: int
    start: int
    stop: int
    wanted_start: int
    wanted_stop: int


def plan_reads(start: int, stop: int, size: int, chunk_bytes: int = CHUNK_BYTES) -> list[Read]:
    """Return which chunks to read for the bytes ``start`` to ``stop`` of an entry of ``size`` bytes. Pure.

    >>> plan_reads(3, 9, 10, chunk_bytes=4)
    [Read(number=0, start=0, stop=4, wanted_start=3, wanted_stop=4), Read(number=1, start=4, stop=8, \
wanted_start=4, wanted_stop=8), Read(number=2, start=8, stop=10, wanted_start=8, wanted_stop=9)]
    """
    if start >= stop:
        return []
    reads: list[Read] = []
    for number in range(start // chunk_bytes, (stop - 1) // chunk_bytes + 1):
        first, last = number * chunk_bytes, min((number + 1) * chunk_bytes, size)
        reads.append(Read(number, first, last, max(first, start), min(last, stop)))
    return reads


def read_boxes(
    disk: Disk, folder: Folder, manifest: Manifest, boxes: Sequence[Box], *, num_threads: int | None = None
) -> list[torch.Tensor]:
    """Read parts of a checkpoint into new tensors, and give them out once all of them are verified.

    Of a box that is a range of the first dimension, only the chunks are read that it has bytes in; any other
    box is cut out of the rows that it lies in.

    Args:
        disk: To read from.
        folder: The checkpoint.
        manifest: Of the checkpoint.
        boxes: What to read, in any order.
        num_threads: That read at a time; None takes up to four, by the number of processors.

    Returns:
        A contiguous tensor on the CPU for each box, in order.

    Raises:
        ValueError: A box lies outside of its piece, or ``into`` has another form.
        DamagedCheckpointError: A file is missing or isn't what was written; with the file and the tensor.
        OSError: A file can't be read.
    """
    results: list[torch.Tensor | None] = [None] * len(boxes)
    by_file: dict[str, list[int]] = {}
    for index, box in enumerate(boxes):
        _check_box(box)
        by_file.setdefault(box.piece.file, []).append(index)
    expected = expected_entries(manifest)
    for name in sorted(by_file):
        file = open_tensor_file(disk, folder, name, manifest.files[name], expected[name])
        try:
            # In the order of the file, which is that of the disk.
            indices = sorted(by_file[name], key=lambda index: file.entries[boxes[index].piece.key].start)
            targets = [_rows_for(boxes[index]) for index in indices]
            chunks = [
                chunk
                for index, (rows, first) in zip(indices, targets, strict=True)
                for chunk in _chunks(boxes[index], file.entries, rows, first)
            ]
            _read_chunks(disk, file, chunks, num_threads)
        finally:
            disk.close(file.descriptor)
        for index, (rows, _) in zip(indices, targets, strict=True):
            results[index] = _cut(boxes[index], rows)
    return cast("list[torch.Tensor]", results)


def verify_tensor_file(
    disk: Disk, folder: Folder, name: str, stored: StoredFile, expected: Mapping[str, Expected]
) -> None:
    """Read a whole file and check every byte of it, with little memory.

    Args:
        disk: To read from.
        folder: The checkpoint.
        name: Of the file.
        stored: What the manifest says of the file.
        expected: What it says of the file's entries.

    Raises:
        DamagedCheckpointError: A byte isn't what was written; with the file and the tensor.
        OSError: The file can't be read.
    """
    file = open_tensor_file(disk, folder, name, stored, expected)
    try:
        chunks = [
            _Chunk(expected[key].tensor, expected[key].piece, None, 0, read)
            for key, entry in file.entries.items()
            if key in expected
            for read in plan_reads(0, entry.stop - entry.start, entry.stop - entry.start)
        ]
        _read_chunks(disk, file, chunks, None)
    finally:
        disk.close(file.descriptor)


class _Chunk(NamedTuple):
    """A chunk to read and verify, and the memory that its wanted bytes go to."""

    tensor: str
    piece: Piece
    target: torch.Tensor | None  # None: nothing of it is wanted but to know that it is sound
    target_start: int  # the byte of the entry that the target begins with
    read: Read


def _check_box(box: Box) -> None:
    offset = box.offset if box.offset is not None else (0,) * len(box.piece.shape)
    shape = box.shape if box.shape is not None else box.piece.shape
    fits = len(offset) == len(shape) == len(box.piece.shape) and all(
        start >= 0 and length >= 0 and start + length <= size
        for start, length, size in zip(offset, shape, box.piece.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"tensor {box.name!r}: the box of shape {list(shape)} at {list(offset)} lies outside of its "
            f"piece of shape {list(box.piece.shape)}."
        )
    into = box.into
    if into is not None and (
        str(into.dtype) != f"torch.{box.dtype}"
        or tuple(into.shape) != tuple(shape)
        or into.device.type != "cpu"
        or not into.is_contiguous()
    ):
        raise ValueError(
            f"tensor {box.name!r} needs a contiguous {box.dtype} {list(shape)} on the CPU to be read into, "
            f"got {into.dtype} {list(into.shape)} on {into.device}."
        )


def _rows_for(box: Box) -> tuple[torch.Tensor, int]:
    """Return memory for the rows that a box lies in, and the number of the first row."""
    whole = box.piece.shape
    rows = whole if not box.shape else (box.shape[0], *whole[1:])
    first = box.offset[0] if box.offset else 0
    if box.into is not None and tuple(box.into.shape) == rows:
        return box.into.detach(), first
    dtype: torch.dtype = getattr(torch, box.dtype)
    # torch warns of new tensors of complex32, and not of views.
    plain = torch.float32 if dtype == torch.complex32 else dtype
    return torch.empty(rows, dtype=plain, device="cpu").view(dtype).view(rows), first


def _chunks(box: Box, entries: Mapping[str, Entry], rows: torch.Tensor, first: int) -> Iterator[_Chunk]:
    entry = entries[box.piece.key]
    size = entry.stop - entry.start
    start = first * (size // box.piece.shape[0]) if first else 0
    for read in plan_reads(start, start + rows.numel() * rows.dtype.itemsize, size):
        yield _Chunk(box.name, box.piece, rows, start, read)


def _cut(box: Box, rows: torch.Tensor) -> torch.Tensor:
    """Return the box out of the rows that were read."""
    if not box.shape or tuple(rows.shape) == tuple(box.shape):
        return rows if box.into is None else box.into
    offset = box.offset or (0,) * len(box.shape)
    inner = tuple(slice(start, start + size) for start, size in zip(offset[1:], box.shape[1:], strict=True))
    # torch copies some dtypes of one byte as bytes only.
    plain = torch.uint8 if rows.dtype.itemsize == 1 else rows.dtype
    part = rows.view(plain)[(slice(None), *inner)]
    if box.into is None:
        return part.clone(memory_format=torch.contiguous_format).view(rows.dtype)
    box.into.detach().view(plain).copy_(part)
    return box.into


def _read_chunks(disk: Disk, file: TensorFile, chunks: Sequence[_Chunk], num_threads: int | None) -> None:
    """Read and verify chunks of one file, in several threads where that is worth it."""
    batches: list[list[_Chunk]] = [[]]
    size = 0
    for chunk in chunks:
        if size >= _BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(chunk)
        size += chunk.read.stop - chunk.read.start
    threads = min(num_threads or min(_MAX_THREADS, os.cpu_count() or 1), len(batches))
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
        for chunk in batch:
            read, start = chunk.read, file.entries[chunk.piece.key].start
            memory = memoryview(b"") if chunk.target is None else memory_of(chunk.target)
            wanted = (read.start, read.start) if chunk.target is None else read[3:]
            place, crc32 = read.start, 0
            while place < read.stop:
                inside = wanted[0] <= place < wanted[1]
                border = wanted[1] if inside else wanted[0] if place < wanted[0] else read.stop
                end = min(place + _READ_BYTES, border)
                if inside:
                    part = memory[place - chunk.target_start : end - chunk.target_start]
                else:
                    spare = spare or memoryview(bytearray(_READ_BYTES))
                    part = spare[: end - place]
                if not read_exactly(disk, file.descriptor, part, start + place):
                    _damaged(file.path, file.name, "it became shorter while it was read")
                crc32 = zlib.crc32(part, crc32)
                place = end
            if crc32 != chunk.piece.crc32[read.number]:
                _damaged(
                    file.path,
                    file.name,
                    f"bytes {read.start} to {read.stop} of tensor {leaf_path(chunk.tensor)!r} aren't what "
                    "was written",
                )
