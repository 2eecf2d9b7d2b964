"""Tensors whose memory is a file of weights, which the kernel reads where they are used.

A mapping is private and copy-on-write: reading takes pages from the kernel's cache of the file, which it
takes back when it needs memory, and what is written lands in a copy of the page that this process has for
itself. So such a tensor is an ordinary one in every respect, and no file ever changes.

The file must stay as it is while a tensor of it lives: a later change shows through in what was not written
yet, and reading past the end of a file that was cut kills the process (SIGBUS). To replace a file, write
another and rename it into place, as everything here does; the mapping then keeps the old one.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import torch

from accelfn.checkpoint.files.header import Entry, check_length, check_safetensors_header
from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES
from accelfn.errors import DamagedCheckpointError

__all__ = (
    "STORED_DTYPES",
    "MappedFrom",
    "advise_memory",
    "drop_pages",
    "is_mappable",
    "map_tensors",
    "mapped_from",
    "read_ahead",
    "read_in",
)

STORED_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})
"""The dtypes of torch that a safetensors file can hold, by its name for them."""

# Files without a header can hold these, too.
_RAW_DTYPES = MappingProxyType(
    {"complex32": torch.complex32, "complex128": torch.complex128, **STORED_DTYPES}
)

_RECORD = "_accelfn_mapped_from"  # on the storage, so that a Parameter of a mapped tensor has it, too
# Python's mmap doesn't name it. Without it, Linux refuses private mappings larger than its memory.
_MAP_NORESERVE = 0x4000
_POPULATE_READ = 22  # of madvise on Linux, since 5.14
# Of a page in /proc/self/pagemap: bit 61 is set if it is the file's, 62 if it is swapped, 63 if it is there.
_FLAGS_SHIFT, _NOT_THERE, _CLEAN = 61, 0b000, 0b101


class MappedFrom(NamedTuple):
    """Which bytes of which file a tensor's memory is.

    What was written to the tensor since isn't in the file.

    Attributes:
        path: Of the file.
        start: First byte, from the file's beginning.
        address: Of the memory.
        num_bytes: How many.
    """

    path: Path
    start: int
    address: int
    num_bytes: int


def is_mappable(entry: Entry) -> bool:
    """Whether a tensor can be used where it lies in a file: torch has its dtype, and it lies aligned."""
    dtype = _RAW_DTYPES.get(entry.dtype)
    return dtype is not None and entry.start % _alignment(dtype) == 0


def _alignment(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def map_tensors(
    path: str | os.PathLike[str], entries: Mapping[str, Entry], *, is_raw: bool = False
) -> dict[str, torch.Tensor]:
    """Map tensors of a file into memory, without reading them.

    All of them share one mapping of the file, which ends with the last of them; but each is a storage of its
    own, so that pickling or copying one takes its bytes only.

    Ranks: local.

    Args:
        path: A safetensors file.
        entries: Of the tensors, by name, as ``read_header`` gave them.
        is_raw: The file has no header: ``entries`` alone say what is in it.

    Returns:
        By name, on the CPU, with the dtypes and shapes of ``entries``. Tensors without elements are ordinary.

    Raises:
        DamagedCheckpointError: The file isn't what it was when ``entries`` were read. Nothing was mapped.
        ValueError: A tensor can't be mapped, see :func:`is_mappable`.
        OSError: It can't be opened or mapped.
    """
    unfit = [name for name, entry in entries.items() if not is_mappable(entry)]
    if unfit:
        said = ", ".join(
            f"{name} ({entries[name].dtype} at byte {entries[name].start})" for name in unfit[:5]
        )
        raise ValueError(f"{path}: {said} can't be mapped: torch lacks the dtype, or they lie misaligned.")
    place = Path(os.path.abspath(path))
    with open(place, "rb") as file:
        _check(file, place, entries, is_raw)
        has_bytes = any(entry.stop > entry.start for entry in entries.values())
        mapping = _map(file) if has_bytes else None
    return {name: _view(mapping, place, entry) for name, entry in entries.items()}


def _check(file: BinaryIO, path: Path, entries: Mapping[str, Entry], is_raw: bool) -> None:
    size = os.fstat(file.fileno()).st_size
    if is_raw:
        end = max((entry.stop for entry in entries.values()), default=0)
        if end > size:
            raise DamagedCheckpointError(
                f"{path} has {size} bytes, and its tensors need {end}: it was cut off. Take another copy.",
                path.name,
            )
        return
    start = file.read(8)
    head = start + file.read(check_length(start, size, str(path)) - len(start))
    now = check_safetensors_header(head, size, str(path)).entries
    changed = [name for name, entry in entries.items() if now.get(name) != entry]
    if changed:
        raise DamagedCheckpointError(
            f"{path} was replaced while it was read: {', '.join(changed[:5])} in it were elsewhere before. "
            "Load again.",
            path.name,
        )


def _map(file: BinaryIO) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    options: dict[str, Any] = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    if sys.platform == "linux":
        options["flags"] |= _MAP_NORESERVE
    if sys.version_info >= (3, 13):
        options["trackfd"] = False  # a mapping of hundreds of files shall not keep them open, too
    return mmap.mmap(file.fileno(), 0, **options)


def _view(mapping: mmap.mmap | None, path: Path, entry: Entry) -> torch.Tensor:
    dtype = _RAW_DTYPES[entry.dtype]
    count = math.prod(entry.shape)
    if mapping is None or not count:
        return torch.empty(entry.shape, dtype=dtype)
    flat = torch.frombuffer(mapping, dtype=dtype, count=count, offset=entry.start)
    storage = flat.untyped_storage()
    record = MappedFrom(path, entry.start, storage.data_ptr(), storage.nbytes())
    setattr(storage, _RECORD, record)
    return flat.view(entry.shape)


def mapped_from(tensor: torch.Tensor) -> MappedFrom | None:
    """Return which bytes of which file a tensor's memory is.

    Args:
        tensor: Of any kind; a parameter that was made of a mapped tensor counts as well.

    Returns:
        None if it isn't mapped, or no more: it got other memory, or is a part of a mapped tensor.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # subclasses that are made of other tensors have none
        return None
    record = getattr(storage, _RECORD, None)
    if not isinstance(record, MappedFrom) or tensor.data_ptr() != record.address:
        return None
    # The storage may have got other memory in place, as by share_memory_.
    return record if (storage.data_ptr(), storage.nbytes()) == (record.address, record.num_bytes) else None


