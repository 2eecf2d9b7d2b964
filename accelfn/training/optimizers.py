"""One optimizer or several, as functions take them, and their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.parallel.engines import EngineOptimizer
from accelfn.parallel.pointers import newest


def list_optimizers(operation: str, optimizer: object, or_else: str = "") -> tuple[Optimizer, ...]:
    """Return one optimizer or several as a tuple; ``or_else`` is added to the error.

    Raises:
        TypeError: It is anything else.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, Optimizer):
        return (optimizer,)
    several = cast("Sequence[object]", optimizer) if isinstance(optimizer, (list, tuple)) else ()
    found = tuple(one for one in several if isinstance(one, Optimizer))
    if not found or len(found) < len(several):
        raise TypeError(
            f"{operation}: optimizer must be a torch optimizer or a sequence of them{or_else}; got {kind}."
        )
    return found


def list_parameters(operation: str, parameters: object) -> list[torch.Tensor]:
    """Return parameters as a list.

    Raises:
        TypeError: They are a module.
    """
    if isinstance(parameters, nn.Module):
        kind = type(parameters).__name__
        raise TypeError(f"{operation}: takes parameters, got the module {kind}. Pass model.parameters().")
    return [parameters] if isinstance(parameters, torch.Tensor) else list(cast("Any", parameters))


def parameters_in(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return the parameters of optimizers, each once; of an engine's those of its model."""
    found: dict[int, torch.Tensor] = {}
    for optimizer in optimizers:
        if isinstance(optimizer, EngineOptimizer):  # its groups hold the engine's own tensors
            groups = [{"params": optimizer.model_parameters}]
        else:
            groups = optimizer.param_groups
        for group in groups:
            for item in group["params"]:
                found[id(item)] = item
    return list(found.values())


def parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Return the ids of an optimizer's parameters, or of their successors."""
    return frozenset(id(newest(parameter)) for parameter in parameters_in([optimizer]))
