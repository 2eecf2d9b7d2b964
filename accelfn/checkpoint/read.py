"""Read tensors from the files of a checkpoint, and verify them."""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import NamedTuple

import torch

from accelfn.checkpoint.manifest import Manifest, Part, StoredFile, entry_key, leaf_path
from accelfn.context import device_module
from accelfn.errors import DamagedCheckpointError
from accelfn.storage.disk import Disk, Folder, naming, open_regular, read_exactly
from accelfn.weights.dtypes import SAME_SIZE, dtype_from_name, stored_form
from accelfn.weights.header import Entry, check_length, check_safetensors_header
from accelfn.weights.write import CHUNK_BYTES, SUMS, memory_of, num_chunks

# Bytes read at a time.
_READ_BYTES = 1 << 20
# Chunks of at most so many bytes are read with their neighbours; between them there may be padding.
_SMALL_BYTES = 1 << 16
_NEAR_BYTES = 64
# Between parts that an object store is asked for together.
_GAP_BYTES = 1 << 16
# The least work for a thread; less is done without one.
_BATCH_BYTES = 1 << 22
_MAX_THREADS = 4


class TensorFile(NamedTuple):
    """An open file of tensors whose header and checksums have been verified.

    Attributes:
        name: In the checkpoint.
        path: Of the file.
        descriptor: Of the open file.
        entries: Of tensors, by key.
        sums: The checksum of each ``CHUNK_BYTES`` of all entries, in the order of the file.
        first: Of each entry, where its checksums begin among ``sums``.
    """

    name: str
    path: str
    descriptor: int
    entries: Mapping[str, Entry]
    sums: Sequence[int]
    first: Mapping[str, int]


class Box(NamedTuple):
    """A part of a stored tensor to read, or a box of it.

    Attributes:
        name: Of the tensor, for errors.
        key: Of the entry in one of the files of the part's rank.
        dtype: As torch names it.
        part: The stored part.
        offset: Of the box in the part, by dimension; None for the part as a whole.
        shape: Of the box; None for the part as a whole.
    """

    name: str
    key: str
    dtype: str
    part: Part
    offset: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None


def files_by_rank(manifest: Manifest) -> dict[int, list[str]]:
    """List the files of tensors of each rank, in order. Pure."""
    found: dict[int, list[str]] = {}
    for name, file in sorted(manifest.files.items()):
        found.setdefault(file.rank, []).append(name)
    return found


def all_boxes(manifest: Manifest) -> dict[int, dict[str, Box]]:
    """Return all that ranks have written, by rank and key. Pure."""
    found: dict[int, dict[str, Box]] = {file.rank: {} for file in manifest.files.values()}
    for name, (dtype, _, parts) in manifest.tensors.items():
        for part in parts:
            key = entry_key(name, parts, part)
            found[part.rank][key] = Box(name, key, dtype, part)
    return found


