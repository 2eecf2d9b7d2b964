"""Convert checkpoints: from the folders of other programs, to such folders, and to files of weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, get_args

import torch

from accelfn.checkpoint.accelerate import is_accelerate, read_folder
from accelfn.checkpoint.by_rank import document_of
from accelfn.checkpoint.commit import check_target
from accelfn.checkpoint.dcp import is_unnamed, lost_keys, numbered_keys, read_dcp, torch_form, write_dcp
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.nodes import children_of
from accelfn.checkpoint.find import locate
from accelfn.checkpoint.load import read_parts
from accelfn.checkpoint.manifest import Json, Manifest
from accelfn.checkpoint.model_files import write_weights
from accelfn.checkpoint.save import save_for_ranks
from accelfn.checkpoint.sharded_folder import is_sharded_folder
from accelfn.checkpoint.stand_ins import Optimizer, State, states_in
from accelfn.errors import CheckpointError, NoCheckpointError
from accelfn.storage.address import as_path, is_address
from accelfn.storage.disk import kind_of, list_names
from accelfn.storage.object_store import disk_at

Form = Literal["accelfn", "safetensors", "dcp"]

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


class _Source(NamedTuple):
    """What is read from a source.

    Attributes:
        parts: By their names: stand-ins of objects, values, and dicts of these.
        random: The state of the generators by rank, None for a rank without one; empty if there are none.
        notes: As of :class:`Conversion`.
    """

    parts: dict[str, Any]
    random: Sequence[Any] = ()
    notes: tuple[str, ...] = ()


# Gets the names of the parts of a source, and returns those that are to be read.
_Choose = Callable[[Sequence[str]], Collection[str]]


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Form,
    names: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    leaf: str | None = None,
    step: int | None = None,
    max_shard_size: int | str = "10GB",
    overwrite: bool = False,
) -> Conversion:
    """Convert a checkpoint. The complete target appears in one step, by a rename.

    The source is a checkpoint of accelfn, a folder of Accelerate 1.x, or a folder that torch's
    ``torch.distributed.checkpoint`` (DCP) has written, as torchtitan's are.

    - ``to="accelfn"`` converts a folder of Accelerate or DCP to a checkpoint that :func:`accelfn.load_state`
      loads into ``{"model": model, "optimizer": optimizer, ...}``. Of Accelerate, the parts are those that
      :func:`read_accelerate` lists, with the random states of all ranks. If an optimizer refers to parameters
      by number, the numbers are resolved by the optimizer that loads the state. Of DCP, the parts are those
      of the dict that was saved, and ``model`` if a model's tensors are at the top of it.
    - ``to="safetensors"`` extracts the weights of one model, as transformers and Accelerate read them.
    - ``to="dcp"`` writes a folder that ``torch.distributed.checkpoint.load`` reads: one model's state dict,
      for ``leaf``, or else the tree, without random states. In it models are state dicts, and optimizers have
      the form of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.

    Ranks: local; one process does everything, with all tensors in its memory.

    Args:
        source: A checkpoint, a directory of checkpoints (whose newest is used), or a folder of Accelerate or
            DCP. It isn't changed.
        target: The new directory, or an address, for other forms than DCP.
        to: Form of the target.
        names: Paths in the tree by names of a folder's parts, such as ``{"model": "unet"}``. A slash makes
            nested dicts: ``{"model": "models/unet", "model_1": "models/critic"}``.
        leave_out: Paths of parts to leave out, if a whole tree is converted. They may hold more than data.
        leaf: Path of the model whose weights are extracted. None: ``"model"`` for ``to="safetensors"``, the
            whole tree for ``to="dcp"``.
        step: Of the new checkpoint, for ``to="accelfn"``; determines which of several is the newest.
        max_shard_size: Largest size of a file of weights, for ``to="safetensors"``.
        overwrite: Replace a checkpoint at ``target``, for ``to="accelfn"``.

    Raises:
        FileExistsError: ``target`` exists.
        NoCheckpointError: ``source`` is neither a checkpoint nor a folder of Accelerate or DCP.
        DamagedCheckpointError: ``source`` is damaged.
        CheckpointError: The folder is incomplete or holds more than data, or a class in the tree isn't
            imported.
        ValueError: A name doesn't exist; the part isn't a model's state; safetensors lacks a dtype; or
            ``target`` is an address, for ``to="dcp"``.
        OSError: The target can't be written. Nothing is left behind.
    """
    if to not in get_args(Form):
        raise ValueError(f"convert_checkpoint: to must be one of {', '.join(get_args(Form))}, got {to!r}.")
    if to == "dcp" and is_address(target):
        raise ValueError(
            "convert_checkpoint: torch.distributed.checkpoint is written to a directory on a disk, and "
            f"{os.fspath(target)} is an address. Pass a directory, and upload it."
        )
    directory = as_path(target)
    _check_target(directory, to, overwrite)
    path_of = names or {}
    is_own = _is_checkpoint(source)
    if to == "safetensors" or leaf is not None:
        if to == "accelfn":
            raise ValueError(f"convert_checkpoint: to='accelfn' has no leaf, got {leaf!r}. Leave it out.")
        path = "model" if leaf is None else leaf
        tensors = _stored_weights(source, path) if is_own else _folder_weights(Path(source), path_of, path)
        if to == "dcp":
            write_dcp(directory, tensors)
            return Conversion(path=directory, parts=(path,))
        files = write_weights(target, tensors, max_shard_size=max_shard_size)
        return Conversion(path=directory, parts=files)
    if is_own and to == "accelfn":
        raise ValueError(f"convert_checkpoint: {source} is a checkpoint of accelfn already. Copy it instead.")
    left_out = frozenset(leave_out)

    def choose(found: Sequence[str]) -> Collection[str]:
        return _kept(found, path_of, left_out)

    read = (_read_checkpoint if is_own else _read_folder)(source, choose)
    tree = _renamed(read.parts, path_of)
    paths = tuple(path_of.get(name, name) for name in read.parts)
    if to == "dcp":
        notes = _write_tree(directory, tree, has_random=bool(read.random))
        return Conversion(path=directory, parts=paths, notes=read.notes + notes)
    return _save_tree(directory, tree, paths, read, step)


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
    """Whether the source is a checkpoint of accelfn, and not a folder of another program."""
    try:
        locate(disk_at(source), source)
    except NoCheckpointError:
        if not is_sharded_folder(source) and not is_accelerate(Path(source)):
            raise
        return False
    return True


# --- parts ---------------------------------------------------------------------------------------


def _kept(found: Sequence[str], path_of: Mapping[str, str], left_out: frozenset[str]) -> Collection[str]:
    """Check the names in the options, and return the names of the parts that aren't left out."""
    known = {*found, *_VALUES}
    unknown = sorted((set(path_of) - known) | (left_out - known - set(path_of.values())))
    if unknown:
        raise ValueError(
            f"convert_checkpoint: there is no {unknown[0]!r} in the folder. It has "
            f"{', '.join(name for name in found if name not in _VALUES) or 'no parts'}."
        )
    return [name for name in found if not {name, path_of.get(name, name)} & left_out]


