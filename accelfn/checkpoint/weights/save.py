"""Save a model's weights in the layout that the ecosystem reads."""

from __future__ import annotations

import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import nn

from accelfn.checkpoint.files.header import storage_order
from accelfn.checkpoint.state.copies import check_copies
from accelfn.checkpoint.weights.files import (
    SAFETENSORS_NAMES,
    Entry,
    Staged,
    holding,
    publish,
    replacing,
    taken_generations,
    temporary_path,
    write_pickled,
    write_tensors,
    write_text,
)
from accelfn.checkpoint.weights.plan import (
    WeightNames,
    WeightNaming,
    WeightsPlan,
    names_of,
    parse_size,
    plan_weights,
)
from accelfn.checkpoint.weights.state import (
    Meet,
    Stages,
    describe,
    has_bytes,
    is_tensor,
    own_names,
    require_module,
    together,
    whole_state,
    whole_tensors,
)
from accelfn.comm import Call, catch, check_replicas, gather_bytes
from accelfn.context import Context, check_context
from accelfn.context.config import GuardMode
from accelfn.parallel import whole_of
from accelfn.parallel.materialize import check_filled
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor

__all__ = ("save_model", "save_object")

_SAVE = "save_model"
_OBJECT = "save_object"


def save_model(
    ctx: Context,
    model: nn.Module,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
    names: WeightNaming = "transformers",
) -> tuple[Path, ...]:
    """Write the weights of ``model`` as ``model.safetensors``, or as several files with an index.

    The main process writes; with ``ProjectConfiguration(save_on_each_node=True)`` the first process of each
    node does. All new files are complete on disk before any of them takes its name, and the order in which
    they do is such that a reader finds the old model or the new one, whole, whenever the program is killed.
    What an earlier save left behind is removed last. Weights that share all their data are stored once; the
    other names stand in the file's metadata. Views that share a part of it become tensors of their own.

    Of a model that is spread over ranks (``DTensor``, stages of a pipeline) one tensor at a time is gathered
    and written.

    Ranks: every rank of ``ctx``. Returns when the files are in place, on all ranks.

    Args:
        ctx: The world.
        model: Prepared or not. Its class and wrapper leave no trace in the names.
        directory: Made if it isn't there.
        max_shard_size: Largest size of a file's tensors, in bytes or such as ``"5GB"``.
        safe_serialization: Safetensors. Otherwise ``pytorch_model.bin`` and the like are written by
            ``torch.save``, with one file's tensors in memory at a time.
        names: What the files are called: ``"transformers"`` (``model.safetensors``) or ``"diffusers"``
            (``diffusion_pytorch_model.safetensors``).

    Returns:
        The files, on every rank; the index is the last.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: A weight is sparse, of a dtype that safetensors lacks, or on the meta device and has no
            data, the state dict holds something that is no tensor, or an option has another form.
        NotADirectoryError: ``directory`` is a file.
        OSError: The files can't be written; what was there before is still there.
        RemoteRankError: On the other ranks, when a rank failed.
        MismatchError: The ranks' models differ.
        ReplicaDriftError: The parameters differ between ranks, so that another rank's would be lost.
    """
    check_context("save_model", ctx)
    folder = Path(directory)
    _check_replicas(ctx, model)

    def look(meet: Meet) -> tuple[dict[str, torch.Tensor], Stages | None, int]:
        kind = _kind(names, safe_serialization)
        size = parse_size(max_shard_size)
        plain = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        tensors, stages = whole_state(ctx, _SAVE, plain, _tensors(plain, safe_serialization), meet)
        meet(f"{kind} {size}", lambda: describe(tensors, stages))
        return tensors, stages, size

    tensors, stages, size = together(ctx, _SAVE, look)
    kind = _kind(names, safe_serialization)
    with ExitStack() as held:
        generation = _begin(ctx, folder, names, held)
        plan = plan_weights(tensors, size, kind, generation)
        together(
            ctx, _SAVE, lambda meet: _save(folder, plan, tensors, stages, names, kind, meet, _writes(ctx))
        )
    files = [folder / file for file, _ in plan.files]
    return (*files, folder / kind.index) if len(files) > 1 else tuple(files)


def _kind(naming: WeightNaming, safe: bool) -> WeightNames:
    return names_of(naming)[0 if safe else 1]


def _writes(ctx: Context) -> bool:
    return ctx.is_local_main_process if ctx.project.save_on_each_node else ctx.is_main_process


