"""Convert Accelerate's folders to checkpoints, and either of them to files of weights."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from accelfn.checkpoint.accelerate import AccelerateFolder, is_accelerate, read_folder
from accelfn.checkpoint.by_rank import document_of
from accelfn.checkpoint.commit import check_target
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.find import locate
from accelfn.checkpoint.load import read_parts
from accelfn.checkpoint.manifest import Json, Manifest
from accelfn.checkpoint.model_files import write_weights
from accelfn.checkpoint.save import save_for_ranks
from accelfn.errors import CheckpointError, NoCheckpointError
from accelfn.storage.address import as_path
from accelfn.storage.disk import kind_of, list_names
from accelfn.storage.object_store import disk_at

Form = Literal["accelfn", "safetensors"]

_VALUES = ("scaler", "step", "random")  # parts that are stored as values, and not as the state of an object


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Result of :func:`convert_checkpoint`.

    Attributes:
        path: The new directory.
        parts: Its content: paths of the tree's parts, or names of files.
        notes: What the user should know about it, in complete sentences.
    """

    path: Path
    parts: tuple[str, ...]
    notes: tuple[str, ...] = ()


class State:
    """Stands in for an object of which only the state is known."""

    def __init__(self, state: Any) -> None:
        """Keep the state."""
        self._state = state

    def state_dict(self) -> Any:
        """Return the state."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Replace the state."""
        self._state = state


