"""Clip gradients, and step optimizers and schedulers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelfn.comm import Call, check_replicas, count_call, gather_object, reduce
from accelfn.context import Context, end_step, takes_context
from accelfn.data.microbatch import MicroBatch, check_micro
from accelfn.errors import ConfigurationError, NonFiniteGradientError, NotAvailableError
from accelfn.parallel.engines import REPLACED, EngineOptimizer, owner_of_step
from accelfn.parallel.norm import clip_norm_, clip_value_
from accelfn.parallel.optimizers import check_can_step
from accelfn.parallel.pointers import follow
from accelfn.parallel.step_checks import check_reduced, follow_optimizers, send_buffers
from accelfn.training.optimizers import list_optimizers, list_parameters, parameters_in
from accelfn.training.scaler import (
    StepState,
    check_scaler,
    factor_of_weight,
    may_skip,
    step_was_skipped,
    unscale,
    unstepped_after,
    update_scaler,
)
from accelfn.tree import flatten


class NamedParameters(NamedTuple):
    """The parameters of an optimizer.

    Attributes:
        tree: With the best available paths: names, or groups and indexes.
        name: Name of the tree in paths.
    """

    tree: Any
    name: str


def named_parameters(optimizer: Optimizer) -> NamedParameters:
    """Return the parameters of an optimizer, by name where it was made from ``model.named_parameters()``."""
    groups = optimizer.param_groups
    names = [name for group in groups for name in group.get("param_names", ())]
    parameters = [parameter for group in groups for parameter in group["params"]]
    if len(set(names)) == len(parameters):
        return NamedParameters(dict(zip(names, parameters, strict=True)), "parameters")
    return NamedParameters([{"params": group["params"]} for group in groups], "param_groups")


def check_gradients(ctx: Context, optimizers: Sequence[Optimizer]) -> None:
    """Refuse gradients with inf or NaN, by name. Waits for the device.

    Ranks: every rank of ``ctx``.

    Raises:
        NonFiniteGradientError: On every rank, with the names on each rank.
    """
    all_paths: list[str] = []
    gradients: list[torch.Tensor | None] = []
    for optimizer in optimizers:
        tree, name = named_parameters(optimizer)
        parameters, structure = flatten(tree)
        all_paths += structure.paths(name)
        gradients += [parameter.grad for parameter in parameters]
    check_tensors(ctx, all_paths, gradients)


def check_tensors(ctx: Context, paths: Sequence[str], gradients: Sequence[torch.Tensor | None]) -> None:
    """Refuse gradients with inf or NaN, by the path of each. Waits for the device.

    Ranks: every rank of ``ctx``.

    Raises:
        NonFiniteGradientError: On every rank, with the paths on each rank.
    """
    found = [
        path
        for path, gradient in zip(paths, gradients, strict=True)
        if gradient is not None and not _is_finite(gradient)
    ]
    by_rank = gather_object(ctx.tagged("check_gradients"), tuple(found))
    if any(by_rank):
        raise NonFiniteGradientError(tuple(by_rank))


def _is_finite(gradient: torch.Tensor) -> bool:
    return bool(torch.isfinite(gradient._values() if gradient.is_sparse else gradient).all())


@takes_context
def clip_grad_norm_(
    ctx: Context,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    scaler_state: StepState,
) -> torch.Tensor:
    """Scale the gradients so that their total norm is at most ``max_norm``.

    Writes into the gradients. Doesn't wait for the device.

    Ranks: every rank of ``ctx`` where parameters are sharded or on several pipeline stages: one number is
    summed. Local where each rank holds complete parameters, whose averaged gradients are equal.

    Args:
        ctx: The world.
        parameters: The parameters; those without a gradient are ignored. For a list from before the model
            was sharded, the shards are used.
        max_norm: Upper bound, positive.
        norm_type: Of the norm; ``inf`` for the largest entry.
        scaler_state: The newest one: from :func:`accelfn.unscale_gradients`, or from
            :func:`accelfn.backward` with neither float16 nor a weight.

    Returns:
        The norm before scaling, shape ``()``, on the gradients' device; no DTensor, and the same on every
        rank. Zero without gradients. An engine that owns the step (DeepSpeed, Megatron-LM) clips in it: the
        tensor is NaN until then, and has the norm afterwards.

    Raises:
        ValueError: ``max_norm`` isn't positive, or the gradients are not divided by loss scale and weight
            yet; or the state was superseded, or its window is still open.
        ConfigurationError: There are several ranks, and the gradients were not averaged over them.
    """
    ready = _ready("clip_grad_norm_", ctx, parameters, scaler_state)
    check_bound("clip_grad_norm_", "max_norm", max_norm)
    if ctx.strategy.engine is not None:
        owner = owner_of_step("clip_grad_norm_", ready)
        if owner is not None:
            return owner.clip_at_step(max_norm, norm_type, ready[0].device)
    return clip_norm_(ctx, ready, max_norm, norm_type)


@takes_context
def clip_grad_value_(
    ctx: Context,
    parameters: Iterable[torch.Tensor] | torch.Tensor,
    clip_value: float,
    *,
    scaler_state: StepState,
) -> None:
    """Clamp each entry of the gradients to the range ``-clip_value..clip_value``.

    Writes into the gradients. Doesn't wait for the device.

    Ranks: every rank of ``ctx`` where parameters are sharded; else local.

    Args:
        ctx: The world.
        parameters: The parameters.
        clip_value: Bound, positive.
        scaler_state: The newest one: from :func:`accelfn.unscale_gradients`, or from
            :func:`accelfn.backward` with neither float16 nor a weight.

    Raises:
        ValueError: ``clip_value`` isn't positive, or the gradients are not divided by loss scale and weight
            yet; or the state was superseded, or its window is still open.
        ConfigurationError: There are several ranks, and the gradients were not averaged over them.
        NotAvailableError: An engine owns the step, and clips by the norm alone.
    """
    ready = _ready("clip_grad_value_", ctx, parameters, scaler_state)
    check_bound("clip_grad_value_", "clip_value", clip_value)
    owner = None if ctx.strategy.engine is None else owner_of_step("clip_grad_value_", ready)
    if owner is not None:
        raise NotAvailableError(
            f"clip_grad_value_: {owner.name} owns the gradients until its step, and clips them by their norm "
            "alone. Use clip_grad_norm_ or max_norm."
        )
    clip_value_(ctx, ready, clip_value)


def check_bound(operation: str, name: str, bound: float) -> None:
    """Check that a bound is positive.

    Raises:
        ValueError: It isn't.
    """
    if not bound > 0:
        raise ValueError(
            f"{operation}: {name} must be positive, got {bound!r}. Leave it out for no clipping."
        )


def _ready(
    operation: str, ctx: Context, parameters: Iterable[torch.Tensor] | torch.Tensor, scaler_state: StepState
) -> list[torch.Tensor]:
    """Return the current parameters, whose gradients must be complete, averaged and divided."""
    check_scaler(operation, scaler_state, is_closed=True)
    found = follow(list_parameters(operation, parameters))
    if ctx.world.size > 1 and ctx.strategy.engine is None:
        check_reduced(operation, ctx, found)
    if not scaler_state.unscaled and (scaler_state.weight is not None or ctx.precision.scales_loss):
        raise ValueError(
            f"{operation}: the gradients are not divided by loss scale and weight yet, so the bound would be "
            "wrong. Call unscale_gradients first, and pass the state that it returns."
        )
    return found


# Attribute of an optimizer: the number of its steps, for `Guard.check_replicas_every`.
_STEPS = "_accelfn_steps"


@takes_context
def optimizer_step(
    ctx: Context,
    optimizer: Optimizer | Sequence[Optimizer],
    scaler_state: StepState,
    *,
    micro: MicroBatch | None = None,
    max_norm: float | None = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    clear_gradients: bool = True,
) -> StepState:
    """Unscale and clip the gradients, step the optimizer and the scheduler, clear the gradients.

    If a float16 gradient overflowed, neither the optimizer nor the scheduler steps; with
    ``Guard(check_gradients="skip")`` so in any precision, if a gradient is infinite or NaN. With ``micro`` it
    does nothing while the window is open; without, call it where the window closes, under ``if micro.sync:``.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world and the precision.
        optimizer: The optimizer; or several that share ``scaler_state`` in one sequence, which step all or
            none. The returned state is for the next window: optimizers that step one after the other need
            their own states.
        scaler_state: From backward or :func:`unscale_gradients`.
        micro: Of the latest batch; if its window is open, the state is returned as it is.
        max_norm: Bound on the norm over all gradients of the optimizers; see :func:`accelfn.clip_grad_norm_`,
            which also returns the norm.
        scheduler: One or several that step once with each step that isn't skipped; see
            :func:`scheduler_step`.
        clear_gradients: Set the gradients to None afterwards.

    Returns:
        The next state; after a skipped step with a lower scale.

    Raises:
        ValueError: The state was superseded, or its window is still open; or ``max_norm`` isn't positive.
        TypeError: A scheduler needs a metric instead of steps.
        ConfigurationError: There are several ranks, and gradients were not averaged after the latest backward
            pass, or those of a parameter are never averaged. Steps inside of :func:`no_sync` use each rank's
            own gradients, as in local SGD. Or a schedule-free optimizer is in evaluation mode, or an
            optimizer steps in :func:`accelfn.training.lomo_backward`.
        NotAvailableError: The parameters are shards, which the optimizer's package can't step.
        NonFiniteGradientError: A gradient has inf or NaN; checked with ``Guard(check_gradients=True)``.
        ReplicaDriftError: The parameters differ between ranks; checked with ``Guard.check_replicas_every``.

    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> import accelfn as af
    >>> ctx = af.Context()
    >>> scaler = af.backward(ctx, model(torch.ones(1, 1)).sum(), af.init_scaler(ctx))
    >>> scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
    """
    check_micro("optimizer_step", micro)
    if micro is not None and not micro.sync:
        return scaler_state
    check_scaler("optimizer_step", scaler_state, is_closed=True, divides=True)
    optimizers = list_optimizers("optimizer_step", optimizer)
    schedulers = () if scheduler is None else list_schedulers("optimizer_step", scheduler)
    check_can_step("optimizer_step", optimizers)
    if max_norm is not None:
        check_bound("optimizer_step", "max_norm", max_norm)
    before = scaler_state
    engines = [item for item in optimizers if isinstance(item, EngineOptimizer)]
    if ctx.strategy.engine is not None and any(vars(item).get(REPLACED) for item in optimizers):
        raise ConfigurationError(
            f"optimizer_step: {ctx.strategy.engine} has replaced this optimizer, whose steps would change "
            "nothing or let ranks drift apart. Use the optimizer that prepare returned."
        )
    if engines:
        scaler_state = _step_engines(ctx, engines, len(optimizers), scaler_state, max_norm)
    else:
        scaler_state = _step(ctx, optimizers, scaler_state, max_norm)
    if before.weight is not None:
        scaler_state.weight_is_used = True
    if not engines and (
        ctx.precision.scales_loss or before.weight is not None or before.unstepped is not None
    ):
        scaler_state.unstepped = unstepped_after(before, optimizers)
    before.superseded_by = "optimizer_step"
    for moved in schedulers:
        scheduler_step(ctx, moved, scaler_state)
    every = ctx.guard.check_replicas_every
    for item in optimizers:
        if clear_gradients:
            item.zero_grad(set_to_none=True)
        if every is not None and ctx.world.size > 1 and not engines and _count_step(item) % every == 0:
            parameters, name = named_parameters(item)
            check_replicas(ctx, parameters, name=name)
    if ctx.world.device.type == "xla":
        end_step()
    return scaler_state


def _step(
    ctx: Context, optimizers: Sequence[Optimizer], scaler_state: StepState, max_norm: float | None
) -> StepState:
    """Unscale, clip, and step torch's optimizers; return the next state."""
    parameters: list[torch.Tensor] = []
    if ctx.world.size > 1:
        follow_optimizers("optimizer_step", ctx, optimizers)
        parameters = parameters_in(optimizers)
        if check_reduced("optimizer_step", ctx, parameters):
            count_call(ctx, Call("optimizer_step"))
            send_buffers(optimizers)
    scales = ctx.precision.scales_loss
    if scales or scaler_state.weight is not None or scaler_state.unstepped is not None:
        scaler_state = unscale(ctx, optimizers, scaler_state)
    by_norm = False
    if ctx.guard.check_gradients and not scales:
        by_norm = may_skip(ctx)
        if not by_norm:
            check_gradients(ctx, optimizers)
    if max_norm is not None or by_norm:
        bound = math.inf if max_norm is None else max_norm
        norm = clip_norm_(ctx, parameters or parameters_in(optimizers), bound)
        if by_norm:
            scaler_state = scaler_state._replace(found_inf=(~norm.isfinite()).to(scaler_state.found_inf))
    if not (scales or by_norm):
        for item in optimizers:
            item.step()
        return StepState(*scaler_state[:4])
    _step_if_finite(optimizers, scaler_state.found_inf)
    return update_scaler(ctx, scaler_state)


