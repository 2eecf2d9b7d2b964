"""Keep gradients within bounds."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from accelfn.context import Context

__all__ = ("clip_grad_norm_", "clip_grad_value_")


def clip_grad_norm_(
    ctx: Context, parameters: Iterable[torch.Tensor] | torch.Tensor, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale the gradients so that their norm, taken over all of them, is at most ``max_norm``.

    Writes into the gradients. With float16, call :func:`accelfn.unscale_gradients` first.

    Ranks: local: replicated gradients are equal on every rank once they are averaged.

    Args:
        ctx: The world.
        parameters: Whose gradients are meant; those without one are left out.
        max_norm: Upper bound, positive.
        norm_type: Of the norm; ``inf`` for the largest entry.

    Returns:
        The norm before scaling, shape ``()``; zero without gradients.

    Raises:
        ValueError: ``max_norm`` isn't positive.
    """
    del ctx
    if not max_norm > 0:
        raise ValueError(f"clip_grad_norm_: max_norm must be positive, got {max_norm!r}. Leave the call out to not clip.")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def clip_grad_value_(ctx: Context, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float) -> None:
    """Cut each entry of the gradients to the range ``-clip_value..clip_value``.

    Writes into the gradients. With float16, call :func:`accelfn.unscale_gradients` first.

    Ranks: local.

    Args:
        ctx: The world.
        parameters: Whose gradients are meant.
        clip_value: Bound, positive.

    Raises:
        ValueError: ``clip_value`` isn't positive.
    """
    del ctx
    if not clip_value > 0:
        raise ValueError(f"clip_grad_value_: clip_value must be positive, got {clip_value!r}.")
    torch.nn.utils.clip_grad_value_(parameters, clip_value)
