"""Load a checkpoint of any size into a model, each tensor straight to its device."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from accelfn.bigmodel.assign import put, read_dtype
from accelfn.bigmodel.device_map import (
    DeviceMap,
    PlanOptions,
    check_device_map,
    read_places,
    resolve_device_map,
)
from accelfn.bigmodel.devices import MaxMemory, Place, PlaceLike, check_device, listed, names_in, place_of
from accelfn.bigmodel.dispatch import DispatchOptions, dispatch, plan_placements
from accelfn.bigmodel.load_plan import LoadOptions, LoadPlan, LoadStep, Target, has_part, plan_load
from accelfn.bigmodel.model_info import read_shape
from accelfn.bigmodel.offload_folder import check_folder, convert
from accelfn.bigmodel.weight_files import (
    PIECE_BYTES,
    Checkpoint,
    FileId,
    Reading,
    Stored,
    map_stored,
    open_checkpoint,
    read_tensors,
    showing,
)
from accelfn.checkpoint.weights_state import Agreement, require_module, together
from accelfn.comm import broadcast_object_list
from accelfn.context import Context, init_context
from accelfn.training import unwrap_model
from accelfn.tree import is_dtensor, local_of

Read: TypeAlias = Callable[[Sequence[Reading], Callable[[int], None]], None]
"""Reads tensors into memory, and calls with bytes that are done."""

# What is read between two looks at what may go: of tensors that replace others, both are there so long.
_BATCH_BYTES = 1 << 28


def apply_plan(
    model: nn.Module,
    plan: LoadPlan,
    file_ids: Mapping[Path, FileId],
    *,
    read: Read | None = None,
    folder: str | os.PathLike[str] | None = None,
    is_whole: bool = True,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Load a model as a plan says.

    What is written to the disk comes first, as that fails most easily; then tensors are read. Those of a
    model without memory (meta) get into it when all are there, so that an error leaves it as it was.

    Effect: on ``model``, and on ``folder``.

    Args:
        model: That the plan is of.
        plan: Its steps may be carried out once.
        file_ids: Of the files, as they were when the plan was made.
        read: Reads for this rank, where it lacks the files. None: it reads them.
        folder: Where converted tensors go.
        is_whole: Whether the files have whole tensors, where the model has parts of them.
        advance: Called with bytes that are done.

    Raises:
        DamagedCheckpointError: A file isn't what it was.
        OSError: A file can't be read, or the folder not written.
    """
    of = {how: [step for step in plan.steps if step.how == how] for how in ("convert", "map")}
    with torch.no_grad():
        values: list[torch.Tensor] = []
        if of["convert"] and folder is not None:  # without one the plan has refused to convert
            values = convert([(one.source, one.dtype) for one in of["convert"]], file_ids, folder, advance)
        values += map_stored([step.source for step in of["map"]], file_ids)
        advance(sum(step.source.num_bytes for step in of["map"]))
        steps = of["convert"] + of["map"]
        ready = [(step, one.view(step.target.tensor.shape)) for step, one in zip(steps, values, strict=True)]
        for batch in _batches([step for step in plan.steps if step.how in ("fill", "new")]):
            for step, value in _read_batch(batch, file_ids, read, is_whole, advance):
                if step.target.tensor.is_meta:
                    ready.append((step, value))
                else:
                    _assign(step.target, value)
        for step, value in ready:
            _assign(step.target, value)
        for target, value in plan.values:
            _assign(target, value.to(target.tensor.dtype))
    for module, state in plan.extras:
        cast("Any", module).set_extra_state(state.map().clone() if isinstance(state, Stored) else state)
    if plan.needs_ties:
        cast("Any", model).tie_weights()


