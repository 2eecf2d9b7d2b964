"""Spread a model over devices, the host's memory and the disk, and let it run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.arguments import require_path
from accelfn.bigmodel.offload.attach import Attached, attach_moves, attach_return, attach_stream
from accelfn.bigmodel.offload.blocks import has_forward, named_modules, plan_blocks, read_block, slots_of
from accelfn.bigmodel.offload.dispatch_plan import DispatchPlan, plan_dispatch, read_map
from accelfn.bigmodel.offload.fixed import fix, unfix
from accelfn.bigmodel.offload.settle import Sources, find_ties, find_values, settle
from accelfn.bigmodel.offload.stream import Stream, StreamFacts, check_options
from accelfn.bigmodel.places import Place, PlaceLike, check_device, read_place
from accelfn.bigmodel.plan.budgets import available_memory
from accelfn.bigmodel.plan.maps import check_device_map
from accelfn.checkpoint.weights.state import require_module
from accelfn.errors import MissingExtraError

__all__ = ("cpu_offload", "disk_offload", "dispatch_model", "read_offload", "undispatch")

ModelT = TypeVar("ModelT", bound=nn.Module)

_NAME = "_accelfn_dispatched"


def dispatch_model(
    model: ModelT,
    device_map: Mapping[str, PlaceLike],
    main_device: PlaceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Mapping[str, Any]] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | Sequence[str] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    force_hooks: bool = False,
    *,
    num_ahead: int = 1,
    cache_bytes: int | None = None,
) -> ModelT:
    """Spread a model's weights as a device map says, and let its forward find them. In place.

    At rest each module holds its real weights where the map puts them: on a device, in the host's memory, or
    mapped from a file. ``state_dict()``, ``deepcopy``, pickling, optimizers and ``save_model`` see these.
    What lies on the host or the disk is used on the main device: block by block it is brought there, the
    next while the last one is computed, and let go afterwards. Where the main device is the CPU, it is used
    where it lies. Gradients arrive on the weights at rest.

    Ranks: local; each calls it for its own model.

    Args:
        model: Any. It may be on the meta device where ``state_dict`` or the offload folder has its values.
        device_map: Place of each module by name: see :data:`Place`; ``""`` is the whole model.
        main_device: Where inputs come to. None takes the first accelerator of the map, else the CPU.
        state_dict: Values for what lies on the CPU. They are used as they are, without a copy.
        offload_dir: Where weights for the disk are written, in safetensors files; with ``offload_index``, or
            an ``index.json`` in it, weights that the model has no values of are read from there. Not needed
            for weights that :func:`load_checkpoint_in_model` has mapped.
        offload_index: As Accelerate's ``index.json`` has it.
        offload_buffers: Whether buffers of the host and the disk travel with the weights; else they lie on
            the main device. What modules write into them is kept either way.
        skip_keys: Names of keyword arguments, and keys of dicts within inputs and outputs, that aren't moved.
        preload_module_classes: Names of classes that travel as a whole; so do ``model._no_split_modules``.
        force_hooks: Move inputs even if the whole model is on one device.
        num_ahead: How many blocks are fetched ahead. On the device are at most as many blocks and one more,
            and the own weights of the modules around them.
        cache_bytes: How many bytes of the weights on the disk stay in the host's memory after use. None takes
            half of the memory that is free now.

    Returns:
        The same model, with ``hf_device_map`` set.

    Raises:
        ValueError: The map names a module that doesn't exist, misses one, or has a place that this machine
            lacks; weights have no values; or something is to lie on the disk and there is no ``offload_dir``.
            Nothing was changed.
        TypeError: ``model`` is no module, ``device_map`` no mapping, or ``offload_dir`` no path.
        OSError: The folder can't be written, or the disk is full. Nothing was changed, and nothing half is
            left there.
    """
    require_module("dispatch_model", model)
    _check_folder("dispatch_model", offload_dir)
    check_device_map(model, device_map)
    places = read_map(device_map)
    main = None if main_device is None else _device_place(main_device, "main_device")
    options = _Options(
        offload_buffers=offload_buffers,
        skip_keys=_names(skip_keys),
        whole_classes=(*_names(preload_module_classes), *_names(getattr(model, "_no_split_modules", None))),
        num_ahead=num_ahead,
        cache_bytes=cache_bytes,
        force_hooks=force_hooks,
    )
    sources = Sources(state_dict or {}, offload_dir, offload_index)
    _spread(model, places, main, sources, options)
    cast("Any", model).hf_device_map = dict(device_map)
    return model


def cpu_offload(
    model: ModelT,
    execution_device: PlaceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: Sequence[str] | None = None,
    *,
    num_ahead: int = 1,
) -> ModelT:
    """Keep all weights of a model in the host's memory, and bring them to a device block by block. In place.

    Ranks: local.

    Args:
        model: Any.
        execution_device: Where it runs; None takes the device of its first parameter. On the CPU nothing has
            to travel, and forward costs what it costs without.
        offload_buffers: As in :func:`dispatch_model`.
        state_dict: As in :func:`dispatch_model`.
        preload_module_classes: As in :func:`dispatch_model`.
        num_ahead: As in :func:`dispatch_model`.

    Returns:
        The same model.

    Raises:
        ValueError: Weights have no values, or this machine lacks the device. Nothing was changed.
        TypeError: ``model`` is no module.
    """
    require_module("cpu_offload", model)
    options = _Options(
        offload_buffers=offload_buffers,
        whole_classes=(*_names(preload_module_classes), *_names(getattr(model, "_no_split_modules", None))),
        num_ahead=num_ahead,
    )
    _spread(model, {"": "cpu"}, _execution(model, execution_device), Sources(state_dict or {}), options)
    return model


def disk_offload(
    model: ModelT,
    offload_dir: str | os.PathLike[str],
    execution_device: PlaceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: Sequence[str] | None = None,
    *,
    num_ahead: int = 1,
    cache_bytes: int | None = None,
) -> ModelT:
    """Keep all weights of a model on the disk, and bring them to a device block by block. In place.

    Weights that are mapped from files already stay there. Others are written to the folder, in a safetensors
    file that has no name while it is in use, so that the folder looks empty. A model on the meta device is
    read from the ``index.json`` of the folder, as Accelerate writes it.

    Ranks: local; each needs a folder of its own.

    Args:
        model: Any.
        offload_dir: The folder; it is made if it isn't there.
        execution_device: As in :func:`cpu_offload`.
        offload_buffers: As in :func:`dispatch_model`.
        preload_module_classes: As in :func:`dispatch_model`.
        num_ahead: As in :func:`dispatch_model`.
        cache_bytes: As in :func:`dispatch_model`.

    Returns:
        The same model.

    Raises:
        ValueError: Weights have no values, or this machine lacks the device. Nothing was changed.
        TypeError: ``model`` is no module, or ``offload_dir`` no path.
        OSError: The folder can't be written, or the disk is full. Nothing was changed, and nothing half is
            left there.
    """
    require_module("disk_offload", model)
    _check_folder("disk_offload", offload_dir, is_needed=True)
    options = _Options(
        offload_buffers=offload_buffers,
        whole_classes=(*_names(preload_module_classes), *_names(getattr(model, "_no_split_modules", None))),
        num_ahead=num_ahead,
        cache_bytes=cache_bytes,
    )
    _spread(model, {"": "disk"}, _execution(model, execution_device), Sources({}, offload_dir), options)
    return model


def undispatch(model: nn.Module) -> None:
    """Take off what :func:`dispatch_model` and its like have attached. The weights stay where they lie.

    Ranks: local.

    Args:
        model: Any; one that wasn't dispatched is left alone.
    """
    found = vars(model).pop(_NAME, None)
    if found is None:
        return
    for stream in cast("_Dispatched", found).streams:
        stream.abandon()
    for attached in cast("_Dispatched", found).attached:
        attached.remove()
    unfix(model)
    vars(model).pop("hf_device_map", None)


def read_offload(model: nn.Module) -> tuple[StreamFacts, ...]:
    """Return what travels of an offloaded model, and how much of it was on a device at a time.

    Ranks: local.

    Args:
        model: Any.

    Returns:
        For each device to which weights travel; nothing for a model whose weights don't.
    """
    found = vars(model).get(_NAME)
    return () if found is None else tuple(stream.facts() for stream in cast("_Dispatched", found).streams)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    offload_buffers: bool = False
    skip_keys: tuple[str, ...] = ()
    whole_classes: tuple[str, ...] = ()
    num_ahead: int = 1
    cache_bytes: int | None = None
    force_hooks: bool = False


@dataclass(slots=True, eq=False)
class _Dispatched:
    """What hangs on a dispatched model."""

    attached: list[Attached] = field(default_factory=list[Attached])
    streams: list[Stream] = field(default_factory=list[Stream])


def _check_folder(operation: str, offload_dir: object, is_needed: bool = False) -> None:
    if offload_dir is not None or is_needed:
        require_path(operation, "offload_dir", offload_dir)


def _names(said: str | Iterable[str] | None) -> tuple[str, ...]:
    return () if said is None else (said,) if isinstance(said, str) else tuple(said)


def _device_place(said: PlaceLike, what: str) -> Place:
    place = read_place(said, what)
    check_device(place, what)
    return place


def _execution(model: nn.Module, said: PlaceLike | None) -> Place:
    if said is not None:
        return _device_place(said, "execution_device")
    first = next(model.parameters(), None)
    return "cpu" if first is None or first.is_meta else read_place(first.device)


def _spread(
    model: nn.Module, places: Mapping[str, Place], main: Place | None, sources: Sources, options: _Options
) -> None:
    check_options(options.num_ahead, options.cache_bytes or 0)
    slots = dict(slots_of(model))
    plan = plan_dispatch(
        {name: slot.is_parameter for name, slot in slots.items()},
        places,
        find_ties(slots),
        main=main,
        offload_buffers=options.offload_buffers,
        unsaved=[name for name, slot in slots.items() if not slot.is_saved],
    )
    values = find_values(slots, plan, sources)
    undispatch(model)
    settle(slots, plan, values)
    dispatched = _attach(model, plan, places, options)
    vars(model)[_NAME] = dispatched
    if dispatched.streams or len({lies.at for lies in plan.lies.values()}) > 1:
        fix(model)


def _attach(
    model: nn.Module, plan: DispatchPlan, places: Mapping[str, Place], options: _Options
) -> _Dispatched:
    dispatched = _Dispatched()
    travelling: dict[Place, list[str]] = {}
    for name, lies in plan.lies.items():
        if lies.travels:
            travelling.setdefault(lies.used, []).append(name)
    cache_bytes = _half_of_memory() if options.cache_bytes is None else options.cache_bytes
    for place, leaves in travelling.items():
        blocks = [read_block(model, one) for one in plan_blocks(model, leaves, options.whole_classes)]
        stream = Stream(
            blocks, place, num_ahead=options.num_ahead, cache_bytes=cache_bytes // len(travelling)
        )
        dispatched.streams.append(stream)
        dispatched.attached.append(attach_stream(model, stream))
    devices = {check_device(lies.used) for lies in plan.lies.values()} | {check_device(plan.main)}
    if len(set(places.values())) > 1 or travelling or options.force_hooks:
        dispatched.attached.extend(_attach_moves(model, plan, devices, options))
    return dispatched


def _half_of_memory() -> int:
    try:
        return available_memory() // 2
    except MissingExtraError:  # where the system doesn't say, it doesn't let pages go either
        return 0


def _attach_moves(
    model: nn.Module, plan: DispatchPlan, devices: set[torch.device], options: _Options
) -> list[Attached]:
    """Let inputs come to where each module computes, and outputs go back to where the model's came from."""
    if devices == {torch.device("cpu")}:
        return []  # simulated devices are the CPU
    uses: dict[str, set[Place]] = {}
    for name, lies in plan.lies.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            uses.setdefault(".".join(parts[:depth]), set()).add(lies.used)
    attached: list[Attached] = []
    for name, module in named_modules(model):
        used = uses.get(name, set())
        if module is not model and has_forward(module) and len(used) == 1:
            # Within one that is on one device as a whole, only those that others may call by themselves.
            above = uses[name.rpartition(".")[0]]
            if len(above) > 1 or any(True for _ in module.parameters(recurse=False)):
                attached.append(attach_moves(module, check_device(next(iter(used))), options.skip_keys))
    attached.append(attach_moves(model, check_device(plan.main), options.skip_keys))
    attached.append(attach_return(model, options.skip_keys))
    return attached
