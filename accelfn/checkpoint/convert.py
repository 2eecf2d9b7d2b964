"""Checkpoints from one program's form to another's: Accelerate's folders, those of here, bare weights."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch

from accelfn.checkpoint.accelerate_read import AccelerateFolder, is_accelerate, read_folder
from accelfn.checkpoint.accelerate_write import write_accelerate
from accelfn.checkpoint.by_rank import document_of
from accelfn.checkpoint.commit import check_target
from accelfn.checkpoint.disk import REAL_DISK
from accelfn.checkpoint.document.compare import choose_part
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.find import locate
from accelfn.checkpoint.load import read_parts
from accelfn.checkpoint.manifest import Json, Manifest
from accelfn.checkpoint.save import save_for_ranks
from accelfn.checkpoint.weights_files import write_weights
from accelfn.context.config import GradScalerKwargs
from accelfn.data import LoaderState
from accelfn.errors import CheckpointError, NoCheckpointError

Form = Literal["accelfn", "accelerate", "safetensors"]

_PLACES = re.compile(r"(model|optimizer|scheduler|sampler|loader)(_[1-9]\d*)?|custom_\d+|scaler|step")
_PLAIN = ("scaler", "step", "random")  # which no object loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """What :func:`convert_checkpoint` has made.

    Attributes:
        path: The new directory.
        parts: What is in it: paths of the tree's parts, or names of files.
        notes: What the reader of it has to know, in whole sentences.
    """

    path: Path
    parts: tuple[str, ...]
    notes: tuple[str, ...] = ()


class State:
    """Stands for an object whose state alone is known."""

    def __init__(self, state: Any) -> None:
        """Keep the state."""
        self._state = state

    def state_dict(self) -> Any:
        """Return the state."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Keep another state."""
        self._state = state


class Optimizer(State):
    """Stands for an optimizer of whatever class."""


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Form,
    names: Mapping[str, str] | None = None,
    leave_out: Collection[str] = (),
    leaf: str = "model",
    step: int | None = None,
    scaler: GradScalerKwargs | None = None,
    max_shard_size: int | str = "10GB",
    overwrite: bool = False,
) -> Conversion:
    """Convert a checkpoint into one that another program reads. The target appears by one rename.

    - ``to="accelfn"``: of a folder that Accelerate 1.x wrote, a checkpoint that :func:`accelfn.load_state`
      loads into ``{"model": model, "optimizer": optimizer, ...}``, with the random states of all ranks. The
      parts are those that :func:`read_accelerate` lists. Parameters that an optimizer knows by number are
      found by the order of the optimizer that loads the state.
    - ``to="accelerate"``: of a checkpoint, a folder that Accelerate 1.15 loads; what was sharded over ranks
      is put together. What differs between ranks, other than random states, is rank 0's.
    - ``to="safetensors"``: of either, the weights of one model, as transformers reads them.

    Ranks: local; one process does it all, and has all tensors in its memory.

    Args:
        source: A checkpoint, a directory of checkpoints (then the newest), or a folder of Accelerate. It
            isn't changed.
        target: The directory to make.
        to: Its form.
        names: What a part of Accelerate is called in the tree, such as ``{"model": "unet"}``. A slash makes
            trees in trees: ``{"model": "models/unet", "model_1": "models/critic"}``.
        leave_out: Paths of parts that aren't converted.
        leaf: Path of the model, for ``to="safetensors"``.
        step: Of the new checkpoint, for ``to="accelfn"``; it says which is the newest of several.
        scaler: The run's options of the loss scaler, for ``to="accelerate"``. None: the defaults.
        max_shard_size: Of a file of weights, for ``to="safetensors"``.
        overwrite: Replace a checkpoint that stands at ``target`` by a new one (``to="accelfn"``).

    Raises:
        FileExistsError: Something stands at ``target``.
        NoCheckpointError: There is neither a checkpoint nor a folder of Accelerate.
        DamagedCheckpointError: ``source`` isn't what was written.
        CheckpointError: The folder is incomplete, or a class of the tree isn't imported.
        ValueError: A name is that of nothing, or a part has no place in the other form.
        TypeError: A value has no form there.
        OSError: The target can't be written. Nothing is left behind.
    """
    if to not in get_args(Form):
        raise ValueError(f"convert_checkpoint: to must be one of {', '.join(get_args(Form))}, got {to!r}.")
    place = Path(target)
    _check_place(place, to, overwrite)
    called, without = names or {}, frozenset(leave_out)
    is_own = _is_checkpoint(source)
    if to == "safetensors":
        tensors = _stored_weights(source, leaf) if is_own else _folder_weights(source, called, leaf)
        files = write_weights(target, tensors, max_shard_size=max_shard_size)
        return Conversion(path=place, parts=files)
    if to == "accelerate":
        if not is_own:
            raise ValueError(f"convert_checkpoint: {source} is a folder of Accelerate already.")
        return _to_folder(source, place, called, without, scaler)
    if is_own:
        raise ValueError(
            f"convert_checkpoint: {source} is a checkpoint of accelfn already. Copy the directory as it is."
        )
    return _to_checkpoint(read_folder(Path(source)), place, called, without, step)