def _renamed(parts: Mapping[str, Any], path_of: Mapping[str, str]) -> dict[str, Any]:
    """Return the tree that has the parts at their paths."""
    paths = [path_of.get(name, name) for name in parts]
    for path in paths:
        inside = [other for other in paths if other == path or other.startswith(f"{path}/")]
        if not all(path.split("/")) or len(inside) > 1:
            raise ValueError(
                f"convert_checkpoint: {path!r} can't be the path of a part: a key is empty, or another part "
                "is at or below it."
            )
    tree: dict[str, Any] = {}
    for path, part in zip(paths, parts.values(), strict=True):
        for _, state in states_in(part):
            if isinstance(state, Optimizer):
                state.load_state_dict(_with_model_paths(state.state_dict(), path_of))
        *outer, last = path.split("/")
        reduce(lambda inner, key: inner.setdefault(key, {}), outer, tree)[last] = part
    return tree


def _save_tree(
    target: Path, tree: dict[str, Any], paths: tuple[str, ...], read: _Source, step: int | None
) -> Conversion:
    missing = [rank for rank, state in enumerate(read.random) if state is None]
    if missing:
        raise CheckpointError(
            "convert_checkpoint: the folder lacks the random states of rank "
            f"{', '.join(map(str, missing[:5]))} out of {len(read.random)} ranks "
            f"(random_states_{missing[0]}.pkl). Copy the files from their machines, or leave 'random' out."
        )
    path = save_for_ranks(target, tree, read.random, step=step)
    notes = read.notes
    if not read.random:
        notes += ("It has no random states: loading it leaves the generators unchanged.",)
    return Conversion(path=path, parts=paths, notes=notes)


