"""Save a model's weights in the files that other libraries read, and load such files into a model."""

from __future__ import annotations

import itertools
import os
import secrets
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import nn

from accelfn.checkpoint.commit import check_path
from accelfn.checkpoint.model_files import (
    Existing,
    find_existing,
    locked_directory,
    publish,
    replacing,
    staging,
    write_files,
    write_pickled,
    write_safetensors,
)
from accelfn.checkpoint.plan import check_copies
from accelfn.comm import check_replicas, gather_object
from accelfn.config import GuardMode
from accelfn.context import Context, takes_context
from accelfn.parallel.engines import with_plain_weights
from accelfn.parallel.pointers import whole_of
from accelfn.parallel.values import check_filled
from accelfn.storage.address import as_path
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor
from accelfn.weights.dtypes import SAFETENSORS_NAMES
from accelfn.weights.index import (
    WeightNaming,
    names_of,
    parse_size,
    plan_weights,
)
from accelfn.weights.state import (
    Agreement,
    complete_state,
    describe_state,
    gathered_tensors,
    has_bytes,
    is_tensor,
    own_names,
    require_module,
    together,
)

_SAVE, _SAVE_OBJECT, _LOAD = "save_model", "save_object", "load_model"


# --- saving --------------------------------------------------------------------------------------


@takes_context
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
    node does. All new files are complete on disk before they replace the old ones, in an order such that a
    reader finds the complete old model or the complete new one whenever the program is killed. Files of
    earlier saves are removed last. Weights that are the same data are stored once, and the file's metadata
    has the other names. Views that share only a part of their data are stored separately.

    If a model is distributed over ranks (``DTensor``, pipeline stages), one tensor at a time is gathered and
    written.

    Ranks: every rank of ``ctx``. When it returns, the files are complete for all ranks.

    Args:
        ctx: The world.
        model: Prepared or not; the names are those of the model without any wrapper.
        directory: Made if it is missing; or an address such as ``"s3://bucket/model"``.
        max_shard_size: Largest size of the tensors in a file, in bytes or a text such as ``"5GB"``.
        safe_serialization: Write safetensors. Otherwise ``torch.save`` writes ``pytorch_model.bin`` and so
            on, with the tensors of one file in memory at a time.
        names: Whose file names to use: ``"transformers"`` (``model.safetensors``) or ``"diffusers"``
            (``diffusion_pytorch_model.safetensors``).

    Returns:
        Paths of the files, on every rank; the index is the last.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: A weight is sparse, on the meta device, or of a dtype that safetensors lacks; the state
            dict contains a value that isn't a tensor; or an option is malformed.
        MissingExtraError: The package isn't installed that an address needs, such as s3fs.
        NotADirectoryError: ``directory`` is a file.
        OSError: The files can't be written. The old files are unchanged.
        RemoteRankError: Another rank failed.
        MismatchError: The ranks' models differ.
        ReplicaDriftError: Replicas of a parameter differ between ranks, and only one could be saved.
    """
    model, _ = with_plain_weights(model)
    check_path("save_model", directory)
    folder = as_path(directory)
    _check_replicas(ctx, model)

    def save(agree_on: Agreement) -> tuple[Path, ...]:
        kind = names_of(names)[not safe_serialization]
        size = parse_size(max_shard_size)
        inner = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        own = _savable_state(inner, safe_serialization)
        tensors, stages = complete_state(ctx, _SAVE, inner, own, agree_on)
        agree_on(f"{kind} {size}", lambda: describe_state(tensors, stages))
        with ExitStack() as lock:
            generation, existing = _reserve_directory(ctx, folder, names, lock, agree_on)
            plan = plan_weights(tensors, size, kind, generation)
            order = [name for _, stored in plan.files for name in stored]
            values = gathered_tensors(tensors, order, agree_on, stages)
            if existing is not None:
                with staging(folder / "weights") as stage:
                    files = write_files(stage, plan, kind, tensors, values)
                    publish(folder, stage, files, existing)
            else:
                deque(values, maxlen=0)  # takes part in the gathering
        files = [folder / file for file, _ in plan.files]
        return (*files, folder / kind.index) if len(files) > 1 else tuple(files)

    return together(ctx, _SAVE, save)


def _writes(ctx: Context) -> bool:
    return ctx.is_local_main_process if ctx.project.save_on_each_node else ctx.is_main_process


def _check_replicas(ctx: Context, model: nn.Module) -> None:
    guard = ctx.guard
    if ctx.num_processes == 1 or not guard.check_replicas_before_saving or guard.mode == GuardMode.OFF:
        return

    def parameters() -> dict[str, torch.Tensor]:
        # Without buffers: running statistics of batch norm may differ between ranks.
        inner = unwrap_model(require_module(_SAVE, model), keep_torch_compile=False)
        check_filled(_SAVE, inner)  # uninitialised memory would be reported as drift
        return {name: value for name, value in inner.named_parameters() if not value.is_meta}

    found = together(ctx, _SAVE, lambda _: parameters())
    whole = whole_of(unwrap_model(model, keep_torch_compile=False))
    if whole is None and not any(map(is_dtensor, found.values())):
        check_replicas(ctx, found, name="model")
        return
    first: Mapping[str, str] = {} if whole is None else whole.first  # tied weights may be on several stages
    check_copies(ctx, _SAVE, {first.get(name, name): value for name, value in found.items()}, "model")


def _savable_state(model: nn.Module, safe: bool) -> dict[str, torch.Tensor]:
    """Return this rank's state dict by the model's own names.

    Raises:
        ValueError: A value can't be saved.
    """
    check_filled(_SAVE, model)
    names = own_names(_SAVE, model)
    # With keep_vars, tied parameters are the same object.
    state = {names[name]: value for name, value in model.state_dict(keep_vars=True).items()}
    refused: dict[str, list[str]] = {}
    for name, value in state.items():
        reason = _refusal(value, safe)
        if reason is not None:
            refused.setdefault(reason, []).append(name)
    for reason, odd in refused.items():
        listed = f"{', '.join(odd[:5])}{' and others' if len(odd) > 5 else ''}"
        raise ValueError(f"{_SAVE}: can't save {listed}: {reason}.")
    return cast("dict[str, torch.Tensor]", state)


def _refusal(value: object, safe: bool) -> str | None:
    """Return why a value can't be saved as a weight; None if it can."""
    if not is_tensor(value):
        return (
            "the state dict contains a value that isn't a tensor, and files of weights hold only tensors. "
            "Let get_extra_state return a tensor, or save the value separately"
        )
    if value.layout != torch.strided:
        return f"a tensor has the layout {value.layout}. Convert it with to_dense first"
    if value.is_meta:
        return "no data (meta device). Load or initialise the model first"
    if not is_dtensor(value) and not has_bytes(value):
        kind = type(value).__name__
        return f"tensors of class {kind} consist of others. Convert them to plain tensors first"
    if safe and value.dtype not in SAFETENSORS_NAMES:
        return f"safetensors lacks {value.dtype}. Convert the tensor, or pass safe_serialization=False"
    return None


