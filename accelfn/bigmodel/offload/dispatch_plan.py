"""Where each tensor of a model lies at rest, and where it is used: read off a device map. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from accelfn.bigmodel.places import Place, check_device, is_accelerator, order_of, read_place

__all__ = ("DispatchPlan", "Lies", "plan_dispatch", "read_map")


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
        torn: Groups of tied tensors that can't stay tied, since they are used on different accelerators.
    """

    main: Place
    lies: Mapping[str, Lies]
    torn: tuple[tuple[str, ...], ...] = ()

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
    unsaved: Collection[str] = (),
) -> DispatchPlan:
    """Return where each tensor of a model lies and is used.

    What the map puts on an accelerator lies and is used there. What it puts on the host or the disk is used
    on the main device. Of that, buffers lie on the main device anyway, unless ``offload_buffers``: they are
    small, and modules write into them.

    Args:
        leaves: Full names of the tensors, and whether each is a parameter.
        places: By name of a module or tensor; the longest that fits counts.
        ties: Groups of names that are one tensor.
        main: Where inputs come to; None takes the first accelerator of the map, or else the CPU.
        offload_buffers: Whether buffers travel, too.
        unsaved: Names of tensors that state dicts don't have. The map needn't say anything of them: then they
            lie on the main device.

    Raises:
        ValueError: The map says nothing of a tensor.
    """
    accelerators = sorted({place for place in places.values() if is_accelerator(place)}, key=order_of)
    if main is None:
        main = accelerators[0] if accelerators else "cpu"
    found = {name: _place_of(name, places) for name in leaves}
    found.update({name: main for name in unsaved if found[name] is None})
    missing = [name for name, place in found.items() if place is None]
    if missing:
        raise ValueError(
            f"device_map says nothing of {_listed(missing)}. Name these, or a module above them; '' is the "
            "whole model."
        )
    lies: dict[str, Lies] = {}
    for name, place in found.items():
        assert place is not None
        used = place if is_accelerator(place) else main
        stays = not leaves[name] and not offload_buffers
        lies[name] = Lies(used if stays else place, used)
    torn: list[tuple[str, ...]] = []
    for group in ties:
        uses = {lies[name].used for name in group}
        resident = {lies[name].used for name in group if not lies[name].travels}
        for name in group:
            if lies[name].used in resident:  # it is there already for another name
                lies[name] = Lies(lies[name].used, lies[name].used)
        if len(uses) > 1:
            torn.append(group)
    return DispatchPlan(main=main, lies=lies, torn=tuple(torn))


def _place_of(name: str, places: Mapping[str, Place]) -> Place | None:
    while True:
        if name in places:
            return places[name]
        if not name:
            return None
        name = name.rpartition(".")[0]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more
