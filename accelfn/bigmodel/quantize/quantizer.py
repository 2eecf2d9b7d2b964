"""What a package that quantises has to offer: a record of callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

__all__ = ("Quantizer", "has_bias", "stand_in")


def _leave(layer: nn.Linear) -> None:
    del layer


def _is_unknown(parts: Mapping[str, torch.dtype]) -> str | None:
    return f"has {', '.join(parts)}"


def _restore_nothing(layer: nn.Linear, saved: Mapping[str, torch.Tensor], device: torch.device) -> None:
    del layer, saved, device


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """How a package quantises one layer.

    Attributes:
        objection: Says why the weight of a layer can't be quantised on a device; None where it can.
        make: Gives the layer that takes the place of one, on the meta device.
        fill: Quantises a weight of shape ``(out_features, in_features)`` into such a layer, on a device. It
            writes into the layer only.
        travels: Whether a quantised weight may lie in the host's memory and be used on an accelerator.
        settle: Called with each layer whose weight does so.
        saved_parts: Names of the tensors that a quantised layer has in a state dict, beside its weight and
            bias; one that ends in ``"*"`` stands for all that begin so. Empty where they can't be read.
        differs: Says how a layer that was saved, given as dtypes by name of ``"weight"`` and of its parts, is
            another one than ``make`` gives; None where it is the same.
        restore: Puts such a layer's tensors, by name, into what ``make`` gave, on a device.
    """

    objection: Callable[[nn.Linear, torch.device], str | None]
    make: Callable[[nn.Linear], nn.Linear]
    fill: Callable[[nn.Linear, torch.Tensor, torch.device], None]
    travels: bool
    settle: Callable[[nn.Linear], None] = _leave
    saved_parts: tuple[str, ...] = ()
    differs: Callable[[Mapping[str, torch.dtype]], str | None] = _is_unknown
    restore: Callable[[nn.Linear, Mapping[str, torch.Tensor], torch.device], None] = _restore_nothing

    def is_part(self, name: str) -> bool:
        """Whether a quantised layer has a tensor of that name in a state dict."""
        return any(
            name.startswith(part[:-1]) if part.endswith("*") else name == part for part in self.saved_parts
        )


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
