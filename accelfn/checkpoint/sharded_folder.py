"""Read a sharded folder of ``torch.distributed.checkpoint``, without running anything in it.

The folder has a pickled table, ``.metadata``, which says at which bytes of which file each box of each tensor
is. The table and each entry are read as data (see ``torch_file``), and the boxes are put together in this
process.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.torch_file import (
    Record,
    RefusedPickleError,
    read_pickle,
    read_torch_stream,
    refuse_pickle,
)
from accelfn.errors import CheckpointError, DamagedCheckpointError

TABLE = ".metadata"
# Whose classes the table has objects of: among them paths, formats of memory and layouts, which aren't used.
_RECORDS = ("torch.distributed.checkpoint.", "torch.serialization", "pathlib")

_Key = tuple[str, "tuple[int, ...] | None"]


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
        CheckpointError: The table holds more than data, or bytes are stored in a way that isn't understood.
        DamagedCheckpointError: The table is missing or contradicts itself.
    """
    name = f"{directory.name}/{TABLE}"
    if not (directory / TABLE).is_file():
        raise DamagedCheckpointError(
            f"{name} is not there. The save was not finished, or not all was copied.", name
        )
    with explaining_damage(directory):
        table: Record = read_pickle((directory / TABLE).read_bytes(), records=_RECORDS)
        stored = cast("dict[Record, Record]", table.get("storage_data"))
        places: dict[_Key, Record] = {}
        for index, place in stored.items():
            if "transform_descriptors" in place and place.get("transform_descriptors"):
                raise CheckpointError(
                    f"{directory.name} was saved with transformed bytes (compressed or encrypted). Save it "
                    "without, or merge it with `accelerate merge-weights` where it was written."
                )
            offset = index.get("offset") if "offset" in index else None  # plain objects have none
            places[index.get("fqn"), None if offset is None else tuple(offset)] = place
        paths = cast("dict[str, Any]", table.get("planner_data") or {})
        tensors: list[ShardedTensor] = []
        others: list[tuple[tuple[Any, ...], Callable[[], Any]]] = []
        for key, described in cast("dict[str, Record]", table.get("state_dict_metadata")).items():
            path = tuple(paths.get(key, (key,)))
            if "size" in described:
                fill = partial(_fill, directory, key, described.get("chunks"), places)
                dtype = described.get("properties").get(0)
                tensors.append(ShardedTensor(path, tuple(described.get("size")), dtype, fill))
            else:
                others.append((path, partial(_read_entry, directory, places[key, None])))
        return ShardedFolder(tuple(tensors), tuple(others))


@contextmanager
def explaining_damage(directory: Path) -> Generator[None]:
    """Turn what goes wrong while a folder's entries are read into our errors.

    Raises:
        CheckpointError: A file holds more than data.
        DamagedCheckpointError: A file is missing, truncated, or contradicts the table.
    """
    name = f"{directory.name}/{TABLE}"
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
        CheckpointError: A file holds more than data, or is stored in a way that isn't understood.
        DamagedCheckpointError: A file is missing, truncated, or contradicts the table.
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
        if list(tree) != [top]:
            raise ValueError(f"it holds {', '.join(map(repr, tree)) or 'nothing'} and not {top!r} alone")
        return _lists(tree[top])


def _fill(
    directory: Path, key: str, chunks: list[Record], places: Mapping[_Key, Record], whole: torch.Tensor
) -> None:
    shape = tuple(whole.shape)
    boxes = [(tuple(box.get("offsets")), tuple(box.get("sizes"))) for box in chunks]
    filled = torch.zeros(shape, dtype=torch.bool) if len(boxes) > 1 else None
    for offsets, sizes in boxes:
        if any(o < 0 or o + n > limit for o, n, limit in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a part of {key} is outside of it")
        part = _read_entry(directory, places[key, offsets])
        if not isinstance(part, torch.Tensor) or tuple(part.shape) != sizes or part.dtype != whole.dtype:
            raise ValueError(f"a part of {key} isn't the tensor that the table promises")
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        whole[box] = part
        if filled is not None:
            filled[box] = True
    # That the sizes agree and each place is filled means that no two parts overlap.
    if sum(math.prod(sizes) for _, sizes in boxes) != whole.numel() or (
        filled is not None and not filled.all()
    ):
        raise ValueError(f"the parts of {key} don't cover it")


def _read_entry(directory: Path, place: Record) -> Any:
    name, length = place.get("relative_path"), place.get("length")
    file = directory / name
    if file.name != name or not file.is_file():
        raise ValueError(f"{name!r} is not there")
    with open(file, "rb") as stream:
        stream.seek(place.get("offset"))
        data = stream.read(length)
    if len(data) != length:
        raise ValueError(f"{name} is cut short")
    return read_torch_stream(io.BytesIO(data), f"{directory.name}/{name}")


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
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
