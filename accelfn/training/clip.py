"""Clip gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from accelfn.context import Context, check_context
from accelfn.parallel import check_reduced, clip_norm_, clip_value_, follow
from accelfn.training.scaler import ScalerState, check_closed, check_newest

__all__ = ("check_bound", "clip_grad_norm_", "clip_grad_value_")


def clip_grad_norm_(
    ctx: Context,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    scaler_state: ScalerState,
) -> torch.Tensor:
    """Scale the gradients so that their norm, taken over all of them, is at most ``max_norm``.

    Writes into the gradients. Nothing waits for the device.

    Ranks: every rank of ``ctx`` where parameters are sharded or layers are on several stages: one number is
    summed. Local where each rank holds whole parameters, whose gradients are equal once they are averaged.

    Args:
        ctx: The world.
        parameters: Whose gradients are meant; those without one are left out. A list from before the
            model was sharded leads to the shards.
        max_norm: Upper bound, positive.
        norm_type: Of the norm; ``inf`` for the largest entry.
        scaler_state: The newest one: what :func:`accelfn.unscale_gradients` returned, or
            :func:`accelfn.backward` where there is neither float16 nor a weight.

    Returns:
        The norm before scaling, shape ``()``, on the gradients' device; no DTensor, and the same on every
        rank. Zero without gradients.

    Raises:
        ValueError: ``max_norm`` isn't positive, or the gradients are not divided by loss scale and weight
            yet; or the state was superseded, or its window is still open.
        ConfigurationError: There are several ranks, and the gradients were not averaged over them.
    """
    check_context("clip_grad_norm_", ctx)
    check_newest("clip_grad_norm_", scaler_state)
    check_bound("clip_grad_norm_", "max_norm", max_norm)
    parameters = follow([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    _check_ready("clip_grad_norm_", ctx, parameters, scaler_state)
    return clip_norm_(ctx, parameters, max_norm, norm_type)


def clip_grad_value_(
    ctx: Context,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    clip_value: float,
    *,
    scaler_state: ScalerState,
) -> None:
    """Cut each entry of the gradients to the range ``-clip_value..clip_value``.

    Writes into the gradients. Nothing waits for the device.

    Ranks: every rank of ``ctx`` where parameters are sharded; else local.

    Args:
        ctx: The world.
        parameters: Whose gradients are meant.
        clip_value: Bound, positive.
        scaler_state: The newest one: what :func:`accelfn.unscale_gradients` returned, or
            :func:`accelfn.backward` where there is neither float16 nor a weight.

    Raises:
        ValueError: ``clip_value`` isn't positive, or the gradients are not divided by loss scale and weight
            yet; or the state was superseded, or its window is still open.
        ConfigurationError: There are several ranks, and the gradients were not averaged over them.
    """
    check_context("clip_grad_value_", ctx)
    check_newest("clip_grad_value_", scaler_state)
    check_bound("clip_grad_value_", "clip_value", clip_value)
    parameters = follow([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    _check_ready("clip_grad_value_", ctx, parameters, scaler_state)
    clip_value_(ctx, parameters, clip_value)


def check_bound(operation: str, name: str, bound: float) -> None:
    """Refuse a bound that isn't positive.

    Raises:
        ValueError: It isn't.
    """
    if not bound > 0:
        raise ValueError(f"{operation}: {name} must be positive, got {bound!r}. Leave it out to not clip.")


def _check_ready(
    operation: str, ctx: Context, parameters: Sequence[torch.Tensor], scaler_state: ScalerState
) -> None:
    check_closed(operation, scaler_state)
    check_reduced(operation, ctx, parameters)
    if not scaler_state.is_unscaled and (scaler_state.weight is not None or ctx.precision.scales_loss):
        raise ValueError(
            f"{operation}: the gradients are not divided by loss scale and weight yet, so the bound would be "
            "another one. Call unscale_gradients before, and pass the state that it returns."
        )
