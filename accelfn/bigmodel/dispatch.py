"""Spread a model over devices, the host's memory and the disk, and let it run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.assign import (
    TensorRef,
    assign_values,
    check_fit,
    has_forward,
    is_packable,
    named_modules,
    refs_of,
    tied_refs,
)
from accelfn.bigmodel.block_hooks import attach_moves, attach_prefetcher, attach_return
from accelfn.bigmodel.block_stream import BlockPrefetcher, StreamFacts
from accelfn.bigmodel.blocks import plan_blocks
from accelfn.bigmodel.device_map import check_device_map, read_places
from accelfn.bigmodel.devices import (
    Place,
    PlaceLike,
    available_memory,
    check_device,
    is_accelerator,
    listed,
    names_in,
    order_of,
    place_of,
    read_place,
)
from accelfn.bigmodel.offload_folder import OffloadedWeightsLoader, write_mapped
from accelfn.bigmodel.weight_files import mapped_from
from accelfn.checkpoint.weights_state import require_module
from accelfn.errors import MissingExtraError


class TensorPlacement(NamedTuple):
    """Where a tensor is.

    Attributes:
        storage: Where it is stored while nobody uses it.
        execution: Where it is used; another place means that it is brought there.
    """

    storage: Place
    execution: Place

    @property
    def is_offloaded(self) -> bool:
        """Whether it is brought to where it is used, or read from the disk there."""
        return self.storage != self.execution


def plan_placements(
    is_parameter: Mapping[str, bool],
    places: Mapping[str, Place],
    ties: Iterable[tuple[str, ...]] = (),
    *,
    main: Place | None = None,
    offload_buffers: bool = False,
) -> dict[str, TensorPlacement]:
    """Return where each tensor of a model is stored and used.

    What the map puts on an accelerator is stored and used there. What it puts on the host or the disk is used
    on the main device. Of that, buffers are on the main device anyway, unless ``offload_buffers``: they are
    small, and modules write into them.

    Args:
        is_parameter: By full names of the tensors.
        places: By name of a module or tensor; the longest that fits counts. What it says nothing of, as of
            a buffer that state dicts don't have, is on the main device.
        ties: Groups of names that are one tensor.
        main: Where inputs come to; None as in :func:`main_device_of`.
        offload_buffers: Whether buffers travel, too.
    """
    main = main_device_of(places) if main is None else main
    found: dict[str, TensorPlacement] = {}
    for name in is_parameter:
        place = place_of(name, places)
        place = main if place is None else place
        execution = place if is_accelerator(place) else main
        stays = not is_parameter[name] and not offload_buffers
        found[name] = TensorPlacement(execution if stays else place, execution)
    for group in ties:
        resident = {found[name].execution for name in group if not found[name].is_offloaded}
        for name in group:
            if found[name].execution in resident:  # it is there already for another name
                found[name] = TensorPlacement(found[name].execution, found[name].execution)
    return found


def main_device_of(places: Mapping[str, Place]) -> Place:
    """Return the first accelerator of a map, or else the CPU."""
    return min((place for place in places.values() if is_accelerator(place)), key=order_of, default="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchOptions:
    """How a model is dispatched, as :func:`dispatch_model` says it.

    Of ``state_dict``, ``folder`` and ``index`` come values that the model lacks.
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
        """Refuse what no prefetcher can do."""
        for name in ("num_ahead", "cache_bytes"):
            number = getattr(self, name)
            if number is not None and number < 0:
                none = "fetches nothing ahead" if name == "num_ahead" else "keeps nothing"
                raise ValueError(f"{name} must not be negative, got {number}. 0 {none}.")


# --- values --------------------------------------------------------------------------------------


