"""What a checkpoint of the ecosystem holds: each tensor with its place in a file, before any is read."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, cast

import torch

from accelfn.bigmodel.load.mapped import STORED_DTYPES, drop_pages, is_mappable, map_tensors
from accelfn.checkpoint.accelerate.torch_file import read_torch_file
from accelfn.checkpoint.files.disk import REAL_DISK, read_exactly
from accelfn.checkpoint.files.header import Entry
from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES, dtype_name
from accelfn.checkpoint.files.tensor_file import memory_of
from accelfn.checkpoint.weights.index import WeightsFiles, find_weights, read_header
from accelfn.errors import DamagedCheckpointError

__all__ = (
    "Checkpoint",
    "Stamp",
    "Stored",
    "map_stored",
    "open_checkpoint",
    "open_unchanged",
    "open_weights",
    "stamp_of",
)

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
    return open_weights(find_weights(path), Path(path))


def open_weights(files: WeightsFiles, place: Path) -> Checkpoint:
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
