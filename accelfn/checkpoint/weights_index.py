"""Files of a model's weights: what is in which, what they are called, and how they are found again."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import torch

from accelfn.checkpoint.header import (
    SAFETENSORS_NAMES,
    Header,
    check_length,
    check_safetensors_header,
    storage_order,
)
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.tree import is_dtensor

WeightNaming: TypeAlias = Literal["transformers", "diffusers"]

_UNITS = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1))


@dataclass(frozen=True, slots=True)
class WeightNames:
    """What the files of a model are called, in one format of one library.

    Attributes:
        stem: Of the names, such as ``"model"``.
        suffix: ``".safetensors"`` or ``".bin"``.
    """

    stem: str
    suffix: str

    @property
    def is_safe(self) -> bool:
        """Whether they are safetensors, which no code can hide in."""
        return self.suffix == ".safetensors"

    @property
    def single(self) -> str:
        """Name of the only file."""
        return f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        """Name of the index of several files."""
        return f"{self.stem}{self.suffix}.index.json"

    def shard(self, number: int, count: int, generation: int = 1) -> str:
        """Name of one of several files.

        A save beside one that has the first names takes those of the next generation, so that no file of an
        index is ever replaced by one of another content.

        >>> WeightNames("model", ".safetensors").shard(1, 3)
        'model-00001-of-00003.safetensors'
        >>> WeightNames("model", ".safetensors").shard(1, 3, generation=2)
        'model-2-00001-of-00003.safetensors'
        """
        middle = "" if generation == 1 else f"-{generation}"
        return f"{self.stem}{middle}-{number:05d}-of-{count:05d}{self.suffix}"

    def generation(self, name: str) -> int | None:
        """Of which generation a file is; None for what is no shard of these names."""
        pattern = rf"{re.escape(self.stem)}(?:-(\d{{1,9}}))?-\d{{5,}}-of-\d{{5,}}{re.escape(self.suffix)}"
        match = re.fullmatch(pattern, name)
        return int(match[1] or 1) if match else None


_DEFAULT = WeightNames("model", ".safetensors")
_NAMES: Mapping[str, tuple[WeightNames, WeightNames]] = MappingProxyType(
    {
        "transformers": (_DEFAULT, WeightNames("pytorch_model", ".bin")),
        "diffusers": (
            WeightNames("diffusion_pytorch_model", ".safetensors"),
            WeightNames("diffusion_pytorch_model", ".bin"),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlan:
    """Which tensor goes into which file.

    Attributes:
        files: Names of files, and of the tensors in each, in the order of the file.
        tied: Name of each tensor that isn't stored, and the stored one that it shares all its data with.
        total_bytes: Of all stored tensors.
    """

    files: tuple[tuple[str, tuple[str, ...]], ...]
    tied: tuple[tuple[str, str], ...]
    total_bytes: int


def names_of(naming: WeightNaming) -> tuple[WeightNames, WeightNames]:
    """What a library calls the files of a model: its safetensors, and those of ``torch.save``.

    Raises:
        ValueError: ``naming`` is neither ``"transformers"`` nor ``"diffusers"``.
    """
    found = _NAMES.get(naming) if isinstance(cast("object", naming), str) else None
    if found is None:
        raise ValueError(f"names must be {' or '.join(map(repr, _NAMES))}, got {naming!r}.")
    return found


def entry_names(naming: WeightNaming) -> tuple[str, ...]:
    """Names of the files that readers open first; of several that are there they take the first of these.

    >>> entry_names("transformers")[:2], entry_names("diffusers")[0]
    (('model.safetensors', 'model.safetensors.index.json'), 'diffusion_pytorch_model.safetensors.index.json')
    """
    # As the libraries do: transformers looks for the only file first, diffusers for the index.
    if naming == "transformers":
        return tuple(name for names in names_of(naming) for name in (names.single, names.index))
    return tuple(name for names in names_of(naming) for name in (names.index, names.single))


def parse_size(size: int | str) -> int:
    """Read a size such as ``"10GB"``, ``"1.5 MB"`` or a number of bytes. Units are powers of 1000.

    Raises:
        ValueError: Another form, or nothing above zero.

    >>> parse_size("1.5MB"), parse_size(10)
    (1500000, 10)
    """
    number = Decimal(size) if isinstance(size, int) else None
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(TB|GB|MB|KB|B)\s*", size, re.IGNORECASE)
        number = Decimal(match[1]) * dict(_UNITS)[match[2].upper()] if match else None
    if number is None or number < 1:
        raise ValueError(
            f"max_shard_size must be bytes or a number with TB, GB, MB or KB, such as '5GB': got {size!r}."
        )
    return int(number)


def tied_by(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A key that two tensors have in common if they are the very same data."""
    # Of a DTensor a rank may hold nothing, so that all ranks can tell only by the object.
    if tensor.is_meta or is_dtensor(tensor) or not tensor.numel() or not tensor.data_ptr():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def storage_names(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Order names as a safetensors file has its tensors."""
    some = ((name, tensors[name]) for name in names)
    forms = ((name, SAFETENSORS_NAMES.get(one.dtype, ""), tuple(one.shape)) for name, one in some)
    return tuple(name for name, _, _ in storage_order(forms))


def plan_weights(
    tensors: Mapping[str, torch.Tensor],
    max_shard_bytes: int,
    names: WeightNames = _DEFAULT,
    generation: int = 1,
) -> WeightsPlan:
    """Decide which tensor goes into which file. Pure.

    Tensors are taken in order; a file is closed when the next one would make it too large, and a tensor that
    is too large by itself gets a file of its own. Tensors with the very same data are stored once, under the
    first name.

    Args:
        tensors: By name.
        max_shard_bytes: Largest size of a file's tensors.
        names: What the files are called.
        generation: Of the names of several files; see :meth:`WeightNames.shard`.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied: list[tuple[str, str]] = []
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, tensor in tensors.items():
        same = tied_by(tensor)
        if same in first:
            tied.append((name, first[same]))
            continue
        first[same] = name
        size = tensor.numel() * tensor.dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
        total += size
    files = (
        [names.single]
        if len(shards) == 1
        else [names.shard(number, len(shards), generation) for number in range(1, len(shards) + 1)]
    )
    return WeightsPlan(
        files=tuple((file, storage_names(shard, tensors)) for file, shard in zip(files, shards, strict=True)),
        tied=tuple(tied),
        total_bytes=total,
    )


_NAMINGS: tuple[WeightNaming, ...] = ("transformers", "diffusers")
# Of real models by far the largest index has some megabytes, and so has the largest header.
_MAX_JSON_BYTES = 100_000_000
_SAFE, _PICKLED = (".safetensors",), (".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFiles:
    """Where the weights of a model are.

    Attributes:
        directory: Of the files.
        files: Their names, in order.
        weight_map: Name of the file of each tensor, where an index says it; None of a single file.
    """

    directory: Path
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None

    @property
    def is_safe(self) -> bool:
        """Whether the files are safetensors, and not pickled."""
        return self.files[0].endswith(_SAFE)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Of the files."""
        return tuple(self.directory / file for file in self.files)


def find_weights(path: str | os.PathLike[str]) -> WeightsFiles:
    """Find the files of a model's weights, as transformers, diffusers and :func:`save_model` name them.

    An index is only believed where each file that it names is a regular file of the same directory. Links are
    followed within the directory, and into the store of the Hugging Face hub's cache beside it
    (``../../blobs``). It is ``{"weight_map": {name: file}}``, or the flat map ``{name: file}``.

    Ranks: local. No tensor is read.

    Args:
        path: A directory; or the only file, or the index.

    Returns:
        Of several sets in the directory the one that the library takes: safetensors before pickled files. If
        none has a name of the libraries, the only ``*.index.json`` of any name.

    Raises:
        NoCheckpointError: There is nothing of that kind.
        DamagedCheckpointError: The index is no index, or names what isn't there or is elsewhere.
        ValueError: The directory holds files of both libraries, or several indexes of other names, or the
            file is of another kind.
    """
    place = Path(path)
    if not place.exists():
        raise NoCheckpointError(f"{place} doesn't exist.")
    if place.is_dir():
        entry, is_given = _find_entry(place), False
    else:
        entry, is_given = place, True  # a link that the user names may lead anywhere
    directory = entry.parent
    if not is_given:
        _check_file(directory, entry.name, entry.name)
    elif not entry.is_file():
        raise NoCheckpointError(f"{entry} is no regular file.")
    if entry.name.endswith((*_SAFE, *_PICKLED)):
        return WeightsFiles(directory=directory, files=(entry.name,))
    if not entry.name.endswith(".json"):
        raise _unknown(entry)
    weight_map = _read_index(entry)
    files = tuple(sorted(set(weight_map.values())))
    match = re.fullmatch(r".+(\.safetensors|\.bin)\.index\.json", entry.name)
    # An index of another name says by its first file what kind it is for.
    suffix = (
        match[1] if match else next((one for one in (*_SAFE, *_PICKLED) if files[0].endswith(one)), ".bin")
    )
    for file in files:
        _check_name(entry.name, file, suffix)
        _check_file(directory, file, entry.name)
    return WeightsFiles(directory=directory, files=files, weight_map=MappingProxyType(weight_map))


def _unknown(entry: Path) -> ValueError:
    return ValueError(
        f"{entry} is no file of weights by its name. Pass a directory, a file that ends in "
        f"{', '.join((*_SAFE, *_PICKLED))}, or an index (.safetensors.index.json, .bin.index.json)."
    )


def _find_entry(directory: Path) -> Path:
    found: list[str] = []
    for naming in _NAMINGS:
        there = [name for name in entry_names(naming) if os.path.lexists(directory / name)]
        found.extend(there[:1])
    if not found:
        found = sorted(name for name in os.listdir(directory) if name.endswith(".index.json"))
    if not found:
        raise NoCheckpointError(
            f"{directory} has no weights: neither {entry_names('transformers')[0]} nor another of the names "
            "that transformers and diffusers give, and no index of them. Pass the file itself if it has "
            "another name."
        )
    if len(found) > 1:
        raise ValueError(f"{directory} has {' and '.join(found)}: pass the one to read.")
    return directory / found[0]


def _read_index(path: Path) -> dict[str, str]:
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise DamagedCheckpointError(f"{path} is too large for an index.", path.name)
    said = _parse(path.read_bytes(), path)
    is_index = path.name.endswith(".index.json")
    # Some write the map alone. A configuration may have texts, too: only names of files make it one.
    flat = all(
        isinstance(file, str) and (is_index or file.endswith((*_SAFE, *_PICKLED))) for file in said.values()
    )
    found: object = said.get("weight_map", said if flat else None)
    if not isinstance(found, dict) or not found:
        if not is_index:
            raise _unknown(path)
        raise DamagedCheckpointError(f"{path} is no index: it has no weight_map.", path.name)
    for name, file in cast("dict[str, object]", found).items():
        if not isinstance(file, str):
            raise DamagedCheckpointError(f"{path}: the file of {name!r} is {file!r}, and no name.", path.name)
    return cast("dict[str, str]", found)


def _parse(content: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("a name stands in it twice")
        return made

    try:
        said: object = json.loads(content, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} holds no sound JSON: {error}.", path.name) from error
    if not isinstance(said, dict):
        raise DamagedCheckpointError(f"{path} holds {type(said).__name__} instead of an object.", path.name)
    return cast("dict[str, Any]", said)


def _check_name(index: str, file: str, suffix: str) -> None:
    """Refuse what is no plain name of a file of the kind that the index is for."""
    # No separator of any system, no drive, no NUL or other control character, no hidden file.
    is_plain = re.fullmatch(r"(?!\.)[^/\\:\x00-\x1f\x7f]{1,255}", file)
    if is_plain is None or not file.endswith(suffix):
        raise DamagedCheckpointError(
            f"{index} names {file!r}, which is no plain name of a {suffix} file beside it.", index
        )


def _check_file(directory: Path, file: str, index: str) -> None:
    path = directory / file
    try:
        target = path.resolve(strict=True)
        is_regular = stat.S_ISREG(target.stat().st_mode)
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise DamagedCheckpointError(f"{path} is missing, and {index} needs it: {error}.", index) from error
    if not is_regular:
        raise DamagedCheckpointError(f"{path} is no regular file.", index)
    home = directory.resolve()
    if home not in target.parents and not _is_blob(home, target):
        raise DamagedCheckpointError(f"{path} is a link that leads out of the directory, to {target}.", index)


def _is_blob(home: Path, target: Path) -> bool:
    # The hub's cache: models--NAME/snapshots/REVISION/FILE links to models--NAME/blobs/HASH.
    return home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"


def read_header(path: Path) -> Header:
    """Read what a safetensors file says of its tensors, and check it before anything is read by it.

    Raises:
        DamagedCheckpointError: It is no sound safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        head = start + file.read(check_length(start, size, str(path)) - len(start))
    return check_safetensors_header(head, size, str(path))
