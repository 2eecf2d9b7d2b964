"""What every package that quantises has to offer: a record of three callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

__all__ = ("Quantizer", "has_bias", "stand_in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """How a package quantises one layer.

    Attributes:
        objection: Says why the weight of a layer can't be quantised on a device; None where it can.
        make: Gives the layer that takes the place of one, on the meta device.
        fill: Quantises a weight of shape ``(out_features, in_features)`` into such a layer, on a device. It
            writes into the layer only.
        parts: Names of the tensors beside ``"weight"`` from which a layer is known to have been quantised
            when it was saved. Empty where such layers can't be read.
        restore: Puts what was saved into such a layer, on a device: a tensor for ``"weight"`` and for each of
            its parts. None where that can't be done.
    """

    objection: Callable[[nn.Linear, torch.device], str | None]
    make: Callable[[nn.Linear], nn.Linear]
    fill: Callable[[nn.Linear, torch.Tensor, torch.device], None]
    parts: Callable[[str], bool] = lambda name: False
    restore: Callable[[nn.Linear, Mapping[str, torch.Tensor], torch.device], None] | None = None


def has_bias(layer: nn.Linear) -> bool:
    """Whether a layer has a bias."""
    return cast("object", layer.bias) is not None


def stand_in(layer: nn.Linear, new: nn.Linear) -> nn.Linear:
    """Let ``new`` stand where ``layer`` stood: with its bias, its mode and its hooks.

    Args:
        layer: The one that goes.
        new: Changed in place, and given back.
    """
    new.bias = layer.bias
    new.training = layer.training
    for name, value in vars(layer).items():
        if name.endswith("_hooks") or "_hooks_" in name:
            setattr(new, name, value)
    return new
