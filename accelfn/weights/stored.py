"""Files of weights: their headers, mapping them into memory, and reading them.

A tensor is either read into allocated memory, in pieces, by a few threads; or its file is mapped, and the
kernel reads pages when they are used. Mappings are private and copy-on-write: clean pages are shared with the
page cache and can be reclaimed, and a page that is written becomes a copy of this process. So a mapped tensor
behaves like any other, and its file never changes.

The file must not be modified while a mapped tensor exists: changes are visible in pages that weren't written
yet, and reading beyond the end of a truncated file kills the process (SIGBUS). To replace a file, write
another one and rename it, as this library does; the mapping then keeps the old file.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from accelfn.errors import DamagedCheckpointError
from accelfn.storage.address import Address
from accelfn.storage.disk import Disk, Status, naming, open_regular, opened, read_exactly
from accelfn.storage.object_store import disk_at
from accelfn.weights.write import memory_of

PIECE_BYTES = 1 << 23
"""What a thread reads at a time: for an accelerator, or for a checksum."""

_RECORD = "_accelfn_mapped_from"  # an attribute of the storage, which a Parameter of the tensor shares
# Without it, Linux refuses private mappings larger than its memory.
_MAP_NORESERVE = 0x4000
_POPULATE_READ = 22  # of madvise on Linux, since 5.14
# Flags of a page in /proc/self/pagemap: bit 61 for file pages, 62 for swapped ones, 63 for present ones.
_FLAGS_SHIFT, _NOT_PRESENT, _CLEAN = 61, 0b000, 0b101


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: Its name in the file.
        path: The file.
        dtype: Its stored dtype.
        shape: Its shape.
        start: Offset of its first byte in the file.
        elements: Returns its values, if they aren't contiguous in the file.
        parts: The stored tensors that it is assembled from, if any.
        operations: How it is assembled from them, as text.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    elements: Callable[[], torch.Tensor] | None = None
    parts: tuple[Stored, ...] = ()
    operations: str = ""

    @property
    def num_bytes(self) -> int:
        """Size of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """Dtype and shape, for messages."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    @property
    def is_mappable(self) -> bool:
        """Whether it can be used in place: in a file, contiguous and aligned."""
        alignment = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
        is_file = not isinstance(self.path, Address)
        return is_file and self.elements is None and self.start % alignment == 0

    def map(self) -> torch.Tensor:
        """Map it, see :func:`map_stored`."""
        return map_stored([self])[0]

    def equals(self, other: Stored) -> bool:
        """Check whether two stored tensors have the same bytes."""
        spans = {(stored.path, stored.start, stored.num_bytes) for stored in (self, other)}
        if len(spans) == 1 and self.elements is None and other.elements is None:
            return self.dtype == other.dtype
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        tensors = self.map(), other.map()
        equal = torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors))
        drop_pages(tensors)
        return equal


class FileId(NamedTuple):
    """File identity, used to detect modification."""

    inode: int
    num_bytes: int
    modified_ns: int


def file_id_of(path: Path) -> FileId:
    """Return the identity of a file, to which links may lead, or of an object."""
    if isinstance(path, Address):
        return _object_id(disk_at(path).status(str(path)))
    return _file_id(path.stat())


def check_unchanged(path: Path, before: FileId) -> None:
    """Check that an object is still the same: of one that is replaced, later requests get the new one.

    Raises:
        DamagedCheckpointError: It was modified.
    """
    if isinstance(path, Address) and file_id_of(path) != before:
        raise modified(path)


def modified(path: Path) -> DamagedCheckpointError:
    """Return the error for a file that was modified while it was read."""
    return DamagedCheckpointError(f"{path} was modified while it was read. Load again.", path.name)


def _file_id(status: os.stat_result) -> FileId:
    return FileId(status.st_ino, status.st_size, status.st_mtime_ns)


def _object_id(status: Status) -> FileId:
    return FileId(status.inode, status.size, int(status.modified_s * 1e9))


@contextmanager
def opened_unchanged(
    path: Path, file_ids: Mapping[Path, FileId] | None
) -> Generator[tuple[Disk, int], None, None]:
    """Open a file of weights, and check that it is still the one whose header was read.

    Yields the disk and the descriptor. None doesn't check the file.

    Raises:
        DamagedCheckpointError: It was modified.
    """
    disk = disk_at(path)
    if isinstance(path, Address):
        with opened(disk, str(path.parent)) as folder:
            descriptor = open_regular(disk, folder, path.name)[0]
        found = _object_id(disk.status_of(descriptor))
    else:  # a link may lead to it
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        found = _file_id(os.fstat(descriptor))
    try:
        if file_ids is not None and found != file_ids[path]:
            raise modified(path)
        yield disk, descriptor
        check_unchanged(path, found)
    finally:
        disk.close(descriptor)


class _MappedFrom(NamedTuple):
    """The file range that a tensor's memory is mapped from.

    Attributes:
        path: The file.
        start: Offset of the first byte in the file.
        address: Address in memory.
        num_bytes: Size.
    """

    path: Path
    start: int
    address: int
    num_bytes: int


def map_stored(some: Sequence[Stored], file_ids: Mapping[Path, FileId] | None = None) -> list[torch.Tensor]:
    """Map tensors of files into memory, without reading them.

    Tensors of one file share a mapping, which ends with the last of them, but each has its own storage, so
    that pickling or copying one doesn't include the others. Tensors that can't be used in place are read,
    and so are objects of a store.

    Ranks: local.

    Args:
        some: The tensors; one that is listed twice becomes two tensors.
        file_ids: Identities of the files when their headers were read; None doesn't check them.

    Returns:
        Tensors on the CPU, with their stored dtypes and shapes.

    Raises:
        DamagedCheckpointError: A file is truncated or was modified.
        OSError: A file can't be opened or mapped.
    """
    tensors: dict[int, torch.Tensor] = {}
    by_file: dict[Path, list[int]] = {}
    for index, stored in enumerate(some):
        by_file.setdefault(stored.path, []).append(index)
    for path, indices in by_file.items():
        with opened_unchanged(path, file_ids) as (disk, descriptor):
            in_place = [some[index] for index in indices if some[index].elements is None]
            end = max((stored.start + stored.num_bytes for stored in in_place), default=0)
            size = disk.status_of(descriptor).size
            if end > size:
                raise DamagedCheckpointError(
                    f"{path} has {size} bytes, but its tensors need {end}: it is truncated. Copy it again.",
                    path.name,
                )
            if isinstance(path, Address):
                tensors.update((index, _read(disk, descriptor, some[index])) for index in indices)
                continue
            mapping = _map(descriptor, path) if any(stored.num_bytes for stored in in_place) else None
        tensors.update((index, _view(mapping, some[index])) for index in indices)
    return [tensors[index] for index in range(len(some))]


def _read(disk: Disk, descriptor: int, stored: Stored) -> torch.Tensor:
    if stored.elements is not None:
        return stored.elements()
    value = torch.empty(stored.shape, dtype=stored.dtype)
    with naming(str(stored.path)):
        if not read_exactly(disk, descriptor, memory_of(value), stored.start):
            raise DamagedCheckpointError(f"{stored.path} is truncated. Copy it again.", stored.path.name)
    return value


def _map(descriptor: int, path: Path) -> Any:
    """Map a whole file, privately and writably; return an object with a buffer, which ends the mapping.

    Python's mmap keeps a descriptor open for each mapping before Python 3.13, and the files of an offload
    folder may be more than a process may open.
    """
    size = os.fstat(descriptor).st_size
    if sys.platform == "win32":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | (_MAP_NORESERVE if sys.platform == "linux" else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    mapping = (ctypes.c_ubyte * size).from_address(address)
    # Not at the exit of the interpreter, when other threads may still use the tensors.
    weakref.finalize(mapping, libc.munmap, address, size).atexit = False
    return mapping


def _view(mapping: Any, stored: Stored) -> torch.Tensor:
    if stored.elements is not None:
        return stored.elements()
    if mapping is None or not stored.num_bytes:
        return torch.empty(stored.shape, dtype=stored.dtype)
    if not stored.is_mappable:
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=stored.num_bytes, offset=stored.start)
        return data.clone().view(stored.dtype).view(stored.shape)
    count = stored.num_bytes // stored.dtype.itemsize
    flat = torch.frombuffer(mapping, dtype=stored.dtype, count=count, offset=stored.start)
    storage = flat.untyped_storage()
    path = Path(os.path.abspath(stored.path))
    setattr(storage, _RECORD, _MappedFrom(path, stored.start, storage.data_ptr(), storage.nbytes()))
    return flat.view(stored.shape)


def mapped_from(tensor: torch.Tensor) -> _MappedFrom | None:
    """Return the file range that a tensor's memory is mapped from; None if it isn't.

    Args:
        tensor: Any tensor; also a parameter made from a mapped tensor. A slice of a mapped tensor doesn't
            count, nor does a tensor that has other memory by now.
    """
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # subclasses that consist of other tensors have none
        return None
    record = getattr(storage, _RECORD, None)
    if not isinstance(record, _MappedFrom) or tensor.data_ptr() != record.address:
        return None
    # The storage's memory may have been replaced in place, as by share_memory_.
    return record if (storage.data_ptr(), storage.nbytes()) == (record.address, record.num_bytes) else None


def read_in(tensors: Iterable[torch.Tensor]) -> None:
    """Read mapped tensors into memory ahead of their use, and wait for it.

    Systems without support for waiting only get a hint to read ahead.

    Args:
        tensors: Those that aren't mapped are ignored.
    """
    willneed: int | None = getattr(mmap, "MADV_WILLNEED", None)
    if willneed is None:
        return
    advise = advise_memory()
    for record in _records(tensors):
        start = record.address // mmap.PAGESIZE * mmap.PAGESIZE
        size = record.address + record.num_bytes - start
        # Linux before 5.14 and other systems refuse the first.
        if sys.platform != "linux" or advise(start, size, _POPULATE_READ) != 0:
            advise(start, size, willneed)


def drop_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Release the memory of mapped tensors, which are read again when they are used.

    Writes are never lost: a tensor with a modified page stays in memory, as do all tensors on systems other
    than Linux, which don't report modified pages. No other thread may write to the tensors meanwhile. The
    kernel keeps the file in its page cache while it has memory to spare.

    Args:
        tensors: Those that aren't mapped are ignored.

    Returns:
        The bytes of address space that were released.
    """
    if sys.platform != "linux":
        return 0
    try:
        pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return 0
    try:
        advise, dropped = advise_memory(), 0
        for record in _records(tensors):
            # Pages at the ends may contain other tensors.
            first = -(-record.address // mmap.PAGESIZE)
            last = (record.address + record.num_bytes) // mmap.PAGESIZE
            if first < last and _are_clean(pagemap, first, last - first):
                size = (last - first) * mmap.PAGESIZE
                dropped += size if advise(first * mmap.PAGESIZE, size, mmap.MADV_DONTNEED) == 0 else 0
        return dropped
    finally:
        os.close(pagemap)


def _records(tensors: Iterable[torch.Tensor]) -> Iterable[_MappedFrom]:
    return (record for tensor in tensors if (record := mapped_from(tensor)) is not None)


def _are_clean(pagemap: int, first: int, count: int) -> bool:
    """Check that this process has modified none of the pages."""
    try:
        entries = os.pread(pagemap, count * 8, first * 8)
    except OSError:
        return False
    if len(entries) != count * 8:
        return False
    flags = (torch.frombuffer(bytearray(entries), dtype=torch.int64) >> _FLAGS_SHIFT) & 0b111
    return bool(((flags == _NOT_PRESENT) | (flags == _CLEAN)).all())


def advise_memory() -> Any:
    """Return the system's ``madvise``: address, length, advice -> 0 on success."""
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise
