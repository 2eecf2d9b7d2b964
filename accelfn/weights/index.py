"""The files of a model's weights: their names, which tensor is in which file, and how they are found."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import torch

from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.storage.address import Address, as_path
from accelfn.storage.disk import kind_of, list_names
from accelfn.storage.object_store import disk_at, open_binary
from accelfn.tree import is_dtensor
from accelfn.weights.dtypes import SAFETENSORS_NAMES
from accelfn.weights.header import Header, check_length, check_safetensors_header, storage_order

WeightNaming: TypeAlias = Literal["transformers", "diffusers"]

_NAMINGS: tuple[WeightNaming, ...] = ("transformers", "diffusers")
_UNITS = MappingProxyType({"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1})
_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module"})
_SAFE, _PICKLED = (".safetensors",), (".bin", ".pt", ".pth")


# --- names ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WeightNames:
    """File names of a model's weights, in one format of one library.

    Attributes:
        stem: Begins each name, such as ``"model"``.
        suffix: ``".safetensors"`` or ``".bin"``.
    """

    stem: str
    suffix: str

    @property
    def is_safe(self) -> bool:
        """Whether the files are safetensors, which can't contain code."""
        return self.suffix == ".safetensors"

    @property
    def single(self) -> str:
        """Name of the file if there is only one."""
        return f"{self.stem}{self.suffix}"

    @property
    def index(self) -> str:
        """Name of the index of several files."""
        return f"{self.stem}{self.suffix}.index.json"

    def shard(self, number: int, count: int, generation: int = 1) -> str:
        """Return the name of one of several files.

        A save next to files of generation 1 uses generation 2, and the other way round, so that no file that
        an index names is ever replaced by a file of another model.

        >>> WeightNames("model", ".safetensors").shard(1, 3)
        'model-00001-of-00003.safetensors'
        >>> WeightNames("model", ".safetensors").shard(1, 3, generation=2)
        'model-2-00001-of-00003.safetensors'
        """
        middle = "" if generation == 1 else f"-{generation}"
        return f"{self.stem}{middle}-{number:05d}-of-{count:05d}{self.suffix}"

    def generation(self, name: str) -> int | None:
        """Return the generation of a shard by its file name; None for other files."""
        pattern = rf"{re.escape(self.stem)}(?:-(\d{{1,9}}))?-\d{{5,}}-of-\d{{5,}}{re.escape(self.suffix)}"
        match = re.fullmatch(pattern, name)
        return int(match[1] or 1) if match else None


def names_of(naming: WeightNaming) -> tuple[WeightNames, WeightNames]:
    """Return a library's file names for safetensors and for ``torch.save``.

    Raises:
        ValueError: ``naming`` is neither ``"transformers"`` nor ``"diffusers"``.
    """
    if naming not in _NAMINGS:
        raise ValueError(f"names must be {' or '.join(map(repr, _NAMINGS))}, got {naming!r}.")
    if naming == "diffusers":
        stem = "diffusion_pytorch_model"
        return WeightNames(stem, ".safetensors"), WeightNames(stem, ".bin")
    return WeightNames("model", ".safetensors"), WeightNames("pytorch_model", ".bin")


def entry_names(naming: WeightNaming) -> tuple[str, ...]:
    """List the files that a reader may open first, in the order in which the library looks for them.

    >>> entry_names("transformers")[:2], entry_names("diffusers")[0]
    (('model.safetensors', 'model.safetensors.index.json'), 'diffusion_pytorch_model.safetensors.index.json')
    """
    # transformers looks for the single file first, diffusers for the index.
    if naming == "transformers":
        return tuple(name for names in names_of(naming) for name in (names.single, names.index))
    return tuple(name for names in names_of(naming) for name in (names.index, names.single))


# --- the plan of a save --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsPlan:
    """Which tensor goes into which file.

    Attributes:
        files: Each file's name with the names of its tensors, in the order in which they are stored.
        tied: Pairs of a tensor that isn't stored and the stored tensor that has the same data.
        total_bytes: Size of all stored tensors.
    """

    files: tuple[tuple[str, tuple[str, ...]], ...]
    tied: tuple[tuple[str, str], ...]
    total_bytes: int


