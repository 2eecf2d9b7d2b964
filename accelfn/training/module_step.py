"""A train step over torch modules and torch optimizers, which are changed where they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from accelfn.comm import Call, catch, check
from accelfn.context import Context
from accelfn.data import MicroBatch, plan_microbatch
from accelfn.data.batch_key import Draws
from accelfn.errors import ConfigurationError
from accelfn.parallel import handle_of, has_engine, repoint
from accelfn.training.backward import (
    accumulate,
    accumulate_block,
    differentiate,
    modules_in,
    run_batch,
)
from accelfn.training.clip import clip_grad_norm_
from accelfn.training.finite import named_parameters
from accelfn.training.loss import Loss
from accelfn.training.scaler import (
    ScalerState,
    init_scaler,
    inverse_of_weight,
    parameters_in,
    unscale_gradients,
)
from accelfn.training.step import optimizer_step
from accelfn.training.window import (
    Piece,
    StepMetrics,
    Terms,
    add_terms,
    average,
    average_in_order,
    cut_window,
    equal_pieces,
    not_compiled,
    terms_of,
)
from accelfn.tree import flatten

__all__ = ("TrainState", "first_module_state", "module_step")

Model = TypeVar("Model")
Batch = TypeVar("Batch")


class TrainState(NamedTuple):
    """What a train step over modules passes on, besides the modules and optimizers themselves.

    Attributes:
        scaler: Where loss scaling stands.
        num_steps: Windows so far, skipped ones too; int64, shape ``()``.
    """

    scaler: ScalerState
    num_steps: torch.Tensor


def first_module_state(ctx: Context) -> TrainState:
    """Return the state before the first step."""
    return TrainState(init_scaler(ctx), torch.zeros((), dtype=torch.int64, device=ctx.device))


def module_step(
    ctx: Context,
    loss_fn: Callable[[Model, Batch], torch.Tensor | Loss],
    optimizers: Sequence[Optimizer],
    model: Model,
    schedulers: Sequence[LRScheduler],
    max_norm: float | None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """Make the step. Checks once what would go wrong in every step; see :func:`accelfn.make_train_step`."""
    models = modules_in("make_train_step", model)
    _check_schedulers(schedulers, optimizers)
    for one in optimizers:
        repoint(one)
    _check_trained(ctx, models, optimizers)

    is_exact = ctx.reduction is not None

    def finish(scaler: ScalerState, found: Sequence[Terms]) -> tuple[ScalerState, Terms, torch.Tensor | None]:
        if is_exact:
            terms, _ = average_in_order(ctx, lambda: [(one, ()) for one in found])
            if terms.weight is not None:
                _divide_gradients(optimizers, terms.weight)
        else:
            terms, _ = average(ctx, add_terms(found))
        norm = None
        if max_norm is not None:
            scaler = unscale_gradients(ctx, optimizers, scaler)
            norm = clip_grad_norm_(ctx, parameters_in(optimizers), max_norm, scaler_state=scaler)
        scaler = optimizer_step(ctx, optimizers, scaler, scheduler=schedulers)
        return scaler, terms, norm

    first = handle_of(models[0])
    # Of models that keep what a window that failed has left elsewhere.
    handles = [one for one in map(handle_of, models) if one is not None and one.holds_gradients]
    num_steps = ctx.gradient_accumulation_steps
    num_pieces = 1 if first is not None and first.cuts_batches else num_steps
    full = [_place(index, num_pieces) for index in range(num_pieces)]
    # What talks to other ranks counts its calls, and each count would be another graph.
    add_gradients = differentiate if ctx.num_processes == 1 else not_compiled(differentiate)
    close = finish if ctx.num_processes == 1 else not_compiled(finish)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        if not isinstance(cast("object", state), TrainState):
            raise TypeError(
                f"the train step over modules takes a TrainState, got {type(state).__name__}. Make the first "
                "with init_train_state(ctx, optimizer), and pass on what the step returns."
            )
        # What another loss, or a window that failed, has left belongs to no loss of this window.
        # By hand, since there are seldom any: zero_grad costs a tenth of a small step.
        for parameter in parameters_in(optimizers):
            parameter.grad = None
        for handle in handles:
            handle.discard()
        pieces = _cut(ctx, batch, num_pieces)
        # Another state with the same values: a step that fails leaves the one that was given as it is.
        scaler, found = state.scaler._replace(), list[Terms]()
        for index, piece in enumerate(pieces):
            micro = full[index] if len(pieces) == num_pieces else _place(index, len(pieces))
            if is_exact:
                number = ctx.rank * num_pieces + index
                micro = micro._replace(draws=Draws(f"microbatch {number} of step {int(state.num_steps)}"))
                block = accumulate_block(ctx, micro, models, is_held=True)
            else:
                block = accumulate(ctx, micro, *models)
            with block:
                scaler, loss = run_batch(
                    ctx,
                    "make_train_step",
                    loss_fn,
                    model,
                    piece.batch,
                    scaler,
                    micro,
                    first,
                    share=piece.share,  # one with more rows than another counts for more in a mean over rows
                    counts_weight=not is_exact,  # which adds them in order too, and divides at the end
                    num_batches=num_steps // num_pieces,
                    differentiate=add_gradients,
                )
            found.append(terms_of(loss, piece, 1 if is_exact else len(pieces)))
        scaler, terms, norm = close(scaler, found)
        metrics = StepMetrics(terms.loss, norm, scaler.found_inf != 0, terms.aux)
        return TrainState(scaler, state.num_steps + 1), metrics

    return not_compiled(step) if is_exact else step


def _divide_gradients(optimizers: Sequence[Optimizer], weight: torch.Tensor) -> None:
    factor = inverse_of_weight(weight)
    for parameter in parameters_in(optimizers):
        if parameter.grad is not None:
            parameter.grad.mul_(factor.to(parameter.grad))


def _place(index: int, count: int) -> MicroBatch:
    return plan_microbatch(index, 0, count, count)


def _cut(ctx: Context, batch: Any, number: int) -> Any:
    def cut() -> list[Piece]:
        return cut_window(batch, number) if ctx.reduction is None else equal_pieces(ctx, batch)

    if ctx.num_processes == 1:
        return cut()
    pieces, error = catch(cut)
    if error is not None:
        check(ctx, Call("make_train_step"), error)  # the others hear of it where they meet next
    return pieces


def _check_schedulers(schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    for one in schedulers:
        if isinstance(one, ReduceLROnPlateau):
            raise TypeError(
                "make_train_step: ReduceLROnPlateau moves by what you measure, and not by steps. Leave it "
                "out, and call scheduler_step(ctx, scheduler, metric=...) after each measurement."
            )
        if not isinstance(cast("object", one), LRScheduler):
            raise TypeError(
                f"make_train_step: scheduler= takes torch's schedulers, got {type(one).__name__}."
            )
        # Compared by parameter groups, since an optimizer may stand behind another object.
        groups: object = one.optimizer.param_groups
        if not any(groups is optimizer.param_groups for optimizer in optimizers):
            raise ConfigurationError(
                f"make_train_step: the {type(one).__name__} moves the learning rate of an optimizer that "
                "doesn't step here. Make it from the optimizer that you pass."
            )


def _check_trained(ctx: Context, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse parameters that would get no gradient, or on each rank another one."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    averaged = {id(parameter) for model in models if has_engine(model) for parameter in model.parameters()}
    for optimizer in optimizers:
        tree, name = named_parameters(optimizer)
        leaves, structure = flatten(tree)
        for index, parameter in enumerate(cast("list[torch.Tensor]", leaves)):
            if not parameter.requires_grad:
                continue
            if id(parameter) not in known:
                raise ConfigurationError(
                    f"make_train_step: {structure.paths(name)[index]} of the {type(optimizer).__name__} is "
                    "no parameter of model, so a step would never see its gradient. Make the optimizer from "
                    "model.parameters() of the same model; several models are passed as a tuple."
                )
            if ctx.num_processes > 1 and id(parameter) not in averaged:
                raise ConfigurationError(
                    f"make_train_step: nobody averages the gradient of {structure.paths(name)[index]} over "
                    f"the {ctx.num_processes} ranks, so their models would drift apart. Pass as model what "
                    "prepare_model(ctx, model) gave back, without evaluation_mode."
                )