def _write_tree(target: Path, tree: dict[str, Any], *, has_random: bool) -> tuple[str, ...]:
    """Write a tree as a DCP folder, and return notes."""
    form = torch_form(tree)
    write_dcp(target, form)
    notes: list[str] = []
    if has_random:
        notes.append("The random states are left out.")
    unnamed = [
        path
        for path, part in states_in(tree)
        if isinstance(part, Optimizer) and is_unnamed(part.state_dict())
    ]
    if unnamed:
        notes.append(
            f"{', '.join(unnamed)}: parameters have numbers and no names, as in the optimizer's state_dict()."
        )
    lost = list(lost_keys(form))
    if lost:
        notes.append(
            f"{', '.join(lost[:5])}: keys that are no texts have become texts, as torch writes them."
        )
    return tuple(notes)


# --- from Accelerate and DCP ---------------------------------------------------------------------


def _read_folder(source: str | os.PathLike[str], choose: _Choose) -> _Source:
    if is_sharded_folder(source):
        parts = read_dcp(Path(source), choose)
        doubtful = [*numbered_keys(parts)][:5]
        note = f"{', '.join(doubtful)}: keys are texts, as torch writes numbers. Check them before you load."
        return _Source(parts, (), (note,) if doubtful else ())
    folder = read_folder(Path(source))
    chosen = choose([*folder.tree])
    parts: dict[str, Any] = {}
    for name, value in folder.tree.items():
        if name in chosen and name != "random":
            kind = Optimizer if name.startswith("optimizer") else State
            parts[name] = value if name in _VALUES else kind(value)
    return _Source(parts, folder.tree["random"] if "random" in chosen else (), folder.notes)


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


def _folder_weights(source: Path, path_of: Mapping[str, str], leaf: str) -> dict[str, torch.Tensor]:
    if is_sharded_folder(source):
        found: list[str] = []

        def choose(names: Sequence[str]) -> Collection[str]:
            found.extend(path_of.get(name, name) for name in names)
            return [name for name in names if f"{leaf}/".startswith(f"{path_of.get(name, name)}/")]

        states = dict(states_in(_renamed(read_dcp(source, choose), path_of)))
        if leaf not in states:
            raise ValueError(f"convert_checkpoint: there is no model {leaf!r}. There are {', '.join(found)}.")
        return _checked_weights(states[leaf].state_dict(), leaf)
    tree = read_folder(source, kinds=("model",)).tree
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
    return _checked_weights(decode(stored.documents[0], stored.tensors), leaf)


def _checked_weights(state: Any, leaf: str) -> dict[str, torch.Tensor]:
    values = cast("dict[Any, Any]", state) if isinstance(state, dict) else {}
    odd = [name for name, value in values.items() if not isinstance(value, torch.Tensor)]
    if not values or odd or not all(isinstance(name, str) for name in values):
        what = f"{', '.join(map(str, odd[:5]))} must be tensors" if odd else "it has no named tensors"
        raise ValueError(
            f"convert_checkpoint: {leaf!r} is not the state of a model: {what}. Pass the path of one as leaf."
        )
    return {name: value.detach() for name, value in values.items()}


def _read_checkpoint(source: str | os.PathLike[str], choose: _Choose) -> _Source:
    chosen: dict[str, Json] = {}
    differs = False

    def documents(manifest: Manifest) -> list[Json]:
        nonlocal chosen, differs
        tree, joined = document_of(manifest.tree, 0), cast("dict[str, Json]", manifest.tree)
        if not isinstance(tree, dict) or "$" in tree:
            raise ValueError(
                f"convert_checkpoint: the tree in {source} is no dict with texts as keys, as "
                "torch.distributed.checkpoint needs it. Save a dict of its parts."
            )
        kept = choose([*tree])
        own = {name: node for name, node in tree.items() if name in kept}
        chosen, differs = own, any(node != joined.get(name) for name, node in own.items())
        return [*own.values()]

    stored = read_parts(source, documents)
    parts = {name: _from_document(node, stored.tensors, f"/{name}") for name, node in chosen.items()}
    notes = ("What each rank had for itself is that of rank 0.",) if differs else ()
    return _Source(parts, () if stored.manifest.random is None else (None,), notes)


def _from_document(node: Json, tensors: Mapping[str, torch.Tensor], path: str) -> Any:
    """Build a tree from its document, with stand-ins for the objects, and dicts for named tuples."""
    children = children_of(node, path)
    kind = node.get("$", "dict") if isinstance(node, dict) else "list"
    if children is None or kind == "node":
        return decode(node, tensors)
    values = [_from_document(child, tensors, path) for _, child in children]
    if kind == "object":
        (state,) = values
        is_optimizer = isinstance(state, dict) and {"state", "groups"} <= state.keys()
        return Optimizer(state) if is_optimizer else State(state)
    if kind in ("list", "deque"):
        return values
    if kind == "tuple":
        return tuple(values)
    return dict(zip((key for key, _ in children), values, strict=True))
