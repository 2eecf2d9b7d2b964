"""Keep gradients within bounds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from accelfn.context import Context, check_context
from accelfn.training.scaler import ScalerState, check_state

__all__ = ("clip_grad_norm_", "clip_grad_value_")


def clip_grad_norm_(
    ctx: Context,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    scaler_state: ScalerState | None = None,
) -> torch.Tensor:
    """Scale the gradients so that their norm, taken over all of them, is at most ``max_norm``.

    Writes into the gradients. Nothing waits for the device.

    Ranks: local where ranks hold whole parameters, whose gradients are equal once they are averaged; where
    they hold parts (``DTensor``), every rank of the parameters' mesh, and the norm is that of the whole.

    Args:
        ctx: The world.
        parameters: Whose gradients are meant; those without one are left out.
        max_norm: Upper bound, positive.
        norm_type: Of the norm; ``inf`` for the largest entry.
        scaler_state: What :func:`accelfn.unscale_gradients` returned; needed with float16, and where losses
            had weights.

    Returns:
        The norm before scaling, shape ``()``, on the gradients' device; zero without gradients.

    Raises:
        ValueError: ``max_norm`` isn't positive, or the gradients are not divided by loss scale and weight
            yet.
    """
    check_context("clip_grad_norm_", ctx)
    check_state("clip_grad_norm_", scaler_state)
    if not max_norm > 0:
        raise ValueError(
            f"clip_grad_norm_: max_norm must be positive, got {max_norm!r}. Leave the call out to not clip."
        )
    _check_unscaled("clip_grad_norm_", ctx, scaler_state)
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
    whole = getattr(norm, "full_tensor", None)  # of a DTensor
    return norm if whole is None else cast("torch.Tensor", whole())


def clip_grad_value_(
    ctx: Context,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    clip_value: float,
    *,
    scaler_state: ScalerState | None = None,
) -> None:
    """Cut each entry of the gradients to the range ``-clip_value..clip_value``.

    Writes into the gradients. Nothing waits for the device.

    Ranks: local.

    Args:
        ctx: The world.
        parameters: Whose gradients are meant.
        clip_value: Bound, positive.
        scaler_state: What :func:`accelfn.unscale_gradients` returned; needed with float16, and where losses
            had weights.

    Raises:
        ValueError: ``clip_value`` isn't positive, or the gradients are not divided by loss scale and weight
            yet.
    """
    check_context("clip_grad_value_", ctx)
    check_state("clip_grad_value_", scaler_state)
    if not clip_value > 0:
        raise ValueError(f"clip_grad_value_: clip_value must be positive, got {clip_value!r}.")
    _check_unscaled("clip_grad_value_", ctx, scaler_state)
    torch.nn.utils.clip_grad_value_(parameters, clip_value)


def _check_unscaled(operation: str, ctx: Context, scaler_state: ScalerState | None) -> None:
    if scaler_state is None:
        if ctx.precision.scales_loss:
            raise ValueError(
                f"{operation}: with float16, gradients are unscaled before they are clipped. Pass "
                "scaler_state=, the state that unscale_gradients returned."
            )
        return
    if scaler_state.is_unscaled:
        return
    if scaler_state.weight is not None or ctx.precision.scales_loss:
        raise ValueError(
            f"{operation}: the gradients are not divided by loss scale and weight yet, so the bound would be "
            "another one. Call unscale_gradients before, and pass the state that it returns."
        )
