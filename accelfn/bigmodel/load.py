"""Load a checkpoint of any size into a model, each tensor directly to its device."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from accelfn.bigmodel.device_map import (
    DeviceMap,
    PlanOptions,
    check_device_map,
    read_places,
    resolve_device_map,
)
from accelfn.bigmodel.dispatch import DispatchOptions, dispatch, main_device_of, plan_placements
from accelfn.bigmodel.model_info import read_shape
from accelfn.bigmodel.offload_folder import check_folder, convert
from accelfn.comm import broadcast_object_list
from accelfn.context import Context, init_context
from accelfn.training import unwrap_model
from accelfn.weights.assign import read_dtype
from accelfn.weights.load import apply_plan
from accelfn.weights.match import LoadOptions, LoadPlan, has_part, plan_load
from accelfn.weights.open import OpenedWeights, open_weights
from accelfn.weights.places import MaxMemory, PlaceLike, as_names, check_device, listed, place_of
from accelfn.weights.read import Reading, progress_bar, read_tensors
from accelfn.weights.state import Agreement, require_module, together
from accelfn.weights.stored import PIECE_BYTES, map_stored


def _load_from_rank0(
    ctx: Context,
    model: nn.Module,
    path: str | os.PathLike[str],
    options: LoadOptions,
    meet: Agreement,
    progress: bool | None,
) -> None:
    """Load a checkpoint that only rank 0 can read into the models of all ranks.

    Every rank plans for itself, with the headers from rank 0. Then tensors are broadcast one after another,
    in pieces, from memory to memory.

    Ranks: every rank of ``ctx``.
    """
    opened = open_weights(path) if ctx.is_main_process else None
    meet("headers")
    received = broadcast_object_list(ctx, [None if opened is None else _without_files(opened)])[0]
    checkpoint = opened or cast("OpenedWeights", received)
    # Only rank 0 can compare values.
    plan = plan_load(_LOAD, model, checkpoint, options, compare=opened is not None)
    meet("plan", lambda: {step.target.name: f"{step.target.kind} as {step.dtype}" for step in plan.steps})

    def read(readings: Sequence[Reading], advance: Callable[[int], None]) -> None:
        if ctx.is_main_process:
            read_tensors(readings, checkpoint.file_ids, advance)
        meet("tensors", lambda: {source.name: str(source.num_bytes) for source, _ in readings})
        for _, target in readings:
            plain = target.detach().contiguous()
            flat = plain.view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), PIECE_BYTES):
                ctx.collectives.broadcast(flat[start : start + PIECE_BYTES], 0)
            if plain.data_ptr() != target.data_ptr():
                target.copy_(plain)

    if ctx.is_main_process:
        _warn_of_names(checkpoint, plan)
    with progress_bar("load", plan.num_bytes, progress if ctx.is_main_process else False) as advance:
        apply_plan(model, plan, checkpoint.file_ids, read=read, advance=advance)


def _without_files(checkpoint: OpenedWeights) -> OpenedWeights:
    """Return what a rank without the files needs, without closures, which can't be pickled."""
    # The extra state of modules is small, and sent with the headers.
    extra = {name: stored for name, stored in checkpoint.tensors.items() if name.endswith("_extra_state")}
    return OpenedWeights(
        place=checkpoint.place,
        tensors={name: stored._replace(elements=None) for name, stored in checkpoint.tensors.items()},
        tied=dict(checkpoint.tied),
        others={**checkpoint.others, **{name: stored.map().clone() for name, stored in extra.items()}},
        file_ids={},
    )


ModelT = TypeVar("ModelT", bound=nn.Module)

_LOAD, _DISPATCH = "load_checkpoint_in_model", "load_checkpoint_and_dispatch"
_MAX_NAMES = 10


