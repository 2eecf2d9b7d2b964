"""Load a checkpoint of any size into a model, each tensor straight to where it shall lie."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.arguments import require_path
from accelfn.bigmodel.load.apply import apply_plan, fetch_from_files
from accelfn.bigmodel.load.broadcast import load_from_rank0
from accelfn.bigmodel.load.placing import read_dtype
from accelfn.bigmodel.load.plan import LoadPlan, Wishes, has_part, place_of, plan_load
from accelfn.bigmodel.load.progress import showing
from accelfn.bigmodel.load.read import Reading, read_tensors
from accelfn.bigmodel.load.source import Checkpoint, map_stored, open_checkpoint
from accelfn.bigmodel.load.writing import check_folder
from accelfn.bigmodel.offload.dispatch import dispatch_model
from accelfn.bigmodel.offload.dispatch_plan import plan_dispatch, read_map
from accelfn.bigmodel.places import Place, PlaceLike, check_device
from accelfn.bigmodel.plan.budgets import MaxMemory
from accelfn.bigmodel.plan.maps import DeviceMap, check_device_map, resolve_device_map
from accelfn.bigmodel.plan.shape import read_shape
from accelfn.checkpoint.weights.state import require_module
from accelfn.training import unwrap_model

__all__ = ("load_checkpoint_and_dispatch", "load_checkpoint_in_model", "load_state_dict")

ModelT = TypeVar("ModelT", bound=nn.Module)

_LOAD, _DISPATCH = "load_checkpoint_in_model", "load_checkpoint_and_dispatch"
_SHOWN = 10
_IN_MEMORY = "Tensors that are in memory go into a model by its load_state_dict(state, assign=True)."


def load_state_dict(
    file: str | os.PathLike[str],
    device_map: Mapping[str, PlaceLike] | None = None,
    *,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Read the tensors of a checkpoint, each to its place.

    Ranks: local.

    Args:
        file: A safetensors file, one of ``torch.save`` (read as data: none can run code), an index, or a
            folder of them.
        device_map: Places by module or tensor. What it doesn't name goes to the CPU, and what it puts on the
            disk is mapped: it takes no memory before it is used, and the file must stay as it is.
        progress: Show a bar; None shows it in a terminal, if tqdm is installed.

    Returns:
        Tensors by name; of a pickled file also what else it has.

    Raises:
        NoCheckpointError: There is no such file.
        DamagedCheckpointError: A file isn't sound.
        CheckpointError: A pickled file asks for more than data.
        ValueError: The map names a place that this machine lacks.
    """
    require_path("load_state_dict", "file", file)
    checkpoint = open_checkpoint(file)
    places = {} if device_map is None else read_map(device_map)
    at = {name: place_of(name, places) for name in checkpoint.tensors}
    stay = [name for name, one in checkpoint.tensors.items() if at[name] == "disk" and one.is_mappable]
    mapped = map_stored([checkpoint.tensors[name] for name in stay], checkpoint.stamps)
    found: dict[str, Any] = dict(zip(stay, mapped, strict=True))
    readings: dict[object, Reading] = {}
    for name, stored in checkpoint.tensors.items():
        if name not in found:
            place = at[name]
            device = torch.device("cpu") if place in (None, "disk") else check_device(place)
            # What is one tensor in a pickled file is one here.
            same = (stored._replace(name="", elements=None), id(stored.elements), device)
            if same not in readings:
                memory = torch.empty(stored.shape, dtype=stored.dtype, device=device)
                readings[same] = Reading(stored, memory)
            found[name] = readings[same].target
    with showing("load", sum(one.source.num_bytes for one in readings.values()), progress) as advance:
        read_tensors(tuple(readings.values()), checkpoint.stamps, advance)
    in_order = {name: found[name] for name in checkpoint.tensors}
    return {**in_order, **checkpoint.others}


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, PlaceLike] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Iterable[str] | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    progress: bool | None = None,
) -> None:
    """Load weights into a model, each tensor from its file straight to its place.

    Everything is checked before anything is changed: names, shapes and kinds of dtypes on both sides, that
    files are whole and fit their index, places, and that what goes to the disk can. The values themselves
    can't be checked: safetensors has no checksums. Those of ``.bin`` files are verified.

    A model may be on the meta device, in part or as a whole, and has no tensor there afterwards. What it has
    in memory keeps its memory, where place and dtype don't change, and its parameters stay the same objects.
    A parameter that gets other memory has no gradient afterwards.
    Tied weights stay tied, and need to be there under one of their names. Besides the model, only a
    buffer for each thread that reads is in memory: at most eight of 8 MiB for an accelerator, of 1 MiB for
    the host.

    Effect: on ``model``, and with ``offload_folder`` on that. Where reading fails on the way, tensors that
    had memory before may have changed.

    Ranks: local, unless ``broadcast_from_rank0``: then every rank of the default process group. Of a model
    that is spread over ranks (``DTensor``) each takes its parts.

    Args:
        model: Any.
        checkpoint: A file (safetensors, or of ``torch.save``: read as data, so that none can run code), an
            index, or a folder. Of a folder safetensors come before ``.bin``.
        device_map: Places by name of a module or tensor; ``""`` is the whole model. On the ``"disk"`` weights
            stay in the checkpoint and are mapped: so the files must stay as they are. None leaves every
            tensor on its device; without one (meta) it comes to the CPU.
        offload_folder: Where weights for the disk are written that can't be used where they lie, because
            another dtype is wanted. Needed for nothing else; what it has from before is used if it is made of
            the same files.
        dtype: That floating-point tensors shall have. None: that of the model.
        offload_state_dict: Accepted. Nothing is in memory twice in any case.
        offload_buffers: Accepted. Buffers get the values of the checkpoint wherever they lie.
        keep_in_fp32_modules: Parts of names, such as ``"norm"``, whose tensors become float32 where ``dtype``
            is given.
        offload_8bit_bnb: Accepted; quantised models are loaded by ``load_and_quantize_model``.
        strict: Refuse where a name is missing on either side. Otherwise one warning lists them.
        full_state_dict: Whether the checkpoint has whole tensors. Otherwise it has this rank's part of each
            that is spread over ranks.
        broadcast_from_rank0: Only rank 0 reads; the others get everything from it.
        special_dtypes: Dtypes of single tensors, by name; the model has to have all of them.
        progress: Show a bar; None shows it in a terminal, if tqdm is installed.

    Raises:
        NoCheckpointError: There are no weights.
        DamagedCheckpointError: A file isn't sound, or isn't what the index says.
        CheckpointError: A pickled file asks for more than data, or is of the format of torch before 1.6.
        CheckpointMismatchError: Names (see ``strict``), shapes or kinds of dtypes differ; tied weights have
            two values; or a tensor without memory would stay without. Nothing was changed.
        ValueError: The map or ``special_dtypes`` names what the model lacks; the map has no place for a
            tensor, or one that this machine lacks; something can't be on the disk without ``offload_folder``;
            or arguments contradict each other. Nothing was changed.
        TypeError: ``model`` is no module, ``checkpoint`` or ``offload_folder`` no path, or ``device_map`` or
            ``special_dtypes`` no mapping. Nothing was changed.
        OSError: A file can't be read, or the folder not written.
    """
    _load(
        _LOAD,
        model,
        checkpoint,
        device_map,
        offload_folder,
        dtype,
        keep_in_fp32_modules=keep_in_fp32_modules,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        special_dtypes=special_dtypes,
        progress=progress,
    )


