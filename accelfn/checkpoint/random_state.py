"""Convert the states of random number generators to arrays, and restore them."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch

from accelfn.checkpoint.by_rank import place_of
from accelfn.context import (
    Context,
    device_module,
    device_random_state,
    seed_torch,
    set_device_random_state,
)


def random_states(ctx: Context) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy (if it is imported), torch and the devices.

    Ranks: local; each rank has its own states.

    Returns:
        ``python``: version, int64 array of 625 numbers, and the next Gaussian number or None; ``numpy``: the
        same for its Mersenne Twister; ``torch``: uint8; under the type of the accelerator, a list of uint8:
        of this rank's device, or of all devices if no other rank is on the machine.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "numbers": _array(numbers), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        kind, numbers, position, has_gauss, gauss = importlib.import_module("numpy.random").get_state()
        if kind == "MT19937":  # a program that installs another generator has to save it
            states["numpy"] = {
                "numbers": _array([*map(int, numbers), int(position)]),
                "gauss": float(gauss) if has_gauss else None,
            }
    if ctx.device.type not in ("cpu", "meta"):
        states[ctx.device.type] = [device_random_state(device) for device in _devices(ctx)]
    return states


def _array(numbers: Any) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device="cpu")


def _numbers(array: torch.Tensor) -> list[int]:
    return cast("list[int]", array.tolist())  # pyright: ignore[reportUnknownMemberType]


def _devices(ctx: Context) -> list[torch.device]:
    kind = ctx.device.type
    if ctx.world.local_size == 1:
        return [torch.device(kind, index) for index in range(device_module(kind).device_count())]
    return [ctx.device]


def restore_random_states(ctx: Context, states: Mapping[str, Any], *, is_own: bool) -> None:
    """Restore the generators.

    Ranks: local.

    Args:
        ctx: This rank and its device.
        states: From :func:`random_states`.
        is_own: Whether the states were saved for this rank. Otherwise they are another rank's, and the
            generators are reseeded from them and this rank's place, so that no two places draw the same.
    """
    python = states["python"]
    random.setstate((python["version"], tuple(_numbers(python["numbers"])), python["gauss"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        *numbers, position = _numbers(states["numpy"]["numbers"])
        gauss = states["numpy"]["gauss"]
        numpy = importlib.import_module("numpy")
        array = numpy.array(numbers, dtype="uint32")
        numpy.random.set_state(("MT19937", array, position, int(gauss is not None), gauss or 0.0))
    device_states = states.get(ctx.device.type, ())
    if device_states and ctx.device.type != "cpu":
        for device, state in zip(_devices(ctx), device_states, strict=False):
            set_device_random_state(device, state)
    if not is_own:
        _reseed(place_of(ctx))


def _reseed(place: int) -> None:
    """Seed all generators from their current states and the place of this rank."""
    # Random hashes a text, so near numbers don't lead to related states.
    draw = random.Random(f"{random.getrandbits(64)} {place}").getrandbits
    random.seed(draw(64))
    seed_torch(draw(63))
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(draw(32))
