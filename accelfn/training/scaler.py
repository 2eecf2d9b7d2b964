"""Loss scale and loss weight, as a value.

Small gradients vanish in float16, so the loss is multiplied by a scale before backward and the gradients are
divided by it afterwards. If a gradient overflows, the step is skipped and the scale lowered; after enough
good steps it grows.

Losses that are sums with a weight, such as the number of tokens, are divided in the same place: by the
weight of the window on all ranks, which is unknown before its last batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

import torch
from torch.optim import Optimizer

from accelfn.comm import Call, catch, check
from accelfn.config import GradientCheck
from accelfn.context import Context, takes_context
from accelfn.data import MicroBatch
from accelfn.devices import DEVICE_TYPES, device_type
from accelfn.parallel.engines import EngineOptimizer
from accelfn.parallel.handle import handles_of
from accelfn.parallel.step_checks import follow_optimizers
from accelfn.training.optimizers import list_optimizers, parameters_in
from accelfn.training.unstepped import Unstepped, left_by
from accelfn.tree import local_of


class _Fields(NamedTuple):
    scale: torch.Tensor
    growth_tracker: torch.Tensor
    found_inf: torch.Tensor
    num_skipped: torch.Tensor
    unscaled: tuple[int, ...] = ()
    weight: torch.Tensor | None = None
    is_open: Literal[True] | None = None


_WITHOUT_FLOAT64 = frozenset(name for name, row in DEVICE_TYPES.items() if not row.has_float64)


class StepState(_Fields):
    """Loss scale and loss weight, as a value. Reading it on the host waits for the device.

    Each state is used once: :func:`accelfn.backward`, :func:`unscale_gradients` and
    :func:`accelfn.optimizer_step` return the next one, and refuse earlier ones. ``state._replace()`` is a
    new state with the same values, to continue twice from here on purpose.

    Attributes:
        scale: Factor of the loss; float32, shape ``()``.
        growth_tracker: Steps without overflow since the scale changed; int32, shape ``()``.
        found_inf: 1 if a gradient of the latest step was not finite, else 0; float32, shape ``()``.
        num_skipped: Steps that were skipped so far; int64, shape ``()``.
        unscaled: Ids of the optimizers whose gradients are divided already; empty after a step.
        weight: Total weight of this rank's losses behind the current gradients, if they are sums; float64 if
            the device has it, shape ``()``. None if they are means, and after a step.
        is_open: True if the accumulation window is still open after the latest backward pass, else None, so
            that all leaves of a state after a step are tensors.
    """

    # An attribute and no field, so that copies by `_replace`, tree maps or checkpoints are new states.
    superseded_by: str | None = None
    """Name of the function that returned a newer state; None for the newest."""
    weight_is_used: bool = False
    """Whether a step has divided gradients by the weight, without a backward pass since."""
    unstepped: Unstepped | None = None
    """Gradients that earlier steps have left, of parameters that other optimizers step; None for none."""

    @property
    def is_unscaled(self) -> bool:
        """Whether the current gradients are divided already."""
        return bool(self.unscaled)


def _no_state(operation: str, found: object) -> TypeError:
    return TypeError(
        f"{operation}: scaler_state must be a StepState, got {type(found).__name__}. Pass the state that "
        "init_scaler, or the last backward or optimizer_step, returned."
    )


def check_scaler(
    operation: str, scaler_state: object, *, is_closed: bool = False, divides: bool = False
) -> None:
    """Refuse a superseded state, and one that a step can't be taken from.

    Args:
        operation: Name of the operation in errors.
        scaler_state: The state.
        is_closed: Whether its window must be closed.
        divides: Whether gradients are divided by the state's weight, which an earlier step must not have used
            then.

    Raises:
        TypeError: It is no state.
        ValueError: Another function has returned a newer one, the latest batch doesn't close the window, or a
            step has used the weight of the latest losses.
    """
    if not isinstance(scaler_state, StepState):
        raise _no_state(operation, scaler_state)
    newer = scaler_state.superseded_by
    if newer is not None:
        raise ValueError(
            f"{operation}: this StepState was superseded: {newer} returned a newer one. Probably:\n"
            "    af.backward(ctx, loss, scaler, micro)  # its result was dropped\n"
            "    scaler = af.optimizer_step(ctx, optimizer, scaler)\n"
            "Write `scaler = af.backward(...)`, and likewise for unscale_gradients and optimizer_step; pass "
            "optimizers that step on the same losses together, as a list. To continue from one state twice "
            "on purpose, pass scaler._replace()."
        )
    if is_closed and scaler_state.is_open:
        raise ValueError(
            f"{operation}: the accumulation window is still open, so the current gradients are neither "
            "complete nor averaged over the ranks. Put the call under `if micro.sync:`. Where the batch that "
            "closes a window is left out, leave out the step too, and the next window adds to its gradients; "
            "or pass its loss as zero: backward(ctx, 0 * loss, scaler, micro)."
        )
    if divides and scaler_state.weight_is_used:
        raise ValueError(
            f"{operation}: the latest losses had weights, and an earlier optimizer_step divided only its own "
            "optimizer's gradients by them. Pass optimizers that step on the same losses together: "
            "optimizer_step(ctx, [first, second], scaler)."
        )


@takes_context
def init_scaler(ctx: Context) -> StepState:
    """Return the first state. Without float16 the scale is always 1.

    Ranks: local; the same on every rank.

    >>> init_scaler(Context()).scale
    tensor(1.)
    """
    scale = ctx.precision.scaler.init_scale if ctx.precision.scales_loss else 1.0
    return StepState(
        scale=torch.tensor(scale, dtype=torch.float32, device=ctx.device),
        growth_tracker=torch.zeros((), dtype=torch.int32, device=ctx.device),
        found_inf=torch.zeros((), dtype=torch.float32, device=ctx.device),
        num_skipped=torch.zeros((), dtype=torch.int64, device=ctx.device),
    )


@takes_context
def unscale_gradients(
    ctx: Context, optimizer: Optimizer | Sequence[Optimizer], scaler_state: StepState
) -> StepState:
    """Divide the gradients by the loss scale and by their weight, for clipping or inspecting them.

    Writes into the gradients. Does nothing if it is called again for an optimizer before the step, or with
    neither float16 nor weights.

    Ranks: every rank of ``ctx``: whether a gradient overflowed is agreed, so that all skip or none.

    Args:
        ctx: The world and its precision.
        optimizer: The optimizer of the gradients; several that step together in one sequence.
        scaler_state: From :func:`accelfn.backward`.

    Returns:
        The next state, also where there was nothing to do.

    Raises:
        ValueError: The state was superseded, or its window is still open; or a gradient is float16, since its
            parameter is, and scaling would not help.
        MismatchError: Some ranks have weights and some have none.
    """
    check_scaler("unscale_gradients", scaler_state, is_closed=True, divides=True)
    following = unscale(ctx, optimizer, scaler_state)
    if scaler_state.unstepped is not None:
        following.unstepped = scaler_state.unstepped
    scaler_state.superseded_by = "unscale_gradients"
    return following


def unscale(ctx: Context, optimizer: Optimizer | Sequence[Optimizer], scaler_state: StepState) -> StepState:
    """Run :func:`unscale_gradients` without its checks of the state, which can be used again."""
    scales, weight = ctx.precision.scales_loss, scaler_state.weight
    several = list_optimizers("unscale_gradients", optimizer)
    engines = [one for one in several if isinstance(one, EngineOptimizer)]
    follow_optimizers("unscale_gradients", ctx, [one for one in several if one not in engines])
    left = [one for one in several if id(one) not in scaler_state.unscaled]
    settle_unstepped(scaler_state)
    if not left or (not scales and weight is None and scaler_state.unstepped is None):
        return scaler_state._replace()
    if engines:  # their steps divide
        return scaler_state._replace(unscaled=(*scaler_state.unscaled, *map(id, left)))
    grads, error = catch(lambda: _gradients_to_divide(left, scaler_state, scales))
    if ctx.num_processes > 1:  # before anything changes
        check(ctx, Call("unscale_gradients", f"scaled={scales} weighted={weight is not None}"), error)
    elif error is not None:
        raise error
    share = None if weight is None else factor_of_weight(ctx, weight)
    following = divide_gradients_(ctx, grads or [], scaler_state, share)
    unscaled = (*scaler_state.unscaled, *map(id, left))
    if not scales:
        return following._replace(unscaled=unscaled)
    found_inf = following.found_inf
    if scaler_state.is_unscaled:
        found_inf = torch.maximum(scaler_state.found_inf, found_inf)
    if ctx.num_processes > 1:
        flag = found_inf.reshape(1).clone()
        ctx.collectives.all_reduce(flag, "max")
        found_inf = flag.reshape(())
    return following._replace(found_inf=found_inf, unscaled=unscaled)


def with_loss(
    operation: str, scaler_state: StepState, weight: torch.Tensor | float | None, micro: MicroBatch | None
) -> StepState:
    """Return the state after a backward pass: with the loss weight, and whether the window is still open."""
    total = scaler_state.weight if weight is None else _add_weight(scaler_state, weight)
    is_open = True if micro is not None and not micro.sync else None
    following = StepState(*scaler_state[:5], total, is_open)  # a third of the cost of _replace
    if scaler_state.unstepped is not None:
        following.unstepped = scaler_state.unstepped
    scaler_state.superseded_by = operation
    return following


def _add_weight(scaler_state: StepState, weight: torch.Tensor | float) -> torch.Tensor:
    before = scaler_state.weight
    if before is None:
        # Sums of integers are exact in it, in any order.
        is_wide = device_type(scaler_state.scale.device.type).has_float64
        dtype = torch.float64 if is_wide else torch.float32
        before = torch.zeros_like(scaler_state.scale, dtype=dtype)
    return before + (weight.detach().reshape(()).to(before) if isinstance(weight, torch.Tensor) else weight)


def divide_gradients_(
    ctx: Context, gradients: Sequence[torch.Tensor], scaler_state: StepState, share: torch.Tensor | None
) -> StepState:
    """Divide gradients by the loss scale, and multiply them by ``share``. Writes into them.

    Ranks: local.

    Args:
        ctx: Whether losses are scaled.
        gradients: Dense ones of any dtypes and devices.
        scaler_state: Has the scale.
        share: Factor of gradients of sums with a weight; None for means.

    Returns:
        The state; where losses are scaled, with ``found_inf`` of these gradients.
    """
    if not ctx.precision.scales_loss:
        if share is not None:
            multiply_gradients_(gradients, share)
        return scaler_state
    with torch.no_grad():
        # In float64 if the device has it.
        wide = torch.float32 if scaler_state.scale.device.type in _WITHOUT_FLOAT64 else torch.float64
        factor = ((1.0 if share is None else share.to(wide)) / scaler_state.scale.to(wide)).float()
        found_inf = torch.zeros_like(scaler_state.found_inf)
        for device, grads in _by_kind(gradients):
            found_here = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
                grads, found_here, factor.to(device)
            )
            found_inf = torch.maximum(found_inf, found_here.to(found_inf.device))
    return scaler_state._replace(found_inf=found_inf)


def multiply_gradients_(gradients: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a factor of shape ``()``. Writes into them.

    Ranks: local.
    """
    with torch.no_grad():
        for device, grads in _by_kind(gradients):
            torch._foreach_mul_(grads, factor.to(device))  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


