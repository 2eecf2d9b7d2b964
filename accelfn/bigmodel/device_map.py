"""Device maps: planned from sizes, inferred, checked and cleaned."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.model_info import (
    AnyDtype,
    CustomDtype,
    LeafShape,
    ModelShape,
    check_names,
    counted_bytes,
    get_module_leaves,
    read_dtype,
    read_dtypes,
    read_shape,
    sizes_of,
)
from accelfn.bigmodel.placement import Allocation, Budget, Units
from accelfn.errors import DoesNotFitError
from accelfn.tree.structure import size_text
from accelfn.weights.places import (
    MaxMemory,
    Place,
    PlaceLike,
    as_names,
    check_device,
    get_max_memory,
    is_accelerator,
    listed,
    place_of,
    read_budgets,
    read_place,
    suggest_names,
)

T = TypeVar("T")


def clean_device_map(device_map: Mapping[str, T], module_name: str = "") -> dict[str, T]:
    """Replace the entries below a module by one entry where all are on one place. Pure.

    Only the map is considered: names that it leaves out are covered by the new entries.

    Args:
        device_map: Places by name of a module or tensor. It isn't modified.
        module_name: Clean only the entries below this module.

    Returns:
        A new map.

    >>> clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": "cpu"})
    {'a': 0, 'b.x': 0, 'b.y': 'cpu'}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = {
        name: place for name, place in device_map.items() if name == module_name or name.startswith(prefix)
    }
    outside = {name: place for name, place in device_map.items() if name not in inside}
    return {**outside, **_cleaned(module_name, inside)}


