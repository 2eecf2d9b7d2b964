"""Local SGD: ranks train independently, and average their parameters every few steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from accelfn.comm import reduce
from accelfn.context import Context, check_context
from accelfn.errors import ConfigurationError

__all__ = ("LocalSGDState", "average_parameters", "local_sgd_step")


class LocalSGDState(NamedTuple):
    """How many optimizer steps the ranks have made by themselves since they last averaged."""

    num_steps: int = 0


def average_parameters(ctx: Context, model: nn.Module) -> None:
    """Set the trainable parameters of ``model`` to their mean over all ranks. Writes into them.

    Buffers and the state of optimizers stay each rank's own.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: Prepared or not; the same on every rank but for its values.

    Raises:
        MismatchError: The parameters differ in a name, shape or dtype.
    """
    check_context("average_parameters", ctx)
    if ctx.num_processes == 1:
        return
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    values = {name: one.detach() for name, one in parameters.items()}
    with torch.no_grad():
        for name, mean in reduce(ctx.tagged("average_parameters"), values, "mean").items():
            parameters[name].copy_(mean)


def local_sgd_step(ctx: Context, model: nn.Module, state: LocalSGDState, *, every: int = 8) -> LocalSGDState:
    """Count an optimizer step, and average the parameters over all ranks after each ``every`` of them.

    The forward and backward passes between stand under :func:`accelfn.no_sync`. At the end of training call
    :func:`average_parameters`. Optimizers keep their own state on each rank. A check of replicas
    (``Guard.check_replicas_every``) would find that they differ, as they are meant to.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: What was stepped.
        state: ``LocalSGDState()`` first, and then what the last call returned.
        every: Optimizer steps between two averages, at least 1. With 1 and plain SGD the parameters are what
            averaged gradients would give.

    Returns:
        The next state.

    Raises:
        ValueError: ``every`` is below 1.
        ConfigurationError: The context is in exact mode, where ranks never train independently.
        MismatchError: The parameters differ between ranks in a name, shape or dtype.

    >>> model = nn.Linear(1, 1)
    >>> state = local_sgd_step(Context(), model, LocalSGDState(), every=2)
    >>> state
    LocalSGDState(num_steps=1)
    >>> local_sgd_step(Context(), model, state, every=2)
    LocalSGDState(num_steps=0)
    """
    check_context("local_sgd_step", ctx)
    if every < 1:
        raise ValueError(f"local_sgd_step: every must be at least 1 step, got {every}.")
    if ctx.reduction is not None:
        raise ConfigurationError(
            'local_sgd_step: this context has reduction="canonical", which sums the gradients of all ranks '
            "in each step, and Local SGD lets ranks train independently. Use one of the two."
        )
    if state.num_steps + 1 < every:
        return LocalSGDState(state.num_steps + 1)
    average_parameters(ctx, model)
    return LocalSGDState()