def _check_replicas(ctx: Context, model: nn.Module) -> None:
    guard = ctx.guard
    if ctx.num_processes == 1 or not guard.check_replicas_before_saving or guard.mode == GuardMode.OFF:
        return

    def parameters() -> dict[str, torch.Tensor]:
        # Parameters alone: running statistics of a batch differ between ranks by right.
        plain = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        check_filled(_SAVE, plain)  # else whatever was in the memory would be said to have drifted
        named = plain.named_parameters()
        return {name: value for name, value in named if not value.is_meta}

    found = together(ctx, _SAVE, lambda _: parameters())
    staged = whole_of(unwrap_model(model, keep_torch_compile=False))
    if staged is None and not any(map(is_dtensor, found.values())):
        check_replicas(ctx, found, name="model")
        return
    first: Mapping[str, str] = {} if staged is None else staged.first  # as stages call what they share
    check_copies(ctx, _SAVE, {first.get(name, name): value for name, value in found.items()}, "model")


def _tensors(plain: nn.Module, safe: bool) -> dict[str, torch.Tensor]:
    """Return what this rank has to be saved, under the names that the model itself gives.

    Raises:
        ValueError: It can't be saved.
    """
    check_filled(_SAVE, plain)
    names = own_names(_SAVE, plain)
    # With the parameters themselves, by which tied ones are known.
    state = {names[name]: value for name, value in plain.state_dict(keep_vars=True).items()}
    _refuse(
        [name for name, value in state.items() if not is_tensor(value)],
        "in the state dict is no tensor, and would be lost: the files hold tensors only. Let get_extra_state "
        "give a tensor, or save it by yourself",
    )
    tensors = cast("dict[str, torch.Tensor]", state)
    _refuse(
        [name for name, value in tensors.items() if value.layout != torch.strided],
        "must be dense to be saved. Make it dense (to_dense) first",
    )
    _refuse(
        [name for name, value in tensors.items() if value.is_meta],
        "have no data (meta device). Load or initialise the model first",
    )
    _refuse(
        [name for name, value in tensors.items() if not is_dtensor(value) and not has_bytes(value)],
        "is of a class of its own, which the files can't hold. Convert it to a plain tensor first",
    )
    _refuse(
        [name for name, value in tensors.items() if safe and value.dtype not in SAFETENSORS_NAMES],
        "has a dtype that safetensors lacks. Convert it, or pass safe_serialization=False",
    )
    return tensors


def _refuse(names: list[str], why: str) -> None:
    if names:
        shown = f"{', '.join(names[:5])}{' and others' if len(names) > 5 else ''}"
        raise ValueError(f"{_SAVE}: {shown} {why}.")


def _begin(ctx: Context, folder: Path, naming: WeightNaming, held: ExitStack) -> int:
    """Make the directory, keep others from writing there, and choose names that are free on all nodes."""

    def begin() -> bytes:
        if not _writes(ctx):
            return b""
        held.enter_context(holding(folder, naming))
        return " ".join(map(str, taken_generations(folder, naming))).encode()

    taken, error = catch(begin)
    if ctx.num_processes > 1:
        told = gather_bytes(ctx, Call(_SAVE, "names", takes_long=True), taken or b"", error)
    elif error is not None:
        raise error
    else:
        told = [taken or b""]
    used = {int(number) for one in told for number in one.split()}
    return next(number for number in itertools.count(1) if number not in used)


