"""A train step in exact mode: the pieces of all ranks are microbatches, and what they give is added in their order.

The batch of a step is this rank's part of one global batch, in rank order. So its pieces are microbatches that lie
together: with ``k`` pieces a rank, piece ``j`` of rank ``r`` is microbatch ``r * k + j``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch

from accelfn.comm import catch
from accelfn.context import Collectives, Context, World
from accelfn.training.exact import draw_as, mean_of_microbatches
from accelfn.training.scaler import ScalerState, inverse_of_weight
from accelfn.training.window import Loss, Piece, Terms, average, cut_window, read_loss, terms_of
from accelfn.tree import flatten

__all__ = ("MicrobatchResult", "alone", "equal_pieces", "mean_of_pieces", "set_exact_gradients")


class MicrobatchResult(NamedTuple):
    """What one piece gave: its part of the metrics, and a gradient or None for each parameter."""

    terms: Terms
    grads: Sequence[torch.Tensor | None]


def alone(ctx: Context) -> Context:
    """Give a context of this rank alone, without exact mode: for what one piece computes."""
    return replace(ctx, world=World(device=ctx.device), collectives=Collectives(), reduction=None)


def equal_pieces(ctx: Context, batch: Any) -> list[Piece]:
    """Cut the batch of a step into one piece for each microbatch.

    Raises:
        ValueError: It can't be cut into equal ones.
    """
    number = ctx.gradient_accumulation_steps
    pieces = cut_window(batch, number)
    if len(pieces) != number or any(piece.share != 1.0 for piece in pieces):
        raise ValueError(
            f"make_train_step: in exact mode the rows of a batch are cut into {number} equal microbatches on each "
            "rank, and these can't be. Pass a multiple of as many rows, or drop the last batch."
        )
    return pieces


def mean_of_pieces(
    ctx: Context, parameters: Sequence[torch.Tensor], compute: Callable[[], Sequence[MicrobatchResult]]
) -> MicrobatchResult:
    """Average what the pieces of all ranks gave, in the order of the microbatches.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: In exact mode.
        parameters: That the gradients are of.
        compute: Gives the microbatches of this rank.

    Returns:
        The same bits on every rank: metrics divided by their weight, and gradients divided by it too.

    Raises:
        Exception: What ``compute`` raises, and RemoteRankError on the other ranks.
    """
    found, error = catch(compute)
    rows: list[list[torch.Tensor]] = []
    structure: Any = None
    for microbatch in found or ():
        leaves, structure = flatten(microbatch.terms)
        present = torch.tensor([float(grad is not None) for grad in microbatch.grads], device=ctx.device)
        grads = [
            torch.zeros_like(item) if grad is None else grad
            for item, grad in zip(parameters, microbatch.grads, strict=True)
        ]
        rows.append([*leaves, present, *grads])
    means = mean_of_microbatches(ctx.tagged("make_train_step"), rows, error)
    number = len(means) - len(parameters) - 1
    terms = cast("Terms", structure.unflatten(means[:number]))
    factor = None if terms.weight is None else inverse_of_weight(terms.weight)
    terms, _ = average(alone(ctx), terms)
    grads = means[number + 1 :]
    if factor is not None:
        grads = [grad * factor.to(grad.dtype) for grad in grads]
    present = means[number].unbind()
    return MicrobatchResult(
        terms, [grad if there > 0 else None for grad, there in zip(grads, present, strict=True)]
    )


def set_exact_gradients(
    ctx: Context,
    loss_fn: Callable[[Any, Any], torch.Tensor | Loss],
    model: Any,
    parameters: Sequence[torch.Tensor],
    batch: Any,
    scaler: ScalerState,
    num_steps: int,
) -> Terms:
    """Give ``parameters`` the gradients of a step, times the loss scale.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: In exact mode.
        loss_fn: Of the model and a piece of the batch.
        model: A module, or a tree of them.
        parameters: That are trained.
        batch: This rank's.
        scaler: Says the loss scale.
        num_steps: Number of the step: by it and by its microbatch a piece's random numbers are known.
    """

    def compute() -> list[MicrobatchResult]:
        pieces = equal_pieces(ctx, batch)
        microbatches: list[MicrobatchResult] = []
        for index, piece in enumerate(pieces):
            number = ctx.rank * len(pieces) + index
            with draw_as(ctx, f"microbatch {number} of step {num_steps}"):
                loss = read_loss(loss_fn(model, piece.batch))
                value = loss.value.reshape(())
                if not value.requires_grad:
                    raise ValueError(
                        "make_train_step: the loss depends on no parameter that is trained, so it has no "
                        "gradient. It was detached, or computed under torch.no_grad()."
                    )
                if ctx.precision.scales_loss:
                    value = value * scaler.scale
                grads = torch.autograd.grad(value, list(parameters), allow_unused=True)
            microbatches.append(MicrobatchResult(terms_of(loss, piece, 1), grads))
        return microbatches

    terms, grads = mean_of_pieces(ctx, parameters, compute)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    return terms