def parse_size(size: int | str, name: str = "max_shard_size") -> int:
    """Return a size in bytes: a number, or a text such as ``"10GB"`` or ``"1.5 MB"`` in powers of 1000.

    ``name`` is what errors call the size.

    Raises:
        ValueError: The text has another form, or the size is less than 1 byte.

    >>> parse_size("1.5MB"), parse_size(10)
    (1500000, 10)
    """
    num_bytes = size if isinstance(size, int) else 0
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(TB|GB|MB|KB|B)\s*", size, re.IGNORECASE)
        num_bytes = round(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if num_bytes < 1:
        raise ValueError(
            f"{name} must be a number of bytes, or a number with TB, GB, MB or KB such as '5GB': got "
            f"{size!r}."
        )
    return num_bytes


def tied_by(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return a key that two tensors share if they are the same data."""
    # A rank may hold no part of a DTensor, so only the identity of the object is the same on all ranks.
    if tensor.is_meta or is_dtensor(tensor) or not tensor.numel() or not tensor.data_ptr():
        return (id(tensor),)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def plan_weights(
    tensors: Mapping[str, torch.Tensor],
    max_shard_bytes: int,
    names: WeightNames | None = None,
    generation: int = 1,
) -> WeightsPlan:
    """Assign tensors to files. Pure.

    Files are filled in the order of the tensors, up to the limit; a tensor that exceeds the limit by itself
    gets its own file. Tensors that are the same data are stored once, under the first name.

    Args:
        tensors: By name.
        max_shard_bytes: Largest size of the tensors in a file.
        names: Names of the files. None: ``model.safetensors`` and its shards.
        generation: Of the shards; see :meth:`WeightNames.shard`.
    """
    names = names or names_of("transformers")[0]
    first: dict[tuple[Any, ...], str] = {}
    tied: list[tuple[str, str]] = []
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name, tensor in tensors.items():
        stored = first.setdefault(tied_by(tensor), name)
        if stored != name:
            tied.append((name, stored))
            continue
        size = tensor.numel() * tensor.dtype.itemsize
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
        total += size
    files: list[tuple[str, tuple[str, ...]]] = []
    for number, shard in enumerate(shards, 1):
        file = names.single if len(shards) == 1 else names.shard(number, len(shards), generation)
        forms = [
            (name, SAFETENSORS_NAMES.get(tensors[name].dtype, ""), tuple(tensors[name].shape))
            for name in shard
        ]
        files.append((file, tuple(name for name, _, _ in storage_order(forms))))
    return WeightsPlan(files=tuple(files), tied=tuple(tied), total_bytes=total)


# --- finding files -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFiles:
    """The files that hold a model's weights.

    Attributes:
        directory: Contains the files.
        files: Their names, in order.
        weight_map: The file of each tensor, from the index; None for a single file.
    """

    directory: Path
    files: tuple[str, ...]
    weight_map: Mapping[str, str] | None = None

    @property
    def is_safe(self) -> bool:
        """Whether the files are safetensors; otherwise they are pickled."""
        return self.files[0].endswith(_SAFE)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Paths of the files."""
        return tuple(self.directory / file for file in self.files)


def find_weights(path: str | os.PathLike[str]) -> WeightsFiles:
    """Find the files of a model's weights, by the names that transformers, diffusers and ``save_model`` use.

    An index is accepted only if every file that it names is a regular file in the same directory. Links are
    followed within the directory, and into the Hugging Face hub's cache next to it (``../../blobs``). An
    index is ``{"weight_map": {name: file}}``, or the flat map ``{name: file}``.

    Ranks: local. No tensor is read.

    Args:
        path: A directory, a single file of weights, or an index.

    Returns:
        The files. If a directory holds several sets, the one that the library would load: safetensors before
        pickled files. If no file has a library's name, the directory's only ``*.index.json``.

    Raises:
        NoCheckpointError: There are no weights at ``path``.
        DamagedCheckpointError: The index is malformed, or names a file that is missing or elsewhere.
        ValueError: The directory holds files of both libraries, or several indexes with other names, or
            ``path`` is a file of another kind.
    """
    source = as_path(path)
    kind = _kind_of(source)
    if kind is None:
        raise NoCheckpointError(f"{source} doesn't exist.")
    entry = _find_entry(source) if kind == "directory" else source
    directory = entry.parent
    if kind == "directory":  # a link that the user passes may lead anywhere
        _check_file(directory, entry.name, entry.name)
    elif kind != "file":
        raise NoCheckpointError(f"{entry} is not a regular file.")
    if entry.name.endswith((*_SAFE, *_PICKLED)):
        return WeightsFiles(directory=directory, files=(entry.name,))
    weight_map = _read_index(entry)
    files = tuple(sorted(set(weight_map.values())))
    match = re.fullmatch(r".+(\.safetensors|\.bin)\.index\.json", entry.name)
    suffix = match[1] if match else Path(files[0]).suffix  # all files have to be of one kind
    for file in files:
        if (
            Path(file).name != file
            or "\\" in file
            or not file.endswith(suffix)
            or suffix not in (*_SAFE, *_PICKLED)
        ):
            raise DamagedCheckpointError(
                f"{entry} names {file!r}, which is not a weights file in the same directory.", entry.name
            )
        _check_file(directory, file, entry.name)
    return WeightsFiles(directory=directory, files=files, weight_map=MappingProxyType(weight_map))


def _kind_of(path: Path) -> str | None:
    """Return what kind of thing is at a path, to which links may lead; None if nothing is."""
    if isinstance(path, Address):
        return kind_of(disk_at(path), path)
    return "directory" if path.is_dir() else "file" if path.is_file() else "other" if path.exists() else None


def _find_entry(directory: Path) -> Path:
    names = list_names(disk_at(directory), str(directory))
    found: list[str] = []
    for naming in _NAMINGS:
        existing = [name for name in entry_names(naming) if name in names]
        found.extend(existing[:1])
    if not found:
        found = sorted(name for name in names if name.endswith(".index.json"))
    if not found and "manifest.json" in names:
        raise NoCheckpointError(
            f"{directory} is the checkpoint of a training (save_state) and has no files of weights. Take the "
            "model out of it, by its path in the tree that was saved: "
            f'load_state(ctx, {str(directory)!r}, {{"model": model}}, partial=True). Or write its weights to '
            f"files: `accelfn checkpoint convert {directory} DIRECTORY --to safetensors --leaf model`. If an "
            'Accelerator saved it, use {"models": {"model": model}} and models/model.'
        )
    if not found and ".metadata" in names:
        raise NoCheckpointError(
            f"{directory} is a checkpoint of torch.distributed.checkpoint. Merge its weights into a file: "
            f"`accelfn merge-weights {directory} DIRECTORY`, and load that directory."
        )
    if not found:
        raise NoCheckpointError(
            f"{directory} has no weights: neither {entry_names('transformers')[0]}, nor another file that "
            "transformers or diffusers would load, nor an index. Pass the path of the file if it has another "
            "name."
        )
    if len(found) > 1:
        raise ValueError(f"{directory} has {' and '.join(found)}. Pass the path of the one to read.")
    return directory / found[0]


def _read_index(path: Path) -> dict[str, str]:
    is_index = path.name.endswith(".index.json")
    unknown = ValueError(
        f"{path} is not a weights file by its name. Pass a directory, a file that ends in "
        f"{', '.join((*_SAFE, *_PICKLED))}, or an index (.safetensors.index.json, .bin.index.json)."
    )
    if not path.name.endswith(".json"):
        raise unknown
    try:
        with open_binary(path) as file:
            content: object = json.loads(file.read(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path} is not valid JSON: {error}.", path.name) from error
    index = cast("dict[str, object]", content) if isinstance(content, dict) else {}
    # The flat map has no weight_map. Any other JSON file is an index only if all its values name weights.
    is_flat = all(
        isinstance(file, str) and (is_index or file.endswith((*_SAFE, *_PICKLED))) for file in index.values()
    )
    weight_map = index.get("weight_map", index if is_flat else None)
    if not isinstance(weight_map, dict) or not weight_map:
        if not is_index:
            raise unknown
        raise DamagedCheckpointError(f"{path} is not an index: it has no weight_map.", path.name)
    for name, file in cast("dict[str, object]", weight_map).items():
        if not isinstance(file, str):
            raise DamagedCheckpointError(
                f"{path} names {file!r} as the file of {name!r}; it must be a text.", path.name
            )
    return cast("dict[str, str]", weight_map)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _check_file(directory: Path, file: str, index: str) -> None:
    """Check that a file is a regular file in the directory; links may lead to other files in it."""
    path = directory / file
    if isinstance(path, Address) and _kind_of(path) is None:
        raise DamagedCheckpointError(f"{path} is missing, and {index} needs it.", index)
    if isinstance(path, Address):
        return
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL
        raise DamagedCheckpointError(f"{path} is missing, and {index} needs it: {error}.", index) from error
    if not target.is_file():
        raise DamagedCheckpointError(f"{path} is not a regular file.", index)
    home = directory.resolve()
    # The hub's cache: models--NAME/snapshots/REVISION/FILE links to models--NAME/blobs/HASH.
    is_blob = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
    if home not in target.parents and not is_blob:
        raise DamagedCheckpointError(f"{path} is a link that leads out of the directory, to {target}.", index)


def read_header(path: Path) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        DamagedCheckpointError: The file is not valid safetensors.
    """
    with open_binary(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        start = file.read(8)
        head = start + file.read(check_length(start, size, str(path)) - len(start))
    return check_safetensors_header(head, size, str(path))


def prefix_hint(expected: set[str], stored: set[str]) -> str:
    """Describe a prefix by which names would match; "" if there is none. Pure.

    Args:
        expected: Names of the model's tensors.
        stored: Names in the files.

    >>> prefix_hint({"weight", "bias"}, {"module._orig_mod.weight", "module._orig_mod.bias"})[:55]
    " The names match without the prefix 'module._orig_mod.'"
    """
    if not expected or not stored or 2 * len(expected & stored) > min(len(expected), len(stored)):
        return ""
    prefix = _prefix_between(stored, expected)
    if prefix is not None and _WRAPPERS.issuperset(prefix[:-1].split(".")):
        return (
            f" The names match without the prefix {prefix!r}, which is a wrapper's "
            "(DistributedDataParallel, torch.compile). Save the state dict of the model inside, or remove "
            "the prefix from the names."
        )
    if prefix is not None:
        return (
            f" The names match without the prefix {prefix!r}: the checkpoint is of a model that contains "
            f"this one as {prefix[:-1]!r}. Load it into that model."
        )
    prefix = _prefix_between(expected, stored)
    if prefix is not None:
        return (
            f" The names match with the prefix {prefix!r}: the checkpoint is of an inner model. Load it into "
            f"the module {prefix[:-1]!r} of this one."
        )
    return ""


def nesting_hint(content: Mapping[str, object]) -> str:
    """Describe a dict of tensors within the content of a file; "" if there is none. Pure.

    >>> nesting_hint({"state_dict": {"weight": torch.ones(2)}, "epoch": 3})
    " Its 'state_dict' is a dict of tensors: save that alone."
    """
    for key, value in content.items():
        inner: Mapping[object, object] = value if isinstance(value, Mapping) else {}  # pyright: ignore[reportUnknownVariableType]
        if any(isinstance(one, torch.Tensor) for one in inner.values()):
            return f" Its {key!r} is a dict of tensors: save that alone."
    return ""


def _prefix_between(outer: set[str], inner: set[str]) -> str | None:
    """Return the prefix in ``outer`` without which most names of ``inner`` are in it. Pure."""
    counts: Counter[str] = Counter()
    for name in sorted(outer):
        end = 0
        for _ in range(3):
            end = name.find(".", end) + 1
            if not end:
                break
            counts[name[:end]] += name[end:] in inner
    prefix, count = next(iter(counts.most_common(1)), ("", 0))
    return prefix if 2 * count > len(inner) else None
