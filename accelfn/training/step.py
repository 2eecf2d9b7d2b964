"""From gradients to changed parameters: the optimizer's and the scheduler's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelfn.comm import check_replicas, reduce
from accelfn.context import Context, check_context
from accelfn.parallel import check_reduced, clip_norm_, follow_optimizers
from accelfn.training.clip import check_bound
from accelfn.training.finite import check_gradients, named_parameters
from accelfn.training.scaler import (
    ScalerState,
    check_closed,
    check_newest,
    check_weight,
    list_optimizers,
    parameters_in,
    step_was_skipped,
    supersede,
    unscale_gradients,
    update_scaler,
)

__all__ = ("optimizer_step", "scheduler_step")

# Where an optimizer keeps the number of its steps, for `Guard.check_replicas_every`.
_STEPS = "_accelfn_steps"


def optimizer_step(
    ctx: Context,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler_state: ScalerState,
    *,
    max_norm: float | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    clear_gradients: bool = True,
) -> ScalerState:
    """Unscale and clip the gradients, let the optimizer step, move the schedule, clear the gradients.

    Where a float16 gradient overflowed, neither the optimizer nor the schedule moves. Call it where the
    window closes: under ``if micro.sync:``.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: Says the precision.
        optimizer: What steps; several that share ``scaler_state`` in one sequence, which then step all or
            none. After a step the state is that of the next window: one for each optimizer where they step
            one after the other.
        scaler_state: As backward or :func:`unscale_gradients` left it.
        max_norm: Bound on the norm over all gradients of the optimizers; see :func:`accelfn.clip_grad_norm_`,
            which returns the norm too.
        scheduler: One or several that move by one with each step that isn't skipped; see
            :func:`scheduler_step`.
        clear_gradients: Set the gradients to None afterwards.

    Returns:
        The next state; after a skipped step with a lower scale.

    Raises:
        ValueError: The state was superseded, or its window is still open; or ``max_norm`` isn't positive.
        TypeError: A scheduler moves by a metric, and not by steps.
        ConfigurationError: There are several ranks, and gradients were not averaged since a backward pass
            added to them, or nobody averages those of a parameter. Steps inside of :func:`no_sync` are on
            the gradients of each rank, as local SGD has them.
        NonFiniteGradientError: A gradient is infinite or NaN; ``Guard.check_gradients`` asks for it.
        ReplicaDriftError: The parameters differ between ranks; ``Guard.check_replicas_every`` asks for it.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> import accelfn as af
    >>> ctx = af.Context()
    >>> scaler = af.backward(ctx, model(torch.ones(1, 1)).sum(), af.init_scaler(ctx))
    >>> scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
    """
    check_context("optimizer_step", ctx)
    check_newest("optimizer_step", scaler_state)
    optimizers = list_optimizers("optimizer_step", optimizer)
    schedulers = _steppable(scheduler)
    if max_norm is not None:
        check_bound("optimizer_step", "max_norm", max_norm)
    check_closed("optimizer_step", scaler_state)
    check_weight("optimizer_step", scaler_state)
    if ctx.num_processes > 1:
        follow_optimizers("optimizer_step", ctx, optimizers)
        check_reduced("optimizer_step", ctx, parameters_in(optimizers))
    scales = ctx.precision.scales_loss
    given = scaler_state
    if scales or scaler_state.weight is not None:
        scaler_state = unscale_gradients(ctx, optimizers, scaler_state._replace())
    if ctx.guard.check_gradients and not scales:
        check_gradients(ctx, optimizers)
    if max_norm is not None:
        clip_norm_(ctx, parameters_in(optimizers), max_norm)
    if not scales:
        for one in optimizers:
            cast("Any", one).step()
        scaler_state = scaler_state._replace(unscaled=(), weight=None)
    else:
        _step_if_finite(optimizers, scaler_state.found_inf)
        scaler_state = update_scaler(ctx, scaler_state)
    if given.weight is not None:
        scaler_state.weight_is_used = True
    supersede("optimizer_step", given)
    for one in schedulers:
        scheduler_step(ctx, one, scaler_state)
    every = ctx.guard.check_replicas_every
    for one in optimizers:
        if clear_gradients:
            one.zero_grad(set_to_none=True)
        if every is not None and ctx.num_processes > 1 and _count_step(one) % every == 0:
            parameters, name = named_parameters(one)
            check_replicas(ctx, parameters, name=name)
    return scaler_state


def _count_step(optimizer: Optimizer) -> int:
    """Count a step of an optimizer, on the optimizer itself; as an attribute it is in no state dict."""
    number: int = getattr(optimizer, _STEPS, 0) + 1
    setattr(optimizer, _STEPS, number)
    return number


def _steppable(scheduler: LRScheduler | Sequence[LRScheduler] | None) -> tuple[LRScheduler, ...]:
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, Sequence) else (scheduler,)
    if any(isinstance(one, ReduceLROnPlateau) for one in schedulers):
        raise TypeError(
            "optimizer_step: ReduceLROnPlateau moves by what you measure, and not by steps. Leave it out, "
            "and call scheduler_step(ctx, scheduler, metric=...) after each measurement."
        )
    return schedulers


def _step_if_finite(optimizers: Sequence[Optimizer], found_inf: torch.Tensor) -> None:
    rest: list[Optimizer] = []
    for one in cast("Sequence[Any]", optimizers):
        if not getattr(one, "_step_supports_amp_scaling", False):
            rest.append(one)
            continue
        # Fused optimizers look at the flag on the device, so the host needn't wait for it.
        one.grad_scale, one.found_inf = None, found_inf
        try:
            one.step()
        finally:
            del one.grad_scale, one.found_inf
    if rest and not found_inf.item():
        for one in rest:
            one.step()


def scheduler_step(
    ctx: Context,
    scheduler: LRScheduler,
    scaler_state: ScalerState | None = None,
    *,
    metric: torch.Tensor | float | None = None,
) -> None:
    """Move a learning rate schedule on by one, unless the optimizer's step was skipped.

    One optimizer step is one scheduler step, at any number of ranks and any accumulation.

    Ranks: local; call it where :func:`optimizer_step` is called. With ``metric``, every rank of ``ctx``: it
    is averaged over them, so that all have the same learning rate.

    Args:
        ctx: Says the precision.
        scheduler: What moves.
        scaler_state: What :func:`optimizer_step` returned; needed with float16 to know of skipped steps.
        metric: What ``ReduceLROnPlateau`` watches.

    Raises:
        ValueError: The context scales losses, and no state was passed; or it was superseded.
        TypeError: The scheduler needs a metric and got none, or got one and takes none.
    """
    check_context("scheduler_step", ctx)
    if scaler_state is not None:
        check_newest("scheduler_step", scaler_state)
    if isinstance(scheduler, ReduceLROnPlateau) != (metric is not None):
        needs = "needs metric=..., what it watches" if metric is None else "takes no metric: leave it out"
        raise TypeError(f"scheduler_step: {type(scheduler).__name__} {needs}.")
    if metric is not None:  # moves by epochs, and not by steps that may be skipped
        value = torch.as_tensor(metric, dtype=torch.float64, device="cpu").reshape(())
        cast("Any", scheduler).step(float(reduce(ctx.tagged("scheduler_step"), value, "mean")))
        return
    if scaler_state is None and ctx.precision.scales_loss:
        raise ValueError(
            "scheduler_step: with float16 a step may be skipped, so pass the scaler state that "
            "optimizer_step returned."
        )
    if scaler_state is None or not step_was_skipped(ctx, scaler_state):
        scheduler.step()