class Optimizer(State):
    """Stands in for an optimizer of any class."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Form,
    names: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    leaf: str = "model",
    step: int | None = None,
    max_shard_size: int | str = "10GB",
    overwrite: bool = False,
) -> Conversion:
    """Convert a checkpoint. The complete target appears in one step, by a rename.

    - ``to="accelfn"`` converts a folder of Accelerate 1.x to a checkpoint that :func:`accelfn.load_state`
      loads into ``{"model": model, "optimizer": optimizer, ...}``, with the random states of all ranks. The
      parts are those that :func:`read_accelerate` lists. If an optimizer refers to parameters by number, the
      numbers are resolved by the optimizer that loads the state.
    - ``to="safetensors"`` extracts the weights of one model from such a folder or from a checkpoint, as
      transformers and Accelerate read them.

    Ranks: local; one process does everything, with all tensors in its memory.

    Args:
        source: A checkpoint, a directory of checkpoints (whose newest is used), or a folder of Accelerate. It
            isn't changed.
        target: The new directory, or an address.
        to: Form of the target.
        names: Paths in the tree by names of Accelerate's parts, such as ``{"model": "unet"}``. A slash makes
            nested dicts: ``{"model": "models/unet", "model_1": "models/critic"}``.
        leave_out: Paths of parts to leave out, for ``to="accelfn"``.
        leaf: Path of the model, for ``to="safetensors"``.
        step: Of the new checkpoint, for ``to="accelfn"``; determines which of several is the newest.
        max_shard_size: Largest size of a file of weights, for ``to="safetensors"``.
        overwrite: Replace a checkpoint at ``target``, for ``to="accelfn"``.

    Raises:
        FileExistsError: ``target`` exists.
        NoCheckpointError: ``source`` is neither a checkpoint nor a folder of Accelerate.
        DamagedCheckpointError: ``source`` is damaged.
        CheckpointError: The folder is incomplete, or a class in the tree isn't imported.
        ValueError: A name doesn't exist; the part isn't a model's state; or safetensors lacks a dtype.
        OSError: The target can't be written. Nothing is left behind.
    """
    if to not in get_args(Form):
        raise ValueError(f"convert_checkpoint: to must be one of {', '.join(get_args(Form))}, got {to!r}.")
    directory = as_path(target)
    _check_target(directory, to, overwrite)
    path_of = names or {}
    is_own = _is_checkpoint(source)
    if to == "safetensors":
        tensors = _stored_weights(source, leaf) if is_own else _folder_weights(source, path_of, leaf)
        files = write_weights(target, tensors, max_shard_size=max_shard_size)
        return Conversion(path=directory, parts=files)
    if is_own:
        raise ValueError(f"convert_checkpoint: {source} is a checkpoint of accelfn already. Copy it instead.")
    return _to_checkpoint(read_folder(Path(source)), directory, path_of, frozenset(leave_out), step)


def _check_target(target: Path, to: Form, overwrite: bool) -> None:
    disk = disk_at(target)
    kind = kind_of(disk, target)
    if kind is None or (kind == "directory" and not list_names(disk, os.fspath(target))):
        return
    if to == "accelfn" and overwrite:
        check_target(disk, target)  # refuses anything but a checkpoint
        return
    hint = "or pass overwrite to replace a checkpoint" if to == "accelfn" else "or remove it"
    raise FileExistsError(f"convert_checkpoint: {target} exists already. Pass a new directory, {hint}.")


def _is_checkpoint(source: str | os.PathLike[str]) -> bool:
    """Whether the source is a checkpoint of accelfn, and not a folder of Accelerate."""
    try:
        locate(disk_at(source), source)
    except NoCheckpointError:
        if not is_accelerate(Path(source)):
            raise
        return False
    return True


# --- from Accelerate -----------------------------------------------------------------------------


def _to_checkpoint(
    folder: AccelerateFolder,
    target: Path,
    path_of: Mapping[str, str],
    left_out: frozenset[str],
    step: int | None,
) -> Conversion:
    known = {*folder.tree, *_VALUES}
    unknown = sorted((set(path_of) - known) | (left_out - known - set(path_of.values())))
    if unknown:
        raise ValueError(
            f"convert_checkpoint: there is no {unknown[0]!r} in the folder. It has "
            f"{', '.join(name for name in folder.tree if name not in _VALUES) or 'no parts'}."
        )
    kept = [name for name in folder.tree if not {name, path_of.get(name, name)} & left_out]
    paths = [path_of.get(name, name) for name in kept]
    for path in paths:
        inside = [other for other in paths if other == path or other.startswith(f"{path}/")]
        if not all(path.split("/")) or len(inside) > 1:
            raise ValueError(
                f"convert_checkpoint: {path!r} can't be the path of a part: a key is empty, or another part "
                "is at or below it."
            )
    tree: dict[str, Any] = {}
    for name, path in zip(kept, paths, strict=True):
        value = folder.tree[name]
        if name.startswith("optimizer"):
            value = Optimizer(_with_model_paths(value, path_of))
        elif name not in _VALUES:
            value = State(value)
        *outer, last = path.split("/")
        reduce(lambda inner, key: inner.setdefault(key, {}), outer, tree)[last] = value
    random: list[Any] = tree.pop("random", [])
    missing = [rank for rank, state in enumerate(random) if state is None]
    if missing:
        raise CheckpointError(
            "convert_checkpoint: the folder lacks the random states of rank "
            f"{', '.join(map(str, missing[:5]))} out of {len(random)} ranks "
            f"(random_states_{missing[0]}.pkl). Copy the files from their machines, or leave 'random' out."
        )
    path = save_for_ranks(target, tree, random, step=step)
    notes = folder.notes
    if not random:
        notes += ("It has no random states: loading it leaves the generators unchanged.",)
    return Conversion(path=path, parts=tuple(path for path in paths if path != "random"), notes=notes)


def _with_model_paths(optimizer: Mapping[str, Any], path_of: Mapping[str, str]) -> dict[str, Any]:
    """Refer to parameters by the new paths of their models."""

    def rename(parameter: str) -> str:
        model, slash, rest = parameter.partition("/")
        return f"{path_of.get(model, model)}{slash}{rest}"

    return {
        **optimizer,
        "state": {rename(name): value for name, value in optimizer["state"].items()},
        "groups": [
            {**group, "params": [rename(name) for name in group["params"]]} for group in optimizer["groups"]
        ],
    }


def _folder_weights(
    source: str | os.PathLike[str], path_of: Mapping[str, str], leaf: str
) -> dict[str, torch.Tensor]:
    tree = read_folder(Path(source), kinds=("model",)).tree
    models = {path_of.get(name, name): value for name, value in tree.items()}
    if leaf not in models:
        raise ValueError(f"convert_checkpoint: there is no model {leaf!r}. There are {', '.join(models)}.")
    return models[leaf]


# --- from a checkpoint ---------------------------------------------------------------------------


def _stored_weights(source: str | os.PathLike[str], leaf: str) -> dict[str, torch.Tensor]:
    def choose(manifest: Manifest) -> list[Json]:
        document = document_of(manifest.tree, 0)
        node = document
        for key in leaf.strip("/").split("/"):
            if not isinstance(node, dict) or "$" in node or key not in node:
                keys = ", ".join(document) if isinstance(document, dict) else "no keys"
                raise ValueError(f"convert_checkpoint: there is no {leaf!r} in the tree, which has {keys}.")
            node = cast("dict[str, Json]", node)[key]
        return [node]

    stored = read_parts(source, choose)
    state = decode(stored.documents[0], stored.tensors)
    values = cast("dict[Any, Any]", state) if isinstance(state, dict) else {}
    odd = [name for name, value in values.items() if not isinstance(value, torch.Tensor)]
    if not values or odd or not all(isinstance(name, str) for name in values):
        what = f"{', '.join(map(str, odd[:5]))} must be tensors" if odd else "it has no named tensors"
        raise ValueError(
            f"convert_checkpoint: {leaf!r} is not the state of a model: {what}. Pass the path of one as leaf."
        )
    return {name: value.detach() for name, value in values.items()}
