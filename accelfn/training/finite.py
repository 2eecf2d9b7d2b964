"""Gradients that are infinite or NaN are found before a step, and not by a model that is ruined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from accelfn.comm import gather_object
from accelfn.context import Context
from accelfn.errors import NonFiniteGradientError
from accelfn.tree import flatten

__all__ = ("NamedParameters", "check_gradients", "check_tensors", "named_parameters")


class NamedParameters(NamedTuple):
    """The parameters of an optimizer.

    Attributes:
        tree: With the best paths there are: their names, or groups and places in them.
        name: What the tree is called in paths.
    """

    tree: Any
    name: str


def named_parameters(optimizer: Optimizer) -> NamedParameters:
    """Return the parameters of an optimizer, by name where it was made from ``model.named_parameters()``."""
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
    all_paths: list[str] = []
    gradients: list[torch.Tensor | None] = []
    for optimizer in optimizers:
        tree, name = named_parameters(optimizer)
        parameters, structure = flatten(tree)
        all_paths += structure.paths(name)
        gradients += [parameter.grad for parameter in parameters]
    check_tensors(ctx, all_paths, gradients)


def check_tensors(ctx: Context, paths: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse gradients that are not finite, by the path of each. Waits for the device.

    Ranks: every rank of ``ctx``.

    Raises:
        NonFiniteGradientError: On every rank, with what each has found.
    """
    found = [
        path
        for path, gradient in zip(paths, gradients, strict=True)
        if gradient is not None and not _is_finite(gradient)
    ]
    by_rank = gather_object(ctx.tagged("check_gradients"), tuple(found))
    if any(by_rank):
        raise NonFiniteGradientError(tuple(by_rank))


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient._values() if gradient.is_sparse else gradient).all())
