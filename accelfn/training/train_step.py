"""An optimizer step as one function, with forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from accelfn.comm import Call, check
from accelfn.context import Context, takes_context
from accelfn.data import MicroBatch, Window, plan_microbatch
from accelfn.data.microbatch import Draws
from accelfn.errors import ConfigurationError
from accelfn.parallel.engines import EngineOptimizer
from accelfn.parallel.handle import handle_of, has_engine
from accelfn.parallel.pointers import repoint
from accelfn.parallel.strategies.compilation import not_compiled
from accelfn.training.backward_pass import differentiate, modules_in, run_batch
from accelfn.training.functional_optimizers import FunctionalOptimizer
from accelfn.training.loss import Loss
from accelfn.training.metrics import (
    StepMetrics,
    Terms,
    add_terms,
    average,
    average_in_order,
    first_number,
    terms_of,
)
from accelfn.training.optimizers import list_optimizers, parameters_in
from accelfn.training.pieces import splitter
from accelfn.training.pure_step import (
    PureOptimizer,
    PureTrainState,
    check_shardable,
    first_pure_state,
    is_pure_optimizer,
    pure_step,
)
from accelfn.training.scaler import (
    StepState,
    init_scaler,
    inverse_of_weight,
    local_gradients,
    multiply_gradients_,
    unscale_gradients,
)
from accelfn.training.step import (
    check_bound,
    clip_grad_norm_,
    list_schedulers,
    named_parameters,
    optimizer_step,
)
from accelfn.training.window import accumulate, accumulate_block
from accelfn.tree import flatten

Model = TypeVar("Model")
Params = TypeVar("Params")
Batch = TypeVar("Batch")


class TrainState(NamedTuple):
    """The state of a train step over modules, besides the modules and optimizers themselves.

    Attributes:
        scaler: State of loss scaling.
        num_steps: Number of windows so far, including skipped ones; int64, shape ``()``.
    """

    scaler: StepState
    num_steps: torch.Tensor


def module_step(
    ctx: Context,
    loss_fn: Callable[[Model, Batch], torch.Tensor | Loss],
    optimizers: Sequence[Optimizer],
    model: Model,
    schedulers: Sequence[LRScheduler],
    max_norm: float | None,
) -> Callable[[TrainState, Batch | Window[Batch]], tuple[TrainState, StepMetrics]]:
    """Build the step, after the checks that need no data; see :func:`accelfn.make_train_step`."""
    models = modules_in("make_train_step", model)
    _check_schedulers(schedulers, optimizers)
    for optimizer in optimizers:
        repoint(optimizer)
    _check_trained(ctx, models, optimizers)

    is_exact = ctx.reduction is not None
    has_engine_step = any(isinstance(one, EngineOptimizer) for one in optimizers)

    def finish(
        scaler: StepState, parts: Sequence[Terms], rows: float | None, by_place: bool
    ) -> tuple[StepState, Terms, torch.Tensor | None]:
        if has_engine_step and rows not in (None, 1) and parts[0].weight is None:
            # Seen here, since the mean over the ranks is on the device; they raise where they average.
            check(ctx, Call("make_train_step"), _unequal_rows())
        if is_exact:
            terms, _ = average_in_order(ctx, lambda: [(part, ()) for part in parts], by_place=by_place)
        else:
            terms, _ = average(ctx, add_terms(parts))
        if terms.divisor is not None and not has_engine_step and (is_exact or terms.weight is None):
            multiply_gradients_(local_gradients(optimizers), inverse_of_weight(terms.divisor))
        norm = None
        if max_norm is not None:
            scaler = unscale_gradients(ctx, optimizers, scaler)
            norm = clip_grad_norm_(ctx, parameters_in(optimizers), max_norm, scaler_state=scaler)
        scaler = optimizer_step(ctx, optimizers, scaler, scheduler=schedulers)
        return scaler, terms, norm

    first = handle_of(models[0])
    # Handles that may hold gradients of a failed window.
    handles = [one for one in map(handle_of, models) if one is not None and one.holds_gradients]
    split = splitter(ctx)
    num_steps = ctx.gradient_accumulation_steps
    num_pieces = 1 if first is not None and first.splits_batches else num_steps
    full = [_place(index, num_pieces) for index in range(num_pieces)]
    # Communication counts its calls, and each count would be another graph.
    add_gradients = differentiate if ctx.num_processes == 1 else not_compiled(differentiate)
    close = finish if ctx.num_processes == 1 else not_compiled(finish)

    def step(state: TrainState, batch: Batch | Window[Batch]) -> tuple[TrainState, StepMetrics]:
        if not isinstance(cast("object", state), TrainState):
            raise TypeError(
                f"the train step over modules takes a TrainState, got {type(state).__name__}. Create the "
                "first with init_train_state(ctx, optimizer), and pass on the state that the step returns."
            )
        # Gradients of another loss, or of a failed window, don't belong to this one. A plain loop, since
        # there are seldom any: zero_grad costs a tenth of a small step.
        for parameter in parameters_in(optimizers):
            parameter.grad = None
        for handle in handles:
            handle.discard()
        pieces, rows = split(batch, num_pieces)
        weight = 1 if rows is None else rows  # of a mean of this rank
        # A copy: a step that fails leaves the state that it got usable.
        scaler, parts = state.scaler._replace(), list[Terms]()
        number_of_step = int(state.num_steps) if is_exact else 0
        for index, piece in enumerate(pieces):
            micro = piece.micro or (full[index] if len(pieces) == num_pieces else _place(index, len(pieces)))
            if is_exact and piece.micro is None:
                number = ctx.rank * num_pieces + index
                micro = micro._replace(draws=Draws(f"microbatch {number} of step {number_of_step}"))
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
                    share=piece.share * weight,  # a piece with more rows counts more in a mean over rows
                    counts_weight=not is_exact,  # exact mode adds weights in order, and divides at the end
                    num_batches=num_steps // num_pieces if piece.micro is None else 1,
                    differentiate=add_gradients,
                )
            parts.append(terms_of(loss, piece, 1 if is_exact else len(pieces), rows))
        scaler, terms, norm = close(scaler, parts, rows, isinstance(batch, Window))
        metrics = StepMetrics(terms.loss, norm, scaler.found_inf != 0, terms.aux)
        return TrainState(scaler, state.num_steps + 1), metrics

    return not_compiled(step) if is_exact else step


def _unequal_rows() -> ConfigurationError:
    return ConfigurationError(
        "make_train_step: ranks or windows have batches of different numbers of rows, and the engine "
        "averages the means of the ranks. Return the sum and its weight, accelfn.Loss(total, weight=count)."
    )


def _place(index: int, count: int) -> MicroBatch:
    return plan_microbatch(index, 0, count, count)


def _check_schedulers(schedulers: Sequence[LRScheduler], optimizers: Sequence[Optimizer]) -> None:
    for one in schedulers:
        # Compared by parameter groups, since the scheduler may have a proxy of the optimizer.
        groups: object = one.optimizer.param_groups
        if not any(groups is optimizer.param_groups for optimizer in optimizers):
            raise ConfigurationError(
                f"make_train_step: the {type(one).__name__} is for an optimizer that doesn't step here. Make "
                "it from the optimizer that you pass."
            )


def _check_trained(ctx: Context, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Refuse parameters that would get no gradient, or different gradients on each rank."""
    known = {id(parameter) for model in models for parameter in model.parameters()}
    averaged = {id(parameter) for model in models if has_engine(model) for parameter in model.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, EngineOptimizer):  # its groups hold the engine's own tensors
            continue
        tree, name = named_parameters(optimizer)
        leaves, structure = flatten(tree)
        for index, parameter in enumerate(cast("list[torch.Tensor]", leaves)):
            if not parameter.requires_grad:
                continue
            if id(parameter) not in known:
                raise ConfigurationError(
                    f"make_train_step: {structure.paths(name)[index]} of the {type(optimizer).__name__} is "
                    "no parameter of model, so it would get no gradient. Make the optimizer from "
                    "model.parameters() of the same model; pass several models as a tuple."
                )
            if ctx.num_processes > 1 and id(parameter) not in averaged:
                raise ConfigurationError(
                    f"make_train_step: the gradient of {structure.paths(name)[index]} is not averaged over "
                    f"the {ctx.num_processes} ranks, so their models would drift apart. Pass the model that "
                    "prepare_model(ctx, model) returns, without evaluation_mode."
                )


