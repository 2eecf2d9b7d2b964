"""Which tensor of a model goes into which file, and what the files are called. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast

import torch

from accelfn.tree import is_dtensor

__all__ = (
    "WeightNames",
    "WeightNaming",
    "WeightsPlan",
    "entry_names",
    "names_of",
    "parse_size",
    "plan_weights",
    "tied_by",
)

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
        files: Names of files, and of the tensors in each, in order.
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
        files=tuple((file, tuple(shard)) for file, shard in zip(files, shards, strict=True)),
        tied=tuple(tied),
        total_bytes=total,
    )
