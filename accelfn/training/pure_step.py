"""A train step over pytrees: takes parameters and optimizer state, and returns new ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from typing_extensions import NamedTuple, TypeIs

from accelfn.comm import Call, broadcast, catch, check, check_replicas, reduce_scatter
from accelfn.comm.pieces import cut, join
from accelfn.context import Collectives, Context, World
from accelfn.data import Window
from accelfn.errors import ConfigurationError
from accelfn.parallel.norm import clip_pieces_, clip_tensors_
from accelfn.parallel.strategies.compilation import not_compiled
from accelfn.training.functional_optimizers import FunctionalOptimizer, not_elementwise
from accelfn.training.gradients import value_and_grad
from accelfn.training.loss import Loss, read_loss
from accelfn.training.metrics import (
    StepMetrics,
    Terms,
    add_terms,
    average,
    average_in_order,
    first_number,
    terms_of,
)
from accelfn.training.pieces import Piece, splitter
from accelfn.training.scaler import (
    StepState,
    divide_gradients_,
    init_scaler,
    inverse_of_weight,
    may_skip,
    update_scaler,
)
from accelfn.training.step import check_tensors
from accelfn.tree import Sharded, flatten, from_local, local_of, send_to_device

Params = TypeVar("Params")
Batch = TypeVar("Batch")


class PureOptimizer(Protocol):
    """An optimizer that is a pair of functions, such as those of torchopt.

    A :class:`FunctionalOptimizer` is one whose ``update`` returns new parameters instead of updates.

    Attributes:
        init: ``init(params)`` returns the first state, a tree.
        update: ``update(grads, state, params=params)`` returns ``(updates, state)``: a tree like the
            parameters that is added to them, where None changes nothing; and the next state. One with an
            argument ``inplace``, like torchopt's, is called with ``inplace=False``.
    """

    @property
    def init(self) -> Callable[[Any], Any]:
        """Return the first state."""
        ...

    @property
    def update(self) -> Callable[..., tuple[Any, Any]]:
        """Return the next updates and the next state."""
        ...


class PureTrainState(NamedTuple, Generic[Params]):
    """The state of a train step over pytrees.

    Attributes:
        params: The parameters, a tree of tensors without ``requires_grad``.
        optimizer_state: State of the optimizer.
        scaler: State of loss scaling.
        num_steps: Number of windows so far, including skipped ones; int64, shape ``()``.
    """

    params: Params
    optimizer_state: Any
    scaler: StepState
    num_steps: torch.Tensor


def is_pure_optimizer(optimizer: object) -> TypeIs[PureOptimizer]:
    """Return whether an optimizer is a pair of functions."""
    return callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))


def check_shardable(operation: str, optimizer: object) -> None:
    """Check that an optimizer can update pieces of parameters, and keep its state of these alone.

    Raises:
        TypeError: It isn't from :func:`accelfn.functional`.
        NotAvailableError: It doesn't update each element by itself.
    """
    if not isinstance(optimizer, FunctionalOptimizer):
        raise TypeError(
            f"{operation}: shard_optimizer_state=True takes an optimizer from accelfn.functional, which can "
            f"update pieces of parameters, got {type(optimizer).__name__}. Shard modules with FSDP2, and "
            "other pairs of functions by hand, as the page 'Shard a pytree yourself' shows."
        )
    if not optimizer.is_elementwise:
        raise not_elementwise(operation, optimizer.name)


def first_pure_state(
    ctx: Context, optimizer: PureOptimizer, params: Params, is_sharded: bool
) -> PureTrainState[Params]:
    """Return the initial state: parameters of rank 0, on this rank's device."""
    if ctx.device_placement:
        params = send_to_device(params, ctx.device)
    params = broadcast(ctx.tagged("init_train_state"), params)
    leaves, structure = flatten(params)
    # Parameters of a module require gradients; the graph of what is computed from them would grow for ever.
    params = structure.unflatten([leaf.detach() for leaf in leaves])
    optimizer_state = optimizer.init(cut(ctx, params) if is_sharded else params)
    return PureTrainState(params, optimizer_state, init_scaler(ctx), first_number(ctx))


class _Window(NamedTuple):
    """One rank's results of a window."""

    terms: Terms
    grads: list[torch.Tensor]