def _reserve_directory(
    ctx: Context, folder: Path, naming: WeightNaming, lock: ExitStack, agree_on: Agreement
) -> tuple[int, Existing | None]:
    """Lock the directory on the ranks that write, and return a generation that is unused on all nodes.

    Without a lock, it is a random one, which no program uses that saves at the same time.

    Ranks: every rank of ``ctx``.

    Returns:
        The generation; and on the ranks that write the files that are there.
    """
    existing: Existing | None = None
    is_locked = True
    if _writes(ctx):
        is_locked = lock.enter_context(locked_directory(folder, naming))
        existing = find_existing(folder, naming, is_locked=is_locked)
    agree_on("names")
    random = 0 if is_locked else secrets.randbelow(10**9 - 1000) + 1000
    used = () if existing is None else sorted({*existing.shards.values()})
    numbers = gather_object(ctx, [-random, *used])
    if min(numbers):
        return -min(numbers), existing
    return next(generation for generation in itertools.count(1) if generation not in numbers), existing


def save_object(
    ctx: Context,
    obj: Any,
    path: str | os.PathLike[str] | BinaryIO,
    safe_serialization: bool = False,
) -> None:
    """Write an object once, with ``torch.save``, or write a dict of tensors as safetensors.

    The main process writes; with ``ProjectConfiguration(save_on_each_node=True)`` the first process of each
    node does. The file is complete on disk before it replaces an old one, in one step.

    Ranks: every rank of ``ctx``. When it returns, the file is complete for all ranks.

    Args:
        ctx: The world.
        obj: Anything that ``torch.save`` accepts, or a dict of dense tensors by name. Only the ranks that
            write use it.
        path: The file, in an existing directory. For ``torch.save`` also a binary file object.
        safe_serialization: Write safetensors. Otherwise the file is pickled: read it with
            ``torch.load(weights_only=True)``, unless you trust it.

    Raises:
        TypeError: For safetensors, ``obj`` is not a dict of tensors, or ``path`` is not a path.
        ValueError: A tensor is sparse, on the meta device, or of a dtype that safetensors lacks.
        OSError: The file can't be written. The old file is unchanged.
        RemoteRankError: Another rank failed.
    """

    def write(_: Agreement) -> None:
        if not _writes(ctx):
            return
        tensors = _require_tensors(obj) if safe_serialization else None
        if not isinstance(path, (str, os.PathLike)):
            if tensors is not None:
                raise TypeError(f"{_SAVE_OBJECT}: safetensors need a path, got {type(path).__name__}.")
            torch.save(obj, path)
            return
        with replacing(as_path(path)) as temporary:
            if tensors is None:
                write_pickled(temporary, obj)
            else:
                forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
                write_safetensors(temporary, forms, tensors.__getitem__, {"format": "pt"})

    together(ctx, _SAVE_OBJECT, write)


def _require_tensors(obj: object) -> dict[str, torch.Tensor]:
    if not isinstance(obj, Mapping):
        raise TypeError(
            f"{_SAVE_OBJECT}: safetensors hold a dict of tensors by name, got {type(obj).__name__}."
        )
    tensors = dict(cast("Mapping[Any, Any]", obj))
    for name, value in tensors.items():
        if not isinstance(name, str) or not is_tensor(value):
            raise TypeError(
                f"{_SAVE_OBJECT}: safetensors hold a dict of tensors by name, got a dict with "
                f"{type(value).__name__} under {name!r}."
            )
        reason = _refusal(value, safe=True)
        if reason is not None:
            raise ValueError(f"{_SAVE_OBJECT}: can't save {name}: {reason}.")
    return tensors