def _cleaned(name: str, places: Mapping[str, T]) -> dict[str, T]:
    """Clean a map whose keys are the module and names below it."""
    first = next(iter(places.values()), None)
    if len(places) <= 1:
        return dict(places)
    if all(place == first for place in places.values()):
        return {name: cast("T", first)}
    prefix = f"{name}." if name else ""
    by_child: dict[str, dict[str, T]] = {}
    for key, place in places.items():
        child = key if key == name else prefix + key[len(prefix) :].partition(".")[0]
        by_child.setdefault(child, {})[key] = place
    return {
        key: place
        for child, inside in by_child.items()
        for key, place in (inside if child == name else _cleaned(child, inside)).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How a model may be distributed over places.

    Attributes:
        no_split_module_classes: Names of classes whose modules aren't split; None for those that the model
            specifies in ``_no_split_modules``. The plan warns about names that no module's class has, unless
            the model specifies them: transformers models name classes that some of them lack.
        dtype: The dtype that the model will be loaded with; None for its own. It never makes a tensor larger.
        special_dtypes: Dtypes of single tensors, by name.
        clean_result: Whether the map has one entry for a module that is on one place.
        offload_buffers: Whether buffers of offloaded modules are offloaded too. It only silences the warning
            that they don't fit on an accelerator.
        fallback_allocation: If the first part for an accelerator is too large for it, use the first later
            part that fits instead of leaving the accelerator empty.
    """

    no_split_module_classes: Collection[str] | None = ()
    dtype: AnyDtype | None = None
    special_dtypes: Mapping[str, AnyDtype] = field(default_factory=dict[str, AnyDtype])
    clean_result: bool = True
    offload_buffers: bool = False
    fallback_allocation: bool = False

    def __post_init__(self) -> None:
        """Convert names and dtypes."""
        special = read_dtypes(self.special_dtypes)
        if self.no_split_module_classes is not None:
            object.__setattr__(self, "no_split_module_classes", as_names(self.no_split_module_classes))
        object.__setattr__(self, "special_dtypes", MappingProxyType(special))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", read_dtype(self.dtype))

    def unsplit_classes(self, shape: ModelShape) -> frozenset[str]:
        """Return the names of classes whose modules aren't split in a model."""
        classes = self.no_split_module_classes
        return frozenset(shape.no_split_classes if classes is None else classes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePlan:
    """The tensors on one place.

    Attributes:
        place: The place.
        budget: Its capacity in bytes; None without a limit.
        used: Bytes of its tensors.
        reserved: Bytes reserved for the largest layer stored elsewhere, which has to be moved there to run.
        leaves: Its tensors in model order, with their sizes there: 0 if a tied name on the same place counts.
    """

    place: Place
    budget: int | None
    used: int
    reserved: int
    leaves: tuple[LeafShape, ...]


class TensorCopy(NamedTuple):
    """A tied tensor that is copied to several places.

    Attributes:
        names: Its names, in model order.
        places: The place of each name.
        num_bytes: Size of each copy.
    """

    names: tuple[str, ...]
    places: tuple[Place, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The place of every tensor of a model. It prints as a table.

    Attributes:
        entries: Places by name of a module or tensor, in the order of allocation.
        places: The tensors of each place, fastest first; also of empty places.
        ties: Groups of names that share one tensor on one place.
        copies: Tied tensors that are copied to several places.
        warnings: Consequences that may be unexpected.
        options: The options of the plan.
    """

    entries: Mapping[str, Place]
    places: tuple[PlacePlan, ...]
    ties: tuple[tuple[str, ...], ...]
    copies: tuple[TensorCopy, ...]
    warnings: tuple[str, ...]
    options: PlanOptions

    @property
    def device_map(self) -> dict[str, Place]:
        """The map that :func:`accelfn.dispatch_model` takes."""
        return clean_device_map(self.entries) if self.options.clean_result else dict(self.entries)

    def __str__(self) -> str:
        from accelfn.bigmodel.drawing import draw_device_plan

        return draw_device_plan(self)


def plan_device_map(
    shape: ModelShape,
    budgets: MaxMemory,
    options: PlanOptions | None = None,
    *,
    log: Callable[[str], object] | None = None,
) -> DevicePlan:
    """Choose a place for every tensor of a model. Pure: only names and sizes are read.

    Places are filled one after another, fastest first, with the model's tensors in order: a module's
    parameters, its children, its buffers. A module that doesn't fit is split, unless its class forbids that;
    when something unsplittable doesn't fit, the next place is filled. So each place holds a contiguous range
    of that order, and a longer one with a larger budget. The first accelerator (or ``"mps"``, if it is among
    the places) and ``"cpu"`` reserve memory for the largest later layer, which has to be moved there to run.

    Modules that share a parameter are on one place, together with the first of them.
    If nothing fits that way, each place gets a copy, which ``copies`` lists.

    Ranks: local.

    Args:
        shape: From :func:`read_shape` or :func:`shape_from_leaves`.
        budgets: Capacities by place, in bytes or such as ``"10GB"``. The disk holds the remainder, and is
            unlimited unless it has a budget; other places that aren't listed aren't used.
        options: See :class:`PlanOptions`.
        log: Called with a line of text for each decision.

    Raises:
        ValueError: Something fits nowhere (the error names its size and the capacity of each place), a budget
            or its place is invalid, or ``special_dtypes`` names an unknown tensor.
        TypeError: ``shape`` isn't a shape, or ``budgets`` isn't a mapping.

    >>> from torch import nn
    >>> from accelfn.bigmodel.model_info import read_shape
    >>> shape = read_shape(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)))
    >>> plan_device_map(shape, {0: 200, 1: 200}).device_map
    {'0': 0, '1': 1, '2': 1}
    """
    options = PlanOptions() if options is None else options
    check_names(shape, options.special_dtypes)
    devices = _devices(read_budgets(budgets, "budgets"))
    try:
        return _plan(shape, devices, options, log)
    except DoesNotFitError:
        # If copies don't help either, the first error is raised: the caller didn't ask for copies.
        if shape.ties:
            with suppress(DoesNotFitError):
                return _plan(shape, devices, options, log, keep_ties=False)
        raise


def _devices(budgets: Mapping[Place, int]) -> list[Budget]:
    places = [*budgets, *(("disk",) if "disk" not in budgets else ())]
    accelerators = [place for place in places if is_accelerator(place)]
    main = ("mps",) if "mps" in accelerators else (*accelerators[:1], "cpu")
    return [Budget(place, budgets.get(place), place in main) for place in places]


def _plan(
    shape: ModelShape,
    devices: Sequence[Budget],
    options: PlanOptions,
    log: Callable[[str], object] | None,
    keep_ties: bool = True,
) -> DevicePlan:
    dtype = cast("torch.dtype | CustomDtype | None", options.dtype)
    special = cast("Mapping[str, torch.dtype | CustomDtype]", options.special_dtypes)
    no_split = options.unsplit_classes(shape)

    def size_of(leaf: LeafShape) -> int:
        return counted_bytes(leaf, dtype, special)

    units = Units(shape, no_split, size_of, keep_ties)
    allocation = Allocation(units, devices, options.fallback_allocation, log)
    leaves: list[list[LeafShape]] = [[] for _ in devices]
    tied: dict[int, list[tuple[str, int, int]]] = {}
    for unit, device in zip(units.units, allocation.device_of, strict=True):
        for leaf in unit.leaves:
            size = size_of(leaf)
            if leaf.tie is not None:
                names = tied.setdefault(leaf.tie, [])
                full_size = names[0][2] if names else size
                size = 0 if any(other == device for _, other, _ in names) else full_size
                names.append((leaf.name, device, full_size))
            leaves[device].append(leaf if size == leaf.num_bytes else leaf._replace(num_bytes=size))
    places = [
        PlacePlan(
            place=budget.place,
            budget=budget.num_bytes,
            used=allocation.used[device],
            reserved=allocation.reserved[device],
            leaves=tuple(leaves[device]),
        )
        for device, budget in enumerate(devices)
    ]
    ties: list[tuple[str, ...]] = []
    copies: list[TensorCopy] = []
    for group in tied.values():
        names = tuple(name for name, _, _ in group)
        if len({device for _, device, _ in group}) == 1:
            ties.append(names)
        else:
            copy_places = tuple(devices[device].place for _, device, _ in group)
            copies.append(TensorCopy(names, copy_places, group[0][2]))
    return DevicePlan(
        entries=MappingProxyType({name: devices[device].place for name, device in allocation.entries}),
        places=tuple(places),
        ties=tuple(ties),
        copies=tuple(copies),
        warnings=(*_class_warnings(shape, no_split), *_memory_warnings(places, copies, options)),
        options=options,
    )


def _class_warnings(shape: ModelShape, names: Collection[str]) -> Iterator[str]:
    known = {module.class_name for module in shape.root.modules()}
    unknown = sorted(set(names) - known - set(shape.no_split_classes))
    if unknown:
        yield (
            "no_split_module_classes: the model has no modules of class "
            f"{suggest_names(unknown, known)}. Those names have no effect."
        )


def _memory_warnings(
    places: Sequence[PlacePlan], copies: Sequence[TensorCopy], options: PlanOptions
) -> Iterator[str]:
    accelerators = [plan for plan in places if is_accelerator(plan.place)]
    offloaded = [leaf for plan in places if not is_accelerator(plan.place) for leaf in plan.leaves]
    buffers = sum(leaf.num_bytes for leaf in offloaded if leaf.kind != "parameter")
    free = [(plan.budget or 0) - plan.used - plan.reserved for plan in accelerators]
    in_use = any(plan.leaves for plan in accelerators)
    if in_use and buffers > max(0, *free) and not options.offload_buffers:
        yield (
            f"offloaded modules have buffers of {size_text(buffers)}, which fit on no accelerator. Pass "
            "offload_buffers=True to offload them too."
        )
    parameters = {leaf.name for plan in places for leaf in plan.leaves if leaf.kind == "parameter"}
    copied = [
        ", ".join(f"{name} on {place!r}" for name, place in zip(copy.names, copy.places, strict=True))
        for copy in copies
        if parameters.intersection(copy.names)
    ]
    if copied:
        yield f"the model only fits with independent copies of tied parameters: {'; '.join(copied)}."


DeviceMap: TypeAlias = "str | Mapping[str, PlaceLike]"
"""``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or places by module name."""

MAP_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
) -> dict[str, Place]:
    """Choose a place for each part of a model by size; :func:`plan_device_map` describes how.

    Ranks: local. Only sizes are read, so the model may be on the meta device.

    Args:
        model: Any module.
        max_memory: As in :func:`get_max_memory`. None for the free memory of this machine.
        no_split_module_classes: Names of classes whose modules aren't split, such as those with residual
            connections. Names of no module's class cause a warning, unless ``_no_split_modules`` has them.
        dtype: The dtype that the model will be loaded with; see :func:`compute_module_sizes`.
        special_dtypes: Dtypes of single tensors, by name.
        verbose: Print each decision.
        clean_result: Return one entry for a module that is on one place.
        offload_buffers: Whether buffers of offloaded modules are offloaded too; it silences a warning.
        fallback_allocation: If the first part for an accelerator is too large for it, use the first later
            part that fits.

    Returns:
        Places by name of a module or tensor; ``""`` is the whole model.

    Raises:
        ValueError: Something fits nowhere (the error names its size and the capacity of each place), or an
            argument is invalid.
        TypeError: ``model`` isn't a module, ``max_memory`` isn't a mapping, or a size is neither a string nor
            a number.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    >>> infer_auto_device_map(model, {0: 210, "cpu": "1GB"})
    {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    options = PlanOptions(
        no_split_module_classes=no_split_module_classes or (),
        dtype=dtype,
        special_dtypes=special_dtypes or {},
        clean_result=clean_result,
        offload_buffers=offload_buffers,
        fallback_allocation=fallback_allocation,
    )
    shape = read_shape(model, "infer_auto_device_map")
    plan = plan_device_map(shape, get_max_memory(max_memory), options, log=print if verbose else None)
    return _with_warnings(plan)


def _with_warnings(plan: DevicePlan) -> dict[str, Place]:
    for text in plan.warnings:
        warnings.warn(text, stacklevel=3)
    return plan.device_map


def plan_named_map(
    shape: ModelShape,
    name: str,
    max_memory: MaxMemory | None = None,
    options: PlanOptions | None = None,
) -> DevicePlan:
    """Plan a device map by strategy.

    ``"auto"`` and ``"balanced"`` use all accelerators evenly, ``"balanced_low_0"`` leaves as much of the
    first one free as possible, and ``"sequential"`` fills one after another.

    Ranks: local.

    Args:
        shape: The shape of the model.
        name: The strategy.
        max_memory: As in :func:`get_max_memory`. None for the free memory of this machine.
        options: See :class:`PlanOptions`.

    Raises:
        ValueError: There is no such strategy, or as in :func:`plan_device_map`.
        TypeError: As in :func:`plan_device_map`.
    """
    if name not in MAP_NAMES:
        raise ValueError(
            f"device_map must be one of {', '.join(map(repr, MAP_NAMES))}, or places by module name, such as "
            f"{{'': 0}}: got {name!r}."
        )
    options = PlanOptions() if options is None else options
    budgets = get_max_memory(max_memory)
    if name != "sequential":
        low_zero = name == "balanced_low_0"
        budgets = _balance_budgets(shape, budgets, options, low_zero, leave_tenth=max_memory is None)
    return plan_device_map(shape, budgets, options)


def resolve_device_map(
    model: nn.Module | ModelShape,
    device_map: DeviceMap,
    max_memory: MaxMemory | None = None,
    options: PlanOptions | None = None,
) -> dict[str, Place]:
    """Return a device map: planned if it is the name of a strategy, and checked otherwise.

    Ranks: local. Only sizes are read, so the model may be on the meta device.

    Args:
        model: Any module, or its shape.
        device_map: A strategy, see :func:`plan_named_map`, or a map.
        max_memory: As in :func:`get_max_memory`, for a strategy.
        options: For a strategy. None: classes in the model's ``_no_split_modules`` aren't split.

    Returns:
        Places by name of a module or tensor.

    Raises:
        ValueError: As in :func:`plan_named_map` and :func:`check_device_map`.
        TypeError: ``model`` isn't a module, ``device_map`` is neither a name nor a map, or as in
            :func:`plan_named_map`.
    """
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    if isinstance(device_map, Mapping):
        check_device_map(shape, device_map)
        return {name: read_place(place) for name, place in device_map.items()}
    options = PlanOptions(no_split_module_classes=None) if options is None else options
    return _with_warnings(plan_named_map(shape, device_map, max_memory, options))


def read_places(device_map: Mapping[str, object]) -> dict[str, Place]:
    """Normalise the places of a device map, and check that this machine has them.

    Raises:
        ValueError: A place is unknown, or this machine lacks it.
    """
    places = {name: read_place(place, f"device_map[{name!r}]") for name, place in device_map.items()}
    for name, place in places.items():
        if place != "disk":
            check_device(place, f"device_map[{name!r}]")
    return places


def check_device_map(model: nn.Module | ModelShape, device_map: Mapping[str, PlaceLike]) -> None:
    """Check that the names of a map exist in a model, and that it covers the model's state dict.

    Ranks: local.

    Args:
        model: Any module, or its shape.
        device_map: Places by name of a module, parameter or buffer; ``""`` is the whole model.

    Raises:
        ValueError: The model lacks a name, the map covers a tensor neither by name nor by a module around, or
            a place is unknown.
        TypeError: ``model`` isn't a module, or ``device_map`` isn't a mapping.
    """
    shape = model if isinstance(model, ModelShape) else read_shape(model, "check_device_map")
    if not isinstance(cast("object", device_map), Mapping):
        raise TypeError(
            f"device_map must map module names to places, such as {{'': 0}}: got {device_map!r}. Pass 'auto' "
            "to load_checkpoint_and_dispatch, or plan a map with infer_auto_device_map."
        )
    modules = {module.name for module in shape.root.modules()}
    leaves = list(shape.root.leaves())
    known = modules | {leaf.name for leaf in leaves}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        raise ValueError(
            "device_map names modules or tensors that the model doesn't have: "
            f"{suggest_names(unknown, known)}."
        )
    for name, place in device_map.items():
        read_place(place, f"device_map[{name!r}]")
    stored = [leaf.name for leaf in leaves if leaf.kind != "non_persistent"]
    missing = [name for name in stored if place_of(name, device_map) is None]
    if missing:
        raise ValueError(
            f"device_map has no place for {listed(missing)}. Add an entry for "
            f"{'it' if len(missing) == 1 else 'them'}, for a module around, or for the whole model ('')."
        )


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    low_zero: bool = False,
) -> dict[Place, int]:
    """Reduce the budgets of accelerators, so that a model that would fit on few is balanced over all.

    Ranks: local. :func:`get_max_memory` describes what it queries.

    Args:
        model: Any module, also on the meta device.
        max_memory: As in :func:`get_max_memory`. Without it, a single accelerator keeps a tenth of its memory
            free for activations.
        no_split_module_classes: Names of classes whose modules aren't split.
        dtype: The dtype that the model will be loaded with; see :func:`compute_module_sizes`.
        special_dtypes: Dtypes of single tensors, by name.
        low_zero: Leave as much as possible of the first accelerator free.

    Returns:
        Bytes by place, fastest first. ``max_memory`` isn't modified.

    Raises:
        ValueError: As in :func:`get_max_memory` and :func:`compute_module_sizes`.
        TypeError: As in :func:`get_max_memory`.
    """
    shape = read_shape(model, "get_balanced_memory")
    check_names(shape, special_dtypes)
    options = PlanOptions(
        no_split_module_classes=no_split_module_classes or (),
        dtype=dtype,
        special_dtypes=special_dtypes or {},
    )
    budgets = get_max_memory(max_memory)
    return _balance_budgets(shape, budgets, options, low_zero, leave_tenth=max_memory is None)


def _balance_budgets(
    shape: ModelShape,
    budgets: Mapping[Place, int],
    options: PlanOptions,
    low_zero: bool,
    leave_tenth: bool,
) -> dict[Place, int]:
    """Return what :func:`get_balanced_memory` returns, for a shape. Pure.

    Each accelerator but the last gets an equal share, plus 1.25 times the largest unsplit block or the mean
    layer size, whichever is larger.

    Args:
        shape: The shape of the model.
        budgets: Bytes by place, fastest first.
        options: The options of the plan.
        low_zero: Leave as much as possible of the first accelerator free.
        leave_tenth: Leave a tenth of a single accelerator free.
    """
    balanced = dict(budgets)
    accelerators = [place for place in budgets if is_accelerator(place)]
    used = [place for place in accelerators if budgets[place] > 0]
    if len(used) <= 1:
        if used and leave_tenth:
            balanced[used[0]] = balanced[used[0]] * 9 // 10
        return balanced
    sizes = sizes_of(shape, options.dtype, options.special_dtypes)
    total = sizes[""]
    share = total // (len(used) - low_zero)
    unsplit = options.unsplit_classes(shape)
    class_of = {module.name: module.class_name for module in shape.root.modules()}
    blocks: dict[str, int] = {}  # size of the first module of each class
    for name, size in sizes.items():
        if name and class_of.get(name) in unsplit:
            blocks.setdefault(class_of[name], size)
    tensors = frozenset(get_module_leaves(sizes))
    layers = get_module_leaves({name: size for name, size in sizes.items() if name not in tensors})
    mean = sum(sizes[name] for name in layers) // max(len(layers), 1)
    share += int(1.25 * max([mean, *blocks.values()]))
    first, last = accelerators[0], used[-1]
    for place in used:
        if place != last and not (low_zero and place == first):
            balanced[place] = min(share, balanced[place])
    if low_zero:
        rest = sum(balanced[place] for place in accelerators if place != first)
        balanced[first] = min(balanced[first], max(0, total - rest))
    return balanced