def load_checkpoint_and_dispatch(
    model: ModelT,
    checkpoint: str | os.PathLike[str],
    device_map: DeviceMap | None = None,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    keep_in_fp32_modules: Iterable[str] | None = None,
    special_dtypes: Mapping[str, str | torch.dtype] | None = None,
    fallback_allocation: bool = False,
    progress: bool | None = None,
) -> ModelT:
    """Load a checkpoint into a model that may be too large for one device, and make it ready to run.

    It plans where each part lies (:func:`infer_auto_device_map`), loads (:func:`load_checkpoint_in_model`),
    and lets the model's forward find its weights (:func:`dispatch_model`).

    Effect: on ``model``, and with ``offload_folder`` on that.

    Ranks: as :func:`load_checkpoint_in_model`.

    Args:
        model: Any; such as one that was built under :func:`init_empty_weights`.
        checkpoint: As :func:`load_checkpoint_in_model` takes it.
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or places by name of a
            module. None only loads.
        max_memory: Bytes by place, for a map that is named; None for what this machine has free.
        no_split_module_classes: Names of classes whose modules stay whole; None for those that the model
            itself names.
        offload_folder: As :func:`load_checkpoint_in_model` takes it.
        offload_buffers: Whether buffers travel with what is offloaded, too.
        dtype: That floating-point tensors shall have. None: that of the model.
        offload_state_dict: Accepted. Nothing is in memory twice in any case.
        skip_keys: Names of keyword arguments, and keys of dicts, that aren't moved between devices.
        preload_module_classes: Names of classes that travel as a whole.
        force_hooks: Move inputs even if the whole model is on one device.
        strict: Refuse where a name is missing on either side.
        full_state_dict: As :func:`load_checkpoint_in_model` takes it.
        broadcast_from_rank0: As :func:`load_checkpoint_in_model` takes it.
        keep_in_fp32_modules: As :func:`load_checkpoint_in_model` takes it.
        special_dtypes: As :func:`load_checkpoint_in_model` takes it; planned with, too.
        fallback_allocation: Where the first part for an accelerator is too large for it, put the first one
            there that isn't.
        progress: As :func:`load_checkpoint_in_model` takes it.

    Returns:
        The same model; ``hf_device_map`` says what lies where, if there is a map.

    Raises:
        ValueError: As the three functions do; nothing was changed.
        TypeError: The same.
        CheckpointError: As :func:`load_checkpoint_in_model` does.
        OSError: A file can't be read, or the folder not written.
    """
    require_module(_DISPATCH, model)
    _check_paths(_DISPATCH, checkpoint, offload_folder)
    found: dict[str, Place] | None = None
    if device_map is not None:
        special = _dtypes(_DISPATCH, special_dtypes)
        if dtype is not None:
            special = {**_kept(model, _names(keep_in_fp32_modules)), **special}
        found = resolve_device_map(
            model,
            device_map,
            max_memory,
            no_split_module_classes,
            _float(_DISPATCH, dtype),
            special,
            offload_buffers,
            fallback_allocation,
        )
    _load(
        _DISPATCH,
        model,
        checkpoint,
        None if found is None else _where_to_load(model, found, offload_buffers),
        offload_folder,
        dtype,
        keep_in_fp32_modules=keep_in_fp32_modules,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        special_dtypes=special_dtypes,
        progress=progress,
    )
    if found is None:
        return model
    return dispatch_model(
        model,
        cast("Mapping[str, PlaceLike]", found),
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=skip_keys,
        preload_module_classes=preload_module_classes,
        force_hooks=force_hooks,
        # Who says how much the host may hold, means the pages of mapped weights, too.
        cache_bytes=0 if max_memory is not None else None,
    )


