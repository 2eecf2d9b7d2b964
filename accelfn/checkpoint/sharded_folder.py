"""Read and merge sharded folders of ``torch.distributed.checkpoint``, without running any code in them.

Such a folder has a pickled table, ``.metadata``, with the file and offset of each chunk of each tensor. The
table and the entries are read as data (see ``torch_file``), and one process assembles the chunks.
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.model_files import replacing, write_pickled, write_safetensors
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.storage.address import as_path
from accelfn.storage.disk import is_there
from accelfn.storage.object_store import disk_at
from accelfn.weights.dtypes import SAFETENSORS_NAMES
from accelfn.weights.torch_file import (
    Record,
    RefusedPickleError,
    read_pickle,
    read_torch_stream,
    refuse_pickle,
)

_TABLE = ".metadata"
# Modules of the classes in the table; some, such as paths and memory formats, aren't used.
_RECORDS = ("torch.distributed.checkpoint.", "torch.serialization", "pathlib")
# Accelerate's names for the folders within one of its checkpoints.
_WEIGHTS, _OPTIMIZER = "pytorch_model_fsdp_0", "optimizer_0"
# Keys of states that programs save together.
MODELS = ("model", "model_state_dict", "state_dict", "module")
OPTIMIZERS = re.compile(r"optim(izers?)?(_state(_dict)?)?|opt|param_groups")

EntryPath = tuple[Any, ...]  # keys in the dict that was saved
_ChunkKey = tuple[str, "tuple[int, ...] | None"]


class _ShardedTensor(NamedTuple):
    """A tensor of a sharded folder.

    Attributes:
        path: Keys in the state dict that was saved.
        shape: Of the complete tensor.
        dtype: Of the complete tensor.
        read: Reads and assembles the chunks.
    """

    path: EntryPath
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]


class _ShardedFolder(NamedTuple):
    """The content of a sharded folder.

    Attributes:
        tensors: In the order of the table.
        others: Path and reader of each entry that isn't a tensor.
    """

    tensors: tuple[_ShardedTensor, ...]
    others: tuple[tuple[EntryPath, Callable[[], Any]], ...]


def _open(directory: Path) -> _ShardedFolder:
    """Read the table of a folder.

    Raises:
        CheckpointError: The table contains more than data, or the chunks are compressed or encrypted.
        DamagedCheckpointError: The table is missing or inconsistent.
    """
    name = f"{directory.name}/{_TABLE}"
    if not (directory / _TABLE).is_file():
        raise DamagedCheckpointError(
            f"{name} is missing: the save was not finished, or not all files were copied.", name
        )
    with _explaining_damage(directory):
        table: Record = read_pickle((directory / _TABLE).read_bytes(), records=_RECORDS)
        chunks: dict[_ChunkKey, Record] = {}
        for index, chunk in cast("dict[Record, Record]", table.get("storage_data")).items():
            if "transform_descriptors" in chunk and chunk.get("transform_descriptors"):
                raise CheckpointError(
                    f"{directory.name} has transformed chunks (compressed or encrypted). Save it without "
                    "transforms, or merge it with `accelerate merge-weights` where it was written."
                )
            offset = index.get("offset") if "offset" in index else None  # objects have no offset
            chunks[index.get("fqn"), None if offset is None else tuple(offset)] = chunk
        paths = cast("dict[str, Any]", table.get("planner_data") or {})
        tensors: list[_ShardedTensor] = []
        others: list[tuple[EntryPath, Callable[[], Any]]] = []
        for key, described in cast("dict[str, Record]", table.get("state_dict_metadata")).items():
            path = tuple(paths.get(key, (key,)))
            if "size" in described:
                shape, dtype = tuple(described.get("size")), described.get("properties").get(0)
                boxes = [
                    (tuple(box.get("offsets")), tuple(box.get("sizes"))) for box in described.get("chunks")
                ]
                read = partial(_assemble, directory, key, shape, dtype, boxes, chunks)
                tensors.append(_ShardedTensor(path, shape, dtype, read))
            else:
                others.append((path, partial(_read_chunk, directory, chunks[key, None])))
        return _ShardedFolder(tuple(tensors), tuple(others))


@contextmanager
def _explaining_damage(directory: Path) -> Generator[None]:
    """Convert errors while a folder is read.

    Raises:
        CheckpointError: A file contains more than data.
        DamagedCheckpointError: A file is missing, truncated, or inconsistent with the table.
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
            f"{directory.name} can't be assembled: {error}. Copy the folder again, or merge it with "
            "`accelerate merge-weights` where it was written.",
            name,
        ) from error


