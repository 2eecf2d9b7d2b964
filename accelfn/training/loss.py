"""What a loss function returns, in one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.tree import flatten

__all__ = ("Loss", "check_means", "join_losses", "read_loss")


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


def check_means(ctx: Context, operation: str) -> None:
    """Refuse a mean where ranks share sequences: nobody can tell how many tokens it is of.

    Labels that are left out, and padding, are on some ranks more than on others.

    Raises:
        ConfigurationError: There are ranks along "cp" or "sp".
    """
    if ctx.mesh is not None and ctx.mesh.plan.size("seq") > 1:
        raise ConfigurationError(
            f"{operation}: ranks along {' x '.join(ctx.mesh.plan.active('seq'))} share sequences, and have "
            "different numbers of labels that count, so that a mean over each rank's would be wrong. Give "
            'the sum, as of cross_entropy(..., reduction="sum"), and its weight, (labels != -100).sum(): to '
            "backward, or as accelfn.Loss(total, weight=count) in forward_backward or make_train_step."
        )


def read_loss(ctx: Context, operation: str, given: object, *, needs_gradient: bool = True) -> Loss:
    """Return a loss that can be differentiated in one form, with ``value`` of shape ``()``.

    Raises:
        ConfigurationError: It is a mean, and ranks share sequences.
        TypeError: It is neither a tensor nor a :class:`Loss` with one.
        ValueError: The loss or its weight is no single number, the weight is negative or NaN, or the loss
            has no gradient.
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
    if not isinstance(weight, torch.Tensor) and weight is not None and not weight >= 0:
        raise ValueError(f"{operation}: the weight must be at least 0, got {weight}.")
    if needs_gradient and not value.requires_grad:
        raise ValueError(
            f"{operation}: the loss depends on no parameter that is trained, so it has no gradient. It was "
            "detached, computed under torch.no_grad(), or all parameters are frozen."
        )
    if weight is None:
        check_means(ctx, operation)
    return loss if not value.dim() and loss is given else Loss(value.reshape(()), weight, aux)


def join_losses(parts: Sequence[Loss]) -> Loss:
    """Return the loss of a batch of those of its parts, of equally many rows, without gradients: as tensors.

    Raises:
        ValueError: One has a weight and another none, or their ``aux`` differ in structure.
    """
    leaves, structure = flatten(parts[0])
    columns: list[list[Any]] = [[] for _ in leaves]
    for part in parts:
        own, other = flatten(part)
        if other != structure:
            raise ValueError(
                "forward_backward: the loss function gave a weight, or an aux of another structure, for one "
                "microbatch and not for another. Give each loss the same."
            )
        for column, leaf in zip(columns, own, strict=True):
            column.append(leaf.detach() if isinstance(leaf, torch.Tensor) else torch.tensor(leaf))
    device = parts[0].value.device
    sums = [torch.stack([leaf.to(device) for leaf in column]).sum(0) for column in columns]
    if parts[0].weight is None:
        sums = [leaf / len(parts) for leaf in sums]
    return cast("Loss", structure.unflatten(sums))
