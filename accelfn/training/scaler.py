"""Loss scaling for float16: a state that goes in and comes out.

Small gradients vanish in float16, so the loss is multiplied by a scale before backward and the gradients are
divided by it afterwards. Where a gradient overflows, the step is skipped and the scale lowered; after enough
good steps it grows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.optim import Optimizer

from accelfn.comm import Call, attempt, check
from accelfn.context import Context
from accelfn.parallel import scale_open_sums

__all__ = (
    "ScalerState",
    "init_scaler",
    "rescale_gradients",
    "step_was_skipped",
    "unscale_gradients",
    "update_scaler",
)


class ScalerState(NamedTuple):
    """Where loss scaling stands. One for each optimizer. Reading it on the host waits for the device.

    Attributes:
        scale: Factor of the loss; float32, shape ``()``.
        growth_tracker: Steps without overflow since the scale changed; int32, shape ``()``.
        found_inf: 1 if a gradient of the latest step was not finite, else 0; float32, shape ``()``.
        num_skipped: Steps that were skipped so far; int64, shape ``()``.
        is_unscaled: Whether the gradients at hand are divided by the scale already.
    """

    scale: torch.Tensor
    growth_tracker: torch.Tensor
    found_inf: torch.Tensor
    num_skipped: torch.Tensor
    is_unscaled: bool = False


def init_scaler(ctx: Context) -> ScalerState:
    """Give the first state. Without float16 the scale is 1 and stays so.

    Ranks: local; the same on every rank.

    >>> init_scaler(Context()).scale
    tensor(1.)
    """
    scale = ctx.precision.scaler.init_scale if ctx.precision.scales_loss else 1.0
    return ScalerState(
        scale=torch.tensor(scale, dtype=torch.float32, device=ctx.device),
        growth_tracker=torch.zeros((), dtype=torch.int32, device=ctx.device),
        found_inf=torch.zeros((), dtype=torch.float32, device=ctx.device),
        num_skipped=torch.zeros((), dtype=torch.int64, device=ctx.device),
    )


def unscale_gradients(ctx: Context, optimizer: Optimizer, scaler_state: ScalerState) -> ScalerState:
    """Divide the gradients by the scale, as is needed before they are clipped or looked at.

    Writes into the gradients. Called again before the step it does nothing, as without float16.

    Ranks: every rank of ``ctx``: whether a gradient overflowed is agreed, so that all skip or none.

    Args:
        ctx: The world and its precision.
        optimizer: Whose parameters' gradients are meant.
        scaler_state: As backward left it.

    Returns:
        The next state.

    Raises:
        ValueError: A gradient is float16, so its parameter is, and there is nothing to gain from scaling.
    """
    if not ctx.precision.scales_loss or scaler_state.is_unscaled:
        return scaler_state
    found_inf = torch.zeros_like(scaler_state.found_inf)
    inverse = scaler_state.scale.double().reciprocal().float()
    by_kind, error = attempt(lambda: _gradients(optimizer))
    if ctx.num_processes > 1:  # nothing is changed where a rank can't
        check(ctx, Call("unscale_gradients"), error)
    elif error is not None:
        raise error
    with torch.no_grad():
        for (device, _), grads in (by_kind or {}).items():
            found_here = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                grads, found_here, inverse.to(device)
            )
            found_inf = torch.maximum(found_inf, found_here.to(found_inf.device))
        if ctx.num_processes > 1:
            flag = found_inf.reshape(1).clone()
            ctx.collectives.all_reduce(flag, "max")
            found_inf = flag.reshape(())
    return scaler_state._replace(found_inf=found_inf, is_unscaled=True)


def _gradients(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Sort the gradients by where and what they are."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            grad: torch.Tensor | None = parameter.grad
            if grad is None:
                continue
            if grad.dtype == torch.float16:
                raise ValueError(
                    f"unscale_gradients: a gradient of shape {tuple(grad.shape)} is float16, because its "
                    "parameter is. "
                    "Keep the model's parameters in float32; autocast computes in float16 where it helps."
                )
            by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    return by_kind


def update_scaler(ctx: Context, scaler_state: ScalerState) -> ScalerState:
    """Give the state after a step that was made or skipped as ``found_inf`` says. Pure."""
    options = ctx.precision.scaler
    scale, tracker = scaler_state.scale.clone(), scaler_state.growth_tracker.clone()
    torch._amp_update_scale_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        scale,
        tracker,
        scaler_state.found_inf,
        options.growth_factor,
        options.backoff_factor,
        options.growth_interval,
    )
    return ScalerState(
        scale=scale,
        growth_tracker=tracker,
        found_inf=scaler_state.found_inf,
        num_skipped=scaler_state.num_skipped + scaler_state.found_inf.to(torch.int64),
    )


def rescale_gradients(optimizers: Iterable[Optimizer], before: ScalerState, after: ScalerState) -> None:
    """Bring gradients that are not unscaled yet from one loss scale to another.

    Writes into the gradients. For optimizers that share a scale and step at different times.
    """
    parameters: list[torch.Tensor] = [
        parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]
    ratio = after.scale / before.scale
    with torch.no_grad():
        for grad in [parameter.grad for parameter in parameters if parameter.grad is not None]:
            grad.mul_(ratio.to(grad.device, grad.dtype))
        scale_open_sums(parameters, ratio)


def step_was_skipped(ctx: Context, scaler_state: ScalerState) -> bool:
    """Say whether the latest optimizer step was skipped. With float16 this waits for the device."""
    return ctx.precision.scales_loss and bool(scaler_state.found_inf.item())
