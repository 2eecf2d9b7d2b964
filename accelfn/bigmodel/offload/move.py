"""Inputs and outputs moved to where they are needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from accelfn.tree import find_device, send_to_device
from accelfn.tree.structure import flatten, is_packed_sequence

__all__ = ("input_device", "moved")


def input_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device of the first tensor among a module's inputs; None without any."""
    return find_device((args, kwargs))


def moved(value: Any, device: torch.device, skip_keys: Iterable[str] | None = None) -> Any:
    """Move the tensors of a value, which is given back itself if nothing is to move.

    The host waits for what comes to it from a device; what goes the other way is ordered by the device.

    Args:
        value: Any tree.
        device: Where to.
        skip_keys: Keys of mappings, at any depth, below which nothing is moved.
    """
    ahead = device.type != "cpu"  # else the host could read memory that the copy has yet to fill
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=ahead)
    # Most often all is there already, and a look is cheaper than taking the tree apart.
    kind = cast("Any", type(value))
    if kind in (tuple, list, dict):
        parts = value.values() if kind is dict else value
        if all(_is_there(part, device) for part in parts):
            return value
    # What holds state (a cache of keys and values, say) has to stay the same object.
    leaves, _ = flatten(value, is_packed_sequence)
    if all(
        (isinstance(leaf, torch.Tensor) and leaf.device == device) or not hasattr(leaf, "to")
        for leaf in leaves
    ):
        return value
    return send_to_device(value, device, non_blocking=ahead, skip_keys=skip_keys)


def _is_there(part: Any, device: torch.device) -> bool:
    if isinstance(part, torch.Tensor):
        return part.device == device
    return part is None or type(part) in (bool, int, float, str)
