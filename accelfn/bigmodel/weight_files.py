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
import functools
import math
import mmap
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from accelfn.checkpoint.disk import REAL_DISK, read_exactly
from accelfn.checkpoint.files import memory_of
from accelfn.checkpoint.header import (
    SAFETENSORS_NAMES,
    Entry,
    check_length,
    check_safetensors_header,
    dtype_name,
)
from accelfn.checkpoint.torch_file import read_torch_file
from accelfn.checkpoint.weights_index import WeightsFiles, find_weights, read_header
from accelfn.errors import DamagedCheckpointError

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


class _MappedFrom(NamedTuple):
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
    record = _MappedFrom(path, entry.start, storage.data_ptr(), storage.nbytes())
    setattr(storage, _RECORD, record)
    return flat.view(entry.shape)


def mapped_from(tensor: torch.Tensor) -> _MappedFrom | None:
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
    if not isinstance(record, _MappedFrom) or tensor.data_ptr() != record.address:
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


def _records(tensors: Iterable[torch.Tensor]) -> Iterable[_MappedFrom]:
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


# Frameworks whose kernels lie otherwise than torch's.
_FOREIGN = frozenset({"tf", "flax", "mlx"})
_READ_BYTES = 1 << 23


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: In the file.
        path: Of the file.
        dtype: As it lies there.
        shape: Of the tensor.
        start: Its first byte in the file.
        is_raw: Whether the file is another than one of safetensors.
        elements: Gives its elements, where they don't lie one after the other in the file.
        made_of: What its elements are made of, where they are several tensors.
        made_by: How they are made of them.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    is_raw: bool = False
    elements: Callable[[], torch.Tensor] | None = None
    made_of: tuple[Stored, ...] = ()
    made_by: str = ""

    @property
    def num_bytes(self) -> int:
        """Of its elements."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def kind(self) -> str:
        """Dtype and shape, for people."""
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    @property
    def entry(self) -> Entry:
        """Its place, as the head of a file says it."""
        dtype = SAFETENSORS_NAMES.get(self.dtype) or dtype_name(self.dtype)
        return Entry(dtype, self.shape, self.start, self.start + self.num_bytes)

    @property
    def is_mappable(self) -> bool:
        """Whether it can be used where it lies."""
        return self.elements is None and is_mappable(self.entry)

    def map(self) -> torch.Tensor:
        """Map it. Nothing is read; where it can't be used where it lies, it comes into memory.

        Raises:
            DamagedCheckpointError: The file isn't what it was.
        """
        if self.elements is not None:
            return self.elements()
        if self.is_mappable:
            return map_tensors(self.path, {self.name: self.entry}, is_raw=self.is_raw)[self.name]
        value = torch.empty(self.shape, dtype=self.dtype)
        with open(self.path, "rb") as file:
            if not read_exactly(REAL_DISK, file.fileno(), memory_of(value), self.start):
                raise DamagedCheckpointError(f"{self.path} was cut off while it was read.", self.path.name)
        return value

    def has_bits_of(self, other: Stored) -> bool:
        """Whether it has the same bytes as another one, or is the same."""
        places = {(one.path, one.start, one.num_bytes) for one in (self, other)}
        if len(places) == 1 and self.elements is None and other.elements is None:
            return self.dtype == other.dtype
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return False
        one, two = self.map(), other.map()
        alike = torch.equal(*(value.contiguous().view(-1).view(torch.uint8) for value in (one, two)))
        drop_pages((one, two))
        return alike


class Stamp(NamedTuple):
    """By what a file is known to be the same, unchanged."""

    inode: int
    num_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What the files of a checkpoint hold.

    Attributes:
        place: Where it is, as given.
        tensors: By name.
        tied: Names that aren't stored, each with the stored one that it shares its data with.
        others: What else stands in pickled files, by name, such as the extra state of modules.
        stamps: Of the files, as they were when their heads were read.
    """

    place: Path
    tensors: Mapping[str, Stored]
    tied: Mapping[str, str]
    others: Mapping[str, object]
    stamps: Mapping[Path, Stamp]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read what a checkpoint holds: the heads of safetensors files, or all but the tensors of pickled ones.

    Pickled files are read as data, so that none can run code, and the checksums of their tensors are verified
    now. Files of safetensors have none.

    Ranks: local.

    Args:
        path: A directory, the only file, or the index; see :func:`accelfn.checkpoint.find_weights`.

    Raises:
        NoCheckpointError: There are no weights.
        DamagedCheckpointError: A file isn't sound: cut off, not of the others' save, or of an unknown dtype.
        CheckpointError: A pickled file asks for more than data, or is of the format of torch before 1.6.
        ValueError: It isn't clear which files are meant, or they are another framework's.
    """
    return _open_weights(find_weights(path), Path(path))


def _open_weights(files: WeightsFiles, place: Path) -> Checkpoint:
    """Do the same for files that were found.

    Args:
        files: Of the weights.
        place: What errors call them.

    Raises:
        DamagedCheckpointError: A file isn't sound.
        CheckpointError: A pickled file asks for more than data, or is of the format of torch before 1.6.
        ValueError: They are another framework's.
    """
    tensors: dict[str, Stored] = {}
    tied: dict[str, str] = {}
    others: dict[str, object] = {}
    stamps: dict[Path, Stamp] = {}
    for path in files.paths:
        stamps[path] = stamp_of(path)
        found = _open_safe(path) if files.is_safe else _open_pickled(path)
        promised = found.tensors.keys() | found.others.keys()
        if files.weight_map is not None:
            promised = {name for name, file in files.weight_map.items() if file == path.name}
            lost = sorted(promised - found.tensors.keys() - found.others.keys())
            if lost:
                raise DamagedCheckpointError(
                    f"{path} lacks {', '.join(lost[:5])}, which the index says is in it: the files are not "
                    "of one save.",
                    path.name,
                )
        tensors.update({name: one for name, one in found.tensors.items() if name in promised})
        others.update({name: one for name, one in found.others.items() if name in promised})
        tied.update(found.tied)
    return Checkpoint(
        place=place,
        tensors=MappingProxyType(tensors),
        tied=MappingProxyType({name: one for name, one in tied.items() if one in tensors}),
        others=MappingProxyType(others),
        stamps=MappingProxyType(stamps),
    )


class _Opened(NamedTuple):
    tensors: Mapping[str, Stored]
    tied: Mapping[str, str] = MappingProxyType({})
    others: Mapping[str, object] = MappingProxyType({})


def _open_safe(path: Path) -> _Opened:
    header, metadata = read_header(path)
    unknown = sorted({one.dtype for one in header.values()} - STORED_DTYPES.keys())
    if unknown:
        raise DamagedCheckpointError(
            f"{path} has tensors of {', '.join(unknown)}, which torch lacks.", path.name
        )
    if metadata.get("format") in _FOREIGN:
        raise ValueError(
            f"{path} was written for {metadata['format']}, whose weights lie otherwise than torch's. Convert "
            "it with the library that wrote it."
        )
    tensors = {
        name: Stored(name, path, STORED_DTYPES[one.dtype], one.shape, one.start)
        for name, one in header.items()
    }
    return _Opened(tensors, {name: first for name, first in metadata.items() if first in header})


# --- pickled files -------------------------------------------------------------------------------


class _Span(NamedTuple):
    start: int
    length: int
    crc32: int


def _open_pickled(path: Path) -> _Opened:
    whole: torch.Tensor | None = None
    spans: list[_Span] = []

    def take(start: int, length: int, crc32: int) -> torch.Tensor:
        nonlocal whole
        if whole is None:
            size = path.stat().st_size
            whole = map_tensors(path, {"": Entry("U8", (size,), 0, size)}, is_raw=True)[""]
        spans.append(_Span(start, length, crc32))
        return whole[start : start + length]

    found: object = read_torch_file(path, take)
    named = cast("Mapping[object, object]", found) if isinstance(found, Mapping) else None
    if named is None or not all(isinstance(name, str) for name in named):
        raise DamagedCheckpointError(f"{path} holds no dict of tensors by name.", path.name)
    _verify(path, spans)
    tensors: dict[str, Stored] = {}
    others: dict[str, object] = {}
    for name, value in cast("Mapping[str, object]", named).items():
        if isinstance(value, torch.Tensor):
            start = value.data_ptr() - whole.data_ptr() if whole is not None and value.numel() else 0
            elements = None if value.is_contiguous() else functools.partial(_itself, value)
            tensors[name] = Stored(name, path, value.dtype, tuple(value.shape), start, True, elements)
        else:
            others[name] = value
    return _Opened(tensors, others=others)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _verify(path: Path, spans: Sequence[_Span]) -> None:
    """Compare the bytes of storages with the checksums that the archive has of them."""

    def differs(span: _Span) -> bool:
        crc32, at, end = 0, span.start, span.start + span.length
        with open(path, "rb") as file:
            file.seek(at)
            buffer = bytearray(min(_READ_BYTES, span.length))
            while at < end:
                count = file.readinto(memoryview(buffer)[: min(len(buffer), end - at)])
                if not count:
                    return True
                crc32 = zlib.crc32(memoryview(buffer)[:count], crc32)
                at += count
        return crc32 != span.crc32

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "accelfn-verify") as pool:
        if any(pool.map(differs, spans)):
            raise DamagedCheckpointError(
                f"{path} is damaged: bytes of a tensor don't match their checksum. Nothing was taken up. "
                "Copy it again from where it was written.",
                path.name,
            )


def map_stored(some: Sequence[Stored], stamps: Mapping[Path, Stamp]) -> list[torch.Tensor]:
    """Map tensors of a checkpoint, with one mapping for each file.

    Args:
        some: What to map; one that is named twice becomes two tensors.
        stamps: Of the files, as they were when their heads were read.

    Raises:
        DamagedCheckpointError: A file isn't what it was.
    """
    by_file: dict[Path, dict[str, Entry]] = {}
    for number, one in enumerate(some):
        by_file.setdefault(one.path, {})[str(number)] = one.entry
    found: dict[str, torch.Tensor] = {}
    for path, entries in by_file.items():
        open_unchanged(path, stamps).close()
        # The heads were read when the stamps were taken, so they aren't read again.
        found.update(map_tensors(path, entries, is_raw=True))
    return [found[str(number)] for number in range(len(some))]


# --- the same file again -------------------------------------------------------------------------


def stamp_of(path: Path) -> Stamp:
    """Return by what a file would be known again."""
    return _stamp(path.stat())


def _stamp(status: os.stat_result) -> Stamp:
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


def open_unchanged(path: Path, stamps: Mapping[Path, Stamp]) -> BinaryIO:
    """Open a file of a checkpoint that is still the one whose head was read.

    Raises:
        DamagedCheckpointError: It isn't.
    """
    file = open(path, "rb", buffering=0)  # noqa: SIM115 -- the caller closes it
    if _stamp(os.fstat(file.fileno())) != stamps[path]:
        file.close()
        raise DamagedCheckpointError(f"{path} was changed while it was read. Load again.", path.name)
    return cast("Any", file)
