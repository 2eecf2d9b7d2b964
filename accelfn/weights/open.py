"""Open files of weights: their headers, and the values of pickled ones."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from accelfn.errors import DamagedCheckpointError
from accelfn.storage.address import Address, as_path
from accelfn.weights.dtypes import STORED_DTYPES
from accelfn.weights.index import find_weights, read_header
from accelfn.weights.stored import PIECE_BYTES, FileId, Stored, check_unchanged, file_id_of, map_stored
from accelfn.weights.torch_file import read_torch_file
from accelfn.weights.write import memory_of

# Frameworks whose weights have other layouts than torch's.
_FOREIGN = frozenset({"tf", "flax", "mlx"})


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedWeights:
    """What is in some files of weights.

    Attributes:
        place: The path, as given.
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


def open_weights(path: str | os.PathLike[str]) -> OpenedWeights:
    """Read the headers of safetensors files, or all but the tensors of pickled ones.

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
        file_ids[file] = file_id_of(file)
        try:
            contents, metadata = (_read_safetensors if files.is_safe else _read_pickled)(file)
        except DamagedCheckpointError:
            check_unchanged(file, file_ids[file])
            raise
        check_unchanged(file, file_ids[file])
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
    return OpenedWeights(
        place=as_path(path),
        tensors=MappingProxyType(tensors),
        tied=MappingProxyType({name: first for name, first in tied.items() if first in tensors}),
        others=MappingProxyType({name: value for name, value in values.items() if name not in tensors}),
        file_ids=MappingProxyType(file_ids),
    )


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the tensors of files of weights, mapped, and other values of pickled ones, by name.

    Raises:
        NoCheckpointError: There are no weights at ``path``.
        DamagedCheckpointError: A file is malformed.
        CheckpointError: A pickled file requires running code, or has the format of torch before 1.6.
    """
    opened = open_weights(path)
    mapped = map_stored([*opened.tensors.values()], opened.file_ids)
    return {**dict(zip(opened.tensors, mapped, strict=True)), **opened.others}


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
    size = file_id_of(path).num_bytes
    file_bytes = Stored("", path, torch.uint8, (size,), 0).map()
    spans: list[_Span] = []

    def take(start: int, length: int, crc32: int) -> torch.Tensor:
        spans.append(_Span(start, length, crc32))
        return file_bytes[start : start + length]

    contents: object = read_torch_file(path, take)
    state = cast("Mapping[object, object]", contents) if isinstance(contents, Mapping) else None
    if state is None or not all(isinstance(name, str) for name in state):
        raise DamagedCheckpointError(f"{path} isn't a dict of tensors by name.", path.name)
    _verify_checksums(path, spans, file_bytes)

    def stored(name: str, value: torch.Tensor) -> Stored:
        start = value.data_ptr() - file_bytes.data_ptr() if value.numel() else 0
        is_read = isinstance(path, Address) or not value.is_contiguous()
        elements = (lambda: value) if is_read else None
        return Stored(name, path, value.dtype, tuple(value.shape), start, elements)

    tensors_and_others = {
        name: stored(name, value) if isinstance(value, torch.Tensor) else value
        for name, value in cast("Mapping[str, object]", state).items()
    }
    return tensors_and_others, {}


def _verify_checksums(path: Path, spans: Sequence[_Span], file_bytes: torch.Tensor) -> None:
    """Compare storages with their checksums in the archive."""

    def differs(span: _Span) -> bool:
        crc32, position, end = 0, span.start, span.start + span.length
        if isinstance(path, Address):  # of which all bytes are in memory
            return zlib.crc32(memory_of(file_bytes[position:end])) != span.crc32
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
