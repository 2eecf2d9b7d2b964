"""Random states, memory and waiting, for the device of any type."""

from __future__ import annotations

from typing import Any

import torch

from accelfn.context.xla import XlaModule, loaded_xla
from accelfn.devices import device_type


def device_module(kind: str) -> Any:
    """Return torch's module of a type of accelerator, such as ``torch.cuda``; for XLA one that is like it."""
    return XlaModule() if kind == "xla" else torch.get_device_module(kind)


def _number(device: torch.device) -> tuple[int, ...]:
    """Return the arguments that select a device; none for types with a single device."""
    return () if device_type(device.type).numbering == "none" else (device.index or 0,)


def device_random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator: uint8, on the host. Waits for the device."""
    if device.type == "cpu":
        return torch.get_rng_state()
    return device_module(device.type).get_rng_state(*_number(device))


def set_device_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Restore a state from :func:`device_random_state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        device_module(device.type).set_rng_state(state, *_number(device))


def seed_torch(seed: int) -> None:
    """Seed torch's generators: of the CPU, of all devices of its accelerator, and of XLA if it is loaded."""
    torch.random.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    xla = loaded_xla()
    if xla is not None:
        xla.manual_seed(seed)


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has finished its work; a program on the CPU has nothing to wait for."""
    if device.type != "cpu":
        device_module(device.type).synchronize(*_number(device))


def empty_device_cache(kind: str) -> None:
    """Release torch's cached memory on devices of a type, where it has a cache."""
    empty = getattr(device_module(kind), "empty_cache", None)
    if empty is not None:
        empty()
