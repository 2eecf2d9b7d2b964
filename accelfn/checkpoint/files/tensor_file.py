"""Write tensors to a safetensors file, with checksums.

The bytes go to the system in slices from where they lie, and a second thread hashes each slice meanwhile, so
the checksums cost little.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from accelfn.checkpoint.files.disk import Disk, naming, write_all
from accelfn.checkpoint.files.header import Entry, format_header
from accelfn.checkpoint.files.manifest import CHUNK_BYTES
from accelfn.checkpoint.files.stored_dtype import stored_form
from accelfn.tree.digest import split_flat

__all__ = ("NewEntry", "Written", "memory_of", "new_entry", "write_tensors")

# At a time, to write: a divisor of CHUNK_BYTES.
_SLICE_BYTES = 1 << 24
# Smaller tensors are collected, so that thousands of them don't take a system call each.
_SMALL_BYTES = 1 << 18
# Elements of a tensor that isn't contiguous, at a time: of each, its place takes eight bytes meanwhile.
_PIECE_ELEMENTS = 1 << 18


class NewEntry(NamedTuple):
    """A tensor to write.

    Attributes:
        key: Its name in the file.
        dtype: As safetensors names it.
        shape: As the file shall say; ``stored_form`` gives both.
        source: A dense tensor on any device, or its bytes.
        crc32: Of each ``CHUNK_BYTES``, where they are known already; None has them computed.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    source: torch.Tensor | bytes | bytearray | memoryview
    crc32: tuple[int, ...] | None = None


class Written(NamedTuple):
    """What a manifest has to say of a new file.

    Attributes:
        size: In bytes.
        header_crc32: Of the header's length and the header.
        crc32: By key, of each ``CHUNK_BYTES`` of the entry, in order.
    """

    size: int
    header_crc32: int
    crc32: Mapping[str, tuple[int, ...]]


def new_entry(key: str, tensor: torch.Tensor) -> NewEntry:
    """Return a tensor the dtype and shape under which safetensors stores it."""
    form = stored_form(tensor.dtype, tensor.shape)
    return NewEntry(key, *form, tensor)


def write_tensors(
    disk: Disk,
    path: str,
    entries: Iterable[NewEntry],
    metadata: Mapping[str, str],
) -> Written:
    """Write a new safetensors file; its bytes are on the disk when this returns.

    A contiguous tensor on the CPU is written from where it lies; any other one passes through the CPU piece
    by piece, with at most about 32 MiB at a time.

    Args:
        disk: To write to.
        path: Of the file, which mustn't exist.
        entries: The tensors, in any order.
        metadata: Free texts for the header.

    Returns:
        Size and checksums.

    Raises:
        ValueError: A name is taken twice, or a tensor is sparse, has no data, or isn't as long as its dtype
            and shape say. Nothing was written.
        OSError: With the file's name. What was written of it is left for the caller to remove.
    """
    todo = list(entries)
    head, places = format_header([(one.key, one.dtype, one.shape) for one in todo], metadata)
    by_key = {one.key: one for one in todo}
    for key, place in places.items():
        _check_source(by_key[key], place.stop - place.start)
    found: dict[str, tuple[int, ...]] = {}
    with naming(path):
        descriptor = disk.create(path)
        try:
            with ThreadPoolExecutor(1, "accelfn-checksum") as helper:
                end = _write_slices(disk, descriptor, head, places, by_key, found, helper)
            disk.sync(descriptor)
        finally:
            disk.close(descriptor)
    return Written(end, zlib.crc32(head), found)


def _write_slices(
    disk: Disk,
    descriptor: int,
    head: bytes,
    places: Mapping[str, Entry],
    by_key: Mapping[str, NewEntry],
    found: dict[str, tuple[int, ...]],
    helper: ThreadPoolExecutor,
) -> int:
    """Write the head and all tensors in their order; put the checksums into ``found``."""
    end = started = 0
    small = bytearray(head)

    def put(content: memoryview) -> None:
        nonlocal end, started
        write_all(disk, descriptor, content, end)
        end += len(content)
        if end - started >= _SLICE_BYTES:  # not for less: small requests to a disk cost more than they save
            disk.start_writing(descriptor, started, end - started)
            started = end

    def flush() -> None:
        nonlocal small
        if small:
            put(memoryview(small))
            small = bytearray()

    for key in places:
        entry = by_key[key]
        sums: list[int] = []
        done = 0
        for part in _parts(entry.source):
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
                # crc32 lets other threads run, so it runs while the system copies the slice.
                hashed = helper.submit(zlib.crc32, part, sums[-1]) if entry.crc32 is None else None
                try:
                    put(part)
                finally:  # also where the disk is full: the memory may be gone after this
                    sums[-1] = hashed.result() if hashed is not None else 0
            done += len(part)
        found[key] = tuple(sums) if entry.crc32 is None else entry.crc32
    flush()
    return end


def _check_source(entry: NewEntry, size: int) -> None:
    source = entry.source
    if isinstance(source, torch.Tensor):
        if source.layout != torch.strided or source.is_meta or source.is_quantized:
            raise ValueError(
                f"tensor {entry.key!r} is sparse, quantized or on the meta device, and has no plain bytes to "
                "write. Make it dense (to_dense, dequantize) or load it first."
            )
        given = source.numel() * source.dtype.itemsize
    else:
        given = memoryview(source).nbytes
    if given != size:
        raise ValueError(
            f"tensor {entry.key!r} has {given} bytes, and {entry.dtype} {list(entry.shape)} has {size}."
        )
    if entry.crc32 is not None and len(entry.crc32) != -(-size // CHUNK_BYTES):
        raise ValueError(
            f"tensor {entry.key!r} has {size} bytes, and {len(entry.crc32)} checksums are given."
        )


def _parts(source: torch.Tensor | bytes | bytearray | memoryview) -> Iterator[memoryview]:
    """Return the bytes in logical order; a part never crosses the border of a chunk."""
    if not isinstance(source, torch.Tensor):
        content = memoryview(source).cast("B")
        for start in range(0, len(content), _SLICE_BYTES):
            yield content[start : start + _SLICE_BYTES]
        return
    size = source.numel() * source.dtype.itemsize
    if not size:
        return
    plain = source.device.type == "cpu" and source.is_contiguous() and not source.is_conj()
    if size <= _SLICE_BYTES and plain and not source.is_neg():
        yield memory_of(source)  # most tensors are small, and cutting them takes longer than writing them
        return
    # A size of an element is a power of two, so these sizes divide that of a chunk.
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
