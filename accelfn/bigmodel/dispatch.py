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
    Slot,
    fitting,
    has_forward,
    is_packable,
    named_modules,
    put,
    slots_of,
    tied_slots,
)
from accelfn.bigmodel.block_hooks import attach_moves, attach_return, attach_stream
from accelfn.bigmodel.block_stream import Stream, StreamFacts, check_options
from accelfn.bigmodel.blocks import plan_blocks, read_block
from accelfn.bigmodel.device_map import check_device_map
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


class Lies(NamedTuple):
    """Of a tensor.

    Attributes:
        at: Where it lies at rest.
        used: Where it is used; another place means that it travels.
    """

    at: Place
    used: Place

    @property
    def travels(self) -> bool:
        """Whether it is brought to where it is used, or read from the disk there."""
        return self.at != self.used


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchPlan:
    """Where the tensors of a model go.

    Attributes:
        main: Where inputs come to, and where what lies on the host is used.
        lies: By full name of the tensor.
    """

    main: Place
    lies: Mapping[str, Lies]

    def at(self, place: Place) -> tuple[str, ...]:
        """Return the names of the tensors that lie at a place."""
        return tuple(name for name, lies in self.lies.items() if lies.at == place)


def read_map(device_map: Mapping[str, object]) -> dict[str, Place]:
    """Read a device map as callers write it.

    Raises:
        ValueError: It has a place that can't exist, or that this machine lacks.
    """
    places = {name: read_place(place, f"device_map[{name!r}]") for name, place in device_map.items()}
    for name, place in places.items():
        if place != "disk":
            check_device(place, f"device_map[{name!r}]")
    return places


def plan_dispatch(
    leaves: Mapping[str, bool],
    places: Mapping[str, Place],
    ties: Iterable[tuple[str, ...]] = (),
    *,
    main: Place | None = None,
    offload_buffers: bool = False,
) -> DispatchPlan:
    """Return where each tensor of a model lies and is used.

    What the map puts on an accelerator lies and is used there. What it puts on the host or the disk is used
    on the main device. Of that, buffers lie on the main device anyway, unless ``offload_buffers``: they are
    small, and modules write into them.

    Args:
        leaves: Full names of the tensors, and whether each is a parameter.
        places: By name of a module or tensor; the longest that fits counts. What it says nothing of, as of
            a buffer that state dicts don't have, is on the main device.
        ties: Groups of names that are one tensor.
        main: Where inputs come to; None takes the first accelerator of the map, or else the CPU.
        offload_buffers: Whether buffers travel, too.
    """
    accelerators = sorted({place for place in places.values() if is_accelerator(place)}, key=order_of)
    if main is None:
        main = accelerators[0] if accelerators else "cpu"
    lies: dict[str, Lies] = {}
    for name in leaves:
        place = place_of(name, places)
        place = main if place is None else place
        used = place if is_accelerator(place) else main
        stays = not leaves[name] and not offload_buffers
        lies[name] = Lies(used if stays else place, used)
    for group in ties:
        resident = {lies[name].used for name in group if not lies[name].travels}
        for name in group:
            if lies[name].used in resident:  # it is there already for another name
                lies[name] = Lies(lies[name].used, lies[name].used)
    return DispatchPlan(main=main, lies=lies)


class _Sources(NamedTuple):
    """Where values come from that the model itself doesn't have.

    Attributes:
        state_dict: In memory.
        folder: Of offloaded weights, which takes others, too.
        entries: What the folder has; None reads its own, if it has one.
    """

    state_dict: Mapping[str, torch.Tensor]
    folder: str | os.PathLike[str] | None = None
    entries: Mapping[str, Mapping[str, Any]] | None = None


def find_values(slots: Mapping[str, Slot], plan: DispatchPlan, sources: _Sources) -> dict[int, torch.Tensor]:
    """Find values of what has none, and put on the disk what isn't there; the model isn't changed.

    Args:
        slots: Of the model, by full name of the tensor.
        plan: Where they go.
        sources: Of values.

    Returns:
        By the ``id`` of a tensor of the model: its value, where that isn't its own.

    Raises:
        ValueError: A tensor has no values, or ones of another shape or kind; or there is no folder to write
            to.
        OSError: The folder can't be written.
    """
    values: dict[int, torch.Tensor] = {}
    for name, slot in slots.items():
        given, now = sources.state_dict.get(name), slot.read()
        if given is not None and not given.is_meta and (now.is_meta or plan.lies[name].at == "cpu"):
            values[id(now)] = fitting(name, given, now)
    _read_folder(slots, sources, values)
    bare = [name for name, slot in slots.items() if slot.read().is_meta and id(slot.read()) not in values]
    if bare:
        raise ValueError(
            f"{listed(map(repr, bare))} have no values: they are on the meta device. Load "
            "them with load_checkpoint_and_dispatch, or pass state_dict=."
        )
    to_write: dict[int, tuple[str, torch.Tensor]] = {}
    for name in plan.at("disk"):
        now = slots[name].read()
        value = values.get(id(now), now)
        if value.numel() and mapped_from(value) is None:
            _check_plain(name, value)
            to_write.setdefault(id(now), (name, value))
    if to_write:
        first = next(iter(to_write.values()))[0]
        if sources.folder is None:
            raise ValueError(
                f"device_map puts {len(to_write)} tensors on the disk that lie in memory now, {first!r} "
                "among them, and there is no offload_dir. Pass one, or load the weights with "
                "load_checkpoint_and_dispatch, which uses a safetensors checkpoint where it lies."
            )
        written = write_mapped(sources.folder, dict(to_write.values()))
        values.update({number: written[name] for number, (name, _) in to_write.items()})
    return values


def _read_folder(slots: Mapping[str, Slot], sources: _Sources, values: dict[int, torch.Tensor]) -> None:
    """Map offloaded weights for what has no values. Others aren't looked at: the folder may be an old one."""
    index, folder = sources.entries, sources.folder
    if index is None and (folder is None or not (Path(folder) / "index.json").is_file()):
        return
    stored = OffloadedWeightsLoader(save_folder=folder, index=index)
    for name, slot in slots.items():
        now = slot.read()
        if now.is_meta and id(now) not in values and name in stored.index:
            value = fitting(name, stored[name], now)
            values[id(now)] = value if value.dtype == now.dtype else value.to(now.dtype)


def _check_plain(name: str, value: torch.Tensor) -> None:
    if not is_packable(value):
        raise ValueError(
            f"{name!r} can't lie on the disk: it is a {type(value).__name__} of layout {value.layout}, which "
            "is more than bytes. Leave it on the CPU."
        )


def _settle(slots: Mapping[str, Slot], plan: DispatchPlan, values: Mapping[int, torch.Tensor]) -> None:
    """Put every tensor where it lies. Tied names stay one tensor wherever they lie together.

    Args:
        slots: Of the model, by full name of the tensor. Effect: on their modules.
        plan: Where they go.
        values: As :func:`find_values` gives them.
    """
    for names in tied_slots(slots):
        old = slots[names[0]].read()
        value = values.get(id(old), old)
        by_device: dict[torch.device, list[Slot]] = {}
        for name in names:
            at = plan.lies[name].at
            by_device.setdefault(check_device("cpu" if at == "disk" else at), []).append(slots[name])
        # The first place keeps the object, so that optimizers know it; what it had is copied before.
        moved = {device: _moved(old, value, device) for device in by_device}
        for number, (device, some) in enumerate(by_device.items()):
            put(some, old, moved[device], as_new=number > 0)