def _save(
    folder: Path,
    plan: WeightsPlan,
    tensors: Mapping[str, torch.Tensor],
    stages: Stages | None,
    naming: WeightNaming,
    kind: WeightNames,
    meet: Meet,
    writes: bool,
) -> None:
    files = {file: _in_storage_order(names, tensors) for file, names in plan.files}
    values = whole_tensors(tensors, [name for names in files.values() for name in names], meet, stages)
    if not writes:
        deque(values, maxlen=0)  # this rank only helps to gather, and keeps none of them
        return
    stored_in = {name: file for file, names in plan.files for name in names}
    staged = [Staged(temporary_path(folder / file), folder / file) for file in files]
    index = Staged(temporary_path(folder / kind.index), folder / kind.index)
    try:
        for one in (*staged, index):
            one.temporary.unlink(missing_ok=True)  # of a program that was killed, and had the same number
        for one, (file, names) in zip(staged, files.items(), strict=True):
            tied = {name: first for name, first in plan.tied if stored_in[first] == file}
            if kind.is_safe:
                entries = [Entry(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names]
                write_tensors(one.temporary, entries, values, {"format": "pt", **tied})
            else:
                write_pickled(one.temporary, _held(names, values, tied))
        if len(staged) > 1:
            # Pickled files hold tied weights under each name, which share their data there.
            shared = {} if kind.is_safe else {name: stored_in[first] for name, first in plan.tied}
            said = {"metadata": {"total_size": plan.total_bytes}, "weight_map": {**stored_in, **shared}}
            write_text(index.temporary, json.dumps(said, indent=2, sort_keys=True) + "\n")
            publish(folder, naming, staged, index)
        else:
            publish(folder, naming, (), staged[0])
    finally:
        for one in (*staged, index):
            one.temporary.unlink(missing_ok=True)


def _in_storage_order(names: Iterable[str], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    given = ((name, tensors[name]) for name in names)
    forms = ((name, SAFETENSORS_NAMES.get(one.dtype, ""), tuple(one.shape)) for name, one in given)
    return [name for name, _, _ in storage_order(forms)]


def _held(
    names: Sequence[str], values: Iterator[torch.Tensor], tied: Mapping[str, str]
) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor] = {}
    for name, value in zip(names, itertools.islice(values, len(names)), strict=True):
        plain = value.cpu().resolve_conj().resolve_neg().contiguous()
        # torch.save writes the whole storage, of which this may be a part.
        is_part = plain.untyped_storage().nbytes() != plain.numel() * plain.dtype.itemsize
        held[name] = plain.clone() if is_part else plain
    return {**held, **{name: held[first] for name, first in tied.items()}}


def save_object(
    ctx: Context,
    obj: Any,
    path: str | os.PathLike[str] | BinaryIO,
    safe_serialization: bool = False,
) -> None:
    """Write an object once: by ``torch.save``, or a dict of tensors as safetensors.

    The main process writes; with ``ProjectConfiguration(save_on_each_node=True)`` the first process of each
    node does. The file is complete on disk before it takes its name, in one step.

    Ranks: every rank of ``ctx``. Returns when the file is there, on all ranks.

    Args:
        ctx: The world.
        obj: Anything that ``torch.save`` takes; or a dict of dense tensors by name. Of each rank, though only
            those that write look at it.
        path: The file, in a directory that exists. For ``torch.save`` a binary file object will do.
        safe_serialization: Safetensors. Otherwise the file is pickled, so read it with
            ``torch.load(weights_only=True)``, unless you trust it.

    Raises:
        TypeError: Safetensors were asked for, and ``obj`` is no dict of tensors, or ``path`` no path.
        ValueError: A tensor is sparse, on the meta device, or of a dtype that safetensors lacks.
        OSError: The file can't be written; what was there before is still there.
        RemoteRankError: On the other ranks, when a rank failed.
    """

    def write(_: Meet) -> None:
        if not _writes(ctx):
            return
        tensors = _require_tensors(obj) if safe_serialization else None
        if not isinstance(path, (str, os.PathLike)):
            if tensors is not None:
                raise TypeError(f"{_OBJECT}: safetensors need a path, got {type(path).__name__}.")
            torch.save(obj, path)
            return
        with replacing(Path(path)) as temporary:
            if tensors is None:
                write_pickled(temporary, obj)
            else:
                names = _in_storage_order(tensors, tensors)
                entries = [Entry(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names]
                write_tensors(temporary, entries, map(tensors.__getitem__, names), {"format": "pt"})

    together(ctx, _OBJECT, write)


def _require_tensors(obj: object) -> dict[str, torch.Tensor]:
    given = dict(cast("Mapping[object, object]", obj)) if isinstance(obj, Mapping) else None
    if given is None or not all(isinstance(name, str) and is_tensor(one) for name, one in given.items()):
        kind = type(cast("object", obj)).__name__
        raise TypeError(f"{_OBJECT}: safetensors hold a dict of tensors by name, got {kind}.")
    tensors = cast("dict[str, torch.Tensor]", given)
    for name, value in tensors.items():
        if (
            value.layout != torch.strided
            or value.is_meta
            or value.dtype not in SAFETENSORS_NAMES
            or not has_bytes(value)
        ):
            raise ValueError(
                f"{_OBJECT}: {name!r} must be a plain dense tensor with data, of a dtype that safetensors "
                f"knows: got {value.dtype}, {value.layout}, on {value.device}, {type(value).__name__}."
            )
    return tensors
