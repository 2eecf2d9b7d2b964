"""Dispatch a model to devices, host memory and the disk, and make it run there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.block_hooks import Moves, attach, attach_prefetcher, read_device
from accelfn.bigmodel.block_stream import BlockPrefetcher, StreamFacts
from accelfn.bigmodel.blocks import plan_blocks
from accelfn.bigmodel.device_map import check_device_map, read_places
from accelfn.bigmodel.model_info import require_values
from accelfn.bigmodel.offload_folder import OffloadedWeightsLoader, write_mapped
from accelfn.errors import MissingExtraError
from accelfn.weights.assign import (
    assign_values,
    check_fit,
    has_forward,
    is_packable,
    named_modules,
    refs_of,
    tied_refs,
)
from accelfn.weights.places import (
    Place,
    PlaceLike,
    as_names,
    available_memory,
    check_device,
    is_accelerator,
    order_of,
    place_of,
)
from accelfn.weights.state import require_module
from accelfn.weights.stored import mapped_from


class TensorPlacement(NamedTuple):
    """The places of a tensor.

    Attributes:
        place: Its place in the map; that of another name if it shares a tensor that is used in place.
        storage: Where it is stored.
        execution: Where it is used.
    """

    place: Place
    storage: Place
    execution: Place

    @property
    def is_offloaded(self) -> bool:
        """Whether it has to be transferred to be used."""
        return self.storage != self.execution


def plan_placements(
    is_parameter: Mapping[str, bool],
    places: Mapping[str, Place],
    ties: Iterable[tuple[str, ...]],
    main: Place,
    offload_buffers: bool,
) -> dict[str, TensorPlacement]:
    """Return where each tensor of a model is stored and used.

    Tensors on an accelerator are used there; those on the host or the disk are used on the main device.
    Buffers are stored where they are used unless ``offload_buffers``: they are small, and modules write to
    them.

    Args:
        is_parameter: By full name of the tensors.
        places: By name of a module or tensor. Tensors that it doesn't cover, which are non-persistent
            buffers, are on the main device.
        ties: Groups of names that share one tensor.
        main: The main device.
        offload_buffers: Whether buffers are offloaded too.
    """
    placements: dict[str, TensorPlacement] = {}
    for name in is_parameter:
        place = place_of(name, places)
        place = main if place is None else place
        execution = place if is_accelerator(place) else main
        is_resident = not is_parameter[name] and not offload_buffers
        placements[name] = TensorPlacement(place, execution if is_resident else place, execution)
    for group in ties:
        resident = {placements[name].execution for name in group if not placements[name].is_offloaded}
        for name in group:
            execution = placements[name].execution
            if placements[name].is_offloaded and execution in resident:  # stored there under another name
                placements[name] = TensorPlacement(execution, execution, execution)
    return placements


def main_device_of(places: Mapping[str, Place]) -> Place:
    """Return the first accelerator of a map, or else the CPU."""
    return min((place for place in places.values() if is_accelerator(place)), key=order_of, default="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """Options of :func:`dispatch_model`.

    ``state_dict``, ``folder`` and ``index`` provide the values of meta tensors.
    """

    state_dict: Mapping[str, torch.Tensor] | None = None
    folder: str | os.PathLike[str] | None = None
    index: Mapping[str, Mapping[str, Any]] | None = None
    offload_buffers: bool = False
    skip_keys: tuple[str, ...] = ()
    whole_classes: tuple[str, ...] = ()
    num_ahead: int = 1
    cache_bytes: int | None = None
    force_hooks: bool = False

    def __post_init__(self) -> None:
        """Check the numbers."""
        for name in ("num_ahead", "cache_bytes"):
            number = getattr(self, name)
            if number is not None and number < 0:
                raise ValueError(f"{name} must be at least 0, got {number}.")


# --- values --------------------------------------------------------------------------------------


def find_values(
    tensors: Mapping[str, torch.Tensor], weights: Mapping[str, Any] | None, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the values that a mapping has for some of the tensors, by name.

    Raises:
        ValueError: A value has another shape or kind than its tensor.
    """
    for name in names if weights is not None else ():
        value = cast("Any", weights).get(name)
        if isinstance(value, torch.Tensor) and not value.is_meta:
            yield name, check_fit(name, value, tensors[name])


def bare_names(tensors: Mapping[str, torch.Tensor], values: Mapping[int, torch.Tensor]) -> list[str]:
    """Return the names of meta tensors that have no value, by the ``id`` of the tensor."""
    return [name for name, tensor in tensors.items() if tensor.is_meta and id(tensor) not in values]