Optimizers = Optimizer | Sequence[Optimizer]
# A record of functions, which pyright takes for methods when it looks for the protocol.
_Pure = PureOptimizer | FunctionalOptimizer
_OR_PURE = ", or have init(params) and update(grads, state, params=params)"


@overload
def init_train_state(ctx: Context, optimizer: Optimizers) -> TrainState: ...
@overload
def init_train_state(
    ctx: Context, optimizer: _Pure, params: Params, *, shard_optimizer_state: bool = False
) -> PureTrainState[Params]: ...
@takes_context
def init_train_state(
    ctx: Context, optimizer: Any, params: Any = None, *, shard_optimizer_state: bool = False
) -> Any:
    """Return the initial state for a function made by :func:`make_train_step`.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and the precision.
        optimizer: As passed to :func:`make_train_step`.
        params: For an optimizer that is a pair of functions, a tree of floating-point tensors. All ranks
            start with those of rank 0, moved to the context's device; the tree itself isn't changed.
        shard_optimizer_state: As of :func:`make_train_step`.

    Returns:
        A :class:`TrainState`, or with ``params`` a :class:`PureTrainState`.

    Raises:
        TypeError: Another kind of optimizer; ``params`` for a torch optimizer, or none for another.
        NotAvailableError: A state that is to be sharded, of an optimizer that can't update pieces.
        MismatchError: The parameters differ between ranks in structure, shape or dtype.

    >>> init_train_state(Context(), torch.optim.SGD([torch.zeros(1)])).num_steps
    tensor(0)
    """
    if shard_optimizer_state:
        check_shardable("init_train_state", optimizer)
    if not is_pure_optimizer(optimizer):
        list_optimizers("init_train_state", optimizer, _OR_PURE)
        if params is not None:
            raise TypeError(
                "init_train_state: got params for a torch optimizer, whose parameters are in their module. "
                "Leave params out, or pass an optimizer with init and update."
            )
        return TrainState(init_scaler(ctx), first_number(ctx))
    if params is None:
        raise TypeError(
            "init_train_state: an optimizer with init and update needs parameters in the state. Pass "
            "params=, the initial tree."
        )
    return first_pure_state(ctx, optimizer, params, shard_optimizer_state)


