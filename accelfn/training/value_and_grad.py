"""Value and gradient of a function over pytrees, averaged over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from accelfn.comm import catch, reduce
from accelfn.comm.agreement import has_transforms
from accelfn.comm.moves import average as average_differentiably
from accelfn.comm.moves import is_differentiated, keep
from accelfn.context import Context, takes_context
from accelfn.errors import NotAvailableError
from accelfn.parallel.strategies.precision import autocast
from accelfn.training.loss import check_means
from accelfn.training.metrics import mean_of_microbatches
from accelfn.tree import TreeSpec, concatenate, find_batch_size, flatten, map_tensors, require_tensors

P = ParamSpec("P")
V = TypeVar("V")
Params = TypeVar("Params")


@takes_context
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


def split_into_microbatches(ctx: Context, arguments: Any) -> list[Any]:
    """Split each tensor with the batch's number of rows into one part for each batch of a window. Pure.

    Args:
        ctx: Has the number of batches.
        arguments: Of a loss function: any tree. The first tensor with a dimension has the batch's number of
            rows; tensors with other numbers, and other leaves, are in every part.

    Raises:
        ValueError: There is no such tensor, or its rows can't be split into equal parts.
    """
    number = ctx.gradient_accumulation_steps
    size = find_batch_size(arguments)
    if size % number or not size:
        raise ValueError(
            f"value_and_grad: a batch of {size} rows can't be split into {number} equal microbatches, as "
            f"{number * ctx.num_processes} microbatches on {ctx.num_processes} ranks need. Pass a multiple "
            f"of {number} rows on each rank."
        )
    rows = size // number

    def part(start: int) -> Any:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start : start + rows] if tensor.dim() and tensor.shape[0] == size else tensor

        return map_tensors(take, arguments)

    return [part(start) for start in range(0, size, rows)]