def read_ahead(tensors: Iterable[torch.Tensor]) -> None:
    """Ask the kernel to read mapped tensors from the disk before they are used. It doesn't wait for it.

    Args:
        tensors: Those that aren't mapped are left out.
    """
    advice: int | None = getattr(mmap, "MADV_WILLNEED", None)
    if advice is None:
        return
    advise = advise_memory()
    for record in _records(tensors):
        start = record.address // mmap.PAGESIZE * mmap.PAGESIZE
        advise(start, record.address + record.num_bytes - start, advice)


def read_in(tensors: Iterable[torch.Tensor]) -> None:
    """Bring mapped tensors into memory, so that their first use waits for nothing. This does wait.

    Where the system can't, it is asked to read them, as :func:`read_ahead` does.

    Args:
        tensors: Those that aren't mapped are left out.
    """
    kept = tuple(tensors)
    if sys.platform == "linux":
        advise = advise_memory()
        for record in _records(kept):
            start = record.address // mmap.PAGESIZE * mmap.PAGESIZE
            if advise(start, record.address + record.num_bytes - start, _POPULATE_READ) != 0:
                break  # a kernel before 5.14
        else:
            return
    read_ahead(kept)


def drop_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Return the memory of mapped tensors back, which are then read again where they are used.

    No write is ever lost: a tensor stays in memory as a whole if any page of it isn't the file's any more, or
    if this can't be found out (on systems other than Linux). No other thread may write to the tensors
    meanwhile. The kernel keeps the file in its cache for as long as it has memory to spare.

    Args:
        tensors: Those that aren't mapped are left out.

    Returns:
        The bytes of address space that were given back.
    """
    advice: int | None = getattr(mmap, "MADV_DONTNEED", None)
    if sys.platform != "linux" or advice is None:
        return 0
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return 0
    try:
        advise, dropped = advise_memory(), 0
        for record in _records(tensors):
            # Pages at the ends may have bytes of other tensors.
            first = -(-record.address // mmap.PAGESIZE)
            last = (record.address + record.num_bytes) // mmap.PAGESIZE
            if first < last and _are_clean(pagemap, first, last - first):
                size = (last - first) * mmap.PAGESIZE
                dropped += size if advise(first * mmap.PAGESIZE, size, advice) == 0 else 0
        return dropped
    finally:
        os.close(pagemap)


def _records(tensors: Iterable[torch.Tensor]) -> Iterable[MappedFrom]:
    return (record for tensor in tensors if (record := mapped_from(tensor)) is not None)


def _are_clean(pagemap: int, first: int, count: int) -> bool:
    """Whether none of the pages was written by this process: they are the file's, or not there at all."""
    try:
        said = os.pread(pagemap, count * 8, first * 8)
    except OSError:
        return False
    if len(said) != count * 8:
        return False
    flags = (torch.frombuffer(bytearray(said), dtype=torch.int64) >> _FLAGS_SHIFT) & 0b111
    return bool(((flags == _NOT_THERE) | (flags == _CLEAN)).all())


def advise_memory() -> Any:
    """Return the system's ``madvise``: address, length, advice -> 0 where it was taken."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise
