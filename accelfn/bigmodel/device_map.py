"""Device maps: planned from sizes, inferred, checked, and written in fewer words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.devices import (
    MaxMemory,
    Place,
    PlaceLike,
    check_device,
    get_max_memory,
    is_accelerator,
    listed,
    names_in,
    place_of,
    read_budgets,
    read_place,
    tell_unknown,
)
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
from accelfn.bigmodel.placement import Budget, Filling, Units
from accelfn.errors import DoesNotFitError
from accelfn.tree.structure import size_text

T = TypeVar("T")


def clean_device_map(device_map: Mapping[str, T], module_name: str = "") -> dict[str, T]:
    """Name a module instead of all that is below it, where that is in one place. Pure.

    Only the map is looked at: what it leaves out goes where the rest is.

    Args:
        device_map: Places by names of modules or tensors. It is left as it is.
        module_name: Look only at what is below this module.

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
    """Clean a map of which every name is the module's, or below it."""
    first = next(iter(places.values()), None)
    if len(places) <= 1:
        return dict(places)
    if all(place == first for place in places.values()):
        return {name: cast("T", first)}
    prefix = f"{name}." if name else ""
    parts: dict[str, dict[str, T]] = {}
    for one, place in places.items():
        part = one if one == name else prefix + one[len(prefix) :].partition(".")[0]
        parts.setdefault(part, {})[one] = place
    return {
        one: place
        for part, inside in parts.items()
        for one, place in (inside if part == name else _cleaned(part, inside)).items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How a model may be spread.

    Attributes:
        no_split_module_classes: Names of classes whose modules stay whole; None for those that the model
            itself names in ``_no_split_modules``. Of a name that is no module's class the plan warns, unless
            the model has it there: models of transformers name classes that some of them lack.
        dtype: With which the model will be loaded; None for its own. It never makes a tensor larger.
        special_dtypes: Dtypes of single tensors, by name; the model has to have all of them.
        clean_result: Whether the map names a module instead of all its parts, where these lie in one place.
        offload_buffers: Whether buffers of what is offloaded are offloaded too. It only silences the warning
            that there is no room for them.
        fallback_allocation: Where the first part for an accelerator is too large for it, put the first one
            there that isn't, instead of leaving it empty.
    """

    no_split_module_classes: Collection[str] | None = ()
    dtype: AnyDtype | None = None
    special_dtypes: Mapping[str, AnyDtype] = field(default_factory=lambda: MappingProxyType({}))
    clean_result: bool = True
    offload_buffers: bool = False
    fallback_allocation: bool = False

    def __post_init__(self) -> None:
        """Take one name for several, and refuse unknown dtypes."""
        special = read_dtypes(self.special_dtypes)
        if self.no_split_module_classes is not None:
            object.__setattr__(self, "no_split_module_classes", names_in(self.no_split_module_classes))
        object.__setattr__(self, "special_dtypes", MappingProxyType(special))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", read_dtype(self.dtype))

    def whole_classes(self, shape: ModelShape) -> frozenset[str]:
        """Return the names of classes whose modules stay whole in a model."""
        given = self.no_split_module_classes
        return frozenset(shape.no_split_classes if given is None else given)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacePlan:
    """What lies in a place.

    Attributes:
        place: Which.
        budget: Bytes that it may hold; None without a limit.
        used: Bytes of its tensors.
        reserved: Bytes that are kept free in it for the largest layer that lies elsewhere, which has to be
            brought there to be computed.
        leaves: Its tensors, in the order of the model, each with the bytes that it takes there: 0 where
            another name of it in the same place counts.
    """

    place: Place
    budget: int | None
    used: int
    reserved: int
    leaves: tuple[LeafShape, ...]


class TensorCopy(NamedTuple):
    """A tensor that a model has under several names, and that lies in several places.

    Attributes:
        names: In the order of the model.
        places: Of each name.
        num_bytes: In each of these places.
    """

    names: tuple[str, ...]
    places: tuple[Place, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """Where every tensor of a model lies. Printed, it is a table.

    Attributes:
        entries: Place by name of a module or a tensor, in the order in which they were placed.
        places: What lies in each place, the fastest first; also those where nothing does.
        ties: Names that are one tensor, in one place.
        copies: Names that are one tensor in the model, and copies of it in several places.
        warnings: What may surprise.
        options: With which it was made.
    """

    entries: Mapping[str, Place]
    places: tuple[PlacePlan, ...]
    ties: tuple[tuple[str, ...], ...]
    copies: tuple[TensorCopy, ...]
    warnings: tuple[str, ...]
    options: PlanOptions

    @property
    def device_map(self) -> dict[str, Place]:
        """The map that :func:`accelfn.dispatch_model` and others take."""
        return clean_device_map(self.entries) if self.options.clean_result else dict(self.entries)

    def __str__(self) -> str:
        from accelfn.bigmodel.drawing import draw_device_plan

        return draw_device_plan(self)


def plan_device_map(
    shape: ModelShape,
    budgets: MaxMemory,
    options: PlanOptions | None = None,
    *,
    say: Callable[[str], object] | None = None,
) -> DevicePlan:
    """Decide where every tensor of a model lies. Pure: only names and sizes are read.

    Places are filled one after the other, the fastest first, with the model's tensors in order: parameters of
    a module, then the modules in it, then its buffers. A module that doesn't fit as a whole is split, unless
    its class stays whole; once something doesn't fit that can't be split, the place is closed. So each place
    holds a run of that order, and with a larger budget a longer one. In the first accelerator (in ``"mps"``,
    if that is one of the places) and in ``"cpu"`` room is kept for the largest layer that comes later, since
    it will have to be brought there.

    What shares a parameter lies in one place: with the first of its modules come all layers that have it. If
    nothing fits that way, each place gets a copy, and ``copies`` says so.

    Ranks: local.

    Args:
        shape: Of the model, from :func:`read_shape` or :func:`shape_from_leaves`.
        budgets: What each place may hold, in bytes or such as ``"10GB"``. The disk holds whatever is left,
            unless it is given a budget; of the others, those that aren't named aren't used.
        options: See :class:`PlanOptions`.
        say: Is told each decision, as a line.

    Raises:
        ValueError: Something fits nowhere: the error says what it needs, and what each place has. Or a budget
            is of no possible place, or of another form; or ``special_dtypes`` names what the model lacks.
        TypeError: ``shape`` is no shape, or ``budgets`` no mapping.

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
        return _plan(shape, devices, options, say)
    except DoesNotFitError:
        # If copies don't help either, the error is that of the first try: nobody has asked for copies.
        if shape.ties:
            with suppress(DoesNotFitError):
                return _plan(shape, devices, options, say, keep_ties=False)
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
    say: Callable[[str], object] | None,
    keep_ties: bool = True,
) -> DevicePlan:
    dtype = cast("torch.dtype | CustomDtype | None", options.dtype)
    special = cast("Mapping[str, torch.dtype | CustomDtype]", options.special_dtypes)
    no_split = options.whole_classes(shape)

    def size_of(leaf: LeafShape) -> int:
        return counted_bytes(leaf, dtype, special)

    units = Units(shape, no_split, size_of, keep_ties)
    filled = Filling(units, devices, options.fallback_allocation, say)
    leaves: list[list[LeafShape]] = [[] for _ in devices]
    tied: dict[int, list[tuple[str, int, int]]] = {}
    for unit, number in zip(units.units, filled.device_of, strict=True):
        for leaf in unit.leaves:
            size = size_of(leaf)
            if leaf.tie is not None:
                names = tied.setdefault(leaf.tie, [])
                own = names[0][2] if names else size
                # One that is there under another name takes nothing.
                size = 0 if any(other == number for _, other, _ in names) else own
                names.append((leaf.name, number, own))
            leaves[number].append(leaf if size == leaf.num_bytes else leaf._replace(num_bytes=size))
    places = [
        PlacePlan(
            place=one.place,
            budget=one.num_bytes,
            used=filled.used[number],
            reserved=filled.reserved[number],
            leaves=tuple(leaves[number]),
        )
        for number, one in enumerate(devices)
    ]
    ties: list[tuple[str, ...]] = []
    copies: list[TensorCopy] = []
    for group in tied.values():
        names = tuple(name for name, _, _ in group)
        if len({number for _, number, _ in group}) == 1:
            ties.append(names)
        else:
            copies.append(
                TensorCopy(names, tuple(devices[number].place for _, number, _ in group), group[0][2])
            )
    return DevicePlan(
        entries=MappingProxyType({name: devices[number].place for name, number in filled.entries}),
        places=tuple(places),
        ties=tuple(ties),
        copies=tuple(copies),
        warnings=(*_warn_of_classes(shape, no_split), *_warn(places, copies, options)),
        options=options,
    )