def pure_step(
    ctx: Context,
    loss_fn: Callable[[Params, Batch], torch.Tensor | Loss],
    optimizer: PureOptimizer,
    max_norm: float | None,
    is_sharded: bool,
) -> Callable[[PureTrainState[Params], Batch | Window[Batch]], tuple[PureTrainState[Params], StepMetrics]]:
    """Build the step; see :func:`accelfn.make_train_step`.

    If the optimizer's state is sharded, the gradients are averaged into pieces (in exact mode whole, in their
    order, and then cut), and the pieces of the parameters are updated, and gathered.
    """
    update = _without_writing(optimizer.update)
    scales, skips = ctx.precision.scales_loss, may_skip(ctx)
    if skips and isinstance(optimizer, FunctionalOptimizer) and optimizer.donates:
        raise ConfigurationError(
            "make_train_step: the optimizer has donate=True, so parameters and state are overwritten by an "
            "update, and here a step with infinite gradients is skipped, which keeps them. Use donate=False."
        )
    # A world of this rank only: the window is averaged once, at its end.
    own = replace(ctx, world=World(device=ctx.device), collectives=Collectives(), reduction=None, mesh=None)
    together = average if ctx.num_processes == 1 else not_compiled(average)
    is_exact = ctx.reduction is not None
    number = ctx.gradient_accumulation_steps
    split = splitter(ctx)
    # Exact mode has the whole gradients, of all ranks in order.
    by_pieces = is_sharded and not is_exact and ctx.num_processes > 1
    clip = partial(clip_pieces_, ctx) if by_pieces else clip_tensors_

    def loss_of(params: Params, batch: Batch) -> Loss:
        return read_loss(ctx, "make_train_step", loss_fn(params, batch))

    def step(
        state: PureTrainState[Params], batch: Batch | Window[Batch]
    ) -> tuple[PureTrainState[Params], StepMetrics]:
        if not isinstance(cast("object", state), PureTrainState):
            raise TypeError(
                f"the train step over pytrees takes a PureTrainState, got {type(state).__name__}. Create the "
                "first with init_train_state(ctx, optimizer, params), and pass on the state that the step "
                "returns."
            )
        _check_sharding(state.optimizer_state, is_sharded)
        pieces, rows = split(batch, number)

        def compute() -> _Window:
            return _window_of(own, loss_of, state, pieces, rows)

        def compute_each() -> list[_Window]:
            return [_piece_of(own, loss_of, state, piece, 1, rows) for piece in pieces]

        if is_exact:
            by_place = isinstance(batch, Window)
            window = _Window(*not_compiled(average_in_order)(ctx, compute_each, by_place=by_place))
        elif ctx.num_processes == 1:
            window = compute()
        else:
            found, error = catch(compute)
            if error is not None:
                # Other ranks raise where they average.
                not_compiled(check)(ctx, Call("make_train_step"), error)
            window = cast("_Window", found)
        if ctx.guard.check_gradients and not skips:
            not_compiled(check_tensors)(ctx, flatten(state.params)[1].paths("params"), window.grads)
        with torch.no_grad():
            terms, grads = window
            if by_pieces:
                terms, grads = _average_pieces(ctx, terms, grads)
            elif not is_exact:
                terms, (grads,) = together(ctx, terms, grads)
            share = None if terms.divisor is None else inverse_of_weight(terms.divisor)
            if skips or share is not None or max_norm is not None:
                # Copies to write into: two parameters may share a gradient tensor, or one of the batch.
                grads = [grad.clone() for grad in grads]
            scaler = divide_gradients_(ctx, [*map(local_of, grads)], state.scaler, share)
            norm = None if max_norm is None else clip(grads, max_norm)
            if skips and (by_pieces or not scales):  # each rank has looked at its own pieces alone
                whole = clip(grads, math.inf) if norm is None else norm
                scaler = scaler._replace(found_inf=(~whole.isfinite()).to(scaler.found_inf))
            before, tree = state.params, flatten(state.params)[1].unflatten(grads)
            if is_sharded:
                before, tree = cut(ctx, before), cut(ctx, tree)
            if isinstance(optimizer, FunctionalOptimizer):
                params, optimizer_state = update(tree, state.optimizer_state, before)
            else:
                params, optimizer_state = _updated(update, tree, state)
            skipped = scaler.found_inf != 0
            if skips:
                params = _keep(skipped, before, params)
                optimizer_state = _keep(skipped, state.optimizer_state, optimizer_state)
                scaler = update_scaler(ctx, scaler)
            if is_sharded:
                params = join(ctx, "make_train_step", params)
            metrics = StepMetrics(terms.loss, norm, skipped, terms.aux)
            state = PureTrainState(params, optimizer_state, scaler, state.num_steps + 1)
        if ctx.guard.check_replicas_every is not None and ctx.num_processes > 1:
            compare(state)
        return state, metrics

    @not_compiled
    def compare(state: PureTrainState[Params]) -> None:
        every = ctx.guard.check_replicas_every
        if every is not None and int(state.num_steps) % every == 0:
            check_replicas(ctx, state.params, name="params")

    return not_compiled(step) if is_sharded else step