def _check_place(target: Path, to: Form, overwrite: bool) -> None:
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return
    if to == "accelfn" and overwrite:
        check_target(REAL_DISK, target)  # refuses what is no checkpoint
        return
    hint = "pass overwrite to replace a checkpoint" if to == "accelfn" else "only checkpoints are replaced"
    raise FileExistsError(
        f"convert_checkpoint: {target} is there already. Pass a new directory, or remove it ({hint})."
    )


def _is_checkpoint(source: str | os.PathLike[str]) -> bool:
    """Whether the source is a checkpoint of here, and not a folder of Accelerate."""
    try:
        locate(REAL_DISK, source)
    except NoCheckpointError:
        if not is_accelerate(Path(source)):
            raise
        return False
    return True


# --- from Accelerate -----------------------------------------------------------------------------


def _to_checkpoint(
    folder: AccelerateFolder,
    target: Path,
    names: Mapping[str, str],
    without: frozenset[str],
    step: int | None,
) -> Conversion:
    known = [*folder.tree, *_PLAIN]
    unknown = sorted((set(names) - set(known)) | (without - set(known) - set(names.values())))
    if unknown:
        raise ValueError(
            f"convert_checkpoint: there is no {unknown[0]!r} in the folder. It holds "
            f"{', '.join(name for name in folder.tree if name not in _PLAIN) or 'nothing'}."
        )
    kept = [name for name in folder.tree if not {name, names.get(name, name)} & without]
    paths = [names.get(name, name) for name in kept]
    for one in paths:
        others = [other for other in paths if other == one or other.startswith(f"{one}/")]
        if not all(one.split("/")) or len(others) > 1:
            raise ValueError(
                f"convert_checkpoint: {one!r} can't be a part's path: it is empty, or another one's too."
            )
    tree: dict[str, Any] = {}
    for name, path in zip(kept, paths, strict=True):
        value = folder.tree[name]
        if name.startswith("optimizer"):
            value = Optimizer(_renamed(value, names))
        elif name not in _PLAIN:
            value = State(value)
        *outer, last = path.split("/")
        reduce(lambda place, part: place.setdefault(part, {}), outer, tree)[last] = value
    randoms: list[Any] = tree.pop("random", [])
    lost = [rank for rank, one in enumerate(randoms) if one is None]
    if lost:
        raise CheckpointError(
            f"convert_checkpoint: of {len(randoms)} ranks the folder lacks the random states of "
            f"{', '.join(map(str, lost[:5]))} (random_states_{lost[0]}.pkl). Copy them from their machines, "
            "or leave 'random' out."
        )
    path = save_for_ranks(target, tree, randoms, step=step)
    notes = folder.notes if "scaler" in kept else ()
    if not randoms:
        notes += ("There are no random states in it: generators go on as they are when it is loaded.",)
    return Conversion(path=path, parts=tuple(one for one in paths if one != "random"), notes=notes)