def _warn_of_classes(shape: ModelShape, names: Collection[str]) -> Iterator[str]:
    known = {module.class_name for module in shape.root.modules()}
    unknown = sorted(set(names) - known - set(shape.no_split_classes))
    if unknown:
        yield (
            f"no_split_module_classes: no module of the model is of the class{'es' * (len(unknown) > 1)} "
            f"{tell_unknown(unknown, known)}, so nothing stays whole by "
            f"{'that name' if len(unknown) == 1 else 'those names'}."
        )


def _warn(places: Sequence[PlacePlan], copies: Sequence[TensorCopy], options: PlanOptions) -> Iterator[str]:
    accelerators = [one for one in places if is_accelerator(one.place)]
    away = [one for one in places if not is_accelerator(one.place)]
    buffers = sum(leaf.num_bytes for one in away for leaf in one.leaves if leaf.kind != "parameter")
    free = [(one.budget or 0) - one.used - one.reserved for one in accelerators]
    in_use = any(one.leaves for one in accelerators)
    if in_use and buffers > max(0, *free) and not options.offload_buffers:
        yield (
            f"buffers of {size_text(buffers)} are offloaded with their modules, and no accelerator has so "
            "much left to keep them there. Pass offload_buffers=True, so that they are brought when they are "
            "needed."
        )
    split = [one for one in copies if any(leaf.kind == "parameter" for leaf in _leaves_of(one, places))]
    if split:
        yield (
            "nothing fits unless tensors are copied that the model has under several names; a change of one "
            f"copy won't reach the others: {'; '.join(map(_tell_copy, split))}."
        )


