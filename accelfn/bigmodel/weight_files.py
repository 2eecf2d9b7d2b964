"""Files of weights: what they hold, and how it gets into memory.

Either a tensor is read, straight to its memory: in pieces, by a few threads, in bounded memory. Or the file
is mapped, and the kernel reads it where it is used. A mapping is private and copy-on-write: reading takes
pages from the kernel's cache of the file, which it takes back when it needs memory, and what is written lands
in a copy of the page that this process has for itself. So such a tensor is an ordinary one in every respect,
and no file ever changes.

The file must stay as it is while a tensor of it lives: a later change shows through in what was not written
yet, and reading past the end of a file that was cut kills the process (SIGBUS). To replace a file, write
another and rename it into place, as everything here does; the mapping then keeps the old one.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import mmap
import os
import sys
import threading
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
from accelfn.errors import DamagedCheckpointError, MissingExtraError

STORED_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})
"""The dtypes of torch that a safetensors file can hold, by its name for them."""

_RECORD = "_accelfn_mapped_from"  # on the storage, so that a Parameter of a mapped tensor has it, too
# Python's mmap doesn't name it. Without it, Linux refuses private mappings larger than its memory.
_MAP_NORESERVE = 0x4000
_POPULATE_READ = 22  # of madvise on Linux, since 5.14
# Of a page in /proc/self/pagemap: bit 61 is set if it is the file's, 62 if it is swapped, 63 if it is there.
_FLAGS_SHIFT, _NOT_THERE, _CLEAN = 61, 0b000, 0b101
# Frameworks that store weights in other layouts than torch's.
_FOREIGN = frozenset({"tf", "flax", "mlx"})


class Stored(NamedTuple):
    """A tensor in a file.

    Attributes:
        name: In the file.
        path: Of the file.
        dtype: As it is stored.
        shape: Of the tensor.
        start: Its first byte in the file.
        elements: Returns its elements, where they aren't contiguous in the file.
        made_of: What its elements are made of, where they are several tensors.
        made_by: How they are made of them.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
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
    def is_mappable(self) -> bool:
        """Whether it can be used where it lies: contiguous, and aligned."""
        alignment = self.dtype.itemsize // (2 if self.dtype.is_complex else 1)
        return self.elements is None and self.start % alignment == 0

    def map(self) -> torch.Tensor:
        """Map it, see :func:`map_stored`."""
        return map_stored([self])[0]

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


class FileId(NamedTuple):
    """Identity of a file, by which a modification is detected."""

    inode: int
    num_bytes: int
    modified_ns: int


def file_id_of(status: os.stat_result) -> FileId:
    """Return the identity of a file from what the system says of it."""
    return FileId(status.st_ino, status.st_size, status.st_mtime_ns)


def open_unchanged(path: Path, file_ids: Mapping[Path, FileId]) -> BinaryIO:
    """Open a file of a checkpoint that is still the one whose header was read.

    Raises:
        DamagedCheckpointError: It isn't.
    """
    file = open(path, "rb", buffering=0)  # noqa: SIM115 -- the caller closes it
    if file_id_of(os.fstat(file.fileno())) != file_ids[path]:
        file.close()
        raise DamagedCheckpointError(f"{path} was changed while it was read. Load again.", path.name)
    return cast("Any", file)


# --- mapped tensors ------------------------------------------------------------------------------


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


def map_stored(some: Sequence[Stored], file_ids: Mapping[Path, FileId] | None = None) -> list[torch.Tensor]:
    """Map tensors of files into memory, without reading them.

    Those of a file share one mapping, which ends with the last of them; but each is a storage of its own, so
    that pickling or copying one takes its bytes only. What can't be used where it lies comes into memory.

    Ranks: local.

    Args:
        some: What to map; one that is named twice becomes two tensors.
        file_ids: Of the files when their headers were read; None doesn't ask whether they were changed.

    Returns:
        On the CPU, with the dtypes and shapes that they are stored with.

    Raises:
        DamagedCheckpointError: A file was cut off, or isn't what it was.
        OSError: It can't be opened or mapped.
    """
    found: dict[int, torch.Tensor] = {}
    by_file: dict[Path, list[int]] = {}
    for number, one in enumerate(some):
        by_file.setdefault(one.path, []).append(number)
    for path, numbers in by_file.items():
        with open(path, "rb") if file_ids is None else open_unchanged(path, file_ids) as file:
            inside = [some[number] for number in numbers if some[number].elements is None]
            end = max((one.start + one.num_bytes for one in inside), default=0)
            size = os.fstat(file.fileno()).st_size
            if end > size:
                raise DamagedCheckpointError(
                    f"{path} has {size} bytes, and its tensors need {end}: it was cut off. Copy it again.",
                    path.name,
                )
            mapping = _map(file) if any(one.num_bytes for one in inside) else None
        found.update((number, _view(mapping, some[number])) for number in numbers)
    return [found[number] for number in range(len(some))]


