"""A train step over pytrees: takes parameters and optimizer state, and returns new ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import torch
from typing_extensions import NamedTuple, TypeIs

from accelfn.comm import Call, broadcast, catch, check, check_replicas, reduce
from accelfn.comm.agreement import has_transforms
from accelfn.comm.moves import average as average_differentiably
from accelfn.comm.moves import is_differentiated, keep
from accelfn.context import Collectives, Context, World, check_context
from accelfn.errors import NotAvailableError
from accelfn.parallel.norm import clip_tensors_
from accelfn.training.backward import Loss, check_means, read_loss
from accelfn.training.prepare import autocast
from accelfn.training.scaler import (
    ScalerState,
    divide_,
    init_scaler,
    inverse_of_weight,
    may_skip,
    update_scaler,
)
from accelfn.training.step import check_tensors
from accelfn.training.window import (
    Piece,
    StepMetrics,
    Terms,
    add_terms,
    average,
    average_in_order,
    first_number,
    mean_of_microbatches,
    not_compiled,
    split_into_microbatches,
    splitter,
    terms_of,
)
from accelfn.tree import TreeSpec, concatenate, flatten, require_tensors, send_to_device

P = ParamSpec("P")
V = TypeVar("V")
Params = TypeVar("Params")
Batch = TypeVar("Batch")


def value_and_grad(
    ctx: Context, loss_fn: Callable[Concatenate[Params, P], V]
) -> Callable[Concatenate[Params, P], tuple[V, Params]]:
    """Make a function that returns the value of ``loss_fn`` and its gradient, averaged over all ranks.

    For models whose parameters are a pytree. With a mean loss and equal batches, ``n`` ranks of ``b`` samples
    each get the gradient of one rank with all ``n * b``.

    Losses aren't scaled: with float16 small gradients vanish, so scale the loss in ``loss_fn``, or use
    :func:`accelfn.make_train_step`, which does.

    In exact mode the batch of each rank is split along its first dimension into as many equal microbatches as
    the accumulation window has batches, and loss and gradients are means over the microbatches of all ranks,
    in their order: the same bits at any number of ranks that share one global batch in rank order. The
    gradients of all of a rank's microbatches are held at once.

    Args:
        ctx: The world, and the precision that ``loss_fn`` computes in.
        loss_fn: ``loss_fn(params, *args, **kwargs)`` returns a loss of shape ``()``, or a pair ``(loss,
            aux)``. It is differentiated by ``torch.func``, so it must be pure.

    Returns:
        A function with the arguments of ``loss_fn``, which returns ``(value, grads)``: ``value`` is the
        result of ``loss_fn``, with the loss averaged over ranks and this rank's ``aux``; ``grads`` is a tree
        like ``params``, in their dtypes. In exact mode ``aux`` is joined over this rank's microbatches by
        :func:`accelfn.tree.concatenate`, where a 0-d tensor counts as one row. Every rank of ``ctx`` must
        call it, with ``params`` of one structure. Except in exact mode, it can be differentiated again and
        mapped: by backward and ``torch.func``, on all ranks alike.

    Raises:
        ConfigurationError: Ranks share sequences, and their means are over different numbers of tokens.
        TypeError: (when called) A leaf of ``params`` is no floating-point tensor, or the loss no tensor of
            shape ``()``.
        ValueError: (when called) In exact mode, the batch can't be split into equal microbatches.
        MismatchError: (when called) The parameters differ in structure, shape or dtype between ranks.
        NotAvailableError: (when called) In exact mode, inside of a transform of ``torch.func``.

    >>> step = value_and_grad(Context(), lambda params, x: (params["w"] * x).sum())
    >>> step({"w": torch.tensor([1.0, 2.0])}, torch.tensor([3.0, 4.0]))
    (tensor(11.), {'w': tensor([3., 4.])})
    """
    check_context("value_and_grad", ctx)
    check_means(ctx, "value_and_grad")

    def call(params: Params, /, *args: P.args, **kwargs: P.kwargs) -> tuple[V, Params]:
        leaves, structure = flatten(params)
        for index, leaf in enumerate(require_tensors("value_and_grad", leaves, structure)):
            if not (leaf.is_floating_point() or leaf.is_complex()):
                raise TypeError(
                    f"value_and_grad: {structure.paths()[index]} is of dtype {leaf.dtype}, which has no "
                    "gradient. Close over it, or pass it as another argument."
                )

        if ctx.reduction is not None:
            return cast("tuple[V, Params]", _exactly(ctx, loss_fn, leaves, structure, args, kwargs))
        if ctx.num_processes == 1:
            loss, grads, value = _gradients(ctx, loss_fn, leaves, structure, args, kwargs)
        elif has_transforms() or any(map(is_differentiated, leaves)):
            leaves = keep(ctx, "value_and_grad", leaves)
            loss, grads, value = _gradients(ctx, loss_fn, leaves, structure, args, kwargs)
            loss, *grads = average_differentiably(
                ctx.tagged("value_and_grad"), "value_and_grad", [loss, *grads]
            )
        else:
            loss, grads, value = _gradients(ctx, loss_fn, leaves, structure, args, kwargs)
            loss, grads = reduce(ctx.tagged("value_and_grad"), (loss, grads), "mean")
        averaged = (loss, value[1]) if _is_pair(value) else loss
        return cast("V", averaged), cast("Params", structure.unflatten(grads))

    return call


def _gradients(
    ctx: Context, loss_fn: Callable[..., Any], leaves: list[Any], structure: TreeSpec, args: Any, kwargs: Any
) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    """Return this rank's loss, its gradients, and the complete result of ``loss_fn``."""
    rest: list[Any] = []  # torch.func only returns tensors, and only in its own containers

    def loss_and_tensors(flat: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        with autocast(ctx):
            value = loss_fn(structure.unflatten(flat), *args, **kwargs)
        loss = _loss_of(value)
        found, form = flatten(value)
        places = [index for index, leaf in enumerate(found) if isinstance(leaf, torch.Tensor)]
        rest[:] = [form, places, found]
        return loss, (loss, [found[index] for index in places])

    grads, (loss, tensors) = torch.func.grad(loss_and_tensors, has_aux=True)(leaves)
    form, places, found = rest
    for index, tensor in zip(places, tensors, strict=True):
        found[index] = tensor
    return loss, grads, form.unflatten(found)


def _exactly(
    ctx: Context, loss_fn: Callable[..., Any], leaves: list[Any], structure: TreeSpec, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Return value and gradients averaged over the microbatches of all ranks, in their order."""
    if has_transforms():
        raise NotAvailableError(
            "value_and_grad: in exact mode it isn't differentiable, so torch.func can neither differentiate "
            'nor map it. Use a context without reduction="canonical".'
        )
    microbatches, error = catch(lambda: split_into_microbatches(ctx, (args, kwargs)))
    results = [_gradients(ctx, loss_fn, leaves, structure, *microbatch) for microbatch in microbatches or ()]
    tensors = [[loss, *grads] for loss, grads, _ in results]
    loss, *grads = mean_of_microbatches(ctx.tagged("value_and_grad"), tensors, error)
    values = [value for _, _, value in results]
    aux = concatenate([value[1] for value in values]) if _is_pair(values[0]) else None
    return (loss, aux) if _is_pair(values[0]) else loss, structure.unflatten(grads)


def _loss_of(value: Any) -> torch.Tensor:
    loss = value[0] if _is_pair(value) else value
    if not isinstance(loss, torch.Tensor) or loss.dim():
        found = f"one of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise TypeError(f"value_and_grad: the loss must be a tensor of shape (), got {found}. Take its mean.")
    return loss


def _is_pair(value: object) -> bool:
    return isinstance(value, tuple) and len(cast("tuple[object, ...]", value)) == 2


class PureOptimizer(Protocol):
    """An optimizer that is a pair of functions, such as those of torchopt.

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
    scaler: ScalerState
    num_steps: torch.Tensor


def is_pure_optimizer(optimizer: object) -> TypeIs[PureOptimizer]:
    """Return whether an optimizer is a pair of functions."""
    return callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))


