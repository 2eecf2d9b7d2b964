"""Tensors that are spread over ranks, recognised without loading torch's module for them."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch

__all__ = ("is_dtensor", "local_of")


def is_dtensor(value: object) -> bool:
    """Return whether ``value`` is a ``DTensor``, of which ranks may hold parts.

    Ranks: local.
    """
    # To import the module takes half a second; where nobody has loaded it, there is no DTensor.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor is on this rank: of a ``DTensor`` its part, without gradient; else itself.

    It is the very part, so that torch counts what is written into it as a write into the tensor.

    Ranks: local.
    """
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return cast("Any", tensor).to_local()
