"""Places where a tensor of a big model may lie: accelerators, the host's memory, the disk."""

from __future__ import annotations

import re
from typing import TypeAlias

import torch

__all__ = (
    "Place",
    "PlaceLike",
    "check_device",
    "current_place",
    "is_accelerator",
    "is_on",
    "is_simulated",
    "order_of",
    "read_place",
)

Place: TypeAlias = int | str
"""An accelerator by its number, ``"mps"``, ``"cpu"`` (the host's memory), ``"disk"``, or a simulated device.

``"cpu:0"``, ``"cpu:1"`` and so on are simulated devices: they lie in the host's memory, and everything else
treats them as accelerators. So what a model does on several devices can be run without any.
"""

PlaceLike: TypeAlias = int | str | torch.device
"""What callers may write for a place: also devices of torch, ``"cuda:1"`` and ``"cuda"``, the current one."""

_SIMULATED = re.compile(r"cpu:(\d+)")
_NUMBERED = re.compile(r"([a-z]+)(?::(\d+))?")


def read_place(place: object, what: str = "device") -> Place:
    """Turn what a caller writes for a place into the one form that plans use.

    Whether this machine has the device isn't asked: plans are made for other machines too. ``"cuda"`` is the
    current device at the time of the call, and 0 where there is none.

    Args:
        place: A number, a name, or a device of torch.
        what: Where it stands, for errors.

    Raises:
        ValueError: No such place can exist.

    >>> read_place(0), read_place("cuda:1"), read_place("cpu"), read_place("cpu:1"), read_place("disk")
    (0, 1, 'cpu', 'cpu:1', 'disk')
    """
    if isinstance(place, int) and not isinstance(place, bool):
        if place >= 0:
            return place
    elif isinstance(place, (str, torch.device)):
        text = str(place)
        if text in ("cpu", "disk", "mps") or _SIMULATED.fullmatch(text):
            return text
        match = _NUMBERED.fullmatch(text)
        if match is not None and match[1] in _accelerator_types():
            if match[1] == "mps":
                return "mps"
            here = current_place()
            return int(match[2]) if match[2] else here if isinstance(here, int) else 0
    raise ValueError(
        f"{what}: there is no place {place!r}. Places are numbers of accelerators (0, 1, ...), names such as "
        "'cuda:0', 'mps', 'cpu', 'disk', and 'cpu:0', 'cpu:1' and so on for simulated devices."
    )


def _accelerator_types() -> frozenset[str]:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Without any, "cuda:0" is what somebody writes who plans for another machine.
    return frozenset({"cuda"} if here is None else {here.type})


def current_place() -> Place:
    """Return the place where models run if nobody says otherwise: the current accelerator, or the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None:
        return "cpu"
    return "mps" if here.type == "mps" else torch.accelerator.current_device_index()


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is on ``device``; on mps, torch numbers the devices of tensors alone."""
    return tensor.device.type == device.type and (tensor.device.index or 0) == (device.index or 0)


def is_simulated(place: Place) -> bool:
    """Whether it is a device that is simulated in the host's memory."""
    return isinstance(place, str) and _SIMULATED.fullmatch(place) is not None


def is_accelerator(place: Place) -> bool:
    """Whether it is no place of the host: an accelerator, or a simulated one."""
    return place not in ("cpu", "disk")


def order_of(place: Place) -> tuple[int, int]:
    """Where a place stands among others, the fastest first: accelerators, simulated ones, mps, cpu, disk."""
    if isinstance(place, int):
        return (0, place)
    match = _SIMULATED.fullmatch(place)
    if match is not None:
        return (1, int(match[1]))
    return (("mps", "cpu", "disk").index(place) + 2, 0)


def check_device(place: Place, what: str = "device") -> torch.device:
    """Return torch's device for a place.

    Args:
        place: Any but ``"disk"``, which holds no tensors of torch.
        what: Where it stands, for errors.

    Raises:
        ValueError: This machine has no such device, or it is the disk.
    """
    if place == "disk":
        raise ValueError(f"{what}: nothing is computed on the disk. Name a device, such as 'cpu'.")
    if place == "cpu" or is_simulated(place):
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here is not None else 0
    if place == "mps":
        if here is not None and here.type == "mps":
            return torch.device("mps")
    elif here is not None and here.type != "mps" and isinstance(place, int) and place < count:
        return torch.device(here.type, place)
    have = f"{count} of type {here.type}" if here is not None else "none"
    raise ValueError(
        f"{what}: this machine has no accelerator {place!r} (it has {have}). Use 'cpu', or 'cpu:0' and so on "
        "for devices that are simulated in the host's memory."
    )
