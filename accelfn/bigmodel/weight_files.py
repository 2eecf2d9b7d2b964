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
import importlib
import importlib.util
import mmap
import os
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from accelfn.checkpoint.disk import REAL_DISK, naming, read_exactly
from accelfn.checkpoint.files import memory_of
from accelfn.checkpoint.header import SAFETENSORS_NAMES
from accelfn.checkpoint.torch_file import read_torch_file
from accelfn.checkpoint.weights_index import find_weights, read_header
from accelfn.devices import device_type
from accelfn.errors import DamagedCheckpointError, MissingExtraError

STORED_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})
"""torch dtypes by their name in safetensors files."""

_RECORD = "_accelfn_mapped_from"  # an attribute of the storage, which a Parameter of the tensor shares
# Without it, Linux refuses private mappings larger than its memory.
_MAP_NORESERVE = 0x4000
_POPULATE_READ = 22  # of madvise on Linux, since 5.14
# Flags of a page in /proc/self/pagemap: bit 61 for file pages, 62 for swapped ones, 63 for present ones.
_FLAGS_SHIFT, _NOT_PRESENT, _CLEAN = 61, 0b000, 0b101
# Frameworks whose weights have other layouts than torch's.
_FOREIGN = frozenset({"tf", "flax", "mlx"})


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
        """Whether it can be used in place: contiguous and aligned."""
        alignment = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
        return self.elements is None and self.start % alignment == 0

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


def file_id_of(status: os.stat_result) -> FileId:
    """Return the identity of a file."""
    return FileId(status.st_ino, status.st_size, status.st_mtime_ns)


def open_unchanged(path: Path, file_ids: Mapping[Path, FileId]) -> BinaryIO:
    """Open a file of a checkpoint, and check that it is still the one whose header was read.

    Raises:
        DamagedCheckpointError: It was modified.
    """
    file = open(path, "rb", buffering=0)  # noqa: SIM115 -- the caller closes it
    if file_id_of(os.fstat(file.fileno())) != file_ids[path]:
        file.close()
        raise DamagedCheckpointError(f"{path} was modified while it was read. Load again.", path.name)
    return cast("Any", file)


# --- mapped tensors ------------------------------------------------------------------------------


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
    that pickling or copying one doesn't include the others. Tensors that can't be used in place are read.

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
        with open(path, "rb") if file_ids is None else open_unchanged(path, file_ids) as file:
            in_place = [some[index] for index in indices if some[index].elements is None]
            end = max((stored.start + stored.num_bytes for stored in in_place), default=0)
            size = os.fstat(file.fileno()).st_size
            if end > size:
                raise DamagedCheckpointError(
                    f"{path} has {size} bytes, but its tensors need {end}: it is truncated. Copy it again.",
                    path.name,
                )
            mapping = _map(file) if any(stored.num_bytes for stored in in_place) else None
        tensors.update((index, _view(mapping, some[index])) for index in indices)
    return [tensors[index] for index in range(len(some))]


def _map(file: BinaryIO) -> Any:
    """Map a whole file, privately and writably; return an object with a buffer, which ends the mapping.

    Python's mmap keeps a descriptor open for each mapping before Python 3.13, and the files of an offload
    folder may be more than a process may open.
    """
    size = os.fstat(file.fileno()).st_size
    if sys.platform == "win32":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | (_MAP_NORESERVE if sys.platform == "linux" else 0)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file.name)
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


# --- checkpoints ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The contents of a checkpoint's files.

    Attributes:
        place: The path of the checkpoint, as given.
        tensors: Stored tensors by name.
        tied: Names that aren't stored, each with the stored name that shares its data.
        others: Other values in pickled files by name, such as the extra state of modules.
        file_ids: Identities of the files when their headers were read.
    """

    place: Path
    tensors: Mapping[str, Stored]
    tied: Mapping[str, str]
    others: Mapping[str, object]
    file_ids: Mapping[Path, FileId]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read the headers of a checkpoint's safetensors files, or all but the tensors of pickled ones.

    Pickled files are read as data, so they can't run code, and the checksums of their tensors are verified.
    Safetensors files have no checksums.

    Ranks: local.

    Args:
        path: A directory, a single file, or an index; see :func:`accelfn.checkpoint.find_weights`.

    Raises:
        NoCheckpointError: There are no weights.
        DamagedCheckpointError: A file is truncated, doesn't match the index, or has an unknown dtype.
        CheckpointError: A pickled file requires running code, or has the format of torch before 1.6.
        ValueError: The directory is ambiguous, or the weights are another framework's.
    """
    files = find_weights(path)
    values: dict[str, object] = {}
    tied: dict[str, str] = {}
    file_ids: dict[Path, FileId] = {}
    for file in files.paths:
        file_ids[file] = file_id_of(file.stat())
        contents, metadata = (_read_safetensors if files.is_safe else _read_pickled)(file)
        if files.weight_map is not None:
            indexed = [name for name, file_name in files.weight_map.items() if file_name == file.name]
            missing = sorted(set(indexed) - contents.keys())
            if missing:
                raise DamagedCheckpointError(
                    f"{file} lacks {', '.join(missing[:5])}, which the index lists for it. The index and the "
                    "file aren't from the same save.",
                    file.name,
                )
            contents = {name: contents[name] for name in indexed}
        values.update(contents)
        tied.update(metadata)
    tensors = {name: value for name, value in values.items() if isinstance(value, Stored)}
    return Checkpoint(
        place=Path(path),
        tensors=MappingProxyType(tensors),
        tied=MappingProxyType({name: first for name, first in tied.items() if first in tensors}),
        others=MappingProxyType({name: value for name, value in values.items() if name not in tensors}),
        file_ids=MappingProxyType(file_ids),
    )