def _batches(steps: Iterable[LoadStep]) -> Iterator[list[LoadStep]]:
    batch: list[LoadStep] = []
    size = 0
    for step in steps:
        batch.append(step)
        size += step.source.num_bytes
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_batch(
    batch: Sequence[LoadStep],
    file_ids: Mapping[Path, FileId],
    read: Read | None,
    is_whole: bool,
    advance: Callable[[int], None],
) -> list[tuple[LoadStep, torch.Tensor]]:
    """Read some tensors; return those that are new, and not the model's already."""
    targets: list[torch.Tensor] = []
    readings: list[Reading] = []
    for step in batch:
        source, own = step.source, local_of(step.target.tensor)
        if is_dtensor(step.target.tensor) and is_whole:
            # On the host, as only a part goes to the device; where the files are, only that part is read.
            target = torch.empty(source.shape, dtype=source.dtype) if read is not None else source.map()
        elif step.how == "fill":
            target = own.detach()
        else:
            target = torch.empty(own.shape, dtype=step.dtype, device=step.device)
        targets.append(target)
        if read is None and is_dtensor(step.target.tensor) and is_whole:
            advance(source.num_bytes)
        else:
            readings.append(Reading(source, target if target.dim() else target.view(source.shape)))
    if read is None:
        read_tensors(readings, file_ids, advance)
    else:
        read(readings, advance)
    new: list[tuple[LoadStep, torch.Tensor]] = []
    for step, target in zip(batch, targets, strict=True):
        tensor = step.target.tensor
        value = _sharded(step, target, is_whole) if is_dtensor(tensor) else target
        if step.how == "new":
            new.append((step, value))
        elif is_whole and is_dtensor(tensor):
            local_of(tensor).copy_(local_of(value))
        elif not tensor.is_inference():
            # The memory was written behind torch's back, and graphs that need the old values shall notice.
            torch.autograd.graph.increment_version(local_of(tensor))
    return new


def _sharded(step: LoadStep, value: torch.Tensor, is_whole: bool) -> torch.Tensor:
    """Make a DTensor of what this rank has read; without a message to others."""
    tensor = cast("Any", step.target.tensor)
    # Where there is a DTensor, it has been imported.
    api: Any = importlib.import_module("torch.distributed.tensor")
    mesh, placements = tensor.device_mesh, tensor.placements
    if is_whole:
        whole = value.view(tensor.shape).to(mesh.device_type)
        made = api.distribute_tensor(whole, mesh, placements, src_data_rank=None)
        value = local_of(made).to(step.dtype, copy=True)  # it may be no part, but all of what is a file's
    options = {"run_check": False, "shape": tensor.shape, "stride": tensor.stride()}
    return api.DTensor.from_local(value, mesh, placements, **options)


def _assign(target: Target, value: torch.Tensor) -> None:
    """Assign a value to every name of a target."""
    old = target.tensor
    if is_dtensor(old):
        for ref in target.refs:
            # By torch's own way, since those that shard it keep parts of it elsewhere and want to be told.
            ref.owner.load_state_dict({ref.key: value}, strict=False, assign=True)
        return
    old.grad = None  # of values that are gone, and maybe of another dtype or device
    put(target.refs, old, value)


def _load_from_rank0(
    ctx: Context,
    model: nn.Module,
    path: str | os.PathLike[str],
    options: LoadOptions,
    meet: Agreement,
    progress: bool | None,
) -> None:
    """Load a checkpoint that only rank 0 can read into the models of all ranks.

    Every rank plans for itself, on what rank 0 says of the files. Then tensors travel one after the other, in
    pieces, from and to where they belong.

    Ranks: every rank of ``ctx``.
    """
    here = open_checkpoint(path) if ctx.is_main_process else None
    meet("headers")
    told = broadcast_object_list(ctx, [None if here is None else _without_files(here)])[0]
    checkpoint = here or cast("Checkpoint", told)
    # What only the bytes can tell, rank 0 finds out for all.
    plan = plan_load(_LOAD, model, checkpoint, options, compare=here is not None)
    meet("plan", lambda: {step.target.name: f"{step.target.kind} as {step.dtype}" for step in plan.steps})

    def read(readings: Sequence[Reading], advance: Callable[[int], None]) -> None:
        if ctx.is_main_process:
            read_tensors(readings, checkpoint.file_ids, advance)
        meet("tensors", lambda: {one.source.name: str(one.source.num_bytes) for one in readings})
        for one in readings:
            plain = one.target.detach().contiguous()
            flat = plain.view(-1).view(torch.uint8)
            for start in range(0, flat.numel(), PIECE_BYTES):
                ctx.collectives.broadcast(flat[start : start + PIECE_BYTES], 0)
            if plain.data_ptr() != one.target.data_ptr():
                one.target.copy_(plain)

    if ctx.is_main_process:
        _warn(checkpoint, plan)
    with showing("load", plan.num_bytes, progress if ctx.is_main_process else False) as advance:
        apply_plan(model, plan, checkpoint.file_ids, read=read, advance=advance)


