"""From a loss to changed parameters: backward, accumulation, the optimizer's and the scheduler's step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelfn.comm import check_replicas, reduce
from accelfn.context import Context, check_context
from accelfn.data import MicroBatch
from accelfn.data.microbatch import check_micro
from accelfn.errors import ConfigurationError
from accelfn.parallel import (
    check_reduced,
    clip_norm_,
    exact_backward,
    exact_batch,
    follow_optimizers,
    local_steps,
)
from accelfn.parallel import no_sync as replicas_without_sync
from accelfn.parallel import trigger_sync_in_backward as replicas_triggered
from accelfn.training.clip import check_bound
from accelfn.training.exact import draw_for, num_shards
from accelfn.training.finite import check_gradients, named_parameters
from accelfn.training.prepare import is_averaged
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

__all__ = (
    "accumulate",
    "backward",
    "no_sync",
    "optimizer_step",
    "scheduler_step",
    "trigger_sync_in_backward",
)


def backward(
    ctx: Context,
    loss: torch.Tensor,
    scaler_state: ScalerState,
    micro: MicroBatch | None = None,
    weight: torch.Tensor | float | None = None,
    **kwargs: Any,
) -> ScalerState:
    """Compute gradients of ``loss`` and add them to the parameters' own.

    A loss that is a mean is divided by the number of batches that its accumulation window really holds. One
    that is a sum comes with its ``weight``, such as the number of tokens in it: the gradients are then
    divided once, by the weight of all losses of the window on all ranks, when they are unscaled or the
    optimizer steps. Ranks and batches may have different weights, and some none at all.

    With float16 the loss is multiplied by the loss scale. A prepared model averages its gradients over ranks,
    unless :func:`accumulate` says that the window goes on. In exact mode it sums them, so a mean is divided
    by the number of ranks as well.

    Ranks: every rank of ``ctx``, where a prepared model takes part.

    Args:
        ctx: Says the precision.
        loss: Shape ``()``, with a gradient: a mean over this rank's batch, or a sum.
        scaler_state: From :func:`init_scaler` or the last step.
        micro: Of the batch; without it a mean counts whole.
        weight: Of a sum, at least 0; of shape ``()`` where it is a tensor.
        **kwargs: For ``torch.Tensor.backward``, such as ``retain_graph=True``.

    Returns:
        The next state, which every later call needs: it holds the weight, and whether the window goes on.

    Raises:
        TypeError: ``loss`` is no tensor.
        ValueError: The loss has another shape, or depends on no parameter; or the state was superseded, or
            the gradients at hand were divided already, so new ones can't be added to them.
        ConfigurationError: In exact mode, a parameter got a second gradient from one batch, or one that is
            sparse.
    """
    check_context("backward", ctx)
    check_micro("backward", micro)
    check_newest("backward", scaler_state)
    _check_loss(loss)
    if scaler_state.is_unscaled:
        raise ValueError(
            "backward: the gradients were unscaled already, and adding scaled ones would mix the two. "
            "Unscale and clip only where micro.sync is True, and pass on the state that optimizer_step "
            "returns."
        )
    goes_on = micro is not None and not micro.sync
    following = scaler_state._replace(is_open=True if goes_on else None)
    if weight is not None:
        following = following._replace(weight=_add_weight(scaler_state, weight))
    elif scaler_state.weight is not None:
        raise ValueError(
            "backward: the losses before in this window have a weight, and this one has none. Give each of "
            "them its weight, or none."
        )
    else:
        shards = num_shards(ctx, micro)
        if shards > 1:
            loss = loss / shards
    if ctx.precision.scales_loss:
        loss = loss * scaler_state.scale
    try:
        if ctx.reduction is None:
            loss.backward(**kwargs)  # pyright: ignore[reportUnknownMemberType]
        else:
            with exact_backward(ctx):
                loss.backward(**kwargs)  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:  # torch's own reduction inside says less than is known of a lost rank
        explained = ctx.collectives.translate_error(error)
        if explained is error:
            raise
        raise explained from (explained.__cause__ or error)
    supersede("backward", scaler_state)
    return following


def _check_loss(loss: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"backward: the loss must be a tensor, got {type(loss).__name__}. Pass what the model computed."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"backward: the loss must be one number, got a tensor of shape {tuple(loss.shape)}. Take its "
            "mean, or its sum and pass its weight."
        )
    if not loss.requires_grad:
        raise ValueError(
            "backward: the loss depends on no parameter that is trained, so it has no gradient. It was "
            "detached, computed under torch.no_grad(), or all parameters are frozen."
        )


def _add_weight(scaler_state: ScalerState, weight: torch.Tensor | float) -> torch.Tensor:
    before = scaler_state.weight
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ValueError(
                f"backward: the weight must be one number, got a tensor of shape {tuple(weight.shape)}."
            )
        weight = weight.detach().reshape(())
    elif weight < 0:
        raise ValueError(f"backward: the weight must be at least 0, got {weight}.")
    if before is None:
        # Whole numbers stay exact in it, however they are added up.
        dtype = torch.float32 if scaler_state.scale.device.type == "mps" else torch.float64
        before = torch.zeros_like(scaler_state.scale, dtype=dtype)
    if isinstance(weight, torch.Tensor):
        weight = weight.to(before)
    return before + weight


@contextmanager
def no_sync(ctx: Context, *models: nn.Module) -> Generator[None, None, None]:
    """Leave the gradients of ``models`` unaveraged in backward passes inside; they add up on each rank.

    A step inside is on the gradients of each rank, as local SGD has it. One outside needs a backward pass
    outside before it, which averages what has added up.

    Ranks: all of ``ctx`` in the same way; doesn't communicate.
    """
    check_context("no_sync", ctx)
    del ctx
    with replicas_without_sync(*models), local_steps(*models):
        yield


@contextmanager
def trigger_sync_in_backward(ctx: Context, model: nn.Module) -> Generator[None, None, None]:
    """Average the gradients of ``model`` in a backward pass inside, whose forward pass was under no_sync.

    What earlier backward passes have added to the gradients is averaged with it. For a window whose length
    shows only after its forward passes.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: As :func:`prepare_model` gave it; one that nobody averages is let through.

    Raises:
        ConfigurationError: ``find_unused_parameters`` or ``static_graph`` is on, for which torch must know
            in the forward pass.
    """
    check_context("trigger_sync_in_backward", ctx)
    del ctx
    with replicas_triggered(model):
        yield


def accumulate(ctx: Context, micro: MicroBatch, *models: nn.Module) -> AbstractContextManager[None]:
    """Run forward and backward of one batch of a window: ranks average gradients only where it closes.

    In exact mode, torch draws inside what belongs to the batch's samples, whichever rank has them, and its
    default generators are as before afterwards.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: Says whether each batch is averaged all the same (``sync_each_batch``).
        micro: Of the batch.
        *models: Prepared models that get gradients inside.

    Raises:
        ConfigurationError: There are several ranks, and nobody averages the gradients of a model: it was not
            prepared, or with ``evaluation_mode``; or the context is in exact mode, and a model was prepared
            without it.
    """
    check_context("accumulate", ctx)
    check_micro("accumulate", micro)
    if ctx.num_processes == 1 and ctx.reduction is None:  # nobody to average with, or to be compared with
        return nullcontext()
    return _accumulate(ctx, micro, models)


@contextmanager
def _accumulate(
    ctx: Context, micro: MicroBatch, models: tuple[nn.Module, ...]
) -> Generator[None, None, None]:
    call_log = ctx.collectives.call_log
    # What is called inside is compared with it, so that ranks at different batches don't meet.
    before, call_log.place = (
        call_log.place,
        f"batch {micro.index} of epoch {micro.epoch} ({micro.window} a window)",
    )
    for index, model in enumerate(models):
        if ctx.num_processes > 1 and not is_averaged(model):
            raise ConfigurationError(
                f"accumulate: model {index}, a {type(model).__name__}, was not prepared for training, so "
                "nobody averages its gradients over the ranks. Pass what prepare_model(ctx, model) gives "
                "back, without evaluation_mode."
            )
    try:
        with ExitStack() as stack:
            if ctx.reduction is not None:
                stack.enter_context(exact_batch(models, micro, micro.place, micro.window))
                stack.enter_context(draw_for(ctx, micro))
            if not micro.sync and not ctx.accumulation.sync_each_batch:
                stack.enter_context(replicas_without_sync(*models))
            yield
    finally:
        call_log.place = before


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
        NonFiniteGradientError: A gradient is infinite or no number; ``Guard.check_gradients`` asks for it.
        ReplicaDriftError: The parameters differ between ranks; ``Guard.check_replicas_every`` asks for it.

    >>> model = nn.Linear(1, 1)
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
        if every is not None and ctx.num_processes > 1 and ctx.collectives.call_log.count(one) % every == 0:
            parameters, name = named_parameters(one)
            check_replicas(ctx, parameters, name=name)
    return scaler_state


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