def _find_values(
    refs: Mapping[str, TensorRef], placements: Mapping[str, TensorPlacement], options: DispatchOptions
) -> dict[int, torch.Tensor]:
    """Find values of what has none, and put on the disk what isn't there; the model isn't changed.

    Returns:
        By the ``id`` of a tensor of the model: its value, where that isn't its own.

    Raises:
        ValueError: A tensor has no values, or ones of another shape or kind; or there is no folder to write
            to.
        OSError: The folder can't be written.
    """
    values: dict[int, torch.Tensor] = {}
    given, folder = options.state_dict or {}, options.folder
    stored: Mapping[str, torch.Tensor] = {}
    if options.index is not None or (folder is not None and (Path(folder) / "index.json").is_file()):
        stored = OffloadedWeightsLoader(save_folder=folder, index=options.index)
    for name, ref in refs.items():
        now = ref.read()
        value = given.get(name)
        if value is not None and not value.is_meta and (now.is_meta or placements[name].storage == "cpu"):
            values[id(now)] = check_fit(name, value, now)
        elif now.is_meta and id(now) not in values and name in stored:
            # What has values isn't looked for: the folder may be an old one.
            values[id(now)] = check_fit(name, stored[name], now).to(now.dtype)
    bare = [name for name, ref in refs.items() if ref.read().is_meta and id(ref.read()) not in values]
    if bare:
        raise ValueError(
            f"{listed(map(repr, bare))} have no values: they are on the meta device. Load "
            "them with load_checkpoint_and_dispatch, or pass state_dict=."
        )
    to_write: dict[int, tuple[str, torch.Tensor]] = {}
    for name, ref in refs.items():
        value = values.get(id(ref.read()), ref.read())
        if placements[name].storage == "disk" and value.numel() and mapped_from(value) is None:
            if not is_packable(value):
                raise ValueError(
                    f"{name!r} can't lie on the disk: it is a {type(value).__name__} of layout "
                    f"{value.layout}, which is more than bytes. Leave it on the CPU."
                )
            to_write.setdefault(id(ref.read()), (name, value))
    if to_write and folder is None:
        raise ValueError(
            f"device_map puts {len(to_write)} tensors on the disk that lie in memory now, "
            f"{next(iter(to_write.values()))[0]!r} among them, and there is no offload_dir. Pass one, or "
            "load the weights with load_checkpoint_and_dispatch, which uses a safetensors checkpoint where "
            "it lies."
        )
    if to_write and folder is not None:
        written = write_mapped(folder, dict(to_write.values()))
        values.update({number: written[name] for number, (name, _) in to_write.items()})
    return values


# --- moves of the whole model --------------------------------------------------------------------

_MOVES = ("_apply", "to", "cpu", "cuda", "xpu", "mtia", "ipu", "to_empty")


def refuse_moves(model: nn.Module) -> None:
    """Refuse to move a model, and to change the dtype of weights on the disk, until :func:`allow_moves`.

    A move is refused to whatever device, also to the one where the weights are: a program then does the same
    on a laptop as on a machine with accelerators. Copies of the model refuse it, too.

    Args:
        model: Effect: its own ``to``, ``cuda`` and the like. Its submodules' stay as they are.
    """
    for name in _MOVES:
        if hasattr(type(model), name):
            vars(model)[name] = _Move(model, name)