@contextmanager
def open_tensor_file(
    disk: Disk, folder: Folder, name: str, stored: StoredFile
) -> Generator[TensorFile, None, None]:
    """Open a file of a checkpoint, and verify its header and its checksums against the manifest.

    Args:
        disk: To read from.
        folder: The checkpoint.
        name: Of the file.
        stored: The file in the manifest.

    Raises:
        DamagedCheckpointError: The file is missing, isn't a plain file, has another length, or its header or
            its checksums aren't what was written.
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
            raise _damage(path, name, f"it has {size} bytes, and {stored.size} were written")
        with naming(path):
            start = bytearray(min(size, 8))
            whole = read_exactly(disk, descriptor, memoryview(start), 0)
            head = bytearray(check_length(bytes(start), size, path))
            whole = whole and read_exactly(disk, descriptor, memoryview(head), 0)
        if not whole or zlib.crc32(head) != stored.header_crc32:
            raise _damage(path, name, "its header isn't what was written")
        entries = dict(check_safetensors_header(bytes(head), size, path).entries)
        own = entries.pop(SUMS, None)
        first = [0, *accumulate(num_chunks(entry.stop - entry.start) for entry in entries.values())]
        if own is None or own.dtype != "U32" or own.shape != (first[-1],):
            raise _damage(path, name, "it hasn't a checksum for each of its entries")
        with naming(path):
            sums = bytearray(own.stop - own.start)
            whole = read_exactly(disk, descriptor, memoryview(sums), own.start)
        if not whole or zlib.crc32(sums) != stored.sums_crc32:
            raise _damage(path, name, "its checksums aren't what was written")
        numbers = struct.unpack(f"<{first[-1]}I", sums)
        yield TensorFile(name, path, descriptor, entries, numbers, dict(zip(entries, first, strict=False)))
    finally:
        disk.close(descriptor)


def check_form(file: TensorFile, box: Box) -> None:
    """Check that an entry has the dtype and shape that the manifest says.

    Raises:
        DamagedCheckpointError: It hasn't.
    """
    entry = file.entries[box.key]
    try:
        form = stored_form(dtype_from_name(box.dtype), box.part.shape)
    except ValueError:  # this torch has no such dtype
        form = None
    if form != entry[:2]:
        raise _damage(
            file.path,
            file.name,
            f"tensor {leaf_path(box.name)!r} is {entry.dtype} {list(entry.shape)} in it, and {box.dtype} "
            f"{list(box.part.shape)} in the manifest",
        )


def _damage(path: str, name: str, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
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
        boxes: What to read, in any order, each within its part.
        targets: Dense memory for each box, of its shape and dtype, on any device; None to only verify it.

    Raises:
        DamagedCheckpointError: A file is missing or isn't what was written; with the file and the tensor.
            Some of the targets may have been written.
        OSError: A file can't be read.
    """
    for device in {one.device for one in targets if one is not None and one.device.type != "cpu"}:
        # Threads copy outside of the program's stream, which may still use the memory.
        device_module(device.type).synchronize(device)
    by_rank: dict[int, dict[str, list[int]]] = {}
    for index, box in enumerate(boxes):
        by_rank.setdefault(box.part.rank, {}).setdefault(box.key, []).append(index)
    files = files_by_rank(manifest)
    for rank in sorted(by_rank):
        todo = by_rank[rank]
        for name in files[rank]:
            if not todo:
                break
            with open_tensor_file(disk, folder, name, manifest.files[name]) as file:
                found = [key for key in file.entries if key in todo]  # in the order of the disk
                indices = [index for key in found for index in todo.pop(key)]
                chunks: list[_Chunk] = []
                for index in indices:
                    check_form(file, boxes[index])
                    chunks += _chunks_of(boxes[index], targets[index], file.entries[boxes[index].key])
                _read_chunks(disk, file, chunks)
        if todo:
            raise lacking(folder, files[rank][0], todo)


def lacking(folder: Folder, name: str, keys: Iterable[str]) -> DamagedCheckpointError:
    """Return the error for a file whose entries aren't those that the manifest says."""
    listed = ", ".join(map(repr, sorted(keys)[:5]))
    return _damage(
        os.path.join(folder.path, name), name, f"it hasn't the tensors that the manifest says: {listed}"
    )


def _chunks_of(box: Box, target: torch.Tensor | None, entry: Entry) -> Iterator[_Chunk]:
    """Return the chunks of an entry that contain the rows of a box, and where its bytes go."""
    start, stop = 0, entry.stop - entry.start
    if box.shape and stop:
        row_bytes = stop // box.part.shape[0]
        start = box.offset[0] * row_bytes if box.offset else 0
        stop = start + box.shape[0] * row_bytes
    memory = memoryview(b"")
    if target is not None:
        is_rows = not box.shape or box.shape[1:] == box.part.shape[1:]
        if is_rows and target.device.type == "cpu" and target.is_contiguous() and not target.is_conj():
            memory, target = memory_of(target), None
        else:
            target = target.detach().view(SAME_SIZE[target.dtype.itemsize])
    return _chunks(box, entry, start, stop, memory, target)