def _by_kind(gradients: Iterable[torch.Tensor]) -> list[tuple[torch.device, list[torch.Tensor]]]:
    """Return gradients in groups of one device and dtype, with the device."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return [(device, grads) for (device, _), grads in by_kind.items()]


def factor_of_weight(ctx: Context, weight: torch.Tensor) -> torch.Tensor:
    """Return the factor by which gradients of sums, averaged over ranks, become those of sum over weight.

    That is the number of ranks over the weight of all ranks; zero if the weight is zero.

    Ranks: every rank of ``ctx``.
    """
    total = weight.reshape(1).clone()
    if ctx.num_processes > 1:
        ctx.collectives.all_reduce(total, "sum")
    total = total.reshape(())
    num_averaged = ctx.num_processes if ctx.reduction is None else 1  # exact mode sums
    return num_averaged * inverse_of_weight(total)


def inverse_of_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return ``1 / weight``, and zero for weight zero: without any weight there is nothing to learn from.

    An invalid weight, such as NaN, shows in the gradients and the loss.
    """
    return torch.where(weight == 0, torch.zeros_like(weight), 1 / weight)


def local_gradients(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Return the gradients of optimizers, each once; see :func:`gradients_of`."""
    return gradients_of(parameters_in(optimizers))


def gradients_of(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of parameters: this rank's shards, and the values of sparse ones.

    Of complex numbers, of which the kernels for scaled losses know nothing, both parts.
    """
    found = [item.grad for item in parameters if item.grad is not None]
    return [_as_real(grad._values() if grad.is_sparse else grad) for grad in map(local_of, found)]


def _as_real(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient.is_complex():
        return gradient
    return torch.view_as_real(gradient.conj() if gradient.is_conj() else gradient)  # the same memory


def _gradients_to_divide(
    optimizers: Sequence[Optimizer], scaler_state: StepState, are_scaled: bool
) -> list[torch.Tensor]:
    """Return the gradients of optimizers, after a check of those of scaled losses and of earlier ones."""
    unstepped = scaler_state.unstepped
    if unstepped is not None and unstepped.scale is None:
        own = {id(one) for one in parameters_in(optimizers)}
        found = next((one for one in unstepped.with_gradients() if id(one) in own), None)
        if found is not None:
            raise ValueError(
                f"unscale_gradients: the gradient of a parameter of shape {tuple(found.shape)} holds earlier "
                "losses with weights, after which another optimizer of the same model stepped, and those "
                "weights are gone. Pass optimizers that step on the same losses together, as a list; clear "
                "the gradients of those that don't step, by zero_grad(); or let losses be means, without "
                "weight=, where optimizers step at different times."
            )
    grads = local_gradients(optimizers)
    for grad in grads:
        if are_scaled and grad.dtype == torch.float16:
            raise ValueError(
                f"unscale_gradients: a gradient of shape {tuple(grad.shape)} is float16, like its parameter. "
                "Keep the model's parameters in float32; autocast computes in float16 where it helps."
            )
    return grads


def settle_unstepped(scaler_state: StepState) -> None:
    """Bring gradients that earlier steps left to the present loss scale, and forget those that were cleared.

    Writes into the gradients.

    Ranks: local.
    """
    unstepped = scaler_state.unstepped
    if unstepped is None:
        return
    waiting = unstepped.forget_cleared()
    if not waiting:
        scaler_state.unstepped = None
    elif unstepped.scale is not None:
        rescale_gradients(waiting, unstepped.scale, scaler_state.scale)
        unstepped.scale = scaler_state.scale


def unstepped_after(scaler_state: StepState, optimizers: Sequence[Optimizer]) -> Unstepped | None:
    """Return the gradients that a step of optimizers leaves, of a loss that is scaled or has a weight.

    Ranks: local.
    """
    left = left_by(optimizers)
    if not left:
        return None
    before = scaler_state.unstepped
    can_be_added_to = (
        scaler_state.weight is None
        and (before is None or before.scale is not None)
        and set(scaler_state.unscaled) <= set(map(id, optimizers))
    )
    return Unstepped(left, scaler_state.scale if can_be_added_to else None)


def update_scaler(ctx: Context, scaler_state: StepState) -> StepState:
    """Return the state after a step, which was skipped if ``found_inf`` is set. Pure."""
    options = ctx.precision.scaler
    scale, tracker = scaler_state.scale.clone(), scaler_state.growth_tracker.clone()
    if ctx.precision.scales_loss:
        torch._amp_update_scale_(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            scale,
            tracker,
            scaler_state.found_inf,
            options.growth_factor,
            options.backoff_factor,
            options.growth_interval,
        )
    return StepState(
        scale=scale,
        growth_tracker=tracker,
        found_inf=scaler_state.found_inf,
        num_skipped=scaler_state.num_skipped + scaler_state.found_inf.to(torch.int64),
    )


def rescale_gradients(parameters: Sequence[torch.Tensor], before: torch.Tensor, after: torch.Tensor) -> None:
    """Rescale gradients that are not unscaled yet from one loss scale to another.

    Writes into the gradients. For optimizers that share a scale and step at different times.
    """
    ratio = after / before
    with torch.no_grad():
        for handle in {handle for parameter in parameters for handle in handles_of(parameter)}:
            handle.scale_held(parameters, ratio)
        multiply_gradients_(gradients_of(parameters), ratio)


def may_skip(ctx: Context) -> bool:
    """Return whether steps are skipped where gradients aren't finite."""
    return ctx.precision.scales_loss or ctx.guard.check_gradients == GradientCheck.SKIP


@takes_context
def step_was_skipped(ctx: Context, scaler_state: StepState) -> bool:
    """Return whether the latest optimizer step was skipped, for which this waits for the device.

    Steps are skipped with float16, and with ``Guard(check_gradients="skip")``.
    """
    if not isinstance(cast("object", scaler_state), StepState):
        raise _no_state("step_was_skipped", scaler_state)
    return may_skip(ctx) and bool(scaler_state.found_inf.item())
