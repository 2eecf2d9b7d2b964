"""What a loss function returns, in one form."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch

__all__ = ("Loss", "read_loss")


class Loss(NamedTuple):
    """What a loss function returns that has more to say than a mean.

    Attributes:
        value: Shape ``()``, with a gradient: a mean over the rows, or with ``weight`` a sum.
        weight: What the sum is to be divided by once all of the window and of all ranks are known, such as
            the number of tokens; at least 0, and shape ``()`` where it is a tensor.
        aux: A tree of tensors and numbers to be averaged as the loss is: of means, or with ``weight`` of
            sums. None for nothing.
    """

    value: torch.Tensor
    weight: torch.Tensor | float | None = None
    aux: Any = None


def read_loss(operation: str, given: object) -> Loss:
    """Return a loss that can be differentiated in one form, with ``value`` of shape ``()``.

    Raises:
        TypeError: It is neither a tensor nor a :class:`Loss` with one.
        ValueError: The loss or its weight is no single number, the weight is negative, or the loss has no
            gradient.
    """
    loss = given if isinstance(given, Loss) else Loss(cast("torch.Tensor", given))
    value, weight, aux = loss
    if not isinstance(cast("object", value), torch.Tensor):
        raise TypeError(
            f"{operation}: the loss must be a tensor, got {type(value).__name__}. Pass the mean of a batch. "
            "In a train step loss_fn may also return accelfn.Loss(total, weight=count) or Loss(mean, "
            "aux={...}); what is in a pair would be a guess."
        )
    for name, one in (("loss", value), ("weight", weight)):
        if isinstance(one, torch.Tensor) and one.numel() != 1:
            raise ValueError(
                f"{operation}: the {name} must be one number, got a tensor of shape {tuple(one.shape)}. Take "
                "the mean of losses, or their sum and give its weight."
            )
    if not isinstance(weight, torch.Tensor) and weight is not None and weight < 0:
        raise ValueError(f"{operation}: the weight must be at least 0, got {weight}.")
    if not value.requires_grad:
        raise ValueError(
            f"{operation}: the loss depends on no parameter that is trained, so it has no gradient. It was "
            "detached, computed under torch.no_grad(), or all parameters are frozen."
        )
    return loss if not value.dim() and loss is given else Loss(value.reshape(()), weight, aux)
