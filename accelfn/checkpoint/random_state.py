"""The states of random number generators as arrays, and back."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch

from accelfn.checkpoint.by_rank import place_of
from accelfn.context import Context


def random_states(ctx: Context) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy (where it is used), torch and the devices.

    Ranks: local; each rank has its own.

    Returns:
        ``python``: version, int64 array of 625 and the second half of a pair of Gaussian numbers or None;
        ``numpy``: the same of its Mersenne Twister, where NumPy is imported; ``torch``: uint8; for an
        accelerator its type, with a list of uint8: of this rank's device, or of all where it is alone on its
        machine.
    """
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": {"version": version, "numbers": _array(numbers), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        kind, numbers, place, has_gauss, gauss = importlib.import_module("numpy.random").get_state()
        if kind == "MT19937":  # another generator is saved by the program that has put it there
            states["numpy"] = {
                "numbers": _array([*map(int, numbers), int(place)]),
                "gauss": float(gauss) if has_gauss else None,
            }
    if ctx.device.type not in ("cpu", "meta"):
        module = torch.get_device_module(ctx.device.type)
        states[ctx.device.type] = [module.get_rng_state(index) for index in _devices(ctx)]
    return states


def _array(numbers: Any) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64, device="cpu")


def _numbers(array: torch.Tensor) -> list[int]:
    return cast("list[int]", array.tolist())  # pyright: ignore[reportUnknownMemberType]


def _devices(ctx: Context) -> list[int]:
    if ctx.world.local_size == 1:
        return list(range(torch.get_device_module(ctx.device.type).device_count()))
    return [ctx.device.index or 0]


def restore_random_states(ctx: Context, states: Mapping[str, Any], *, is_own: bool) -> None:
    """Bring the generators to the states that were kept.

    Ranks: local.

    Args:
        ctx: This rank and its device.
        states: From :func:`random_states`.
        is_own: Whether this rank's were kept. A rank that the world before didn't have gets those of another
            one, moved on by its own place, so that no two places draw alike.
    """
    python = states["python"]
    random.setstate((python["version"], tuple(_numbers(python["numbers"])), python["gauss"]))
    torch.set_rng_state(states["torch"])
    if "numpy" in states and "numpy" in sys.modules:
        *numbers, place = _numbers(states["numpy"]["numbers"])
        gauss = states["numpy"]["gauss"]
        numpy = importlib.import_module("numpy")
        state = ("MT19937", numpy.array(numbers, dtype="uint32"), place, int(gauss is not None), gauss or 0.0)
        numpy.random.set_state(state)
    kept = cast("list[torch.Tensor]", states.get(ctx.device.type, []))
    if kept and ctx.device.type != "cpu":
        module = torch.get_device_module(ctx.device.type)
        for index, state in zip(_devices(ctx), kept, strict=False):
            module.set_rng_state(state, index)
    if not is_own:
        _move_on(place_of(ctx))


def _move_on(place: int) -> None:
    """Begin anew with seeds drawn from the states at hand and the place of this rank."""
    # A text is hashed, so that near numbers don't give near states.
    own = random.Random(f"{random.getrandbits(64)} {place}").getrandbits
    random.seed(own(64))
    torch.random.manual_seed(own(63))  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random").seed(own(32))