def _without_files(checkpoint: Checkpoint) -> Checkpoint:
    """Return all that a rank without the files needs, and that can travel."""
    # State of modules is small, and is handed over instead of being put into memory.
    extra = {name: one for name, one in checkpoint.tensors.items() if name.endswith("_extra_state")}
    return Checkpoint(
        place=checkpoint.place,
        tensors={name: one._replace(elements=None) for name, one in checkpoint.tensors.items()},
        tied=dict(checkpoint.tied),
        others={**checkpoint.others, **{name: one.map().clone() for name, one in extra.items()}},
        file_ids={},
    )


ModelT = TypeVar("ModelT", bound=nn.Module)

_LOAD, _DISPATCH = "load_checkpoint_in_model", "load_checkpoint_and_dispatch"
_SHOWN = 10


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
    checkpoint = open_checkpoint(file)
    places = {} if device_map is None else read_places(device_map)
    at = {name: place_of(name, places) for name in checkpoint.tensors}
    stay = [name for name, one in checkpoint.tensors.items() if at[name] == "disk" and one.is_mappable]
    mapped = map_stored([checkpoint.tensors[name] for name in stay], checkpoint.file_ids)
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
        read_tensors(tuple(readings.values()), checkpoint.file_ids, advance)
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
    ctx: Context | None = None,
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

    Ranks: local, unless ``broadcast_from_rank0``: then every rank of ``ctx``. Of a model
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
        ctx: The world that ``broadcast_from_rank0`` is of. None: of the default process group, for which the
            environment is read.

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
    require_module(_LOAD, model)
    plain = unwrap_model(model, keep_torch_compile=False)
    options = LoadOptions(
        dtype=_float(_LOAD, dtype),
        special_dtypes=_dtypes(_LOAD, special_dtypes),
        keep_in_fp32=names_in(keep_in_fp32_modules),
        has_folder=offload_folder is not None,
        strict=strict,
        is_whole=full_state_dict,
    )
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
    """Do what :func:`load_checkpoint_in_model` does, to a model without wrappers."""
    if from_rank0:
        _check_rank0(options, ctx)
        with nullcontext(ctx) if ctx is not None else init_context() as world:
            together(
                world,
                _LOAD,
                lambda meet: _load_from_rank0(world, model, checkpoint, options, meet, progress),
            )
        return
    if folder is not None:
        check_folder(folder, "offload_folder")
    opened = open_checkpoint(checkpoint)
    plan = plan_load(_LOAD, model, opened, options)
    _warn(opened, plan)
    with showing("load", plan.num_bytes, progress) as advance:
        apply_plan(model, plan, opened.file_ids, folder=folder, is_whole=options.is_whole, advance=advance)


