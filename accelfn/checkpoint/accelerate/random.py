"""The states of random number generators: as Accelerate keeps them, and as checkpoints here do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

__all__ = ("from_accelerate_random", "to_accelerate_random")

_OWN = ("python", "numpy", "torch")


def from_accelerate_random(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn what ``from_accelerate`` gives as ``random`` into what ``random_states`` gives, for all ranks.

    Accelerate keeps the generators of all devices on every rank. Of several ranks each has one device here:
    that of its number, counted round the devices of its machine.

    Args:
        states: By rank; all of them.
    """
    return [_own_form(state, rank, len(states)) for rank, state in enumerate(states)]


def _own_form(state: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    own: dict[str, Any] = {}
    if state.get("python") is not None:
        version, numbers, gauss = state["python"]
        own["python"] = {"version": version, "numbers": _array(numbers), "gauss": gauss}
    own["torch"] = state["torch"]
    if state.get("numpy") is not None:
        kind, numbers, place, has_gauss, gauss = state["numpy"]
        if kind == "MT19937":
            own["numpy"] = {
                "numbers": _array([*numbers.tolist(), int(place)]),
                "gauss": float(gauss) if has_gauss else None,
            }
    for name, value in state.items():
        if name not in _OWN and isinstance(value, (list, tuple)):
            devices = list(cast("Sequence[torch.Tensor]", value))
            own[name] = devices if size == 1 or not devices else [devices[rank % len(devices)]]
    return own


def to_accelerate_random(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn the states of all ranks into what ``to_accelerate`` takes as ``random``.

    Each rank of several has its own device here, and Accelerate wants all devices of the machine on every
    rank: they are taken to be those of all ranks, in order.
    """
    ranks = [_their_form(state) for state in states]
    if len(states) > 1:
        names = {name for state in states for name, value in state.items() if isinstance(value, list)}
        for name in sorted(names):
            devices = [device for state in states for device in state.get(name, ())]
            for state in ranks:
                state[name] = devices
    return ranks


def _their_form(state: Mapping[str, Any]) -> dict[str, Any]:
    python = state["python"]
    theirs: dict[str, Any] = {
        "python": (python["version"], tuple(_numbers(python["numbers"])), python["gauss"]),
        **{name: value for name, value in state.items() if name not in _OWN},
    }
    if "numpy" in state:
        *numbers, place = _numbers(state["numpy"]["numbers"])
        gauss = state["numpy"]["gauss"]
        key = torch.tensor(numbers, dtype=torch.uint32)
        theirs["numpy"] = ("MT19937", key, place, int(gauss is not None), gauss or 0.0)
    return {**theirs, "torch": state["torch"]}


def _array(numbers: Any) -> torch.Tensor:
    return torch.tensor(list(numbers), dtype=torch.int64)


def _numbers(array: torch.Tensor) -> list[int]:
    return cast("list[int]", array.tolist())  # pyright: ignore[reportUnknownMemberType]
