"""A whole optimizer step as one function, for those who want no loop code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelfn.context import Context, check_context
from accelfn.training.loss import Loss
from accelfn.training.module_step import TrainState, first_module_state, module_step
from accelfn.training.pure_step import (
    PureOptimizer,
    PureTrainState,
    first_pure_state,
    is_pure_optimizer,
    pure_step,
)
from accelfn.training.window import StepMetrics

__all__ = ("init_train_state", "make_train_step")

Model = TypeVar("Model")
Params = TypeVar("Params")
Batch = TypeVar("Batch")

Optimizers = Optimizer | Sequence[Optimizer]


@overload
def init_train_state(ctx: Context, optimizer: Optimizers) -> TrainState: ...
@overload
def init_train_state(ctx: Context, optimizer: PureOptimizer, params: Params) -> PureTrainState[Params]: ...
def init_train_state(ctx: Context, optimizer: Any, params: Any = None) -> Any:
    """Return the state before the first step of a function that :func:`make_train_step` made.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and the precision.
        optimizer: As given to :func:`make_train_step`.
        params: For an optimizer that is a pair of functions, a tree of floating-point tensors. All ranks
            begin with those of rank 0, moved to the context's device; the tree itself stays as it is.

    Returns:
        A :class:`TrainState`, or with ``params`` a :class:`PureTrainState`.

    Raises:
        TypeError: Another kind of optimizer; ``params`` for a torch optimizer, or none for another.
        MismatchError: The parameters differ between ranks in structure, shape or dtype.

    >>> init_train_state(Context(), torch.optim.SGD([torch.zeros(1)])).num_steps
    tensor(0)
    """
    check_context("init_train_state", ctx)
    if _torch_optimizers(optimizer) is not None:
        if params is not None:
            raise TypeError(
                "init_train_state: got params for a torch optimizer, whose parameters stay in their module. "
                "Leave params out, or pass an optimizer with init and update."
            )
        return first_module_state(ctx)
    pure = _pure("init_train_state", optimizer)
    if params is None:
        raise TypeError(
            "init_train_state: an optimizer with init and update works on parameters that are in the state. "
            "Pass params=, the tree to begin with."
        )
    return first_pure_state(ctx, pure, params)


@overload
def make_train_step(
    ctx: Context,
    loss_fn: Callable[[Model, Batch], torch.Tensor | Loss],
    optimizer: Optimizers,
    *,
    model: Model,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]: ...
@overload
def make_train_step(
    ctx: Context,
    loss_fn: Callable[[Params, Batch], torch.Tensor | Loss],
    optimizer: PureOptimizer,
    *,
    max_norm: float | None = None,
) -> Callable[[PureTrainState[Params], Batch], tuple[PureTrainState[Params], StepMetrics]]: ...
def make_train_step(
    ctx: Context,
    loss_fn: Callable[[Any, Any], torch.Tensor | Loss],
    optimizer: Any,
    *,
    model: Any = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
) -> Callable[[Any, Any], tuple[Any, StepMetrics]]:
    """Make a function that takes a state and a batch through one optimizer step: ``state, metrics = ...``.

    The batch is what this rank contributes to the step. With ``gradient_accumulation_steps=k`` it is cut
    along the first dimension of its tensors into ``k`` pieces, which differ by at most one row, and their
    gradients add up to that of the whole: the mean over its rows, over all ranks. Gradients cross the ranks
    once.

    With a torch optimizer, or several that step together, ``loss_fn(model, batch)`` is differentiated by
    backward, and parameters and the optimizer's state are changed where they are. With an optimizer that is a
    pair of functions, such as torchopt's, ``loss_fn(params, batch)`` is differentiated by ``torch.func`` and
    must be pure; so is the step then: it writes into nothing that it is given.

    Ranks: local; of the function that is made, every rank of ``ctx``.

    Args:
        ctx: The world, the precision, and the size of a window.
        loss_fn: Gives a tensor of shape ``()``, the mean over the rows of its batch; or a :class:`Loss`, with
            a weight where it is a sum, and with more to be averaged.
        optimizer: A torch optimizer; a sequence of them, which step all or none; or anything with ``init``
            and ``update`` (:class:`PureOptimizer`).
        model: With a torch optimizer: what ``loss_fn`` is called with, a module or a tree of modules, as
            ``prepare_model`` gave them.
        scheduler: With a torch optimizer: one or several that move by one with each step that isn't skipped.
        max_norm: Scale the gradient so that its norm, over all parameters, is at most this.

    Returns:
        ``step(state, batch) -> (state, metrics)``, with a state from :func:`init_train_state` and
        :class:`StepMetrics`. It raises what ``backward`` and ``optimizer_step`` do, and

        - TypeError: ``loss_fn`` returned something else, or the state belongs to the other kind of step.
        - ValueError: The batch can't be cut, or the losses of its pieces don't fit together.

    Raises:
        TypeError: Another kind of optimizer; a model, or none, where it doesn't fit; a scheduler that isn't
            moved by steps.
        ValueError: ``max_norm`` isn't positive.
        ConfigurationError: The optimizer has parameters that are not the model's, or whose gradients nobody
            averages over the ranks; or a scheduler moves another optimizer.

    >>> ctx, model = Context(), torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = make_train_step(ctx, lambda model, x: model(x).mean(), optimizer, model=model)
    >>> state = init_train_state(ctx, optimizer)
    >>> state, metrics = step(state, torch.ones(4, 1))
    >>> state.num_steps, metrics.skipped
    (tensor(1), tensor(False))
    """
    check_context("make_train_step", ctx)
    if max_norm is not None and not max_norm > 0:
        raise ValueError(
            f"make_train_step: max_norm must be positive, got {max_norm!r}. Leave it out to not clip."
        )
    if not callable(loss_fn):
        raise TypeError(f"make_train_step: loss_fn must be callable, got {type(loss_fn).__name__}.")
    optimizers = _torch_optimizers(optimizer)
    if optimizers is not None:
        schedulers = tuple(scheduler) if isinstance(scheduler, Sequence) else (scheduler,)
        moved = tuple(one for one in schedulers if one is not None)
        return module_step(ctx, loss_fn, optimizers, model, moved, max_norm)
    pure = _pure("make_train_step", optimizer)
    for name, given in (("model", model), ("scheduler", scheduler)):
        if given is not None:
            raise TypeError(
                f"make_train_step: got {name}= for an optimizer with init and update, which works on "
                "parameters that are in the state. Leave it out"
                + (" and let the optimizer follow a schedule." if name == "scheduler" else ".")
            )
    return pure_step(ctx, loss_fn, pure, max_norm)


def _torch_optimizers(optimizer: Any) -> tuple[Optimizer, ...] | None:
    """Return one or several torch optimizers as a tuple; None for anything else."""
    if isinstance(optimizer, Optimizer):
        return (optimizer,)
    if isinstance(optimizer, Sequence) and optimizer:
        several = tuple(cast("Sequence[object]", optimizer))
        if all(isinstance(one, Optimizer) for one in several):
            return cast("tuple[Optimizer, ...]", several)
    return None


def _pure(operation: str, optimizer: Any) -> PureOptimizer:
    if is_pure_optimizer(optimizer):
        return optimizer
    raise TypeError(
        f"{operation}: the optimizer must be one of torch.optim, a sequence of them, or have init(params) "
        f"and update(grads, state, params=params); got {type(optimizer).__name__}."
    )
