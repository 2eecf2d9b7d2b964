"""The loss of a batch: a mean, or a sum with its weight."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple, cast

import torch

from accelfn.context import Context
from accelfn.data import MicroBatch
from accelfn.errors import ConfigurationError
from accelfn.training.scaler import StepState, settle_unstepped


class Loss(NamedTuple):
    """The result of a loss function that isn't just a mean.

    Attributes:
        value: Shape ``()``, with a gradient: a mean over the rows, or with ``weight`` a sum.
        weight: Divisor of the sum, such as the number of tokens; at least 0, and shape ``()`` if it is a
            tensor. The weights of the window and of all ranks are added first.
        aux: A tree of tensors and numbers that is averaged as the loss is: of means, or with ``weight`` of
            sums. None for nothing.
    """

    value: torch.Tensor
    weight: torch.Tensor | float | None = None
    aux: Any = None


def check_means(ctx: Context, operation: str) -> None:
    """Refuse a mean where ranks share sequences: its number of tokens is unknown.

    Ranks have different numbers of ignored labels and of padding.

    Raises:
        ConfigurationError: There are ranks along "cp" or "sp".
    """
    if ctx.mesh is not None and ctx.mesh.plan.size("seq") > 1:
        raise ConfigurationError(
            f"{operation}: ranks along {' x '.join(ctx.mesh.plan.active('seq'))} share sequences and have "
            "different numbers of labels, so the mean of each rank's would be wrong. Pass the sum, as of "
            'cross_entropy(..., reduction="sum"), and its weight, (labels != -100).sum(): to backward, or as '
            "accelfn.Loss(total, weight=count) in forward_backward or make_train_step."
        )


def read_loss(ctx: Context, operation: str, result: object, *, needs_gradient: bool = True) -> Loss:
    """Check a loss, and return it as a :class:`Loss` with ``value`` of shape ``()``.

    Raises:
        ConfigurationError: It is a mean, and ranks share sequences.
        TypeError: It is neither a tensor nor a :class:`Loss` with one.
        ValueError: The loss or its weight has several elements, the weight is negative or NaN, or the loss
            has no gradient.
    """
    loss = result if isinstance(result, Loss) else Loss(cast("torch.Tensor", result))
    value, weight, aux = loss
    check_loss(operation, value, weight, needs_gradient=needs_gradient)
    if weight is None and ctx.mesh is not None:
        check_means(ctx, operation)
    return Loss(value.reshape(()), weight, aux) if value.dim() else loss


def check_loss(operation: str, value: object, weight: object, *, needs_gradient: bool = True) -> None:
    """Check a loss and its weight by themselves; errors as in :func:`read_loss`."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(
            f"{operation}: the loss must be a tensor, got {type(value).__name__}. Pass the mean of a batch. "
            "In a train step loss_fn may also return accelfn.Loss(total, weight=count) or Loss(mean, "
            "aux={...}), but no other pair."
        )
    if value.numel() != 1:
        raise _not_one_number(operation, "loss", value)
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise _not_one_number(operation, "weight", weight)
    elif weight is not None and not (isinstance(weight, Real) and cast("float", weight) >= 0):
        raise ValueError(f"{operation}: the weight must be at least 0, got {weight!r}.")
    if needs_gradient and not value.requires_grad:
        raise ValueError(
            f"{operation}: the loss has no gradient. It was detached, computed under torch.no_grad() or from "
            "what gather, reduce, broadcast or scatter returned (all_gather and reduce_scatter have "
            "gradients), or all parameters that it depends on are frozen."
        )


def _not_one_number(operation: str, name: str, tensor: torch.Tensor) -> ValueError:
    return ValueError(
        f"{operation}: the {name} must be one number, got a tensor of shape {tuple(tensor.shape)}. "
        "Take the mean of losses, or their sum with its weight."
    )


def divide_loss(
    ctx: Context,
    value: torch.Tensor,
    weight: torch.Tensor | float | None,
    scaler_state: StepState,
    micro: MicroBatch | None,
) -> torch.Tensor:
    """Return the loss to differentiate: a mean divided for its window, multiplied by the loss scale.

    Gradients that an earlier step left are brought to that scale.

    Raises:
        ValueError: The current gradients were unscaled already; or earlier losses of the window have a
            weight, and this one has none.
    """
    if scaler_state.unscaled:
        raise ValueError(
            "backward: the gradients were unscaled already, and adding scaled ones would mix the two. "
            "Unscale and clip only where micro.sync is True, and pass on the state that optimizer_step "
            "returns."
        )
    if scaler_state.unstepped is not None:
        settle_unstepped(scaler_state)
    if weight is None:
        if scaler_state.weight is not None:
            raise ValueError(
                "backward: earlier losses in this window have a weight, and this one has none. Pass a weight "
                "for all of them, or for none."
            )
        number = 1 if micro is None else micro.window
        if ctx.reduction is not None:  # without exact mode, averaging gradients divides by the ranks
            number *= ctx.world.size
        if number > 1:
            value = value / number
    return value * scaler_state.scale if ctx.precision.scales_loss else value