def verify_tensor_file(
    disk: Disk, folder: Folder, name: str, stored: StoredFile, boxes: dict[str, Box]
) -> None:
    """Read a whole file and check every byte of it, with little memory.

    Args:
        disk: To read from.
        folder: The checkpoint.
        name: Of the file.
        stored: The file in the manifest.
        boxes: What its rank has written, by key, see :func:`all_boxes`. What is in this file is removed.

    Raises:
        DamagedCheckpointError: A byte isn't what was written, or an entry isn't what the manifest says; with
            the file and the tensor.
        OSError: The file can't be read.
    """
    with open_tensor_file(disk, folder, name, stored) as file:
        odd = [key for key in file.entries if key not in boxes]
        if odd:
            raise lacking(folder, name, odd)
        chunks: list[_Chunk] = []
        for key, entry in file.entries.items():
            box = boxes.pop(key)
            check_form(file, box)
            chunks += _chunks_of(box, None, entry)
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
    """Copy some elements of a part, in their order, to where a box of the part has them.

    Args:
        target: The box.
        offset: Of the box in the part.
        shape: Of the part.
        start: Number of the first element in the part.
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
    groups = [*_together(file, batch)]
    begins = {begin: end - begin for begin, end in _extents(groups)}
    with naming(file.path):
        for group, begin, end in groups:
            if begin in begins:
                disk.start_reading(file.descriptor, begin, begins[begin])
            if len(group) > 1:
                spare = spare or memoryview(bytearray(_READ_BYTES))
                _read(disk, file, spare[: end - begin], begin)
            for chunk in group:
                offset, crc32 = file.entries[chunk.box.key].start, 0
                for place in range(chunk.start, chunk.stop, _READ_BYTES):
                    stop = min(place + _READ_BYTES, chunk.stop)
                    if len(group) > 1:
                        part = spare[offset + place - begin : offset + stop - begin]
                    elif chunk.first <= place and stop <= chunk.first + len(chunk.memory):
                        part = chunk.memory[place - chunk.first : stop - chunk.first]
                        _read(disk, file, part, offset + place)
                    else:
                        spare = spare or memoryview(bytearray(_READ_BYTES))
                        part = spare[: stop - place]
                        _read(disk, file, part, offset + place)
                    crc32 = zlib.crc32(part, crc32)
                    _store(chunk, part, place)
                if crc32 != file.sums[file.first[chunk.box.key] + chunk.number]:
                    raise _damage(
                        file.path,
                        file.name,
                        f"bytes {chunk.start} to {chunk.stop} of tensor {leaf_path(chunk.box.name)!r} aren't "
                        "what was written",
                    )


def _together(file: TensorFile, batch: Sequence[_Chunk]) -> Iterator[tuple[Sequence[_Chunk], int, int]]:
    """Return chunks to read by one request, with its begin and end in the file: neighbours that are small."""
    group: list[_Chunk] = []
    begin = end = 0
    for chunk in batch:
        offset = file.entries[chunk.box.key].start
        start, stop = offset + chunk.start, offset + chunk.stop
        is_near = end <= start <= end + _NEAR_BYTES and stop - begin <= _READ_BYTES
        is_small = stop - start <= _SMALL_BYTES and chunk.target is None
        if group and not (is_near and is_small and group[-1].target is None):
            yield group, begin, end
            group = []
        if not group:
            begin = start
        group.append(chunk)
        end = stop
    if group:
        yield group, begin, end


def _extents(groups: Iterable[tuple[Sequence[_Chunk], int, int]]) -> Iterator[tuple[int, int]]:
    """Return the begin and end of each part of a file that groups fill, but for gaps not worth a request."""
    begin = end = -1
    for _, start, stop in groups:
        if begin >= 0 and 0 <= start - end <= _GAP_BYTES:
            end = stop
            continue
        if begin >= 0:
            yield begin, end
        begin, end = start, stop
    if begin >= 0:
        yield begin, end


def _read(disk: Disk, file: TensorFile, target: memoryview, place: int) -> None:
    if not read_exactly(disk, file.descriptor, target, place):
        raise _damage(file.path, file.name, "it became shorter while it was read")


def _store(chunk: _Chunk, part: memoryview, place: int) -> None:
    """Copy bytes of an entry, those from ``place`` on, to where they are wanted and aren't yet."""
    stop, memory, target = place + len(part), chunk.memory, chunk.target
    low, high = max(place, chunk.first), min(stop, chunk.first + len(memory))
    if low < high and part.obj is not memory.obj:
        memory[low - chunk.first : high - chunk.first] = part[low - place : high - place]
    if target is not None:
        shape = chunk.box.part.shape
        elements = torch.frombuffer(part, dtype=target.dtype)
        copy_elements(target, chunk.box.offset or [0] * len(shape), shape, place // target.itemsize, elements)


def checksums(disk: Disk, descriptor: int, size: int) -> tuple[int, ...] | None:
    """Return the checksum of each chunk of a file; None where it ends before ``size``."""
    sums: list[int] = []
    buffer = memoryview(bytearray(min(size, _READ_BYTES)))
    disk.start_reading(descriptor, 0, size)
    for place in range(0, size, _READ_BYTES):
        part = buffer[: min(_READ_BYTES, size - place)]
        if not read_exactly(disk, descriptor, part, place):
            return None
        if place % CHUNK_BYTES == 0:
            sums.append(0)
        sums[-1] = zlib.crc32(part, sums[-1])
    return tuple(sums)