def _assemble(
    directory: Path,
    key: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]],
    chunks: Mapping[_ChunkKey, Record],
) -> torch.Tensor:
    whole = torch.empty(shape, dtype=dtype)
    filled = torch.zeros(shape if len(boxes) > 1 else 0, dtype=torch.bool)
    for offsets, sizes in boxes:
        if any(o < 0 or o + n > limit for o, n, limit in zip(offsets, sizes, shape, strict=True)):
            raise ValueError(f"a chunk of {key} is outside of it")
        chunk = _read_chunk(directory, chunks[key, offsets])
        if not isinstance(chunk, torch.Tensor) or tuple(chunk.shape) != sizes or chunk.dtype != dtype:
            raise ValueError(f"a chunk of {key} has another shape or dtype than in the table")
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        whole[box] = chunk
        if len(boxes) > 1:
            filled[box] = True
    # If the sizes add up and every element is filled, no two chunks overlap.
    if sum(math.prod(sizes) for _, sizes in boxes) != whole.numel() or not filled.all():
        raise ValueError(f"the chunks of {key} don't cover it")
    return whole


def _read_chunk(directory: Path, chunk: Record) -> Any:
    name, length = chunk.get("relative_path"), chunk.get("length")
    file = directory / name
    if file.name != name or not file.is_file():
        raise ValueError(f"{name!r} is missing")
    with open(file, "rb") as stream:
        stream.seek(chunk.get("offset"))
        data = stream.read(length)
    if len(data) != length:
        raise ValueError(f"{name} is truncated")
    return read_torch_stream(io.BytesIO(data), f"{directory.name}/{name}")


def read_sharded_folder(directory: Path, top: str) -> dict[str, Any]:
    """Return the complete state dict that ``torch.distributed.checkpoint`` saved, on the CPU.

    Args:
        directory: The folder with ``.metadata`` in it.
        top: The only key of the saved dict, under which Accelerate stores a state dict.

    Raises:
        CheckpointError: A file contains more than data, or is compressed or encrypted.
        DamagedCheckpointError: A file is missing, truncated, or inconsistent with the table.
    """
    tree = read_sharded_tree(directory, lambda tensors, others: {path: path for path in (*tensors, *others)})
    with _explaining_damage(directory):
        if list(tree) != [top]:
            keys = ", ".join(map(repr, tree)) or "no keys"
            raise ValueError(f"it must hold the key {top!r} alone, and has {keys}")
    return tree[top]


def is_sharded_folder(directory: str | os.PathLike[str]) -> bool:
    """Whether a directory contains the table of a sharded folder."""
    return (Path(directory) / _TABLE).is_file()


def read_sharded_tree(
    directory: Path,
    arrange: Callable[[Sequence[EntryPath], Sequence[EntryPath]], Mapping[EntryPath, EntryPath]],
) -> dict[str, Any]:
    """Return the entries of a sharded folder as a tree of dicts and lists, with complete tensors on the CPU.

    Args:
        directory: The folder with ``.metadata`` in it.
        arrange: Gets the paths of the tensors, and of the other entries. Returns the new path of each entry
            that is to be read.

    Raises:
        CheckpointError: A file contains more than data, or is compressed or encrypted.
        DamagedCheckpointError: A file is missing, truncated, or inconsistent with the table.
    """
    folder = _open(directory)
    places = arrange([tensor.path for tensor in folder.tensors], [path for path, _ in folder.others])
    tree: dict[Any, Any] = {}
    with _explaining_damage(directory):
        for path, read in (*((tensor.path, tensor.read) for tensor in folder.tensors), *folder.others):
            if path not in places:
                continue
            *outer, last = places[path]
            inner = tree
            for key in outer:
                inner = inner.setdefault(key, {})
            inner[last] = read()
        return {key: _with_lists(value) for key, value in tree.items()}


def _with_lists(tree: Any) -> Any:
    """Convert dicts with the keys 0, 1, ... back to lists."""
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in cast("dict[Any, Any]", tree).items()}
    is_list = items and all(type(key) is int for key in items) and sorted(items) == list(range(len(items)))
    return [items[index] for index in range(len(items))] if is_list else items