def _check_rank0(options: LoadOptions, ctx: Context | None) -> None:
    """Refuse what rank 0 can't read for all.

    Raises:
        ValueError: There is no process group, something shall go to the disk, or each rank has its own files.
    """
    if ctx is None and not (dist.is_available() and dist.is_initialized()):
        why = (
            "needs a process group. Pass ctx=, or call torch.distributed.init_process_group first, or "
            "leave it out: then every rank reads by itself."
        )
    elif not options.is_whole:
        why = (
            "gives every rank the same whole tensors, and full_state_dict=False says that each has a "
            "checkpoint with parts of its own. Choose one."
        )
    elif "disk" in (options.places or {}).values():
        why = (
            "can put nothing on the disk, since only rank 0 has the files. Let every rank read, or choose "
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
        ctx: As :func:`load_checkpoint_in_model` takes it.

    Returns:
        The same model; ``hf_device_map`` says what lies where, if there is a map.

    Raises:
        ValueError: As the three functions do; nothing was changed.
        TypeError: The same.
        CheckpointError: As :func:`load_checkpoint_in_model` does.
        OSError: A file can't be read, or the folder not written.
    """
    require_module(_DISPATCH, model)
    options = LoadOptions(
        dtype=_float(_DISPATCH, dtype),
        special_dtypes=_dtypes(_DISPATCH, special_dtypes),
        keep_in_fp32=names_in(keep_in_fp32_modules),
        has_folder=offload_folder is not None,
        strict=strict,
        is_whole=full_state_dict,
    )
    places: dict[str, Place] | None = None
    if device_map is not None:
        shape = read_shape(model, _DISPATCH)
        leaves = list(shape.root.leaves())
        parts = () if dtype is None else options.keep_in_fp32
        kept = [leaf.name for leaf in leaves if has_part(leaf.name, parts)]
        planned = PlanOptions(
            no_split_module_classes=no_split_module_classes,
            dtype=options.dtype,
            special_dtypes={**dict.fromkeys(kept, torch.float32), **options.special_dtypes},
            offload_buffers=offload_buffers,
            fallback_allocation=fallback_allocation,
        )
        places = read_places(resolve_device_map(shape, device_map, max_memory, planned))
        # What has several names is loaded where it will be stored, and nowhere else before.
        is_parameter = {leaf.name: leaf.kind == "parameter" for leaf in leaves}
        placements = plan_placements(is_parameter, places, shape.ties, offload_buffers=offload_buffers)
        tied = {name: placements[name].storage for names in shape.ties for name in names}
        options = replace(options, places={**places, **tied})
    plain = unwrap_model(model, keep_torch_compile=False)
    _load(plain, checkpoint, options, offload_folder, broadcast_from_rank0, progress, ctx)
    if places is not None:
        dispatching = DispatchOptions(
            folder=offload_folder,
            offload_buffers=offload_buffers,
            skip_keys=names_in(skip_keys),
            whole_classes=names_in(preload_module_classes),
            force_hooks=force_hooks,
            # Who says how much the host may hold, means the pages of mapped weights, too.
            cache_bytes=0 if max_memory is not None else None,
        )
        dispatch(model, places, None, dispatching)
        cast("Any", model).hf_device_map = places
    return model


def _dtypes(operation: str, given: Mapping[str, str | torch.dtype] | None) -> dict[str, torch.dtype]:
    return {name: cast("torch.dtype", _float(operation, one)) for name, one in (given or {}).items()}


def _float(operation: str, dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = read_dtype(dtype)
    if found is not None and not found.is_floating_point:
        raise ValueError(
            f"{operation}: dtype must be one of floating-point numbers, got {found}. Others are never cast. "
            "To make them of others, use load_and_quantize_model."
        )
    return found


def _warn(checkpoint: Checkpoint, plan: LoadPlan) -> None:
    said: list[str] = []
    if plan.missing:
        verb = "stays as it is" if len(plan.missing) == 1 else "stay as they are"
        said.append(f"it lacks {listed(plan.missing, _SHOWN)}, which {verb} in the model")
    if plan.unexpected:
        verb = "is" if len(plan.unexpected) == 1 else "are"
        said.append(f"the model lacks {listed(plan.unexpected, _SHOWN)}, which {verb} left out")
    if said:
        warnings.warn(
            f"{_LOAD}: the names of {checkpoint.place} and those of the model differ: "
            f"{'; '.join(said)}. strict=True refuses this.",
            stacklevel=4,
        )