@overload
def make_train_step(
    ctx: Context,
    loss_fn: Callable[[Model, Batch], torch.Tensor | Loss],
    optimizer: Optimizers,
    *,
    model: Model,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
) -> Callable[[TrainState, Batch | Window[Batch]], tuple[TrainState, StepMetrics]]: ...
@overload
def make_train_step(
    ctx: Context,
    loss_fn: Callable[[Params, Batch], torch.Tensor | Loss],
    optimizer: _Pure,
    *,
    max_norm: float | None = None,
    shard_optimizer_state: bool = False,
) -> Callable[
    [PureTrainState[Params], Batch | Window[Batch]], tuple[PureTrainState[Params], StepMetrics]
]: ...
@takes_context
def make_train_step(
    ctx: Context,
    loss_fn: Callable[[Any, Any], torch.Tensor | Loss],
    optimizer: Any,
    *,
    model: Any = None,
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    max_norm: float | None = None,
    shard_optimizer_state: bool = False,
) -> Callable[[Any, Any], tuple[Any, StepMetrics]]:
    """Make a function that runs one optimizer step on a batch: ``state, metrics = step(state, batch)``.

    The batch is this rank's part of the step: a :class:`accelfn.Window`, whose batches are accumulated; or
    one batch, which with ``gradient_accumulation_steps=k`` is split along the first dimension of its tensors
    into ``k`` pieces that differ by at most one row. Gradients are the mean over the rows of the step, over
    all ranks, which average them once. Ranks may have different numbers of rows, or none; with modules, those
    that have rows need as many pieces. Batches whose tensors have no first dimension in common count alike,
    and so do the batches of a window in exact mode.

    With a torch optimizer, or several that step together, ``loss_fn(model, batch)`` is differentiated by
    backward, and parameters and the optimizer's state are updated in place. With an optimizer that is a pair
    of functions, such as torchopt's, ``loss_fn(params, batch)`` is differentiated by ``torch.func`` and must
    be pure; the step is pure too: it doesn't write into its arguments.

    Ranks: local; for the function that is made, every rank of ``ctx``.

    Args:
        ctx: The world, the precision, and the size of a window.
        loss_fn: Returns a tensor of shape ``()``, the mean over the rows of its batch; or a :class:`Loss`,
            with a weight if it is a sum, and with more values to average.
        optimizer: A torch optimizer; a sequence of them, which step all or none; or any object with ``init``
            and ``update`` (:class:`PureOptimizer`).
        model: With a torch optimizer: first argument of ``loss_fn``, a module or a tree of modules, from
            ``prepare_model``.
        scheduler: With a torch optimizer: one or several that step once with each step that isn't skipped.
        max_norm: Upper bound of the gradient's norm over all parameters.
        shard_optimizer_state: With an optimizer of :func:`accelfn.functional`: each rank keeps the state of
            its rows of each parameter alone, and updates these (ZeRO-1). Gradients are averaged to
            the ranks that update them, and the parameters gathered. The numbers are those of the same step
            without it within rounding, in exact mode bit for bit. 0-d parameters are updated on every rank.

    Returns:
        ``step(state, batch) -> (state, metrics)``, with a state from :func:`init_train_state` and
        :class:`StepMetrics`. It raises what ``backward`` and ``optimizer_step`` do, and

        - TypeError: ``loss_fn`` returned something else, or the state belongs to another kind of step.
        - ValueError: The batch can't be split, or the losses of its pieces don't fit together.

    Raises:
        TypeError: Another kind of optimizer; a model, or none, where it doesn't fit; a scheduler that needs a
            metric.
        ValueError: ``max_norm`` isn't positive.
        ConfigurationError: The optimizer has parameters that are not the model's, or whose gradients aren't
            averaged over the ranks; or a scheduler is for another optimizer.
        NotAvailableError: The state is to be sharded, of an optimizer that doesn't update each element by
            itself, such as Muon.

    >>> ctx, model = Context(), torch.nn.Linear(1, 1, bias=False)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> step = make_train_step(ctx, lambda model, x: model(x).mean(), optimizer, model=model)
    >>> state = init_train_state(ctx, optimizer)
    >>> state, metrics = step(state, torch.ones(4, 1))
    >>> state.num_steps, metrics.skipped
    (tensor(1), tensor(False))
    """
    if max_norm is not None:
        check_bound("make_train_step", "max_norm", max_norm)
    if not callable(loss_fn):
        raise TypeError(f"make_train_step: loss_fn must be callable, got {type(loss_fn).__name__}.")
    if shard_optimizer_state:
        check_shardable("make_train_step", optimizer)
    if not is_pure_optimizer(optimizer):
        optimizers = list_optimizers("make_train_step", optimizer, _OR_PURE)
        moved = list_schedulers("make_train_step", scheduler)
        return module_step(ctx, loss_fn, optimizers, model, moved, max_norm)
    for name, argument in (("model", model), ("scheduler", scheduler)):
        if argument is not None:
            raise TypeError(
                f"make_train_step: got {name}= for an optimizer with init and update, whose parameters are "
                "in the state. Leave it out"
                + (" and give the optimizer a learning rate schedule." if name == "scheduler" else ".")
            )
    return pure_step(ctx, loss_fn, optimizer, max_norm, shard_optimizer_state)
