"""Moves that hooks make: of a call's arguments and outputs, and of whole modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from accelfn.bigmodel.places import Place, check_device
from accelfn.tree import flatten, is_packed_sequence, send_to_device

__all__ = ("MoveModule", "SkipKeys", "default_place", "is_on", "module_tensors", "move_module", "move_tree")

T = TypeVar("T")

MoveModule: TypeAlias = Callable[[nn.Module, Place], None]
"""Brings all tensors of a module to a place. The seam at which tests count."""

SkipKeys: TypeAlias = str | Iterable[str] | None
"""Keys of dicts, at any depth, below which nothing is moved; names of keyword arguments are such keys."""


def move_tree(tree: T, device: torch.device, skip_keys: SkipKeys = None) -> T:
    """Move each tensor of ``tree`` to ``device``.

    Args:
        tree: Arguments or an output. If nothing in it has to move it comes back as it is, so that a list or
            dict that a module fills for its caller stays the caller's own.
        device: Where to.
        skip_keys: Keys of dicts below which nothing is moved.
    """
    leaves, _ = flatten(tree, is_packed_sequence)
    if all(_stays(leaf, device) for leaf in leaves):
        return tree
    return send_to_device(tree, device, skip_keys=skip_keys)


def _stays(leaf: Any, device: torch.device) -> bool:
    if isinstance(leaf, torch.Tensor):
        return is_on(leaf, device)
    # What else has a .to is asked, as only it knows; a class has one for its instances.
    return isinstance(leaf, type) or not callable(getattr(leaf, "to", None))


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is on ``device``. A device without a number is the first of its type."""
    own = tensor.device
    return own.type == device.type and (own.index or 0) == (device.index or 0)


def module_tensors(module: nn.Module) -> Iterable[torch.Tensor]:
    """Give the parameters and buffers of ``module``, with those of all modules inside of it."""
    return chain(module.parameters(), module.buffers())


def move_module(module: nn.Module, place: Place) -> None:
    """Move all parameters and buffers of ``module`` to ``place``, with their gradients."""
    module.to(check_device(place))


def default_place() -> Place:
    """Give the place where models run if nobody says otherwise: the current accelerator, or the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None:
        return "cpu"
    return "mps" if here.type == "mps" else torch.accelerator.current_device_index()
