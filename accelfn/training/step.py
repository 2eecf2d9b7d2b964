"""From a loss to changed parameters: backward, accumulation, the optimizer's and the scheduler's step."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelfn.comm import check_replicas
from accelfn.context import Context
from accelfn.data import MicroBatch
from accelfn.errors import NotAvailableError
from accelfn.parallel import exact_backward, exact_batch
from accelfn.parallel import no_sync as replicas_without_sync
from accelfn.training.exact import draw_for, num_shards
from accelfn.training.scaler import ScalerState, step_was_skipped, unscale_gradients, update_scaler

__all__ = ("accumulate", "backward", "no_sync", "optimizer_step", "scheduler_step")


def backward(
    ctx: Context,
    loss: torch.Tensor,
    scaler_state: ScalerState,
    micro: MicroBatch | None = None,
    weight: torch.Tensor | float | None = None,
) -> None:
    """Compute gradients of ``loss`` and add them to the parameters' own.

    The loss is divided by the number of batches that its accumulation window really holds, and multiplied by
    the loss scale. A prepared model averages its gradients over ranks, unless :func:`accumulate` says that
    the window goes on. In exact mode it sums them, so the loss is divided by the number of ranks as well.

    Ranks: every rank of ``ctx``, where a prepared model takes part.

    Args:
        ctx: Says the precision.
        loss: A mean over this rank's batch, shape ``()``.
        scaler_state: From :func:`init_scaler` or the last step.
        micro: Of the batch; without it the loss counts whole.
        weight: For losses that are sums with a weight of their own.

    Raises:
        TypeError: ``loss`` is no tensor.
        ValueError: The gradients at hand were unscaled already, so new ones can't be added to them.
        ConfigurationError: In exact mode, a parameter got a second gradient from one batch, or one that is
            sparse.
        NotAvailableError: With ``weight``.
    """
    if not isinstance(cast("object", loss), torch.Tensor):
        raise TypeError(
            f"backward: the loss must be a tensor, got {type(loss).__name__}. Pass what the model computed."
        )
    if weight is not None:
        raise NotAvailableError(
            "backward: weight has no machinery in this version of accelfn yet. Divide the loss before, and "
            "leave it out."
        )
    shards = num_shards(ctx, micro)
    if shards > 1:
        loss = loss / shards
    if ctx.precision.scales_loss:
        if scaler_state.is_unscaled:
            raise ValueError(
                "backward: the gradients were unscaled already, and adding scaled ones would mix the two. "
                "Unscale "
                "and clip only where micro.sync is True, and pass on the state that optimizer_step returns."
            )
        loss = loss * scaler_state.scale
    try:
        with exact_backward(ctx) if ctx.reduction is not None else nullcontext():
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError as error:  # torch's own reduction inside says less than is known of a lost rank
        explained = ctx.collectives.explain(error)
        if explained is error:
            raise
        raise explained from (explained.__cause__ or error)


@contextmanager
def no_sync(ctx: Context, *models: nn.Module) -> Generator[None, None, None]:
    """Leave the gradients of ``models`` unaveraged in backward passes inside; they add up on each rank.

    Ranks: all of ``ctx`` in the same way; doesn't communicate.
    """
    del ctx
    with replicas_without_sync(*models):
        yield


@contextmanager
def accumulate(ctx: Context, micro: MicroBatch, *models: nn.Module) -> Generator[None, None, None]:
    """Run forward and backward of one batch of a window: ranks average gradients only where it closes.

    In exact mode, torch draws inside what belongs to the batch's samples, whichever rank has them, and its
    default generators are as before afterwards.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: Says whether each batch is averaged all the same (``sync_each_batch``).
        micro: Of the batch.
        *models: Prepared models that get gradients inside.

    Raises:
        ConfigurationError: The context is in exact mode, and a model was prepared without it.
    """
    journal = ctx.collectives.journal
    # What is called inside is compared with it, so that ranks at different batches don't meet.
    before, journal.place = (
        journal.place,
        f"batch {micro.index} of epoch {micro.epoch} ({micro.window} a window)",
    )
    try:
        with ExitStack() as stack:
            if ctx.reduction is not None:
                stack.enter_context(exact_batch(models, micro, micro.place, micro.window))
                stack.enter_context(draw_for(ctx, micro))
            if not micro.sync and not ctx.accumulation.sync_each_batch:
                stack.enter_context(no_sync(ctx, *models))
            yield
    finally:
        journal.place = before


def optimizer_step(
    ctx: Context, optimizer: Optimizer, scaler_state: ScalerState, *, clear_gradients: bool = True
) -> ScalerState:
    """Let the optimizer step, unless a float16 gradient overflowed, and clear gradients for the next window.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: Says the precision.
        optimizer: What steps.
        scaler_state: As backward or :func:`unscale_gradients` left it.
        clear_gradients: Set the gradients to None afterwards.

    Returns:
        The next state; after a skipped step with a lower scale.

    Raises:
        ReplicaDriftError: The parameters differ between ranks; ``Guard.check_replicas_every`` asks for it.
    """
    if not ctx.precision.scales_loss:
        optimizer.step()
    else:
        scaler_state = unscale_gradients(ctx, optimizer, scaler_state)
        _step_if_finite(optimizer, scaler_state.found_inf)
        scaler_state = update_scaler(ctx, scaler_state)
    if clear_gradients:
        optimizer.zero_grad(set_to_none=True)
    every = ctx.guard.check_replicas_every
    if every is not None and ctx.num_processes > 1 and ctx.collectives.journal.count(optimizer) % every == 0:
        parameters, name = _named(optimizer)
        check_replicas(ctx, parameters, name=name)
    return scaler_state


def _named(optimizer: Optimizer) -> tuple[Any, str]:
    """Give the parameters of an optimizer as a tree with the best paths that it has, and the tree's name."""
    groups = optimizer.param_groups
    names = [name for group in groups for name in group.get("param_names", ())]
    parameters = [parameter for group in groups for parameter in group["params"]]
    # Known only where it was made from named_parameters().
    if len(set(names)) == len(parameters):
        return dict(zip(names, parameters, strict=True)), "parameters"
    return [{"params": group["params"]} for group in groups], "param_groups"


def _step_if_finite(optimizer: Any, found_inf: torch.Tensor) -> None:
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        # Fused optimizers look at the flag on the device, so the host needn't wait for it.
        optimizer.grad_scale, optimizer.found_inf = None, found_inf
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    elif not found_inf.item():
        optimizer.step()


def scheduler_step(ctx: Context, scheduler: LRScheduler, scaler_state: ScalerState | None = None) -> None:
    """Move a learning rate schedule on by one, unless the optimizer's step was skipped.

    One optimizer step is one scheduler step, at any number of ranks and any accumulation.

    Ranks: local; call it where :func:`optimizer_step` is called.

    Args:
        ctx: Says the precision.
        scheduler: What moves.
        scaler_state: What :func:`optimizer_step` returned; needed with float16 to know of skipped steps.

    Raises:
        ValueError: The context scales losses, and no state was passed.
    """
    if scaler_state is None and ctx.precision.scales_loss:
        raise ValueError(
            "scheduler_step: with float16 a step may be skipped, so pass the scaler state that "
            "optimizer_step returned."
        )
    if scaler_state is None or not step_was_skipped(ctx, scaler_state):
        scheduler.step()