def _map(file: BinaryIO) -> mmap.mmap:
    if sys.platform == "win32":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    options: dict[str, Any] = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    if sys.platform == "linux":
        options["flags"] |= _MAP_NORESERVE
    if sys.version_info >= (3, 13):
        options["trackfd"] = False  # a mapping of hundreds of files shall not keep them open, too
    return mmap.mmap(file.fileno(), 0, **options)


def _view(mapping: mmap.mmap | None, one: Stored) -> torch.Tensor:
    if one.elements is not None:
        return one.elements()
    if mapping is None or not one.num_bytes:
        return torch.empty(one.shape, dtype=one.dtype)
    if not one.is_mappable:
        misaligned = torch.frombuffer(mapping, dtype=torch.uint8, count=one.num_bytes, offset=one.start)
        return misaligned.clone().view(one.dtype).view(one.shape)
    count = one.num_bytes // one.dtype.itemsize
    flat = torch.frombuffer(mapping, dtype=one.dtype, count=count, offset=one.start)
    storage = flat.untyped_storage()
    place = Path(os.path.abspath(one.path))
    setattr(storage, _RECORD, _MappedFrom(place, one.start, storage.data_ptr(), storage.nbytes()))
    return flat.view(one.shape)


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


def read_in(tensors: Iterable[torch.Tensor]) -> None:
    """Bring mapped tensors into memory, so that their first use waits for nothing. This does wait.

    Where the system can't, it is asked to read them ahead.

    Args:
        tensors: Those that aren't mapped are left out.
    """
    willneed: int | None = getattr(mmap, "MADV_WILLNEED", None)
    if willneed is None:
        return
    advise = advise_memory()
    for record in _records(tensors):
        start = record.address // mmap.PAGESIZE * mmap.PAGESIZE
        size = record.address + record.num_bytes - start
        # Linux before 5.14, and other systems, refuse the first.
        if sys.platform != "linux" or advise(start, size, _POPULATE_READ) != 0:
            advise(start, size, willneed)


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
    if sys.platform != "linux":
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
                dropped += size if advise(first * mmap.PAGESIZE, size, mmap.MADV_DONTNEED) == 0 else 0
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