def _load(
    operation: str,
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: object,
    offload_folder: str | os.PathLike[str] | None,
    dtype: str | torch.dtype | None,
    *,
    keep_in_fp32_modules: Iterable[str] | None,
    strict: bool,
    full_state_dict: bool,
    broadcast_from_rank0: bool,
    special_dtypes: Mapping[str, str | torch.dtype] | None,
    progress: bool | None,
) -> None:
    require_module(operation, model)
    _check_paths(operation, checkpoint, offload_folder)
    plain = unwrap_model(model, keep_torch_compile=False)
    wishes = Wishes(
        places=None if device_map is None else _read_map(operation, plain, device_map),
        dtype=_float(operation, dtype),
        special_dtypes=_dtypes(operation, special_dtypes),
        keep_in_fp32=_names(keep_in_fp32_modules),
        has_folder=offload_folder is not None,
        strict=strict,
        is_whole=full_state_dict,
    )
    if broadcast_from_rank0:
        load_from_rank0(
            operation,
            plain,
            checkpoint,
            wishes,
            report=partial(_warn, operation),
            show=lambda total: showing("load", total, progress),
        )
        return
    if offload_folder is not None:
        check_folder(offload_folder, "offload_folder")
    opened = open_checkpoint(checkpoint)
    plan = plan_load(operation, plain, opened, wishes)
    _warn(operation, opened, plan)
    total = sum(step.source.num_bytes for step in plan.steps)
    with showing("load", total, progress) as advance:
        apply_plan(
            plain,
            plan,
            opened.stamps,
            fetch_from_files(opened.stamps),
            folder=offload_folder,
            is_whole=full_state_dict,
            advance=advance,
        )


