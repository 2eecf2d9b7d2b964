"""Checkpoints from one program's form to another's: Accelerate's folders, those of here, bare weights."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from accelfn.checkpoint.accelerate.random import from_accelerate_random, to_accelerate_random
from accelfn.checkpoint.accelerate.reading import AccelerateState, read_accelerate
from accelfn.checkpoint.accelerate.tree import Like, from_accelerate, to_accelerate
from accelfn.checkpoint.accelerate.writing import write_accelerate
from accelfn.checkpoint.conversion.parts import Part, find_part, split_parts, with_shared
from accelfn.checkpoint.conversion.whole import write_whole
from accelfn.checkpoint.document.document import decode, encode
from accelfn.checkpoint.document.nodes import below
from accelfn.checkpoint.files.commit import check_target
from accelfn.checkpoint.files.disk import REAL_DISK
from accelfn.checkpoint.files.find import locate
from accelfn.checkpoint.files.manifest import Json, Manifest
from accelfn.checkpoint.state.by_rank import document_of, join_documents, renamed
from accelfn.checkpoint.state.load import read_parts
from accelfn.checkpoint.weights.folder import write_weights
from accelfn.context.config import GradScalerKwargs
from accelfn.data import LoaderState
from accelfn.errors import CheckpointError, NoCheckpointError
from accelfn.training import unwrap_model

__all__ = ("Conversion", "convert_checkpoint")

Form = Literal["accelfn", "accelerate", "safetensors"]

# What stands for the class of an object, which a folder of Accelerate doesn't tell; and what isn't renamed.
_CLASSES = (
    *(("model", "models", "torch.nn.modules.module:Module"),),
    *(("optimizer", "optimizers", "torch.optim.optimizer:Optimizer"),),
    *(("scheduler", "schedulers", "torch.optim.lr_scheduler:LRScheduler"),),
    *(("sampler", "samplers", "torch.utils.data.sampler:Sampler"),),
    *(("loader", "loaders", "torch.utils.data.dataloader:DataLoader"),),
    *(("custom", "custom", "builtins:object"),),
)
_PLACES = re.compile(r"(model|optimizer|scheduler|sampler|loader)(_[1-9]\d*)?|custom_\d+|scaler|step")
_SINGLE = ("scaler", "step", "random")
_SCALER_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")


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


def convert_checkpoint(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: Form,
    names: Mapping[str, str] | None = None,
    like: Like | None = None,
    leave_out: Collection[str] = (),
    leaf: str = "model",
    step: int | None = None,
    scaler: GradScalerKwargs | None = None,
    max_shard_size: int | str = "10GB",
    overwrite: bool = False,
) -> Conversion:
    """Convert a checkpoint into one that another program reads. The target appears by one rename.

    - ``to="accelfn"``: of a folder that Accelerate 1.x wrote, a checkpoint that :func:`accelfn.load_state`
      takes up into ``{"model": model, "optimizer": optimizer, ...}``, with the random states of all ranks.
      The parts are those that :func:`from_accelerate` lists.
    - ``to="accelerate"``: of a checkpoint, a folder that Accelerate 1.15 loads; what was cut over ranks or
      sharded is put together. What differs between ranks, other than random states, is rank 0's.
    - ``to="safetensors"``: of either, the weights of one model, as transformers reads them.

    Ranks: local; one process does it all, and has all tensors in its memory.

    Args:
        source: A checkpoint, a directory of checkpoints (then the newest), or a folder of Accelerate. It
            isn't changed.
        target: The directory to make.
        to: Its form.
        names: What a part of Accelerate is called in the tree, such as ``{"model": "unet"}``. A slash makes
            trees in trees: ``{"model": "models/unet", "model_1": "models/critic"}``.
        like: What tells the order of an optimizer's parameters, by path in the tree; as for
            :func:`from_accelerate`. A module also tells which names are tied, which safetensors has once.
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
        CheckpointError: It isn't certain which parameter an optimizer's state belongs to; the message says
            what to pass. Or a class of the tree isn't imported.
        ValueError: A name is that of nothing, or a part has no place in the other form.
        TypeError: A value has no form there.
        OSError: The target can't be written. Nothing is left behind.
    """
    if to not in get_args(Form):
        raise ValueError(f"convert_checkpoint: to must be one of {', '.join(get_args(Form))}, got {to!r}.")
    _check_place(Path(target), to, overwrite)
    state = _read_foreign(source)
    without = frozenset(leave_out)
    if to == "safetensors":
        tensors = _weights(source, state, names or {}, leaf)
        files = write_weights(target, tensors, max_shard_size=max_shard_size)
        return Conversion(path=Path(target), parts=files)
    if to == "accelerate":
        if state is not None:
            raise ValueError(f"convert_checkpoint: {source} is a folder of Accelerate already.")
        return _to_folder(source, target, names or {}, without, scaler)
    if state is None:
        raise ValueError(
            f"convert_checkpoint: {source} is a checkpoint of accelfn already. Copy the directory as it is."
        )
    return _to_checkpoint(state, target, names or {}, like or {}, without, step)


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


def _read_foreign(source: str | os.PathLike[str]) -> AccelerateState | None:
    """Read a folder of Accelerate; None where the source is a checkpoint of here."""
    try:
        locate(REAL_DISK, source)
    except NoCheckpointError as error:
        try:
            return read_accelerate(Path(source))
        except NoCheckpointError:
            raise error from None
    return None


# --- from Accelerate -----------------------------------------------------------------------------


def _to_checkpoint(
    state: AccelerateState,
    target: str | os.PathLike[str],
    names: Mapping[str, str],
    like: Like,
    without: frozenset[str],
    step: int | None,
) -> Conversion:
    kept, called, classes = _choose(state, names, without)
    tree = from_accelerate(kept, names=called, like=like)
    models = [path for path, kind in classes.items() if kind == _CLASSES[0][2]]
    for path in models:
        tree[path] = _with_tied(tree[path], like.get(path))
    if len(models) == 1:
        for path, kind in classes.items():
            if kind == _CLASSES[1][2]:
                tree[path] = _within(tree[path], models[0])
    random = tree.pop("random", None)
    for name in _SINGLE[:2]:
        if name in tree and name in without:
            del tree[name]
        elif name in tree:
            tree[names.get(name, name)] = tree.pop(name)
    encoded = encode(_nested(tree))
    document = encoded.document
    for path, kind in classes.items():
        document = _as_object(document, path.split("/"), kind)
    tensors = dict(encoded.tensors)
    random_document = None
    if random is not None and "random" not in without:
        random_document = _random_document(random, tensors)
    size = 1 if random_document is None else len(cast("Sequence[Any]", random))
    path = write_whole(target, document, tensors, random=random_document, world_size=size, step=step)
    return Conversion(path=path, parts=tuple(tree), notes=tuple(_notes(state, random_document, without)))


def _choose(
    state: AccelerateState, names: Mapping[str, str], without: frozenset[str]
) -> tuple[AccelerateState, dict[str, str], dict[str, str]]:
    """Leave out parts; give the others, what the others are called by their new number, and their classes."""
    fields: dict[str, tuple[Any, ...]] = {}
    called: dict[str, str] = {}
    classes: dict[str, str] = {}
    known: list[str] = list(_SINGLE)
    for kind, field, of in _CLASSES:
        kept: list[Any] = []
        for number, value in enumerate(getattr(state, field)):
            known.append(_default(kind, number))
            name = names.get(known[-1], known[-1])
            if not {name, known[-1]} & without:
                called[_default(kind, len(kept))] = name
                classes[name] = of
                kept.append(value)
        fields[field] = tuple(kept)
    unknown = sorted((set(names) - set(known)) | (without - set(known) - set(names.values())))
    if unknown:
        raise ValueError(
            f"convert_checkpoint: there is no {unknown[0]!r} in the folder. It holds "
            f"{', '.join(name for name in known if name not in _SINGLE) or 'nothing'}."
        )
    taken = [*called.values(), *(names.get(name, name) for name in _SINGLE[:2])]
    for one in taken:
        if not all(one.split("/")) or any(other.startswith(f"{one}/") for other in taken):
            raise ValueError(
                f"convert_checkpoint: {one!r} can't be a part's path: it is empty or holds others."
            )
    return state._replace(**fields), called, classes


def _default(kind: str, number: int) -> str:
    return f"{kind}_{number}" if number or kind == "custom" else kind


def _with_tied(model: Mapping[str, torch.Tensor], module: Any) -> dict[str, torch.Tensor]:
    """Add the names that a module ties to others: safetensors has each tensor once."""
    held = {name: tensor.detach() for name, tensor in model.items()}
    if not isinstance(module, nn.Module):
        return held
    inner = unwrap_model(module, keep_torch_compile=False)
    own = inner.state_dict(keep_vars=True)
    by_identity = {id(tensor): name for name, tensor in own.items() if name in held}
    for name, tensor in own.items():
        if name not in held and id(tensor) in by_identity:
            # Another object over the same memory, as a state dict has it.
            held[name] = held[by_identity[id(tensor)]].detach()
    return {name: held[name] for name in (*(name for name in own if name in held), *held)}


def _within(optimizer: Mapping[str, Any], model: str) -> dict[str, Any]:
    """Name an optimizer's parameters with the path of the only model, as ``save_state`` does."""
    return {
        **optimizer,
        "state": {below(model, name): value for name, value in optimizer["state"].items()},
        "groups": [
            {**group, "params": [below(model, name) for name in group["params"]]}
            for group in optimizer["groups"]
        ],
    }