def allow_moves(model: nn.Module) -> None:
    """Undo :func:`refuse_moves`; a model without it is left alone."""
    for name in _MOVES:
        if isinstance(vars(model).get(name), _Move):
            del vars(model)[name]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """Stands for a method of a model, and calls it where it doesn't move the weights."""

    model: nn.Module
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        if self.name == "_apply":
            self._check(*args)
        elif self.name == "to":
            parse: Any = getattr(vars(torch)["_C"]._nn, "_parse_to")  # noqa: B009 - as torch's own reads them
            device = parse(*args, **kwargs)[0]
            if device is not None:
                raise self._refusal(f"to({str(device)!r})")
        else:
            raise self._refusal(f"{self.name}()")
        return getattr(type(self.model), self.name)(self.model, *args, **kwargs)

    def _check(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> None:
        """Try what shall be done to all tensors of the model."""
        tensors = [(name, ref.read()) for name, ref in refs_of(self.model)]
        on_disk = {one.dtype: name for name, one in tensors if mapped_from(one) is not None}
        for device, dtype in dict.fromkeys((one.device, one.dtype) for _, one in tensors):
            result = function(torch.empty(0, device=device, dtype=dtype))
            if result.device != device:
                raise self._refusal(str(result.device))
            if result.dtype != dtype and dtype in on_disk:
                raise RuntimeError(
                    f"this {type(self.model).__name__} has weights on the disk, which can't become "
                    f"{result.dtype} without being read as a whole: {on_disk[dtype]!r}, say. Pass dtype= "
                    "where they are loaded, or call accelfn.bigmodel.undispatch(model) first."
                )

    def _refusal(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"this {type(self.model).__name__}'s weights are spread by a device map or offloaded, so it "
            f"can't be moved as a whole: {what}. It runs where it is: leave the call out, or dispatch it "
            "anew with another map. accelfn.bigmodel.undispatch(model) makes it a plain model again, with "
            "its weights where they lie."
        )


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
    check_device_map(model, device_map)
    places = read_places(device_map)
    main = None if main_device is None else _read_device(main_device, "main_device")
    options = DispatchOptions(
        state_dict=state_dict,
        folder=offload_dir,
        index=offload_index,
        offload_buffers=offload_buffers,
        skip_keys=names_in(skip_keys),
        whole_classes=names_in(preload_module_classes),
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
    options = DispatchOptions(
        state_dict=state_dict,
        offload_buffers=offload_buffers,
        whole_classes=names_in(preload_module_classes),
        num_ahead=num_ahead,
    )
    dispatch(model, {"": "cpu"}, _execution_device(model, execution_device), options)
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
    options = DispatchOptions(
        folder=offload_dir,
        offload_buffers=offload_buffers,
        whole_classes=names_in(preload_module_classes),
        num_ahead=num_ahead,
        cache_bytes=cache_bytes,
    )
    dispatch(model, {"": "disk"}, _execution_device(model, execution_device), options)
    return model


def undispatch(model: nn.Module) -> None:
    """Take off what :func:`dispatch_model` and its like have attached. The weights stay where they lie.

    Ranks: local.

    Args:
        model: Any; one that wasn't dispatched is left alone.
    """
    found: _Dispatched | None = vars(model).pop(_NAME, None)
    if found is None:
        return
    for prefetcher in found.prefetchers:
        prefetcher.abandon()
    for handle in found.handles:
        handle.remove()
    allow_moves(model)
    vars(model).pop("hf_device_map", None)


def read_offload(model: nn.Module) -> tuple[StreamFacts, ...]:
    """Return what travels of an offloaded model, and how much of it was on a device at a time.

    Ranks: local.

    Args:
        model: Any.

    Returns:
        For each device to which weights travel; nothing for a model whose weights don't.
    """
    found: _Dispatched | None = vars(model).get(_NAME)
    return () if found is None else tuple(one.facts() for one in found.prefetchers)


@dataclass(slots=True, eq=False)
class _Dispatched:
    """What a dispatched model has, beside handles of torch's hooks."""

    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    prefetchers: list[BlockPrefetcher] = field(default_factory=list[BlockPrefetcher])


def _read_device(given: PlaceLike, what: str) -> Place:
    place = read_place(given, what)
    check_device(place, what)
    return place


def _execution_device(model: nn.Module, given: PlaceLike | None) -> Place:
    if given is not None:
        return _read_device(given, "execution_device")
    first = next(model.parameters(), None)
    return "cpu" if first is None or first.is_meta else read_place(first.device)


def dispatch(
    model: nn.Module, places: Mapping[str, Place], main: Place | None, options: DispatchOptions
) -> None:
    """Do what :func:`dispatch_model` does, by a map that was checked."""
    main = main_device_of(places) if main is None else main
    refs = dict(refs_of(model))
    is_parameter = {name: ref.is_parameter for name, ref in refs.items()}
    placements = plan_placements(
        is_parameter, places, tied_refs(refs), main=main, offload_buffers=options.offload_buffers
    )
    values = _find_values(refs, placements, options)
    undispatch(model)

    def device_of(name: str, _: torch.Tensor) -> torch.device:
        place = placements[name].storage
        return check_device("cpu" if place == "disk" else place)

    assign_values(refs, device_of, values)
    dispatched = vars(model)[_NAME] = _Dispatched()
    offloaded: dict[Place, list[str]] = {}
    for name, placement in placements.items():
        if placement.is_offloaded:
            offloaded.setdefault(placement.execution, []).append(name)
    whole_classes = (*options.whole_classes, *names_in(getattr(model, "_no_split_modules", None)))
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
        execution = {name: one.execution for name, one in placements.items()}
        dispatched.handles += _attach_moves(model, main, execution, options.skip_keys)
    if offloaded or len({one.storage for one in placements.values()}) > 1:
        refuse_moves(model)


def _half_of_memory() -> int:
    try:
        return available_memory() // 2
    except MissingExtraError:  # where the system doesn't say, it doesn't let pages go either
        return 0


def _attach_moves(
    model: nn.Module, main: Place, execution: Mapping[str, Place], skip_keys: tuple[str, ...]
) -> list[RemovableHandle]:
    """Let inputs come to where each module computes, and outputs go back to where the model's came from."""
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
            # Within one that is on one device as a whole, only those that others may call by themselves.
            above = places_in[name.rpartition(".")[0]]
            if len(above) > 1 or any(True for _ in module.parameters(recurse=False)):
                handles.append(attach_moves(module, check_device(next(iter(used))), skip_keys))
    handles.append(attach_moves(model, check_device(main), skip_keys))
    return [*handles, *attach_return(model, skip_keys)]