def _renamed(optimizer: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Call parameters by the new names of their models."""

    def new(name: str) -> str:
        model, slash, rest = name.partition("/")
        return f"{names.get(model, model)}{slash}{rest}"

    groups = [{**group, "params": [new(name) for name in group["params"]]} for group in optimizer["groups"]]
    return {
        **optimizer,
        "state": {new(name): value for name, value in optimizer["state"].items()},
        "groups": groups,
    }


def _folder_weights(
    source: str | os.PathLike[str], names: Mapping[str, str], leaf: str
) -> dict[str, torch.Tensor]:
    tree = read_folder(Path(source), kinds=("model",)).tree
    models = {names.get(name, name): value for name, value in tree.items()}
    if leaf not in models:
        raise ValueError(f"convert_checkpoint: there is no model {leaf!r}, but {', '.join(models)}.")
    return models[leaf]


# --- from a checkpoint ---------------------------------------------------------------------------


def _to_folder(
    source: str | os.PathLike[str],
    target: Path,
    names: Mapping[str, str],
    without: frozenset[str],
    scaler: GradScalerKwargs | None,
) -> Conversion:
    def choose(manifest: Manifest) -> list[Json]:
        document = document_of(manifest.tree, 0)
        has_random = manifest.random is not None and "random" not in without
        randoms = range(manifest.world_size if has_random else 0)
        return [
            choose_part(document, _without(document, without), _always),
            *(document_of(manifest.random, rank) for rank in randoms),
        ]

    stored = read_parts(source, choose)
    tree, *randoms = (decode(document, stored.tensors) for document in stored.documents)
    default_of = {path: default for default, path in names.items()}
    found = dict(_parts(tree, default_of.keys()))
    lost = [path for path in default_of if path not in found]
    if lost:
        raise ValueError(
            f"convert_checkpoint: there is no {lost[0]!r} in the tree. It has {', '.join(map(repr, found))}."
        )
    loader = {field.name for field in dataclasses.fields(LoaderState)}
    for path, value in found.items():
        if isinstance(value, dict) and loader <= cast("dict[str, Any]", value).keys():
            raise ValueError(
                f"convert_checkpoint: {path!r} is the place of a loader of accelfn, which Accelerate can't "
                f"load. Leave it out: leave_out=[{path!r}]."
            )
    odd = [path for path in found if not _PLACES.fullmatch(default_of.get(path, path))]
    if odd:
        raise ValueError(
            f"convert_checkpoint: a folder of Accelerate has no place for {', '.join(map(repr, odd))}. Say "
            f"which of its parts they are, as in names={{'custom_0': {odd[0]!r}}}, or leave them out: "
            f"leave_out={odd!r}."
        )
    parts = {default_of.get(path, path): value for path, value in found.items()}
    if len(parts) != len(found):
        raise ValueError("convert_checkpoint: names has two parts of the tree at the same place.")
    folder = write_accelerate(target, {**parts, **({"random": randoms} if randoms else {})}, scaler=scaler)
    whole = cast("dict[str, Json]", stored.manifest.tree)
    notes = [
        f"{key} differs between ranks: rank 0's was taken."
        for key, node in whole.items()
        if key not in without and '"$": "by_rank"' in json.dumps(node)
    ]
    return Conversion(path=folder, parts=tuple(found), notes=tuple(notes))


def _always(path: str) -> bool:
    return True


def _without(node: Json, paths: frozenset[str], at: str = "") -> Json:
    """Leave parts out of a document."""
    if not isinstance(node, dict) or "$" in node:
        return node
    return {
        key: _without(one, paths, f"{at}{key}/") for key, one in node.items() if f"{at}{key}" not in paths
    }


def _parts(tree: Any, wanted: Collection[str], at: str = "") -> Iterator[tuple[str, Any]]:
    """List the parts of a tree: those that are asked for, and beside them the others."""
    if not isinstance(tree, dict):
        raise ValueError("convert_checkpoint: the tree is no dict, so its parts have no names.")
    for key, value in cast("dict[Any, Any]", tree).items():
        path = f"{at}{key}"
        if path not in wanted and any(one.startswith(f"{path}/") for one in wanted):
            yield from _parts(value, wanted, f"{path}/")
        else:
            yield path, value


def _stored_weights(source: str | os.PathLike[str], leaf: str) -> dict[str, torch.Tensor]:
    keys = leaf.strip("/").split("/")

    def choose(manifest: Manifest) -> list[Json]:
        document = document_of(manifest.tree, 0)
        node: Any = document
        like: Any = None
        for key in keys:
            if not isinstance(node, dict) or "$" in node or key not in node:
                tops = ", ".join(document) if isinstance(document, dict) else "no names"
                raise ValueError(f"convert_checkpoint: there is no {leaf!r} in the tree, which has {tops}.")
            node = cast("dict[str, Json]", node)[key]
        for key in reversed(keys):
            like = {key: like}
        return [choose_part(document, like, _always)]

    stored = read_parts(source, choose)
    found: Any = reduce(operator.getitem, keys, decode(stored.documents[0], stored.tensors))
    values = cast("dict[Any, Any]", found) if isinstance(found, dict) else {}
    others = [name for name, value in values.items() if not isinstance(value, torch.Tensor)]
    if not values or others or not all(isinstance(name, str) for name in values):
        what = (
            f"{', '.join(map(str, others[:5]))} in it is no tensor" if others else "it has no named tensors"
        )
        raise ValueError(
            f"convert_checkpoint: {leaf!r} is no state of a model: {what}. Pass the path of one as leaf."
        )
    return {name: value.detach() for name, value in values.items()}