def _check_sharding(optimizer_state: Any, is_sharded: bool) -> None:
    """Refuse a state that was made, or is to be updated, as the other kind."""
    tensors = [leaf for leaf in flatten(optimizer_state)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if any(isinstance(leaf, Sharded) != is_sharded for leaf in tensors):
        is_piece, updates = ("not ", "pieces of") if is_sharded else ("", "whole")
        raise TypeError(
            f"make_train_step: the optimizer's state is {is_piece}sharded over the ranks, and this step "
            f"updates {updates} parameters. Pass the same shard_optimizer_state= to make_train_step and "
            "init_train_state."
        )


def _average_pieces(
    ctx: Context, terms: Terms, grads: Sequence[torch.Tensor]
) -> tuple[Terms, list[torch.Tensor]]:
    """Average terms and 0-d gradients over all ranks, and of the other gradients this rank's pieces.

    Returns:
        The terms, as :func:`average` does; and the gradients, Sharded and whole ones.
    """
    terms, (small,) = average(ctx, terms, [grad for grad in grads if not grad.dim()])
    split = [grad for grad in grads if grad.dim()]
    local = reduce_scatter(ctx.tagged("make_train_step"), split, reduction="mean")
    pieces = iter([from_local(*pair) for pair in zip(local, cut(ctx, split), strict=True)])
    rest = iter(small)
    return terms, [next(pieces) if grad.dim() else next(rest) for grad in grads]


def _window_of(
    ctx: Context,
    loss_of: Callable[[Any, Any], Loss],
    state: PureTrainState[Any],
    pieces: Sequence[Piece],
    rows: float | None,
) -> _Window:
    """Compute gradients and metrics of this rank's window."""
    terms: list[Terms] = []
    grads: list[torch.Tensor] = []
    for piece in pieces:
        term, new = _piece_of(ctx, loss_of, state, piece, len(pieces), rows)
        terms.append(term)
        grads = [before + grad for before, grad in zip(grads, new, strict=True)] if grads else new
    return _Window(add_terms(terms), grads)


def _piece_of(
    ctx: Context,
    loss_of: Callable[[Any, Any], Loss],
    state: PureTrainState[Any],
    piece: Piece,
    num_pieces: int,
    rows: float | None,
) -> _Window:
    """Compute the terms and gradients of a piece; a mean is divided by the number of pieces."""
    scales = ctx.precision.scales_loss
    share = piece.share * (1 if rows is None else rows)

    def scaled_loss(params: Any) -> tuple[torch.Tensor, Terms]:
        loss = loss_of(params, piece.batch)
        value = loss.value
        if loss.weight is None:
            value = value * share if share != 1.0 else value
            value = value / num_pieces if num_pieces > 1 else value
        if scales:
            value = value * state.scaler.scale
        return value, terms_of(loss, piece, num_pieces, rows)

    (_, terms), found = value_and_grad(ctx, scaled_loss)(state.params)
    grads = cast("list[torch.Tensor]", flatten(found)[0])
    if scales and any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError(
            "make_train_step: with mixed precision fp16 parameters stay float32, and some are float16. "
            "Autocast computes in float16 where it helps."
        )
    return _Window(terms, grads)


def _without_writing(update: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Make an update not write into its arguments."""
    try:
        can_write = "inplace" in inspect.signature(update).parameters
    except (TypeError, ValueError):  # not written in Python
        can_write = False
    if not can_write:
        return update

    def call(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return update(grads, state, params=params, inplace=False)

    # Torch.compile fails on torchopt's Adam, instead of breaking the graph (torch 2.13, torchopt 0.7.3,
    # optree 0.20). Outside of the graph it runs normally.
    return not_compiled(call)


def _updated(
    update: Callable[..., tuple[Any, Any]], grads: Any, state: PureTrainState[Params]
) -> tuple[Params, Any]:
    """Return the parameters with their updates added, and the optimizer's next state."""
    updates, optimizer_state = update(grads, state.optimizer_state, params=state.params)
    # Flattened again: an update that breaks the graph invalidates structures from before (torch 2.13,
    # optree 0.20).
    params, structure = flatten(state.params, _is_none)
    changes, other = flatten(updates, _is_none)
    if other != structure:
        raise ValueError(
            "make_train_step: the optimizer's update returned a tree of another structure than the "
            f"parameters: {other.describe()} instead of {structure.describe()}. Use parameters in a tree "
            "that the optimizer supports, such as a dict of tensors."
        )
    added = [
        leaf if change is None else leaf + change.to(leaf.dtype)
        for leaf, change in zip(params, changes, strict=True)
    ]
    return structure.unflatten(added), optimizer_state


def _is_none(value: object) -> bool:
    return value is None


def _keep(skipped: torch.Tensor, before: Any, after: Any) -> Any:
    """Return ``before`` if the step is skipped, else ``after``, without waiting for the device."""
    old, structure = flatten(before)
    new, other = flatten(after)
    if other != structure:
        raise ValueError(
            "make_train_step: with float16 a step may be skipped, which must not change the optimizer's "
            f"state; but update returned one of another structure: {other.describe()} instead of "
            f"{structure.describe()}. Use an optimizer whose state keeps its structure."
        )
    kept: list[Any] = []
    for index, (left, right) in enumerate(zip(old, new, strict=True)):
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
            local = torch.where(skipped.to(right.device), local_of(left), local_of(right))
            kept.append(from_local(local, like=right))
        elif left is right or left == right:
            kept.append(right)
        else:
            raise ValueError(
                "make_train_step: with float16 a step may be skipped, which must not change the optimizer's "
                f"state; but {structure.paths('optimizer_state')[index]} is no tensor and changed "
                f"from {left!r} to {right!r}. Use an optimizer that counts in tensors, or bf16."
            )
    return structure.unflatten(kept)
