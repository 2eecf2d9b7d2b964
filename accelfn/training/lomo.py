"""LOMO: parameters are changed while backward runs, so that their gradients never exist all at once."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.optim import Optimizer

from accelfn.context import Context, check_context
from accelfn.data import MicroBatch
from accelfn.data.microbatch import check_micro
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.training.loss import read_loss

__all__ = ("is_lomo", "lomo_backward")


def is_lomo(optimizer: Optimizer) -> bool:
    """Return whether an optimizer steps inside of backward, as ``Lomo`` and ``AdaLomo`` do."""
    return callable(getattr(optimizer, "fused_backward", None))


def lomo_backward(
    ctx: Context,
    loss: torch.Tensor,
    learning_rate: float,
    optimizer: Optimizer,
    micro: MicroBatch | None = None,
) -> None:
    """Compute gradients of ``loss`` and let a LOMO optimizer change the parameters with them, in one pass.

    Writes into the parameters. There is nothing left for an optimizer step to do.

    Ranks: a world of one.

    Args:
        ctx: Says the precision.
        loss: A mean over the batch, shape ``()``.
        learning_rate: Of this pass.
        optimizer: ``Lomo`` or ``AdaLomo`` of the package lomo-optim (``pip install 'accelfn[lomo]'``).
        micro: Of the batch; the loss is divided by the length of its window.

    Raises:
        TypeError: ``loss`` is no tensor, or ``optimizer`` no LOMO optimizer.
        ValueError: ``learning_rate`` is None.
        NotAvailableError: There are several ranks: each parameter is changed before its gradient could be
            averaged.
        ConfigurationError: The context scales losses for float16, which LOMO does by itself; or it is in
            exact mode, which sums gradients before a step.
    """
    check_context("lomo_backward", ctx)
    check_micro("lomo_backward", micro)
    loss = read_loss(ctx, "lomo_backward", loss).value
    if cast("object", learning_rate) is None:
        raise ValueError("lomo_backward: got no learning rate. LOMO steps at once, so it must be given here.")
    if not is_lomo(optimizer):
        raise TypeError(
            f"lomo_backward: {type(optimizer).__name__} has no fused_backward. Pass Lomo or AdaLomo of the "
            "package lomo-optim: pip install 'accelfn[lomo]'."
        )
    if ctx.num_processes > 1:
        raise NotAvailableError(
            f"lomo_backward: LOMO changes each parameter before the {ctx.num_processes} ranks could average "
            "its gradient, so their models would drift apart. Run one process, or use another optimizer."
        )
    if ctx.precision.scales_loss:
        raise ConfigurationError(
            "lomo_backward: the context scales losses for float16, and LOMO never sees the scale. Use bf16, "
            "or float16 parameters without mixed precision, for which LOMO has a scaler of its own."
        )
    if ctx.reduction is not None:
        raise ConfigurationError(
            'lomo_backward: this context has reduction="canonical", which sums the gradients of a window '
            "before a step, and LOMO steps with each of them. Use another optimizer."
        )
    if micro is not None and micro.window > 1:
        loss = loss / micro.window
    cast("Any", optimizer).fused_backward(loss, learning_rate)
