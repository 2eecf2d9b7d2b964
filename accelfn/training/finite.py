"""Gradients that are infinite or no number are found before a step, and not by a model that is ruined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from accelfn.comm import gather_object
from accelfn.context import Context
from accelfn.errors import NonFiniteGradientError
from accelfn.tree import flatten

__all__ = ("NamedParameters", "check_gradients", "named_parameters")


class NamedParameters(NamedTuple):
    """The parameters of an optimizer.

    Attributes:
        tree: With the best paths there are: their names, or groups and places in them.
        name: What the tree is called in paths.
    """

    tree: Any
    name: str


def named_parameters(optimizer: Optimizer) -> NamedParameters:
    """Give the parameters of an optimizer, by name where it was made from ``model.named_parameters()``."""
    groups = optimizer.param_groups
    names = [name for group in groups for name in group.get("param_names", ())]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len(set(names)) == len(parameters):
        return NamedParameters(dict(zip(names, parameters, strict=True)), "parameters")
    return NamedParameters([{"params": group["params"]} for group in groups], "param_groups")


def check_gradients(ctx: Context, optimizers: Sequence[Optimizer]) -> None:
    """Refuse gradients that are not finite, by name. Waits for the device.

    Ranks: every rank of ``ctx``.

    Raises:
        NonFiniteGradientError: On every rank, with what each has found.
    """
    found: list[str] = []
    for optimizer in optimizers:
        tree, name = named_parameters(optimizer)
        parameters, structure = flatten(tree)
        paths = structure.paths(name)
        for path, parameter in zip(paths, parameters, strict=True):
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                found.append(path)
    by_rank = gather_object(ctx.tagged("check_gradients"), tuple(found))
    if any(by_rank):
        raise NonFiniteGradientError(tuple(by_rank))
