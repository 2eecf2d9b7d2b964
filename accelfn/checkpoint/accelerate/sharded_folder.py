"""Read a sharded folder of ``torch.distributed.checkpoint``, without running anything in it.

The folder has a pickled table, ``.metadata``, of which tensor's box lies at which bytes of which file. The
table and each entry are read as data (see ``pickle_data``), and the boxes are put together in this process.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.accelerate.pickle_data import Maker, RefusedPickleError, read_pickle
from accelfn.checkpoint.accelerate.torch_file import TORCH_NAMES, read_torch_stream, refuse_pickle
from accelfn.errors import CheckpointError, DamagedCheckpointError

__all__ = (
    "ShardedFolder",
    "ShardedTensor",
    "explaining_damage",
    "open_sharded_folder",
    "read_sharded_folder",
)

_TABLE = ".metadata"


class _Record:
    """A record of the table, of whatever class: its fields."""

    def __init__(self, *arguments: Any) -> None:
        self.fields: Mapping[str, Any] = MappingProxyType({})

    def get(self, name: str) -> Any:
        if name not in self.fields:
            raise ValueError(f"its table has no {name}")
        return self.fields[name]


class _Place(NamedTuple):
    """Where the bytes of an entry lie."""

    file: str
    offset: int
    length: int


class ShardedTensor(NamedTuple):
    """A tensor of a sharded folder, which isn't read yet.

    Attributes:
        path: Its place in the state dict that was saved.
        shape: Of the whole.
        dtype: Of the whole.
        fill: Reads its parts, one after the other, into a tensor of that shape and dtype.
    """

    path: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor], None]


class ShardedFolder(NamedTuple):
    """What a sharded folder holds.

    Attributes:
        tensors: In the order of the table.
        others: Place and reader of each entry that is no tensor.
    """

    tensors: tuple[ShardedTensor, ...]
    others: tuple[tuple[tuple[Any, ...], Callable[[], Any]], ...]


def open_sharded_folder(directory: Path) -> ShardedFolder:
    """List what ``torch.distributed.checkpoint`` saved; nothing but its table is read.

    Args:
        directory: The folder with ``.metadata`` in it.

    Raises:
        CheckpointError: The table holds more than data, or bytes lie in a way that isn't understood.
        DamagedCheckpointError: The table is missing or contradicts itself.
    """
    name = f"{directory.name}/{_TABLE}"
    table = directory / _TABLE
    if not table.is_file():
        raise DamagedCheckpointError(
            f"{name} is not there. The save was not finished, or not all was copied.", name
        )
    with explaining_damage(directory):
        return _list(directory, read_pickle(table.read_bytes(), _table_names()))


@contextmanager
def explaining_damage(directory: Path) -> Generator[None]:
    """Turn what goes wrong while a folder's entries are read into our errors.

    Raises:
        CheckpointError: A file holds more than data.
        DamagedCheckpointError: A file is missing, cut short, or contradicts the table.
    """
    name = f"{directory.name}/{_TABLE}"
    try:
        yield
    except RefusedPickleError as error:
        raise refuse_pickle(name, error) from None
    except CheckpointError:
        raise
    except (ValueError, TypeError, AttributeError, LookupError, RuntimeError) as error:
        raise DamagedCheckpointError(
            f"{directory.name} can't be put together: {error}. Copy the folder again, or merge it with "
            "`accelerate merge-weights` where it was written.",
            name,
        ) from error


def read_sharded_folder(directory: Path, top: str) -> dict[str, Any]:
    """Return the state dict that ``torch.distributed.checkpoint`` saved, whole, on the CPU.

    Args:
        directory: The folder with ``.metadata`` in it.
        top: The one key that Accelerate saves a state dict under.

    Raises:
        CheckpointError: A file holds more than data, or lies in a way that isn't understood.
        DamagedCheckpointError: A file is missing, cut short, or contradicts the table.
    """
    folder = open_sharded_folder(directory)
    tree: dict[Any, Any] = {}
    with explaining_damage(directory):
        for one in folder.tensors:
            whole = torch.empty(one.shape, dtype=one.dtype)
            one.fill(whole)
            _put(tree, one.path, whole)
        for path, read in folder.others:
            _put(tree, path, read())
        held = _lists(tree)
        if list(held) != [top]:
            raise ValueError(f"it holds {', '.join(map(repr, held)) or 'nothing'} and not {top!r} alone")
        return held[top]


def _list(directory: Path, table: _Record) -> ShardedFolder:
    places: dict[tuple[str, tuple[int, ...] | None], _Place] = {}
    for index, stored in cast("dict[_Record, _Record]", table.get("storage_data")).items():
        if stored.fields.get("transform_descriptors"):
            raise CheckpointError(
                f"{directory.name} was saved with transformed bytes (compressed or encrypted). Save it "
                "without, or merge it with `accelerate merge-weights` where it was written."
            )
        offset = index.fields.get("offset")  # plain objects have none
        place = _Place(stored.get("relative_path"), stored.get("offset"), stored.get("length"))
        places[index.get("fqn"), None if offset is None else tuple(offset)] = place
    tensors: list[ShardedTensor] = []
    others: list[tuple[tuple[Any, ...], Callable[[], Any]]] = []
    for key, described in cast("dict[str, _Record]", table.get("state_dict_metadata")).items():
        path = tuple(cast("dict[str, Any]", table.get("planner_data") or {}).get(key, (key,)))
        if "size" in described.fields:
            shape, dtype = tuple(described.get("size")), described.get("properties")["dtype"]
            fill = partial(_fill, directory, key, described, places)
            tensors.append(ShardedTensor(path, shape, dtype, fill))
        else:
            others.append((path, partial(_read_entry, directory, places[key, None])))
    return ShardedFolder(tuple(tensors), tuple(others))


def _fill(
    directory: Path,
    key: str,
    described: _Record,
    places: Mapping[tuple[str, tuple[int, ...] | None], _Place],
    whole: torch.Tensor,
) -> None:
    shape = tuple(whole.shape)
    boxes = [(tuple(box.get("offsets")), tuple(box.get("sizes"))) for box in described.get("chunks")]
    if sum(math.prod(sizes) for _, sizes in boxes) != math.prod(shape):
        raise ValueError(f"the parts of {key} don't cover it")
    filled = torch.zeros(shape, dtype=torch.bool) if len(boxes) > 1 else None
    for offsets, sizes in boxes:
        if any(o < 0 or o + n > limit for o, n, limit in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part of {key} lies outside of it")
        part = _read_entry(directory, places[key, offsets])
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != whole.dtype:
            raise ValueError(f"a part of {key} isn't the tensor that the table promises")
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        whole[box] = part
        if filled is not None:
            filled[box] = True
    if filled is not None and not filled.all():
        raise ValueError(f"the parts of {key} don't cover it")


def _read_entry(directory: Path, place: _Place) -> Any:
    file = directory / place.file
    if file.name != place.file or not file.is_file():
        raise ValueError(f"{place.file!r} is not there")
    with open(file, "rb") as stream:
        stream.seek(place.offset)
        data = stream.read(place.length)
    if len(data) != place.length:
        raise ValueError(f"{place.file} is cut short")
    return read_torch_stream(io.BytesIO(data), f"{directory.name}/{place.file}")


def _put(tree: dict[Any, Any], path: Sequence[Any], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
    tree[path[-1]] = value


def _lists(tree: Any) -> Any:
    """Turn dicts that stand for lists, with the numbers from 0, into lists."""
    if not isinstance(tree, dict):
        return tree
    held = {key: _lists(value) for key, value in cast("dict[Any, Any]", tree).items()}
    is_list = held and all(type(key) is int for key in held) and sorted(held) == list(range(len(held)))
    return [held[number] for number in range(len(held))] if is_list else held


def _fields(record: _Record, state: Any) -> _Record:
    # A class with slots gives None and a dict; torch's own with a __getstate__ give a tuple of values.
    fields = cast("Any", state[1] if isinstance(state, tuple) and len(cast("Any", state)) == 2 else state)
    if not isinstance(fields, dict):
        raise RefusedPickleError("a record in a form of its own")
    record.fields = cast("dict[str, Any]", fields)
    return record


def _properties(_: _Record, state: tuple[Any, ...]) -> Mapping[str, Any]:
    if not isinstance(cast("object", state), tuple) or not isinstance(state[0], torch.dtype):
        raise RefusedPickleError("a tensor's properties in a form of their own")
    return {"dtype": state[0]}


def _nothing(*arguments: Any) -> None:
    """Stand for what isn't needed."""


def _table_names() -> Mapping[str, Any]:
    record = Maker(_Record, _fields)
    metadata = "torch.distributed.checkpoint.metadata"
    kinds = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")
    return {
        **TORCH_NAMES,
        **{f"{metadata}.{kind}": record for kind in (*kinds, "MetadataIndex", "StorageMeta")},
        f"{metadata}.TensorProperties": Maker(_Record, _properties),
        f"{metadata}._MEM_FORMAT_ENCODING": Maker(_nothing),
        "torch.distributed.checkpoint.filesystem._StorageInfo": record,
        # Where the folder lay when it was written.
        **{f"pathlib.{kind}": Maker(_nothing) for kind in ("PosixPath", "WindowsPath")},
        **{f"pathlib._local.{kind}": Maker(_nothing) for kind in ("PosixPath", "WindowsPath")},
    }
