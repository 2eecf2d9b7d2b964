"""Write tensors to safetensors files with checksums.

The bytes are written from the tensors' memory, in slices that are still in the cache from hashing them, so
checksums cost little.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from accelfn.storage.disk import Disk, naming, write_all
from accelfn.tree.digest import split_flat
from accelfn.weights.dtypes import stored_form
from accelfn.weights.header import Entry, format_header, size_of

# A checksum covers at most this many bytes, so that a rank that needs part of a tensor verifies little more.
CHUNK_BYTES = 1 << 26
# The last entry of a file with checksums: uint32, little endian, of each ``CHUNK_BYTES`` of each other entry,
# in the order of the file. No leaf of a tree has this name, in which ``~`` would be escaped.
SUMS = "~crc32"
# Bytes taken from a tensor at a time: a divisor of CHUNK_BYTES.
_SLICE_BYTES = 1 << 24
# Bytes hashed at a time: few enough to be still in the cache when they are written, or after they were read.
_CACHED_BYTES = 1 << 20
# Smaller tensors are collected in a buffer, so that thousands of them don't need a system call each.
_SMALL_BYTES = 1 << 18
# Elements of a non-contiguous tensor copied at a time: the index of each needs eight bytes meanwhile.
_PIECE_ELEMENTS = 1 << 18


def num_chunks(size: int) -> int:
    """Return how many checksums an entry of so many bytes has."""
    return -(-size // CHUNK_BYTES)


class NewEntry(NamedTuple):
    """A tensor to write.

    Attributes:
        key: Its name in the file.
        dtype: As safetensors names it.
        shape: In the file; ``stored_form`` returns both.
        source: A dense tensor on any device; or a function that returns it when it is written. These are
            called in the order of :func:`~accelfn.weights.header.storage_order`.
        crc32: Of each ``CHUNK_BYTES``, if they are known already or not needed; None to compute them.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    source: torch.Tensor | Callable[[], torch.Tensor]
    crc32: tuple[int, ...] | None = None


class Written(NamedTuple):
    """The size and checksums of a new file, for the manifest.

    Attributes:
        size: In bytes.
        header_crc32: Of the header's length and the header.
        sums_crc32: Of the entry :data:`SUMS`; 0 without one.
    """

    size: int
    header_crc32: int
    sums_crc32: int


def new_entry(key: str, tensor: torch.Tensor) -> NewEntry:
    """Return the entry for a tensor, with the dtype and shape that it has in a safetensors file."""
    form = stored_form(tensor.dtype, tensor.shape)
    return NewEntry(key, *form, tensor)


def write_tensors(
    disk: Disk,
    path: str,
    entries: Iterable[NewEntry],
    metadata: Mapping[str, str],
    *,
    fill: bool = False,
    has_sums: bool = False,
) -> Written:
    """Write a new safetensors file; its bytes are durable when this returns.

    A contiguous tensor on the CPU is written directly from its memory; any other one is copied to the CPU in
    pieces of at most about 32 MiB.

    Args:
        disk: To write to.
        path: Of the file, which must not exist.
        entries: The tensors, in any order.
        metadata: Texts for the header.
        fill: As for :func:`~accelfn.weights.header.format_header`.
        has_sums: Whether the file has the entry :data:`SUMS`.

    Returns:
        Size and checksums.

    Raises:
        ValueError: Two tensors have one name, or a tensor is sparse or has no data: nothing was written. Or a
            function returned a tensor of another dtype or shape than its entry has.
        OSError: With the file's name. The caller removes what was written of it.
    """
    todo = list(entries)
    forms = [(one.key, one.dtype, one.shape) for one in todo]
    count = sum(num_chunks(size_of(dtype, shape) or 0) for _, dtype, shape in forms) if has_sums else 0
    last = (SUMS, "U32", (count,)) if has_sums else None
    head, places = format_header(forms, metadata, fill=fill, last=last)
    by_key = {one.key: one for one in todo}
    for one in todo:
        if isinstance(one.source, torch.Tensor):
            _check_source(one.key, one.source)
    places.pop(SUMS, None)
    with naming(path):
        descriptor = disk.create(path)
        try:
            end, sums = _write_slices(disk, descriptor, head, places, by_key)
            if has_sums:
                content = struct.pack(f"<{len(sums)}I", *sums)
                write_all(disk, descriptor, memoryview(content), end)
                end, sums_crc32 = end + len(content), zlib.crc32(content)
            else:
                sums_crc32 = 0
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
    return Written(end, zlib.crc32(head), sums_crc32)