def load_state_dict(
    file: str | os.PathLike[str],
    device_map: Mapping[str, PlaceLike] | None = None,
    *,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Read the tensors of a checkpoint, each to its place.

    Ranks: local.

    Args:
        file: A safetensors file, a file of ``torch.save`` (read as data, so it can't run code), an index, or
            a folder of them.
        device_map: Places by module or tensor. Tensors that it doesn't cover go to the CPU. Those on the disk
            are mapped: they take no memory until they are used, and the file must not be modified.
        progress: Show a progress bar; None shows it in a terminal, if tqdm is installed.

    Returns:
        Tensors by name, and other values of a pickled file.

    Raises:
        NoCheckpointError: There is no such file.
        DamagedCheckpointError: A file is damaged.
        CheckpointError: A pickled file requires running code.
        ValueError: This machine lacks a place of the map.
    """
    checkpoint = open_weights(file)
    places = {} if device_map is None else read_places(device_map)
    by_name = {name: place_of(name, places) for name in checkpoint.tensors}
    on_disk = [
        name for name, stored in checkpoint.tensors.items() if by_name[name] == "disk" and stored.is_mappable
    ]
    mapped = map_stored([checkpoint.tensors[name] for name in on_disk], checkpoint.file_ids)
    state: dict[str, Any] = {**dict.fromkeys(checkpoint.tensors), **dict(zip(on_disk, mapped, strict=True))}
    readings: dict[object, Reading] = {}
    for name, stored in checkpoint.tensors.items():
        if state[name] is None:
            place = by_name[name]
            device = torch.device("cpu") if place in (None, "disk") else check_device(place)
            # Names that share a tensor in a pickled file share it here.
            identity = (stored._replace(name="", elements=None), id(stored.elements), device)
            if identity not in readings:
                memory = torch.empty(stored.shape, dtype=stored.dtype, device=device)
                readings[identity] = Reading(stored, memory)
            state[name] = readings[identity].target
    total = sum(reading.source.num_bytes for reading in readings.values())
    with progress_bar("load", total, progress) as advance:
        read_tensors(tuple(readings.values()), checkpoint.file_ids, advance)
    return {**state, **checkpoint.others}


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
    ctx: Context | None = None,
) -> None:
    """Load weights into a model, each tensor directly from its file to its place.

    Names, shapes, kinds of dtypes, the files' sizes and indexes, and places are checked before anything is
    changed. Checksums are verified for ``.bin`` files; safetensors files have none.

    The model may be on the meta device, in part or as a whole, and has no meta tensor afterwards. Existing
    tensors keep their memory if place and dtype don't change, and parameters stay the same objects. A
    parameter that gets new memory loses its gradient. Tied weights stay tied, and need to be stored under one
    of their names only. Besides the model, each of at most eight reading threads has a buffer: 8 MiB for an
    accelerator, 1 MiB for the host.

    Effect: on ``model``, and on ``offload_folder``. If reading fails midway, tensors that existed before may
    have changed.

    Ranks: local, unless ``broadcast_from_rank0``: then every rank of ``ctx``. Each rank loads its shards of
    ``DTensor`` parameters.

    Args:
        model: Any module.
        checkpoint: A file (safetensors, or of ``torch.save``, which is read as data and can't run code), an
            index, or a folder. In a folder, safetensors take precedence over ``.bin``.
        device_map: Places by name of a module or tensor; ``""`` is the whole model. Weights on the ``"disk"``
            stay in the checkpoint and are mapped, so its files must not be modified. None leaves every tensor
            on its device, and meta tensors go to the CPU.
        offload_folder: Where weights for the disk are written if they can't be used in place, since another
            dtype is requested. Existing conversions of the same files are reused.
        dtype: The dtype of floating tensors. None: the model's.
        offload_state_dict: Accepted for compatibility; weights are never in memory twice.
        offload_buffers: Accepted for compatibility; buffers are always loaded.
        keep_in_fp32_modules: Parts of names, such as ``"norm"``, whose tensors become float32 if ``dtype`` is
            given.
        offload_8bit_bnb: Accepted for compatibility; ``load_and_quantize_model`` loads quantised models.
        strict: Refuse missing and unexpected names. Otherwise one warning lists them.
        full_state_dict: Whether the checkpoint has complete tensors. Otherwise it has this rank's shards.
        broadcast_from_rank0: Rank 0 reads, and broadcasts everything to the other ranks.
        special_dtypes: Dtypes of single tensors, by name.
        progress: Show a progress bar; None shows it in a terminal, if tqdm is installed.
        ctx: The world of ``broadcast_from_rank0``. None: the default process group, for which the environment
            is read.

    Raises:
        NoCheckpointError: There are no weights.
        DamagedCheckpointError: A file is damaged, or doesn't match the index.
        CheckpointError: A pickled file requires running code, or has the format of torch before 1.6.
        CheckpointMismatchError: Names (see ``strict``), shapes or kinds of dtypes differ, tied weights have
            different values, or a tensor would stay on the meta device. Nothing was changed.
        ValueError: ``device_map`` or ``special_dtypes`` has unknown names, the map lacks a tensor or has a
            place that this machine lacks, a tensor can't be on the disk without ``offload_folder``, or
            arguments contradict each other. Nothing was changed.
        TypeError: ``model`` isn't a module, ``checkpoint`` or ``offload_folder`` isn't a path, or
            ``device_map`` or ``special_dtypes`` isn't a mapping. Nothing was changed.
        OSError: A file can't be read, or the folder can't be written.
    """
    require_module(_LOAD, model)
    plain = unwrap_model(model, keep_torch_compile=False)
    dtypes = dtype, special_dtypes, keep_in_fp32_modules
    options = _load_options(_LOAD, *dtypes, offload_folder, strict, full_state_dict)
    if device_map is not None:
        check_device_map(plain, device_map)
        options = replace(options, places=read_places(device_map))
    _load(plain, checkpoint, options, offload_folder, broadcast_from_rank0, progress, ctx)


def _load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    options: LoadOptions,
    folder: str | os.PathLike[str] | None,
    from_rank0: bool,
    progress: bool | None,
    ctx: Context | None,
) -> None:
    """Load into a model without wrappers."""
    if from_rank0:
        _check_broadcast(options, ctx)
        with nullcontext(ctx) if ctx is not None else init_context() as world:
            together(
                world,
                _LOAD,
                lambda meet: _load_from_rank0(
                    world, model, checkpoint, replace(options, by_modules=False), meet, progress
                ),
            )
        return
    if folder is not None:
        check_folder(folder, "offload_folder")
    opened = open_weights(checkpoint)
    plan = plan_load(_LOAD, model, opened, options)
    _warn_of_names(opened, plan)
    with progress_bar("load", plan.num_bytes, progress) as advance:
        converting = partial(convert, opened.file_ids, folder, advance)
        apply_plan(
            model, plan, opened.file_ids, convert=converting, is_whole=options.is_whole, advance=advance
        )


def _check_broadcast(options: LoadOptions, ctx: Context | None) -> None:
    """Refuse options that ``broadcast_from_rank0`` doesn't support.

    Raises:
        ValueError: There is no process group, the disk is used, or each rank has its own files.
    """
    if ctx is None and not (dist.is_available() and dist.is_initialized()):
        why = (
            "needs a process group. Pass ctx=, or call torch.distributed.init_process_group first, or omit "
            "it: then every rank reads the checkpoint itself."
        )
    elif not options.is_whole:
        why = (
            "broadcasts complete tensors, but with full_state_dict=False each rank has a checkpoint of its "
            "shards. Choose one."
        )
    elif "disk" in (options.places or {}).values():
        why = (
            "can't be used with the disk, since only rank 0 has the files. Let every rank read, or choose "
            "other places."
        )
    else:
        return
    raise ValueError(f"{_LOAD}: broadcast_from_rank0 {why}")


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
    ctx: Context | None = None,
) -> ModelT:
    """Load a checkpoint into a model that may be too large for one device, and make it ready to run.

    It plans a device map (:func:`infer_auto_device_map`), loads (:func:`load_checkpoint_in_model`), and
    dispatches the model (:func:`dispatch_model`).

    Effect: on ``model``, and on ``offload_folder``.

    Ranks: as in :func:`load_checkpoint_in_model`.

    Args:
        model: Any module, such as one built under :func:`init_empty_weights`.
        checkpoint: As in :func:`load_checkpoint_in_model`.
        device_map: ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or places by module
            name. None only loads.
        max_memory: Bytes by place, for planning a map; None for the free memory of this machine.
        no_split_module_classes: Names of classes whose modules aren't split; None for those in the model's
            ``_no_split_modules``.
        offload_folder: As in :func:`load_checkpoint_in_model`.
        offload_buffers: Whether buffers of offloaded modules are offloaded too.
        dtype: The dtype of floating tensors. None: the model's.
        offload_state_dict: Accepted for compatibility; weights are never in memory twice.
        skip_keys: Names of keyword arguments, and keys of dicts, that aren't moved between devices.
        preload_module_classes: Names of classes whose modules are transferred as a whole.
        force_hooks: Move inputs even if the whole model is on one device.
        strict: Refuse missing and unexpected names.
        full_state_dict: As in :func:`load_checkpoint_in_model`.
        broadcast_from_rank0: As in :func:`load_checkpoint_in_model`.
        keep_in_fp32_modules: As in :func:`load_checkpoint_in_model`.
        special_dtypes: As in :func:`load_checkpoint_in_model`; also used for planning.
        fallback_allocation: If the first part for an accelerator is too large for it, use the first later
            part that fits.
        progress: As in :func:`load_checkpoint_in_model`.
        ctx: As in :func:`load_checkpoint_in_model`.

    Returns:
        The same model, with its map in ``hf_device_map``.

    Raises:
        ValueError: As in these three functions. Nothing was changed.
        TypeError: As in these three functions. Nothing was changed.
        CheckpointError: As in :func:`load_checkpoint_in_model`.
        OSError: A file can't be read, or the folder can't be written.
    """
    require_module(_DISPATCH, model)
    dtypes = dtype, special_dtypes, keep_in_fp32_modules
    options = _load_options(_DISPATCH, *dtypes, offload_folder, strict, full_state_dict)
    plain = unwrap_model(model, keep_torch_compile=False)
    rest = offload_folder, broadcast_from_rank0, progress, ctx
    if device_map is None:
        _load(plain, checkpoint, options, *rest)
        return model
    shape = read_shape(model, _DISPATCH)
    leaves = list(shape.root.leaves())
    parts = () if dtype is None else options.keep_in_fp32
    in_fp32 = [leaf.name for leaf in leaves if has_part(leaf.name, parts)]
    plan_options = PlanOptions(
        no_split_module_classes=no_split_module_classes,
        dtype=options.dtype,
        special_dtypes={**dict.fromkeys(in_fp32, torch.float32), **options.special_dtypes},
        offload_buffers=offload_buffers,
        fallback_allocation=fallback_allocation,
    )
    places = read_places(resolve_device_map(shape, device_map, max_memory, plan_options))
    main = main_device_of(places)
    is_parameter = {leaf.name: leaf.kind == "parameter" for leaf in leaves}
    placements = plan_placements(is_parameter, places, shape.ties, main, offload_buffers)
    storage = {name: placement.storage for name, placement in placements.items()}
    _load(plain, checkpoint, replace(options, places={**places, **storage}), *rest)
    dispatch_options = DispatchOptions(
        folder=offload_folder,
        offload_buffers=offload_buffers,
        skip_keys=as_names(skip_keys),
        whole_classes=as_names(preload_module_classes),
        force_hooks=force_hooks,
        # A limit for the host includes cached pages of mapped weights.
        cache_bytes=0 if max_memory is not None else None,
    )
    dispatch(model, places, main, dispatch_options, placements)
    cast("Any", model).hf_device_map = places
    return model


def _load_options(
    operation: str,
    dtype: str | torch.dtype | None,
    special_dtypes: Mapping[str, str | torch.dtype] | None,
    keep_in_fp32_modules: Iterable[str] | None,
    folder: str | os.PathLike[str] | None,
    strict: bool,
    is_whole: bool,
) -> LoadOptions:
    """Return the options of a load without a map."""
    general = read_dtype(dtype)
    special = {name: read_dtype(one) for name, one in (special_dtypes or {}).items()}
    for known in (general, *special.values()):
        if known is not None and not known.is_floating_point:
            raise ValueError(
                f"{operation}: dtype must be a floating dtype, got {known}. Use load_and_quantize_model to "
                "quantise weights."
            )
    return LoadOptions(
        dtype=general,
        special_dtypes=cast("dict[str, torch.dtype]", special),
        keep_in_fp32=as_names(keep_in_fp32_modules),
        has_folder=folder is not None,
        strict=strict,
        is_whole=is_whole,
    )


def _warn_of_names(checkpoint: OpenedWeights, plan: LoadPlan) -> None:
    differences: list[str] = []
    if plan.missing:
        differences.append(f"the checkpoint lacks {listed(plan.missing, _MAX_NAMES)} (kept unchanged)")
    if plan.unexpected:
        differences.append(f"the model lacks {listed(plan.unexpected, _MAX_NAMES)} (ignored)")
    if differences:
        warnings.warn(
            f"{_LOAD}: the names in {checkpoint.place} and in the model differ: {'; '.join(differences)}. "
            "Pass strict=True to refuse this.",
            stacklevel=4,
        )