def _leaves_of(copy: TensorCopy, places: Sequence[PlacePlan]) -> Iterator[LeafShape]:
    names = frozenset(copy.names)
    return (leaf for one in places for leaf in one.leaves if leaf.name in names)


def _tell_copy(copy: TensorCopy) -> str:
    return ", ".join(f"{name} on {place!r}" for name, place in zip(copy.names, copy.places, strict=True))


DeviceMap: TypeAlias = "str | Mapping[str, PlaceLike]"
"""``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``, or places by names of modules."""

MAP_NAMES = ("auto", "balanced", "balanced_low_0", "sequential")
_NO_DTYPES: Mapping[str, AnyDtype] = MappingProxyType({})


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
    """Decide where each part of a model lies, by sizes: see :func:`plan_device_map` for how.

    Ranks: local. Only sizes are read, so the model may be on the meta device.

    Args:
        model: Any module.
        max_memory: As :func:`get_max_memory` takes it. None for what this machine has free.
        no_split_module_classes: Names of classes whose modules stay whole, such as those with residual
            connections. Of a name that is the class of no module a warning tells, unless the model has it in
            ``_no_split_modules``.
        dtype: With which the model will be loaded; see :func:`compute_module_sizes`.
        special_dtypes: Dtypes of single tensors, by name; the model has to have all of them.
        verbose: Print each decision.
        clean_result: Name a module instead of all its parts, where these lie in one place.
        offload_buffers: Whether buffers of what is offloaded are offloaded too; it silences a warning.
        fallback_allocation: Where the first part for an accelerator is too large for it, put the first one
            there that isn't.

    Returns:
        Place by name of a module or a tensor; ``""`` is the whole model.

    Raises:
        ValueError: Something fits nowhere: the error says what it needs, and what each place has. Or an
            argument has another form.
        TypeError: ``model`` is no module, ``max_memory`` is no mapping, or a size is neither a text nor a
            number.

    >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    >>> infer_auto_device_map(model, {0: 210, "cpu": "1GB"})
    {'0': 0, '1': 'cpu', '2': 'cpu'}
    """
    options = PlanOptions(
        no_split_module_classes=no_split_module_classes or (),
        dtype=dtype,
        special_dtypes=special_dtypes or _NO_DTYPES,
        clean_result=clean_result,
        offload_buffers=offload_buffers,
        fallback_allocation=fallback_allocation,
    )
    say = print if verbose else None
    shape = read_shape(model, "infer_auto_device_map")
    plan = plan_device_map(shape, get_max_memory(max_memory), options, say=say)
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
    """Plan what one of the names of maps stands for.

    ``"auto"`` and ``"balanced"`` spread a model evenly over the accelerators, ``"balanced_low_0"`` leaves the
    first one as free as it can, and ``"sequential"`` fills one after the other.

    Ranks: local.

    Args:
        shape: Of the model.
        name: One of ``MAP_NAMES``.
        max_memory: As :func:`get_max_memory` takes it. None for what this machine has free.
        options: See :class:`PlanOptions`.

    Raises:
        ValueError: There is no such name, or as :func:`plan_device_map` does.
        TypeError: As :func:`plan_device_map` does.
    """
    if name not in MAP_NAMES:
        raise ValueError(
            f"device_map must be one of {', '.join(map(repr, MAP_NAMES))}, or places by names of modules "
            f"such as {{'': 0}}: got {name!r}."
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
    """Return the map that a caller asks for, by a name or as it is.

    Ranks: local. Only sizes are read, so the model may be on the meta device.

    Args:
        model: Any module, or its shape.
        device_map: A name, see :func:`plan_named_map`; or a map, which is checked.
        max_memory: As :func:`get_max_memory` takes it; for a name.
        options: For a name. None: what the model names in ``_no_split_modules`` stays whole, as in models of
            transformers.

    Returns:
        Place by name of a module or a tensor.

    Raises:
        ValueError: As :func:`plan_named_map` and :func:`check_device_map` do.
        TypeError: ``model`` is no module, ``device_map`` neither a name nor a map; or as
            :func:`plan_named_map` does.
    """
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    if isinstance(device_map, Mapping):
        check_device_map(shape, device_map)
        return {name: read_place(place) for name, place in device_map.items()}
    options = PlanOptions(no_split_module_classes=None) if options is None else options
    return _with_warnings(plan_named_map(shape, device_map, max_memory, options))


def read_places(device_map: Mapping[str, object]) -> dict[str, Place]:
    """Read the places of a device map, which this machine must have.

    Raises:
        ValueError: There is no such place, or this machine lacks it.
    """
    places = {name: read_place(place, f"device_map[{name!r}]") for name, place in device_map.items()}
    for name, place in places.items():
        if place != "disk":
            check_device(place, f"device_map[{name!r}]")
    return places


def check_device_map(model: nn.Module | ModelShape, device_map: Mapping[str, PlaceLike]) -> None:
    """Check that a map names what a model has, and has a place for all that its state dict holds.

    Ranks: local.

    Args:
        model: Any module, or its shape.
        device_map: Places by names of modules, parameters or buffers; ``""`` is the whole model.

    Raises:
        ValueError: A name isn't in the model, a tensor is neither named nor in a module that is, or there is
            no such place.
        TypeError: ``model`` is no module, or ``device_map`` no mapping.
    """
    shape = model if isinstance(model, ModelShape) else read_shape(model, "check_device_map")
    if not isinstance(cast("object", device_map), Mapping):
        raise TypeError(
            f"device_map takes places by names of modules, such as {{'': 0}}: got {device_map!r}. "
            "load_checkpoint_and_dispatch takes 'auto' and the like, and infer_auto_device_map makes a map."
        )
    modules = {module.name for module in shape.root.modules()}
    leaves = list(shape.root.leaves())
    known = modules | {leaf.name for leaf in leaves}
    unknown = [name for name in device_map if name not in known]
    if unknown:
        raise ValueError(f"device_map names what the model doesn't have: {tell_unknown(unknown, known)}.")
    for name, place in device_map.items():
        read_place(place, f"device_map[{name!r}]")
    lost = [
        leaf.name for leaf in leaves if leaf.kind != "temporary" and place_of(leaf.name, device_map) is None
    ]
    if lost:
        raise ValueError(
            f"device_map has no place for {listed(lost)}. Name "
            f"{'it' if len(lost) == 1 else 'them'}, a module around, or the whole model as ''."
        )


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    low_zero: bool = False,
) -> dict[Place, int]:
    """Lower the budgets of accelerators, so that a model that would fit on few is spread evenly over all.

    Ranks: local. See :func:`get_max_memory` for what it asks the machine.

    Args:
        model: Any module, also on the meta device.
        max_memory: As :func:`get_max_memory` takes it. With a single accelerator and without this, a tenth of
            its memory is left for what the model computes.
        no_split_module_classes: Names of classes whose modules stay whole.
        dtype: With which the model will be loaded; see :func:`compute_module_sizes`.
        special_dtypes: Dtypes of single tensors, by name.
        low_zero: Leave as much as possible of the first accelerator free.

    Returns:
        Bytes by place, the fastest first. ``max_memory`` is left as it is.

    Raises:
        ValueError: As :func:`get_max_memory` and :func:`compute_module_sizes` do.
        TypeError: As :func:`get_max_memory` does.
    """
    shape = read_shape(model, "get_balanced_memory")
    check_names(shape, special_dtypes)
    options = PlanOptions(
        no_split_module_classes=no_split_module_classes or (),
        dtype=dtype,
        special_dtypes=special_dtypes or _NO_DTYPES,
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
    """Do what :func:`get_balanced_memory` does for a shape. Pure.

    Each accelerator but the last gets an equal share, and on top of it a quarter more than the largest block
    or, if that is larger, than layers have on average.

    Args:
        shape: Of the model.
        budgets: Bytes by place, the fastest first.
        options: Of the plan.
        low_zero: Leave as much as possible of the first accelerator free.
        leave_tenth: If there is one accelerator, leave a tenth of it free.
    """
    found = dict(budgets)
    accelerators = [place for place in budgets if is_accelerator(place)]
    used = [place for place in accelerators if budgets[place] > 0]
    if len(used) <= 1:
        if used and leave_tenth:
            found[used[0]] = found[used[0]] * 9 // 10
        return found
    sizes = sizes_of(shape, options.dtype, options.special_dtypes)
    total = sizes[""]
    share = total // (len(used) - low_zero)
    kept = options.whole_classes(shape)
    class_of = {module.name: module.class_name for module in shape.root.modules()}
    blocks: dict[str, int] = {}  # the first of each class stands for all
    for name, size in sizes.items():
        if name and class_of.get(name) in kept:
            blocks.setdefault(class_of[name], size)
    tensors = frozenset(get_module_leaves(sizes))
    layers = get_module_leaves({name: size for name, size in sizes.items() if name not in tensors})
    mean = sum(sizes[name] for name in layers) // max(len(layers), 1)
    share += int(1.25 * max([mean, *blocks.values()]))
    first, last = accelerators[0], used[-1]
    for place in used:
        if place != last and not (low_zero and place == first):
            found[place] = min(share, found[place])
    if low_zero:
        others = sum(found[place] for place in accelerators if place != first)
        found[first] = min(found[first], max(0, total - others))
    return found