def _moved(old: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if value is old and old.device == device:
        return old
    return value.detach().to(device) if is_packable(old) else value.to(device)


_MOVES = ("cpu", "cuda", "xpu", "mtia", "ipu", "to_empty")


def fix(model: nn.Module) -> None:
    """Refuse to move a model, and to change the dtype of weights on the disk, until :func:`unfix`.

    A move is refused to whatever device, also to the one where the weights are: a program then does the same
    on a laptop as on a machine with accelerators. Copies of the model refuse it, too.

    Args:
        model: Effect: its own ``to``, ``cuda`` and the like. Its submodules' stay as they are.
    """
    vars(model)["_apply"] = _Apply(model)
    vars(model)["to"] = _To(model)
    for name in _MOVES:
        if hasattr(type(model), name):
            vars(model)[name] = _Move(model, name)


def unfix(model: nn.Module) -> None:
    """Undo :func:`fix`; a model that wasn't fixed is left alone."""
    for name in ("_apply", "to", *_MOVES):
        if isinstance(vars(model).get(name), (_Apply, _To, _Move)):
            del vars(model)[name]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """Stands for a method that moves a whole model, or throws its weights away."""

    model: nn.Module
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        raise _refusal(self.model, f"{self.name}()")


@dataclass(frozen=True, slots=True, eq=False)
class _To:
    """Stands for a model's ``to``, which moves it or changes its dtype."""

    model: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        parse: Any = getattr(vars(torch)["_C"]._nn, "_parse_to")  # noqa: B009 - as torch's own to() reads them
        device = parse(*args, **kwargs)[0]
        if device is not None:
            raise _refusal(self.model, f"to({str(device)!r})")
        to: Any = type(self.model).to
        return to(self.model, *args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class _Apply:
    """Stands for a model's ``_apply``: whatever changes all tensors of a model goes through it."""

    model: nn.Module

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        tensors = [(name, slot.read()) for name, slot in slots_of(self.model)]
        on_disk = {one.dtype: name for name, one in tensors if mapped_from(one) is not None}
        for device, dtype in dict.fromkeys((one.device, one.dtype) for _, one in tensors):
            result = function(torch.empty(0, device=device, dtype=dtype))
            if result.device != device:
                raise _refusal(self.model, str(result.device))
            if result.dtype != dtype and dtype in on_disk:
                raise RuntimeError(
                    f"this {type(self.model).__name__} has weights on the disk, which can't become "
                    f"{result.dtype} without being read as a whole: {on_disk[dtype]!r}, say. Pass dtype= "
                    "where they are loaded, or call accelfn.bigmodel.undispatch(model) first."
                )
        apply: Any = getattr(type(self.model), "_apply")  # noqa: B009 - torch has no public name for it
        return apply(self.model, function, recurse)


def _refusal(model: nn.Module, what: str) -> RuntimeError:
    return RuntimeError(
        f"this {type(model).__name__}'s weights are spread by a device map or offloaded, so it can't be "
        f"moved as a whole: {what}. It runs where it is: leave the call out, or dispatch it anew with "
        "another map. accelfn.bigmodel.undispatch(model) makes it a plain model again, with its weights "
        "where they lie."
    )


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
    places = read_map(device_map)
    main = None if main_device is None else _device_place(main_device, "main_device")
    options = _Options(
        offload_buffers=offload_buffers,
        skip_keys=names_in(skip_keys),
        whole_classes=_whole_classes(model, preload_module_classes),
        num_ahead=num_ahead,
        cache_bytes=cache_bytes,
        force_hooks=force_hooks,
    )
    sources = _Sources(state_dict or {}, offload_dir, offload_index)
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
        whole_classes=_whole_classes(model, preload_module_classes),
        num_ahead=num_ahead,
    )
    _spread(model, {"": "cpu"}, _execution(model, execution_device), _Sources(state_dict or {}), options)
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
    options = _Options(
        offload_buffers=offload_buffers,
        whole_classes=_whole_classes(model, preload_module_classes),
        num_ahead=num_ahead,
        cache_bytes=cache_bytes,
    )
    _spread(model, {"": "disk"}, _execution(model, execution_device), _Sources({}, offload_dir), options)
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
    for handle in cast("_Dispatched", found).handles:
        handle.remove()
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
    """What a dispatched model has: its streams, and the handles of torch's hooks."""

    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    streams: list[Stream] = field(default_factory=list[Stream])


def _whole_classes(model: nn.Module, given: Iterable[str] | None) -> tuple[str, ...]:
    return (*names_in(given), *names_in(getattr(model, "_no_split_modules", None)))


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
    model: nn.Module, places: Mapping[str, Place], main: Place | None, sources: _Sources, options: _Options
) -> None:
    check_options(options.num_ahead, options.cache_bytes or 0)
    slots = dict(slots_of(model))
    plan = plan_dispatch(
        {name: slot.is_parameter for name, slot in slots.items()},
        places,
        tied_slots(slots),
        main=main,
        offload_buffers=options.offload_buffers,
    )
    values = find_values(slots, plan, sources)
    undispatch(model)
    _settle(slots, plan, values)
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
        dispatched.handles += attach_stream(model, stream)
    devices = {check_device(lies.used) for lies in plan.lies.values()} | {check_device(plan.main)}
    if len(set(places.values())) > 1 or travelling or options.force_hooks:
        dispatched.handles += _attach_moves(model, plan, devices, options)
    return dispatched


def _half_of_memory() -> int:
    try:
        return available_memory() // 2
    except MissingExtraError:  # where the system doesn't say, it doesn't let pages go either
        return 0


def _attach_moves(
    model: nn.Module, plan: DispatchPlan, devices: set[torch.device], options: _Options
) -> list[RemovableHandle]:
    """Let inputs come to where each module computes, and outputs go back to where the model's came from."""
    if devices == {torch.device("cpu")}:
        return []  # simulated devices are the CPU
    uses: dict[str, set[Place]] = {}
    for name, lies in plan.lies.items():
        parts = name.split(".")
        for depth in range(len(parts)):
            uses.setdefault(".".join(parts[:depth]), set()).add(lies.used)
    handles: list[RemovableHandle] = []
    for name, module in named_modules(model):
        used = uses.get(name, set())
        if module is not model and has_forward(module) and len(used) == 1:
            # Within one that is on one device as a whole, only those that others may call by themselves.
            above = uses[name.rpartition(".")[0]]
            if len(above) > 1 or any(True for _ in module.parameters(recurse=False)):
                handles.append(attach_moves(module, check_device(next(iter(used))), options.skip_keys))
    handles.append(attach_moves(model, check_device(plan.main), options.skip_keys))
    return [*handles, *attach_return(model, options.skip_keys)]
