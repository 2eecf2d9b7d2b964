"""Where every tensor of a model lies: decided from names and sizes alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple, cast

import torch

from accelfn.bigmodel.places import Place, is_accelerator
from accelfn.bigmodel.plan.budgets import MaxMemory, read_budgets
from accelfn.bigmodel.plan.clean import clean_device_map
from accelfn.bigmodel.plan.fill import NoRoom, Room, fill
from accelfn.bigmodel.plan.near import tell_unknown
from accelfn.bigmodel.plan.shape import LeafShape, ModelShape, require_shape
from accelfn.bigmodel.plan.sizes import (
    AnyDtype,
    CustomDtype,
    check_names,
    counted_bytes,
    read_class_names,
    read_dtype,
    read_dtypes,
)
from accelfn.bigmodel.plan.units import Units
from accelfn.tree.sizes import size_text

__all__ = ("DevicePlan", "PlacePlan", "PlanOptions", "TensorCopy", "plan_device_map")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How a model may be spread.

    Attributes:
        no_split_module_classes: Names of classes whose modules stay whole. Of a name that is no module's
            class the plan warns, unless the model itself has it in ``_no_split_modules``: models of
            transformers name classes there that some of them lack.
        dtype: With which the model will be loaded; None for its own. It never makes a tensor larger.
        special_dtypes: Dtypes of single tensors, by name; the model has to have all of them.
        clean_result: Whether the map names a module instead of all its parts, where these lie in one place.
        offload_buffers: Whether buffers of what is offloaded are offloaded too. It only silences the warning
            that there is no room for them.
        fallback_allocation: Where the first part for an accelerator is too large for it, put the first one
            there that isn't, instead of leaving it empty.
    """

    no_split_module_classes: Collection[str] = ()
    dtype: AnyDtype | None = None
    special_dtypes: Mapping[str, AnyDtype] = field(default_factory=lambda: MappingProxyType({}))
    clean_result: bool = True
    offload_buffers: bool = False
    fallback_allocation: bool = False

    def __post_init__(self) -> None:
        """Take one name for several, and refuse unknown dtypes."""
        names = read_class_names(self.no_split_module_classes)
        special = read_dtypes(self.special_dtypes)
        object.__setattr__(self, "no_split_module_classes", names)
        object.__setattr__(self, "special_dtypes", MappingProxyType(special))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", read_dtype(self.dtype))


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
        from accelfn.bigmodel.plan.picture import draw_device_plan

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
    >>> from accelfn.bigmodel.plan.shape import read_shape
    >>> shape = read_shape(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)))
    >>> plan_device_map(shape, {0: 200, 1: 200}).device_map
    {'0': 0, '1': 1, '2': 1}
    """
    require_shape("plan_device_map", shape)
    options = PlanOptions() if options is None else options
    check_names(shape, options.special_dtypes)
    rooms = _rooms(read_budgets(budgets, "budgets"))
    plan = _plan(shape, rooms, options, say)
    if isinstance(plan, NoRoom) and shape.ties:
        # The error is that of the first try: it speaks of no copies, for which nobody has asked.
        other = _plan(shape, rooms, options, say, whole_owners=False)
        if isinstance(other, NoRoom):
            other = _plan(shape, rooms, options, say, keep_ties=False)
        plan = plan if isinstance(other, NoRoom) else other
    if isinstance(plan, NoRoom):
        raise ValueError(plan.message)
    return plan


def _rooms(budgets: Mapping[Place, int]) -> list[Room]:
    places = [*budgets, *(("disk",) if "disk" not in budgets else ())]
    accelerators = [place for place in places if is_accelerator(place)]
    main = ("mps",) if "mps" in accelerators else (*accelerators[:1], "cpu")
    return [Room(place, budgets.get(place), place in main) for place in places]


def _plan(
    shape: ModelShape,
    rooms: Sequence[Room],
    options: PlanOptions,
    say: Callable[[str], object] | None,
    whole_owners: bool = True,
    keep_ties: bool = True,
) -> DevicePlan | NoRoom:
    dtype = cast("torch.dtype | CustomDtype | None", options.dtype)
    special = cast("Mapping[str, torch.dtype | CustomDtype]", options.special_dtypes)
    no_split = frozenset(options.no_split_module_classes)
    units = Units(shape, no_split, lambda leaf: counted_bytes(leaf, dtype, special), keep_ties)
    fallback = options.fallback_allocation
    filled = fill(units, rooms, fallback=fallback, whole_owners=whole_owners, say=say)
    if isinstance(filled, NoRoom):
        return filled
    leaves: list[list[LeafShape]] = [[] for _ in rooms]
    tied: dict[int, list[tuple[str, int, int]]] = {}
    start = 0
    for end, room in zip(units.ends, filled.room_of, strict=True):
        for leaf, size in zip(units.leaves[start:end], units.sizes[start:end], strict=True):
            if leaf.tie is not None:
                names = tied.setdefault(leaf.tie, [])
                own = names[0][2] if names else size
                # One that is there under another name takes nothing.
                size = 0 if any(other == room for _, other, _ in names) else own
                names.append((leaf.name, room, own))
            leaves[room].append(leaf if size == leaf.num_bytes else leaf._replace(num_bytes=size))
        start = end
    places = [
        PlacePlan(
            place=room.place,
            budget=room.num_bytes,
            used=filled.used[number],
            reserved=filled.reserved[number],
            leaves=tuple(leaves[number]),
        )
        for number, room in enumerate(rooms)
    ]
    ties: list[tuple[str, ...]] = []
    copies: list[TensorCopy] = []
    for group in tied.values():
        names = tuple(name for name, _, _ in group)
        if len({room for _, room, _ in group}) == 1:
            ties.append(names)
        else:
            copies.append(TensorCopy(names, tuple(rooms[room].place for _, room, _ in group), group[0][2]))
    return DevicePlan(
        entries=MappingProxyType({name: rooms[room].place for name, room in filled.entries}),
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