def first_pure_state(ctx: Context, optimizer: PureOptimizer, params: Params) -> PureTrainState[Params]:
    """Return the initial state: parameters of rank 0, on this rank's device."""
    if ctx.device_placement:
        params = send_to_device(params, ctx.device)
    params = broadcast(ctx.tagged("init_train_state"), params)
    leaves, structure = flatten(params)
    # Parameters of a module require gradients; the graph of what is computed from them would grow for ever.
    params = structure.unflatten([leaf.detach() for leaf in leaves])
    return PureTrainState(params, optimizer.init(params), init_scaler(ctx), first_number(ctx))


class _Window(NamedTuple):
    """One rank's results of a window."""

    terms: Terms
    grads: list[torch.Tensor]


def pure_step(
    ctx: Context,
    loss_fn: Callable[[Params, Batch], torch.Tensor | Loss],
    optimizer: PureOptimizer,
    max_norm: float | None,
) -> Callable[[PureTrainState[Params], Batch], tuple[PureTrainState[Params], StepMetrics]]:
    """Build the step; see :func:`accelfn.make_train_step`."""
    update = _without_writing(optimizer.update)
    scales, skips = ctx.precision.scales_loss, may_skip(ctx)
    # A world of this rank only: the window is averaged once, at its end.
    own = replace(ctx, world=World(device=ctx.device), collectives=Collectives(), reduction=None, mesh=None)
    together = average if ctx.num_processes == 1 else not_compiled(average)
    is_exact = ctx.reduction is not None
    number = ctx.gradient_accumulation_steps
    split = splitter(ctx)

    def loss_of(params: Params, batch: Batch) -> Loss:
        return read_loss(ctx, "make_train_step", loss_fn(params, batch))

    def step(state: PureTrainState[Params], batch: Batch) -> tuple[PureTrainState[Params], StepMetrics]:
        if not isinstance(cast("object", state), PureTrainState):
            raise TypeError(
                f"the train step over pytrees takes a PureTrainState, got {type(state).__name__}. Create the "
                "first with init_train_state(ctx, optimizer, params), and pass on the state that the step "
                "returns."
            )
        pieces, rows = split(batch, number)

        def compute() -> _Window:
            return _window_of(own, loss_of, state, pieces, rows)

        def compute_each() -> list[_Window]:
            return [_piece_of(own, loss_of, state, piece, 1, rows) for piece in pieces]

        if is_exact:
            window = _Window(*not_compiled(average_in_order)(ctx, compute_each))
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
            if not is_exact:
                terms, (grads,) = together(ctx, terms, grads)
            share = None if terms.divisor is None else inverse_of_weight(terms.divisor)
            if skips or share is not None or max_norm is not None:
                # Copies to write into: two parameters may share a gradient tensor, or one of the batch.
                grads = [grad.clone() for grad in grads]
            scaler = divide_(ctx, grads, state.scaler, share)
            norm = None if max_norm is None else clip_tensors_(grads, max_norm)
            if skips and not scales:
                whole = clip_tensors_(grads, math.inf) if norm is None else norm
                scaler = scaler._replace(found_inf=(~whole.isfinite()).to(scaler.found_inf))
            params, optimizer_state = _updated(update, grads, state)
            skipped = scaler.found_inf != 0
            if skips:
                params = _keep(skipped, state.params, params)
                optimizer_state = _keep(skipped, state.optimizer_state, optimizer_state)
                scaler = update_scaler(ctx, scaler)
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

    return step


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
    update: Callable[..., tuple[Any, Any]], grads: list[torch.Tensor], state: PureTrainState[Params]
) -> tuple[Params, Any]:
    """Return the parameters with their updates added, and the optimizer's next state."""
    tree = flatten(state.params)[1].unflatten(grads)
    updates, optimizer_state = update(tree, state.optimizer_state, params=state.params)
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
            kept.append(torch.where(skipped.to(right.device), left, right))
        elif left is right or left == right:
            kept.append(right)
        else:
            raise ValueError(
                "make_train_step: with float16 a step may be skipped, which must not change the optimizer's "
                f"state; but {structure.paths('optimizer_state')[index]} is no tensor and changed "
                f"from {left!r} to {right!r}. Use an optimizer that counts in tensors, or bf16."
            )
    return structure.unflatten(kept)
