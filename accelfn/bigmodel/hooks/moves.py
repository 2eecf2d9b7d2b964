"""Whole modules, and what takes them from place to place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn

from accelfn.bigmodel.places import Place, check_device

__all__ = ("MoveModule", "default_place", "is_on", "module_tensors", "move_module")

MoveModule: TypeAlias = Callable[[nn.Module, Place], None]
"""Brings all tensors of a module to a place. The seam at which tests count."""


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is on ``device``. A device without a number is the first of its type."""
    own = tensor.device
    return own.type == device.type and (own.index or 0) == (device.index or 0)


def module_tensors(module: nn.Module, recurse: bool = True) -> Iterable[torch.Tensor]:
    """Give the parameters and buffers of ``module``, and those inside of it if ``recurse``."""
    return chain(module.parameters(recurse), module.buffers(recurse))


def move_module(module: nn.Module, place: Place) -> None:
    """Move all parameters and buffers of ``module`` to ``place``, with their gradients."""
    module.to(check_device(place))


def default_place() -> Place:
    """Give the place where models run if nobody says otherwise: the current accelerator, or the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None:
        return "cpu"
    return "mps" if here.type == "mps" else torch.accelerator.current_device_index()