# --- checkpoints ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What the files of a checkpoint hold.

    Attributes:
        place: Where it is, as given.
        tensors: By name.
        tied: Names that aren't stored, each with the stored one that it shares its data with.
        others: What else stands in pickled files, by name, such as the extra state of modules.
        file_ids: Of the files, as they were when their headers were read.
    """

    place: Path
    tensors: Mapping[str, Stored]
    tied: Mapping[str, str]
    others: Mapping[str, object]
    file_ids: Mapping[Path, FileId]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read what a checkpoint holds: headers of safetensors files, or all but the tensors of pickled ones.

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
    files = find_weights(path)
    found: dict[str, object] = {}
    tied: dict[str, str] = {}
    file_ids: dict[Path, FileId] = {}
    for file in files.paths:
        file_ids[file] = file_id_of(file.stat())
        here, metadata = (_read_safetensors if files.is_safe else _read_pickled)(file)
        if files.weight_map is not None:
            promised = [name for name, inside in files.weight_map.items() if inside == file.name]
            lost = sorted(set(promised) - here.keys())
            if lost:
                raise DamagedCheckpointError(
                    f"{file} lacks {', '.join(lost[:5])}, which the index says is in it: the files are not "
                    "of one save.",
                    file.name,
                )
            here = {name: here[name] for name in promised}
        found.update(here)
        tied.update(metadata)
    tensors = {name: one for name, one in found.items() if isinstance(one, Stored)}
    return Checkpoint(
        place=Path(path),
        tensors=MappingProxyType(tensors),
        tied=MappingProxyType({name: one for name, one in tied.items() if one in tensors}),
        others=MappingProxyType({name: one for name, one in found.items() if name not in tensors}),
        file_ids=MappingProxyType(file_ids),
    )


def stored_in(path: Path) -> Mapping[str, Stored]:
    """Return the tensors of a safetensors file.

    Raises:
        DamagedCheckpointError: It isn't sound, or has a dtype that torch lacks.
    """
    return _read_safetensors(path)[0]


def _read_safetensors(path: Path) -> tuple[Mapping[str, Stored], Mapping[str, str]]:
    entries, metadata = read_header(path)
    unknown = sorted({one.dtype for one in entries.values()} - STORED_DTYPES.keys())
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
        for name, one in entries.items()
    }
    return tensors, metadata


class _Span(NamedTuple):
    start: int
    length: int
    crc32: int


def _read_pickled(path: Path) -> tuple[Mapping[str, object], Mapping[str, str]]:
    size = path.stat().st_size
    whole = Stored("", path, torch.uint8, (size,), 0).map()
    spans: list[_Span] = []

    def take(start: int, length: int, crc32: int) -> torch.Tensor:
        spans.append(_Span(start, length, crc32))
        return whole[start : start + length]

    found: object = read_torch_file(path, take)
    named = cast("Mapping[object, object]", found) if isinstance(found, Mapping) else None
    if named is None or not all(isinstance(name, str) for name in named):
        raise DamagedCheckpointError(f"{path} holds no dict of tensors by name.", path.name)
    _verify(path, spans)

    def stored(name: str, value: torch.Tensor) -> Stored:
        start = value.data_ptr() - whole.data_ptr() if value.numel() else 0
        elements = None if value.is_contiguous() else lambda: value
        return Stored(name, path, value.dtype, tuple(value.shape), start, elements)

    state = {
        name: stored(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in cast("Mapping[str, object]", named).items()
    }
    return state, {}


def _verify(path: Path, spans: Sequence[_Span]) -> None:
    """Compare the bytes of storages with the checksums that the archive has of them."""

    def differs(span: _Span) -> bool:
        crc32, at, end = 0, span.start, span.start + span.length
        with open(path, "rb") as file:
            file.seek(at)
            buffer = bytearray(min(PIECE_BYTES, span.length))
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


# --- reading -------------------------------------------------------------------------------------

PIECE_BYTES = 1 << 23
"""What a thread reads for an accelerator at a time."""

# More than one thread also on one core: while one waits for the disk, another one copies.
_MIN_THREADS, _MAX_THREADS = 2, 8
# At a time: what the system has just cleared is still in the processor's cache when it is filled.
_STEP_BYTES = 1 << 20
# Linux has it since 5.14; older ones say that they don't know it.
_MADV_POPULATE_WRITE = 23


class Reading(NamedTuple):
    """A tensor to read.

    Attributes:
        source: Where it lies.
        target: Memory of its shape, on any device; what is read is cast to its dtype.
    """

    source: Stored
    target: torch.Tensor


def read_tensors(
    readings: Sequence[Reading],
    file_ids: Mapping[Path, FileId],
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Read tensors into memory that they have already.

    Bytes that need no other dtype go from the system straight into the memory of the host. Others pass
    through a buffer of each of at most eight threads: of 1 MiB where they are cast for the host, and of
    ``PIECE_BYTES``, pinned, where they go to an accelerator; there they are cast, too.

    Effect: on the targets, also where it fails. Ranks: local.

    Args:
        readings: In the order of the files, if disks shall be fast.
        file_ids: Of the files, as they were when their headers were read.
        advance: Called in this thread with bytes of the files that are done.

    Raises:
        DamagedCheckpointError: A file isn't what it was.
        OSError: It can't be read.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = min(_MAX_THREADS, max(_MIN_THREADS, cores)) if REAL_DISK.parallel_reads else 1
    with ExitStack() as closing, torch.no_grad():
        files = {
            path: closing.enter_context(open_unchanged(path, file_ids))
            for path in dict.fromkeys(one.source.path for one in readings)
        }
        reader = _Reader(files)
        pool = closing.enter_context(ThreadPoolExecutor(threads, "accelfn-load"))
        closing.callback(pool.shutdown, cancel_futures=True)
        pieces = [(piece, pool.submit(reader.read, *piece)) for piece in _pieces(readings)]
        for (source, target), done in pieces:
            done.result()
            advance(target.numel() * source.dtype.itemsize)
        # Last, since each of them takes memory of its own size.
        for source, target in readings:
            if not _goes_in_pieces(source, target):
                value = torch.empty(source.shape, dtype=source.dtype)
                if source.elements is None:
                    reader.fill(source, value)
                target.copy_(value if source.elements is None else source.elements())
                advance(source.num_bytes)


def _goes_in_pieces(source: Stored, target: torch.Tensor) -> bool:
    return source.elements is None and target.is_contiguous()


def _pieces(readings: Sequence[Reading]) -> Iterator[Reading]:
    """Return what is read at a time: contiguous parts of the tensors."""
    for source, target in readings:
        if _goes_in_pieces(source, target):
            yield from _parts(source, target.detach().view(-1), PIECE_BYTES)


def _parts(source: Stored, flat: torch.Tensor, num_bytes: int) -> Iterator[Reading]:
    size = source.dtype.itemsize
    for first in range(0, flat.numel(), num_bytes // size):
        part = source._replace(start=source.start + first * size)
        yield Reading(part, flat[first : first + num_bytes // size])


class _Reader(threading.local):
    """Reads from open files. Each thread has buffers of its own, made when they are needed first."""

    def __init__(self, files: Mapping[Path, BinaryIO]) -> None:
        self._files = files
        self._advise: Any = advise_memory() if sys.platform == "linux" else None
        self._buffer: torch.Tensor | None = None

    def read(self, source: Stored, target: torch.Tensor) -> None:
        """Read a piece."""
        if target.device.type != "cpu":
            self._read_staged(source, target)
            return
        for part, memory in _parts(source, target, _STEP_BYTES):
            self._prepare(memory)
            if memory.dtype == part.dtype:
                self.fill(part, memory)
            else:
                self._read_staged(part, memory)

    def fill(self, source: Stored, memory: torch.Tensor) -> None:
        """Read bytes into memory of the host."""
        with naming(str(source.path)):
            file = self._files[source.path].fileno()
            whole = read_exactly(REAL_DISK, file, memory_of(memory), source.start)
        if not whole:
            raise DamagedCheckpointError(
                f"{source.path} was cut off while it was read. Load again.", source.path.name
            )

    def _read_staged(self, source: Stored, target: torch.Tensor) -> None:
        with torch.no_grad():
            num_bytes = target.numel() * source.dtype.itemsize
            if self._buffer is None or self._buffer.numel() < num_bytes:
                can_pin = target.device.type not in ("cpu", "mps")
                size = PIECE_BYTES if can_pin else num_bytes
                self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=can_pin)
            staged = self._buffer[:num_bytes]
            self.fill(source, staged)
            typed = staged.view(source.dtype)
            if target.device.type != "cpu" and target.dtype != source.dtype:
                typed = typed.to(target.device)  # it casts faster, and a cast on the host takes more memory
            target.copy_(typed)  # returns when the buffer is free again

    def _prepare(self, memory: torch.Tensor) -> None:
        """Let the system make new memory real in one go, which it otherwise does page by page."""
        size = memory.numel() * memory.itemsize
        if self._advise is not None and size > mmap.PAGESIZE:
            start = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
            self._advise(start, memory.data_ptr() + size - start, _MADV_POPULATE_WRITE)


@contextmanager
def showing(what: str, total: int, progress: bool | None) -> Generator[Callable[[int], None]]:
    """Show how many bytes are done, and give what is to be called with them.

    Args:
        what: Stands before the bar.
        total: Bytes.
        progress: Whether to show a bar. None: if tqdm is installed, and somebody may be looking (standard
            error is a terminal). Without standard error, as under ``pythonw``, there is none.

    Raises:
        MissingExtraError: A bar is wanted, and tqdm isn't installed.
    """
    has_tqdm = importlib.util.find_spec("tqdm") is not None
    if progress and not has_tqdm:
        raise MissingExtraError("progress=True needs tqdm: pip install 'accelfn[bigmodel]'.")
    error: Any = sys.stderr  # None where a process has none
    if error is None or not (error.isatty() and has_tqdm if progress is None else progress):
        yield lambda _: None
        return
    tqdm: Any = importlib.import_module("tqdm").tqdm
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