def _find_values(
    tensors: Mapping[str, torch.Tensor], placements: Mapping[str, TensorPlacement], options: DispatchOptions
) -> dict[int, torch.Tensor]:
    """Find the values of meta tensors, and write those for the disk; the model isn't changed.

    Returns:
        New values by the ``id`` of the model's tensors; others keep their value.

    Raises:
        ValueError: A tensor has no value, or one of another shape or kind; or there is no folder to write to.
        OSError: The folder can't be written to.
    """
    values: dict[int, torch.Tensor] = {}
    folder = options.folder
    given = [name for name, one in tensors.items() if one.is_meta or placements[name].place == "cpu"]
    for name, value in find_values(tensors, options.state_dict, given):
        is_shared = placements[name].storage == placements[name].place
        values[id(tensors[name])] = value if is_shared else value.clone()
    if options.index is not None or (folder is not None and (Path(folder) / "index.json").is_file()):
        stored = OffloadedWeightsLoader(save_folder=folder, index=options.index)
        # Existing values aren't replaced: the folder may be old.
        for name, value in find_values(tensors, stored, bare_names(tensors, values)):
            values[id(tensors[name])] = value.to(tensors[name].dtype)
    todo = "Load them with load_checkpoint_and_dispatch, or pass state_dict=."
    require_values("", map(repr, bare_names(tensors, values)), todo)
    to_write: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        value = values.get(id(tensor), tensor)
        if placements[name].storage == "disk" and value.numel() and mapped_from(value) is None:
            if not is_packable(value):
                raise ValueError(
                    f"{name!r} can't be on the disk: it is a {type(value).__name__} of layout "
                    f"{value.layout}. Keep it on the CPU."
                )
            to_write.setdefault(id(tensor), (name, value))
    if to_write and folder is None:
        raise ValueError(
            f"device_map puts {len(to_write)} tensors on the disk that are in memory, such as "
            f"{next(iter(to_write.values()))[0]!r}. Pass offload_dir, or load the weights with "
            "load_checkpoint_and_dispatch, which uses a safetensors checkpoint in place."
        )
    if to_write and folder is not None:
        written = write_mapped(folder, dict(to_write.values()))
        values.update({number: written[name] for number, (name, _) in to_write.items()})
    return values


# --- moves of the whole model --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _CheckedApply:
    """A dispatched model's ``_apply``: refuses moves, also to the device where the weights are.

    ``to``, ``cuda`` and similar methods call it, so a program behaves the same on any machine. Copies of the
    model have it too.
    """

    model: nn.Module

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        name = type(self.model).__name__
        if _is_move(function):
            raise RuntimeError(
                f"this {name} is dispatched to several devices or offloaded, and can't be moved as a whole. "
                "It runs without being moved. To dispatch it again, pass another map; to make it an ordinary "
                "model, call accelfn.bigmodel.undispatch(model)."
            )
        for key, ref in refs_of(self.model):
            tensor = ref.read()
            if mapped_from(tensor) is not None:
                dtype = function(torch.empty(0, dtype=tensor.dtype)).dtype
                if dtype != tensor.dtype:
                    raise RuntimeError(
                        f"this {name} has weights on the disk, such as {key!r}, which would have to be read "
                        f"into memory to become {dtype}. Pass dtype= when loading, or call "
                        "accelfn.bigmodel.undispatch(model) first."
                    )
        return cast("Any", type(self.model))._apply(self.model, function, recurse)


