"""Find the files of a model's weights, and refuse those that no honest save has made."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from accelfn.checkpoint.files.header import Header, check_length, check_safetensors_header
from accelfn.checkpoint.weights.plan import WeightNaming, entry_names
from accelfn.errors import DamagedCheckpointError, NoCheckpointError

__all__ = ("WeightsFiles", "find_weights", "read_header")

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
