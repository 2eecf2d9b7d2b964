"""Local SGD: ranks train independently, and average their parameters every few steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from accelfn.comm import reduce
from accelfn.context import Context, takes_context
from accelfn.errors import ConfigurationError, NotAvailableError


class LocalSGDState(NamedTuple):
    """Number of optimizer steps since the ranks last averaged their parameters."""

    num_steps: int = 0


@takes_context
def average_parameters(ctx: Context, model: nn.Module) -> None:
    """Set the trainable parameters of ``model`` to their mean over all ranks. Writes into them.

    Buffers and optimizer states aren't averaged.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: Prepared or not; the same on every rank except for its values.

    Raises:
        MismatchError: The parameters differ in a name, shape or dtype.
    """
    if ctx.num_processes == 1:
        return
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    values = {name: one.detach() for name, one in parameters.items()}
    with torch.no_grad():
        for name, mean in reduce(ctx.tagged("average_parameters"), values, "mean").items():
            parameters[name].copy_(mean)


def check_local_sgd(operation: str, ctx: Context, every: int) -> None:
    """Check the interval of local SGD, and refuse it in exact mode.

    Raises:
        ValueError: ``every`` is below 1.
        ConfigurationError: The context is in exact mode.
        NotAvailableError: An engine owns the step.
    """
    if ctx.strategy.engine is not None:
        raise NotAvailableError(
            f"{operation}: {ctx.strategy.engine} reduces gradients in each step, and local SGD lets ranks "
            "train independently. Use one of the two."
        )
    if every < 1:
        raise ValueError(f"{operation}: the number of steps must be at least 1, got {every}.")
    if ctx.reduction is not None:
        raise ConfigurationError(
            f'{operation}: this context has reduction="canonical", which sums the gradients of all ranks in '
            "each step, but local SGD lets ranks train independently. Use one of the two."
        )


@takes_context
def local_sgd_step(ctx: Context, model: nn.Module, state: LocalSGDState, *, every: int = 8) -> LocalSGDState:
    """Count an optimizer step, and average the parameters over all ranks after each ``every`` of them.

    Run the forward and backward passes in between under :func:`accelfn.no_sync`. At the end of training call
    :func:`average_parameters`. Optimizers keep their own state on each rank. ``Guard.check_replicas_every``
    would fail, since ranks differ on purpose.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: The model that was stepped.
        state: ``LocalSGDState()`` first, and then the result of the last call.
        every: Optimizer steps between two averages, at least 1. With 1 and plain SGD the parameters are the
            same as with averaged gradients.

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
    check_local_sgd("local_sgd_step", ctx, every)
    if state.num_steps + 1 < every:
        return LocalSGDState(state.num_steps + 1)
    average_parameters(ctx, model)
    return LocalSGDState()