def stored_in(path: Path) -> Mapping[str, Stored]:
    """Return the tensors of a safetensors file.

    Raises:
        DamagedCheckpointError: It is damaged, or has a dtype that torch lacks.
    """
    return _read_safetensors(path)[0]


def _read_safetensors(path: Path) -> tuple[Mapping[str, Stored], Mapping[str, str]]:
    entries, metadata = read_header(path)
    unknown = sorted({entry.dtype for entry in entries.values()} - STORED_DTYPES.keys())
    if unknown:
        raise DamagedCheckpointError(
            f"{path} has tensors of {', '.join(unknown)}, which torch lacks.", path.name
        )
    if metadata.get("format") in _FOREIGN:
        raise ValueError(
            f"{path} was written for {metadata['format']}, whose weights have other layouts than torch's. "
            "Convert it with the library that wrote it."
        )
    tensors = {
        name: Stored(name, path, STORED_DTYPES[entry.dtype], entry.shape, entry.start)
        for name, entry in entries.items()
    }
    return tensors, metadata


class _Span(NamedTuple):
    start: int
    length: int
    crc32: int


def _read_pickled(path: Path) -> tuple[Mapping[str, object], Mapping[str, str]]:
    size = path.stat().st_size
    file_bytes = Stored("", path, torch.uint8, (size,), 0).map()
    spans: list[_Span] = []

    def take(start: int, length: int, crc32: int) -> torch.Tensor:
        spans.append(_Span(start, length, crc32))
        return file_bytes[start : start + length]

    contents: object = read_torch_file(path, take)
    state = cast("Mapping[object, object]", contents) if isinstance(contents, Mapping) else None
    if state is None or not all(isinstance(name, str) for name in state):
        raise DamagedCheckpointError(f"{path} isn't a dict of tensors by name.", path.name)
    _verify_checksums(path, spans)

    def stored(name: str, value: torch.Tensor) -> Stored:
        start = value.data_ptr() - file_bytes.data_ptr() if value.numel() else 0
        elements = None if value.is_contiguous() else lambda: value
        return Stored(name, path, value.dtype, tuple(value.shape), start, elements)

    tensors_and_others = {
        name: stored(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in cast("Mapping[str, object]", state).items()
    }
    return tensors_and_others, {}


def _verify_checksums(path: Path, spans: Sequence[_Span]) -> None:
    """Compare storages with their checksums in the archive."""

    def differs(span: _Span) -> bool:
        crc32, position, end = 0, span.start, span.start + span.length
        with open(path, "rb") as file:
            file.seek(position)
            buffer = bytearray(min(PIECE_BYTES, span.length))
            while position < end:
                count = file.readinto(memoryview(buffer)[: min(len(buffer), end - position)])
                if not count:
                    return True
                crc32 = zlib.crc32(memoryview(buffer)[:count], crc32)
                position += count
        return crc32 != span.crc32

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "accelfn-verify") as pool:
        if any(pool.map(differs, spans)):
            raise DamagedCheckpointError(
                f"{path} is damaged: a tensor doesn't match its checksum. Nothing was loaded. Copy the file "
                "again from where it was written.",
                path.name,
            )


# --- reading -------------------------------------------------------------------------------------

PIECE_BYTES = 1 << 23
"""What a thread reads for an accelerator at a time."""

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
    threads = min(_MAX_THREADS, max(_MIN_THREADS, cores)) if REAL_DISK.parallel_reads else 1
    with ExitStack() as closing, torch.no_grad():
        files = {
            path: closing.enter_context(open_unchanged(path, file_ids))
            for path in dict.fromkeys(reading.source.path for reading in readings)
        }
        reader = _Reader(files)
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

    def __init__(self, files: Mapping[Path, BinaryIO]) -> None:
        self._files = files
        self._advise: Any = advise_memory() if sys.platform == "linux" else None
        self._buffer: torch.Tensor | None = None

    def read(self, source: Stored, target: torch.Tensor) -> None:
        """Read a piece."""
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
            file = self._files[source.path].fileno()
            is_complete = read_exactly(REAL_DISK, file, memory_of(memory), source.start)
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