def _step_engines(
    ctx: Context,
    optimizers: Sequence[EngineOptimizer],
    number: int,
    scaler_state: StepState,
    max_norm: float | None,
) -> StepState:
    """Let engines reduce, unscale, clip and step; return the next state.

    Raises:
        ConfigurationError: Only some of the ``number`` optimizers belong to engines.
    """
    if len(optimizers) < number:
        raise ConfigurationError(
            "optimizer_step: got optimizers of an engine and others in one call, but an engine decides by "
            "itself whether its step is skipped. Step them one by one, each with its own StepState."
        )
    if ctx.num_processes > 1:
        count_call(ctx, Call("optimizer_step"))
    # Read only where it counts: reading from a device waits for it.
    divisor = float(scaler_state.scale) if ctx.precision.scales_loss else 1.0
    if scaler_state.weight is not None:
        share = float(factor_of_weight(ctx, scaler_state.weight))
        divisor = divisor / share if share else math.inf  # without any weight there is nothing to learn from
    steps = [item.run_step(divisor, max_norm) for item in optimizers]
    found = torch.full_like(scaler_state.found_inf, float(any(step.overflowed for step in steps)))
    following = scaler_state._replace(found_inf=found, unscaled=(), weight=None)
    return update_scaler(ctx, following)


def _count_step(optimizer: Optimizer) -> int:
    """Count a step of an optimizer, in an attribute, so that it is in no state dict."""
    number: int = getattr(optimizer, _STEPS, 0) + 1
    setattr(optimizer, _STEPS, number)
    return number