def _where_to_load(
    model: nn.Module, device_map: Mapping[str, Place], offload_buffers: bool
) -> dict[str, PlaceLike]:
    """Return where what has several names will lie, so that it is loaded there and nowhere else before."""
    shape = read_shape(model)
    plan = plan_dispatch(
        {leaf.name: leaf.kind == "parameter" for leaf in shape.root.leaves()},
        device_map,
        shape.ties,
        offload_buffers=offload_buffers,
    )
    tied = {name: plan.lies[name].at for names in shape.ties for name in names}
    return {**device_map, **tied}


def _kept(model: nn.Module, parts: tuple[str, ...]) -> dict[str, torch.dtype]:
    """Return for the planner what stays float32."""
    names = (name for name, _ in (*model.named_parameters(), *model.named_buffers()))
    return {name: torch.float32 for name in names if has_part(name, parts)}


def _check_paths(operation: str, checkpoint: object, offload_folder: object) -> None:
    require_path(operation, "checkpoint", checkpoint, _IN_MEMORY if _is_mapping(checkpoint) else "")
    if offload_folder is not None:
        require_path(operation, "offload_folder", offload_folder)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _dtypes(operation: str, said: Mapping[str, str | torch.dtype] | None) -> dict[str, torch.dtype]:
    if not isinstance(cast("object", said or {}), Mapping):
        raise TypeError(
            f"{operation}: special_dtypes takes dtypes by names of tensors, such as "
            f"{{'head.weight': 'float32'}}: got {said!r}."
        )
    return {name: cast("torch.dtype", _float(operation, one)) for name, one in (said or {}).items()}


def _read_map(operation: str, model: nn.Module, device_map: object) -> dict[str, Any]:
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"{operation}: device_map takes a mapping of names to places, got {device_map!r}. "
            "load_checkpoint_and_dispatch makes one of 'auto' and the like."
        )
    places = read_map(cast("Mapping[str, object]", device_map))
    check_device_map(model, cast("Mapping[str, PlaceLike]", places))
    return dict(places)


def _float(operation: str, dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = read_dtype(dtype)
    if found is not None and not found.is_floating_point:
        raise ValueError(
            f"{operation}: dtype must be one of floating-point numbers, got {found}. Others are never cast. "
            "To make them of others, use load_and_quantize_model."
        )
    return found


def _names(said: Iterable[str] | None) -> tuple[str, ...]:
    return () if said is None else (said,) if isinstance(said, str) else tuple(said)


def _warn(operation: str, checkpoint: Checkpoint, plan: LoadPlan) -> None:
    said: list[str] = []
    if plan.missing:
        verb = "stays as it is" if len(plan.missing) == 1 else "stay as they are"
        said.append(f"it lacks {_listed(plan.missing)}, which {verb} in the model")
    if plan.unexpected:
        verb = "is" if len(plan.unexpected) == 1 else "are"
        said.append(f"the model lacks {_listed(plan.unexpected)}, which {verb} left out")
    if said:
        warnings.warn(
            f"{operation}: the names of {checkpoint.place} and those of the model differ: "
            f"{'; '.join(said)}. strict=True refuses this.",
            stacklevel=4,
        )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
