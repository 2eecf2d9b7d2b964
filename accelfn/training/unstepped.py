"""Gradients that a step leaves: of parameters in the same models, which other optimizers step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from accelfn.training.optimizers import parameters_in
from accelfn.training.prepared import MARK


class Siblings:
    """The parameters of one prepared model: the mark of each of them."""

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        """Refer to parameters weakly."""
        self._parameters = [weakref.ref(one) for one in parameters]

    def __len__(self) -> int:
        """Return the number of parameters."""
        return len(self._parameters)

    def with_gradients(self) -> list[torch.Tensor]:
        """Return the parameters that are alive and have a gradient."""
        found = [reference() for reference in self._parameters]
        return [one for one in found if one is not None and one.grad is not None]

    def __reduce__(self) -> tuple[type, tuple[int, ...]]:
        """Copy and pickle as a plain mark: parameters of a copy have gradients of their own."""
        return bool, (1,)


class Unstepped(Siblings):
    """Parameters with gradients of earlier losses, which steps of other optimizers have left.

    Attributes:
        scale: Loss scale of the gradients, to which those of later losses may be added. None where they may
            not, since they are sums whose weights are gone, or divided already.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = (), scale: torch.Tensor | None = None) -> None:
        """Refer to parameters weakly."""
        super().__init__(parameters)
        self.scale = scale

    @override
    def __reduce__(self) -> tuple[type, tuple[int, ...]]:
        """Copy and pickle as None."""
        return type(None), ()

    def forget_cleared(self) -> list[torch.Tensor]:
        """Keep only parameters that have gradients still, and return them."""
        waiting = self.with_gradients()
        self._parameters = [weakref.ref(one) for one in waiting]
        return waiting


def mark_siblings(model: nn.Module) -> None:
    """Mark the parameters of a prepared model as trained together."""
    siblings = Siblings(model.parameters())
    for parameter in model.parameters():
        setattr(parameter, MARK, siblings)


def left_by(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return the parameters with gradients in the models of some optimizers which none of these steps.

    Ranks: local.
    """
    stepped = {id(one): vars(one).get(MARK) for one in parameters_in(optimizers)}
    models = {id(one): one for one in stepped.values() if isinstance(one, Siblings)}
    if sum(map(len, models.values())) <= len(stepped):  # as usual: they step all
        return []
    return [one for model in models.values() for one in model.with_gradients() if id(one) not in stepped]