def list_schedulers(
    operation: str, scheduler: LRScheduler | Sequence[LRScheduler] | None
) -> tuple[LRScheduler, ...]:
    """Return one scheduler, several or none as a tuple.

    Raises:
        TypeError: One needs a metric, or isn't a scheduler of torch.
    """
    if scheduler is None:
        return ()
    schedulers = tuple(scheduler) if isinstance(scheduler, Sequence) else (scheduler,)
    for one in schedulers:
        if isinstance(one, ReduceLROnPlateau):
            raise TypeError(
                f"{operation}: ReduceLROnPlateau needs a metric. Leave it out, "
                "and call scheduler_step(ctx, scheduler, metric=...) after each measurement."
            )
        if not isinstance(cast("object", one), LRScheduler):
            raise TypeError(f"{operation}: scheduler= takes torch's schedulers, got {type(one).__name__}.")
    return schedulers


def _step_if_finite(optimizers: Sequence[Optimizer], found_inf: torch.Tensor) -> None:
    rest: list[Optimizer] = []
    for optimizer in cast("Sequence[Any]", optimizers):
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            rest.append(optimizer)
            continue
        # Fused optimizers read the flag on the device, so the host doesn't wait for it.
        optimizer.grad_scale, optimizer.found_inf = None, found_inf
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf
    if rest and not found_inf.item():
        for one in rest:
            one.step()