def _check_source(key: str, source: torch.Tensor) -> None:
    if source.layout != torch.strided or source.is_meta or source.is_quantized:
        raise ValueError(
            f"tensor {key!r} is sparse, quantized or on the meta device, and has no dense data to write. "
            "Make it dense (to_dense, dequantize) or load it first."
        )


def _source_of(entry: NewEntry) -> torch.Tensor:
    if isinstance(entry.source, torch.Tensor):
        return entry.source
    source = entry.source()
    _check_source(entry.key, source)
    if stored_form(source.dtype, source.shape) != (entry.dtype, entry.shape):
        raise ValueError(
            f"tensor {entry.key!r} has changed during the save: from {entry.dtype} {entry.shape} to "
            f"{source.dtype} {tuple(source.shape)}. Save a copy, or change it afterwards."
        )
    return source


def _write_slices(
    disk: Disk,
    descriptor: int,
    head: bytes,
    places: Mapping[str, Entry],
    by_key: Mapping[str, NewEntry],
) -> tuple[int, list[int]]:
    """Write the header and all tensors in their order; return where they end, and their checksums."""
    end = started = 0
    found: list[int] = []
    small = bytearray(head)

    def put(content: memoryview) -> None:
        nonlocal end, started
        write_all(disk, descriptor, content, end)
        end += len(content)
        if end - started >= _SLICE_BYTES:  # smaller requests to a disk cost more than they save
            disk.start_writing(descriptor, started, end - started)
            started = end

    def flush() -> None:
        nonlocal small
        if small:
            put(memoryview(small))
            small = bytearray()

    for key, place in places.items():
        entry = by_key[key]
        source = _source_of(entry)
        small += bytes(place.start - end - len(small))  # padding
        sums: list[int] = []
        done = 0
        for part in _parts(source):
            if done % CHUNK_BYTES == 0:
                sums.append(0)
            if len(part) <= _SMALL_BYTES:
                if entry.crc32 is None:
                    sums[-1] = zlib.crc32(part, sums[-1])
                small += part
                if len(small) >= _SLICE_BYTES:
                    flush()
            else:
                flush()
                for start in range(0, len(part), _CACHED_BYTES):
                    piece = part[start : start + _CACHED_BYTES]
                    if entry.crc32 is None:
                        sums[-1] = zlib.crc32(piece, sums[-1])
                    put(piece)
            done += len(part)
        del source  # before the next one comes
        found += sums if entry.crc32 is None else entry.crc32
    flush()
    return end, found


def _parts(source: torch.Tensor) -> Iterator[memoryview]:
    """Return the bytes in logical order; a part never crosses the boundary of a chunk."""
    size = source.numel() * source.dtype.itemsize
    if not size:
        return
    plain = source.device.type == "cpu" and source.is_contiguous() and not source.is_conj()
    if size <= _SLICE_BYTES and plain and not source.is_neg():
        yield memory_of(source)  # most tensors are small, and splitting them takes longer than writing them
        return
    # The size of an element is a power of two, so these sizes divide that of a chunk.
    elements = _SLICE_BYTES // source.dtype.itemsize
    if not source.is_contiguous():
        elements = min(elements, _PIECE_ELEMENTS)
    for piece in split_flat(source, elements):
        held = piece.cpu()
        yield memory_of(held)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, without numpy. They live as long as the tensor."""
    size = tensor.numel() * tensor.dtype.itemsize
    if not size:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