# --- merging -------------------------------------------------------------------------------------


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> Path:
    """Merge the weights in a sharded folder of ``torch.distributed.checkpoint`` into one file.

    If the folder has an optimizer's state beside the model's, under keys such as ``"optim"`` and ``"model"``
    (both may be in one of a name such as ``"app"``), the model's tensors are merged.

    The complete file appears in one step. For safetensors, one tensor at a time is in memory. No code in the
    folder runs.

    Ranks: local; one process does everything.

    Args:
        checkpoint_dir: The folder with ``.metadata`` in it, such as Accelerate's ``pytorch_model_fsdp_0``.
        output_path: Directory of the new file; made if it is missing; or an address.
        safe_serialization: True: ``model.safetensors``. False: ``pytorch_model.bin``, by ``torch.save``, with
            all weights in memory.
        remove_checkpoint_dir: Remove the folder afterwards, but not the new file if that is in it.

    Returns:
        Path of the file.

    Raises:
        NoCheckpointError: There is no such folder. The message has the likely one.
        CheckpointError: The folder contains more than data, or no weights.
        DamagedCheckpointError: A file is missing, truncated, or inconsistent with the table.
        ValueError: safetensors lacks a tensor's dtype.
        FileExistsError: The file exists already.
        OSError: The file can't be written. Nothing is left behind.
    """
    source = Path(checkpoint_dir)
    _check_source(source)
    tensors = _named_weights(source)
    target = as_path(output_path) / ("model.safetensors" if safe_serialization else "pytorch_model.bin")
    if is_there(disk_at(target), os.fspath(target)):
        raise FileExistsError(
            f"merge_fsdp_weights: {target} exists already. Remove it, or pass another directory."
        )
    if safe_serialization:
        odd = [name for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_NAMES]
        if odd:
            raise ValueError(
                f"merge_fsdp_weights: safetensors has no dtype for {odd[0]} ({tensors[odd[0]].dtype}). Pass "
                "safe_serialization=False (--unsafe_serialization)."
            )
    with replacing(target) as new, _explaining_damage(source):
        if safe_serialization:
            forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
            write_safetensors(new, forms, lambda name: tensors[name].read(), {"format": "pt"})
        else:
            write_pickled(new, {name: tensor.read() for name, tensor in tensors.items()})
    if remove_checkpoint_dir:
        _remove_all_but(target.resolve(), source)
    return target


def _remove_all_but(kept: Path, folder: Path) -> None:
    """Remove a folder, but not a file that may be in it, nor the folders on the way to that."""
    if not kept.is_relative_to(folder.resolve()):
        shutil.rmtree(folder)
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _remove_all_but(kept, path)
        elif path.resolve() != kept:
            path.unlink()


def _check_source(source: Path) -> None:
    if is_sharded_folder(source):
        return
    if not source.is_dir():
        what = "is a file" if source.exists() else "does not exist"
        raise NoCheckpointError(f"merge_fsdp_weights: {source} {what}. Pass the folder that has the shards.")
    inside = sorted(path.name for path in source.iterdir() if (path / _TABLE).is_file())
    weights = [name for name in inside if not name.startswith("optimizer")]
    if weights:
        hint = f"Pass {source / weights[0]} instead."
    elif (source / "zero_to_fp32.py").is_file():
        hint = "DeepSpeed has written it, and zero_to_fp32.py in it writes the weights."
    elif (source / "manifest.json").is_file():
        hint = "It is a checkpoint of accelfn: convert it with accelfn checkpoint convert --to safetensors."
    else:
        hint = f"Accelerate writes such a folder as {_WEIGHTS} within a checkpoint."
    raise NoCheckpointError(
        f"merge_fsdp_weights: {source} has no {_TABLE}, the table of a sharded folder. {hint}"
    )


def _named_weights(source: Path) -> dict[str, _ShardedTensor]:
    """Return the model's tensors by name, without the keys above them."""
    folder = _open(source)
    place = _place_of_weights(source, folder)
    weights = {
        ".".join(map(str, tensor.path[len(place) :])): tensor
        for tensor in folder.tensors
        if tensor.path[: len(place)] == place
    }
    if not weights:
        raise CheckpointError(f"merge_fsdp_weights: {source} contains no tensors.")
    return weights


def _place_of_weights(source: Path, folder: _ShardedFolder) -> EntryPath:
    """Return the keys under which the weights are: one that all share, the model's beside an optimizer's."""
    paths = [*(tensor.path for tensor in folder.tensors), *(path for path, _ in folder.others)]
    place: EntryPath = ()
    while True:
        below = [path[len(place) :] for path in paths if path[: len(place)] == place and path != place]
        tops = {path[0] for path in below}
        nested = {path[0] for path in below if len(path) > 1}
        models = [key for key in MODELS if key in nested]
        if any(OPTIMIZERS.fullmatch(str(key)) for key in tops):
            if not models:
                raise CheckpointError(
                    f"merge_fsdp_weights: {source} holds an optimizer's state and no model's (under a key "
                    "such as 'model'). Pass the folder of the model, which Accelerate writes as "
                    f"{_WEIGHTS} next to {_OPTIMIZER}."
                )
            place = (*place, models[0])
        elif len(tops) == 1 and tops == nested and (not place or models):
            place = (*place, *tops)
        else:
            return place