def _is_move(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    if function(torch.empty(0)).device.type != "cpu":
        return True
    try:
        return not function(torch.empty(0, device="meta")).is_meta
    except NotImplementedError:  # meta tensors can't be copied to another device
        return True
    except RuntimeError:  # share_memory() doesn't support meta tensors
        return False


# --- dispatching ---------------------------------------------------------------------------------

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
    """Distribute a model's weights as in a device map, and make it run there. In place.

    Modules hold their real weights where the map stores them: on a device, in host memory, or mapped from a
    file. ``state_dict()``, ``deepcopy``, pickling, optimizers and ``save_model`` see these. Weights on the
    host or the disk are used on the main device: each block is transferred while the previous one runs, and
    released afterwards. If the main device is the CPU, they are used in place. Gradients arrive on the stored
    weights.

    Ranks: local; each rank calls it for its own model.

    Args:
        model: Any module. It may be on the meta device if ``state_dict`` or the offload folder has its
            values.
        device_map: Places by module name, see :data:`Place`; ``""`` is the whole model.
        main_device: Where inputs are moved. None is the first accelerator of the map, or the CPU.
        state_dict: Values of weights on the CPU, and of their modules' buffers. Those of weights are shared,
            not copied.
        offload_dir: Where weights for the disk are written, as safetensors. With ``offload_index``, or an
            ``index.json`` in it, values of meta tensors are read from there. Not needed for weights that
            :func:`load_checkpoint_in_model` has mapped.
        offload_index: The contents of Accelerate's ``index.json``.
        offload_buffers: Whether buffers on the host and the disk are transferred with the weights; otherwise
            they are stored on the main device. Writes to them are kept either way.
        skip_keys: Names of keyword arguments, and keys of dicts within inputs and outputs, that aren't moved.
        preload_module_classes: Names of classes whose modules are transferred as a whole, beside those in the
            model's ``_no_split_modules``.
        force_hooks: Move inputs even if the whole model is on one device.
        num_ahead: How many blocks are prefetched. The device holds at most one block more, and the own
            weights of the modules around them.
        cache_bytes: How many bytes of the weights on the disk stay in host memory after use. None is half of
            the memory that is free now.

    Returns:
        The same model, with ``hf_device_map`` set.

    Raises:
        ValueError: The map names an unknown module, lacks one, or has a place that this machine lacks;
            weights have no values; or weights for the disk have no ``offload_dir``. Nothing was changed.
        TypeError: ``model`` isn't a module, ``device_map`` isn't a mapping, or ``offload_dir`` isn't a path.
        OSError: The folder can't be written to, or the disk is full. Nothing was changed, and no partial file
            is left.
    """
    require_module("dispatch_model", model)
    check_device_map(model, device_map)
    places = read_places(device_map)
    main = None if main_device is None else read_device(main_device, "main_device")[0]
    options = DispatchOptions(
        state_dict=state_dict,
        folder=offload_dir,
        index=offload_index,
        offload_buffers=offload_buffers,
        skip_keys=as_names(skip_keys),
        whole_classes=as_names(preload_module_classes),
        num_ahead=num_ahead,
        cache_bytes=cache_bytes,
        force_hooks=force_hooks,
    )
    dispatch(model, places, main, options)
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
    """Keep all weights of a model in host memory, and transfer them to a device block by block. In place.

    Ranks: local.

    Args:
        model: Any module.
        execution_device: Where it runs; None is the device of its first parameter. The CPU uses weights in
            place, at no cost.
        offload_buffers: As in :func:`dispatch_model`.
        state_dict: As in :func:`dispatch_model`.
        preload_module_classes: As in :func:`dispatch_model`.
        num_ahead: As in :func:`dispatch_model`.

    Returns:
        The same model.

    Raises:
        ValueError: Weights have no values, or this machine lacks the device. Nothing was changed.
        TypeError: ``model`` isn't a module.
    """
    require_module("cpu_offload", model)
    options = DispatchOptions(
        state_dict=state_dict,
        offload_buffers=offload_buffers,
        whole_classes=as_names(preload_module_classes),
        num_ahead=num_ahead,
    )
    dispatch(model, {"": "cpu"}, _execution_place(model, execution_device), options)
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
    """Keep all weights of a model on the disk, and transfer them to a device block by block. In place.

    Weights that are mapped from files stay there. Others are written to the folder, to a safetensors file
    that is unlinked while it is in use, so that the folder looks empty. The values of a model on the meta
    device are found through Accelerate's ``index.json`` in the folder.

    Ranks: local; each needs its own folder.

    Args:
        model: Any module.
        offload_dir: The folder, created if it doesn't exist.
        execution_device: As in :func:`cpu_offload`.
        offload_buffers: As in :func:`dispatch_model`.
        preload_module_classes: As in :func:`dispatch_model`.
        num_ahead: As in :func:`dispatch_model`.
        cache_bytes: As in :func:`dispatch_model`.

    Returns:
        The same model.

    Raises:
        ValueError: Weights have no values, or this machine lacks the device. Nothing was changed.
        TypeError: ``model`` isn't a module, or ``offload_dir`` isn't a path.
        OSError: The folder can't be written to, or the disk is full. Nothing was changed, and no partial file
            is left.
    """
    require_module("disk_offload", model)
    options = DispatchOptions(
        folder=offload_dir,
        offload_buffers=offload_buffers,
        whole_classes=as_names(preload_module_classes),
        num_ahead=num_ahead,
        cache_bytes=cache_bytes,
    )
    dispatch(model, {"": "disk"}, _execution_place(model, execution_device), options)
    return model


def undispatch(model: nn.Module) -> None:
    """Remove the hooks of :func:`dispatch_model`, ``cpu_offload`` and ``disk_offload``; the weights stay.

    Ranks: local.

    Args:
        model: Any module; nothing happens if it wasn't dispatched.
    """
    dispatched: _Dispatched | None = vars(model).pop(_NAME, None)
    if dispatched is None:
        return
    for prefetcher in dispatched.prefetchers:
        prefetcher.abandon()
    for handle in dispatched.handles:
        handle.remove()
    if isinstance(vars(model).get("_apply"), _CheckedApply):
        del vars(model)["_apply"]
    vars(model).pop("hf_device_map", None)


def read_offload(model: nn.Module) -> tuple[StreamFacts, ...]:
    """Return what an offloaded model transfers, and how much of it was on a device at once.

    Ranks: local.

    Args:
        model: Any module.

    Returns:
        Statistics of each device to which weights are transferred; none for a model without offloading.
    """
    dispatched: _Dispatched | None = vars(model).get(_NAME)
    return () if dispatched is None else tuple(prefetcher.facts() for prefetcher in dispatched.prefetchers)


@dataclass(slots=True, eq=False)
class _Dispatched:
    """The hooks and prefetchers of a dispatched model."""

    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    prefetchers: list[BlockPrefetcher] = field(default_factory=list[BlockPrefetcher])


def _execution_place(model: nn.Module, device: PlaceLike | None) -> Place:
    first = next(model.parameters(), None)
    own = "cpu" if first is None or first.is_meta else first.device
    return read_device(own if device is None else device)[0]


def dispatch(
    model: nn.Module,
    places: Mapping[str, Place],
    main: Place | None,
    options: DispatchOptions,
    placements: Mapping[str, TensorPlacement] | None = None,
) -> None:
    """Dispatch a model with a checked map, and the placements of its tensors if they were planned before."""
    main = main_device_of(places) if main is None else main
    refs = dict(refs_of(model))
    if placements is None:
        is_parameter = {name: ref.is_parameter for name, ref in refs.items()}
        placements = plan_placements(is_parameter, places, tied_refs(refs), main, options.offload_buffers)
    placements = {name: placements[name] for name in refs}
    values = _find_values({name: ref.read() for name, ref in refs.items()}, placements, options)
    undispatch(model)

    storages = {placement.storage for placement in placements.values()}
    devices = {place: check_device("cpu" if place == "disk" else place) for place in storages}
    assign_values(refs, lambda name, _: devices[placements[name].storage], values)
    dispatched = vars(model)[_NAME] = _Dispatched()
    offloaded: dict[Place, list[str]] = {}
    for name, placement in placements.items():
        if placement.is_offloaded:
            offloaded.setdefault(placement.execution, []).append(name)
    whole_classes = (*options.whole_classes, *as_names(getattr(model, "_no_split_modules", None)))
    cache_bytes = _half_of_memory() if options.cache_bytes is None else options.cache_bytes
    for place, names in offloaded.items():
        prefetcher = BlockPrefetcher(
            plan_blocks(model, names, whole_classes),
            place,
            num_ahead=options.num_ahead,
            cache_bytes=cache_bytes // len(offloaded),
        )
        dispatched.prefetchers.append(prefetcher)
        dispatched.handles += attach_prefetcher(model, prefetcher)
    if len(set(places.values())) > 1 or offloaded or options.force_hooks:
        execution = {name: placement.execution for name, placement in placements.items()}
        dispatched.handles += _attach_moves(model, main, execution, options.skip_keys)
    if offloaded or len(storages) > 1:
        vars(model)["_apply"] = _CheckedApply(model)


def _half_of_memory() -> int:
    try:
        return available_memory() // 2
    except MissingExtraError:  # on these systems pages aren't released either
        return 0


def _attach_moves(
    model: nn.Module, main: Place, execution: Mapping[str, Place], skip_keys: tuple[str, ...]
) -> list[RemovableHandle]:
    """Move inputs to where each module runs, and the model's outputs back to the device of its inputs."""
    if {check_device(place) for place in (main, *execution.values())} == {torch.device("cpu")}:
        return []  # simulated devices are the CPU
    places_in: dict[str, set[Place]] = {}
    for name, place in execution.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            places_in.setdefault(".".join(parts[:depth]), set()).add(place)
    handles: list[RemovableHandle] = []
    for name, module in named_modules(model):
        used = places_in.get(name, set())
        if module is not model and has_forward(module) and len(used) == 1:
            # If its parent is on one device too, only modules with parameters, which may be called directly.
            parent = places_in[name.rpartition(".")[0]]
            if len(parent) > 1 or any(True for _ in module.parameters(recurse=False)):
                moves = Moves(check_device(next(iter(used))), False, skip_keys)
                handles.append(module.register_forward_pre_hook(moves.before, prepend=True, with_kwargs=True))
    return [*handles, *attach(model, Moves(check_device(main), True, skip_keys))]