def _nested(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Make trees in trees of names with slashes."""
    result: dict[str, Any] = {}
    for path, value in tree.items():
        *outer, name = path.split("/")
        place = result
        for part in outer:
            place = place.setdefault(part, {})
        place[name] = value
    return result


def _as_object(document: Json, path: Sequence[str], of: str) -> Json:
    """Mark a part as the state of an object."""
    if not path:
        return {"$": "object", "of": of, "state": document}
    inside = cast("dict[str, Json]", document)
    return {**inside, path[0]: _as_object(inside[path[0]], path[1:], of)}


def _random_document(random: Sequence[Mapping[str, Any] | None], tensors: dict[str, torch.Tensor]) -> Json:
    """Write the random states of all ranks; their tensors go to the others."""
    lost = [str(rank) for rank, one in enumerate(random) if one is None]
    if lost:
        raise CheckpointError(
            f"convert_checkpoint: of {len(random)} ranks the folder lacks the random states of "
            f"{', '.join(lost[:5])} (random_states_{lost[0]}.pkl). Copy them from their machines, or leave "
            "'random' out."
        )
    documents: list[Json] = []
    prefix = "#random"
    while any(name.startswith(f"{prefix}/") for name in tensors):
        prefix = f"#{prefix}"
    for rank, state in enumerate(from_accelerate_random(cast("Sequence[Mapping[str, Any]]", random))):
        encoded = encode(state)
        called = {name: f"{prefix}/{name}{f'@{rank}' if rank else ''}" for name in encoded.tensors}
        documents.append(renamed(encoded.document, called))
        tensors.update({called[name]: tensor for name, tensor in encoded.tensors.items()})
    return join_documents(documents)


def _notes(state: AccelerateState, random: Json, without: frozenset[str]) -> list[str]:
    notes: list[str] = []
    if state.scaler and "scaler" not in without:
        defaults = GradScalerKwargs()
        other = [
            f"{name}={state.scaler[name]!r}"
            for name in _SCALER_OPTIONS
            if name in state.scaler and state.scaler[name] != getattr(defaults, name)
        ]
        if other:
            notes.append(f"The loss scaler had other options: pass GradScalerKwargs({', '.join(other)}).")
    if random is None:
        notes.append("There are no random states in it: generators go on as they are when it is loaded.")
    return notes


# --- from a checkpoint ---------------------------------------------------------------------------


def _to_folder(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    names: Mapping[str, str],
    without: frozenset[str],
    scaler: GradScalerKwargs | None,
) -> Conversion:
    def choose(manifest: Manifest) -> list[Json]:
        parts = _parts_of(manifest, names, without)
        has_random = manifest.random is not None and "random" not in without
        ranks = range(manifest.world_size if has_random else 0)
        return [
            {part.path: part.node for part in parts},
            *(document_of(manifest.random, rank) for rank in ranks),
        ]

    stored = read_parts(source, choose)
    tree, *random = (decode(document, stored.tensors) for document in stored.documents)
    parts: tuple[str, ...] = tuple(tree)
    default_of = {path: default for default, path in names.items()}
    odd = [path for path in parts if not _PLACES.fullmatch(default_of.get(path, path))]
    if odd:
        raise ValueError(
            f"convert_checkpoint: a folder of Accelerate has no place for {', '.join(map(repr, odd))}. Say "
            f"which of its parts they are, as in names={{'custom_0': {odd[0]!r}}}, or leave them out: "
            f"leave_out={odd!r}."
        )
    if random:
        tree["random"] = to_accelerate_random(random)
    folder = write_accelerate(target, to_accelerate(tree, names=names, scaler=scaler))
    whole = split_parts(stored.manifest.tree, tuple(tree), without)
    notes = [
        f"{part.path} differs between ranks: rank 0's was taken." for part in whole if _differs(part.node)
    ]
    return Conversion(path=folder, parts=parts, notes=tuple(notes))


def _parts_of(manifest: Manifest, names: Mapping[str, str], without: frozenset[str]) -> list[Part]:
    parts = split_parts(with_shared(document_of(manifest.tree, 0)), names.values(), without)
    paths = [part.path for part in parts]
    lost = [path for path in names.values() if path not in paths]
    if lost:
        raise ValueError(
            f"convert_checkpoint: there is no {lost[0]!r} in the tree. It has {', '.join(map(repr, paths))}."
        )
    fields = {field.name for field in dataclasses.fields(LoaderState)}
    for part in parts:
        state = part.node.get("state") if isinstance(part.node, dict) else None
        if isinstance(state, dict) and fields <= cast("dict[str, Json]", state).keys():
            raise ValueError(
                f"convert_checkpoint: {part.path!r} is the place of a loader of accelfn, which Accelerate "
                f"can't take up. Leave it out: leave_out=[{part.path!r}]."
            )
    return parts


def _differs(node: Json) -> bool:
    if isinstance(node, list):
        return any(map(_differs, node))
    if not isinstance(node, dict):
        return False
    return node.get("$") == "by_rank" or any(map(_differs, node.values()))


# --- weights -------------------------------------------------------------------------------------


def _weights(
    source: str | os.PathLike[str], state: AccelerateState | None, names: Mapping[str, str], leaf: str
) -> dict[str, torch.Tensor]:
    if state is not None:
        defaults = [_default("model", number) for number in range(len(state.models))]
        models = dict(zip((names.get(name, name) for name in defaults), state.models, strict=True))
        if leaf not in models:
            raise ValueError(f"convert_checkpoint: there is no model {leaf!r}, but {', '.join(models)}.")
        return dict(models[leaf])

    def choose(manifest: Manifest) -> list[Json]:
        part = find_part(with_shared(document_of(manifest.tree, 0)), leaf)
        if part is None:
            tops = ", ".join(one.path for one in split_parts(document_of(manifest.tree, 0), (), ()))
            raise ValueError(f"convert_checkpoint: there is no {leaf!r} in the tree, which has {tops}.")
        return [part.node]

    stored = read_parts(source, choose)
    found: Any = decode(stored.documents[0], stored.tensors)
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
