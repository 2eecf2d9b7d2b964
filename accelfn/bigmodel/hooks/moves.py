"""Whole modules, and what takes them from place to place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import TypeAlias

import torch
from torch import nn

from accelfn.bigmodel.places import Place, check_device

__all__ = ("MoveModule", "module_tensors", "move_module")

MoveModule: TypeAlias = Callable[[nn.Module, Place], None]
"""Brings all tensors of a module to a place. The seam at which tests count."""


def module_tensors(module: nn.Module, recurse: bool = True) -> Iterable[torch.Tensor]:
    """Return the parameters and buffers of ``module``, and those inside of it if ``recurse``."""
    return chain(module.parameters(recurse), module.buffers(recurse))


def move_module(module: nn.Module, place: Place) -> None:
    """Move all parameters and buffers of ``module`` to ``place``, with their gradients."""
    module.to(check_device(place))