@takes_context
def scheduler_step(
    ctx: Context,
    scheduler: LRScheduler,
    scaler_state: StepState | None = None,
    *,
    metric: torch.Tensor | float | None = None,
) -> None:
    """Step a learning rate scheduler, unless the optimizer's step was skipped.

    One optimizer step is one scheduler step, at any number of ranks and any accumulation.

    Ranks: local; call it where :func:`optimizer_step` is called. With ``metric``, every rank of ``ctx``: it
    is averaged over them, so that all have the same learning rate.

    Args:
        ctx: The world and the precision.
        scheduler: The scheduler to step.
        scaler_state: From :func:`optimizer_step`; required where steps may be skipped, to know of those.
        metric: The metric of ``ReduceLROnPlateau``.

    Raises:
        ValueError: Steps may be skipped, and no state was passed; or it was superseded.
        TypeError: The scheduler needs a metric and got none, or got one and takes none.
    """
    if scaler_state is not None:
        check_scaler("scheduler_step", scaler_state)
    if isinstance(scheduler, ReduceLROnPlateau) != (metric is not None):
        needs = "needs metric=..." if metric is None else "takes no metric: leave it out"
        raise TypeError(f"scheduler_step: {type(scheduler).__name__} {needs}.")
    if metric is not None:  # steps by epochs, which aren't skipped
        value = torch.as_tensor(metric, dtype=torch.float64, device="cpu").reshape(())
        cast("Any", scheduler).step(float(reduce(ctx.tagged("scheduler_step"), value, "mean")))
        return
    if scaler_state is None and may_skip(ctx):
        raise ValueError(
            'scheduler_step: with float16, and with Guard(check_gradients="skip"), a step may be skipped, so '
            "pass the scaler state that optimizer_step returned."
        )
    if scaler_state is None or not step_was_skipped(ctx, scaler_state):
        scheduler.step()
