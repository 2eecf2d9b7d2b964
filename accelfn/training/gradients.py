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
from accelfn.training.loss import Loss, check_loss, check_means
from accelfn.training.metrics import mean_of_microbatches
from accelfn.training.scaler import inverse_of_weight
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
        loss_fn: ``loss_fn(params, *args, **kwargs)`` returns a loss of shape ``()``, a pair ``(loss, aux)``,
            or a :class:`Loss`. It is differentiated by ``torch.func``, so it must be pure.

    Returns:
        A function with the arguments of ``loss_fn``, which returns ``(value, grads)``: ``value`` is the
        result of ``loss_fn``, with the loss averaged over ranks and this rank's ``aux``; ``grads`` is a tree
        like ``params``, in their dtypes. Of a :class:`Loss` ``aux`` is averaged too; with a weight, loss,
        ``aux`` and gradients are the sums of all ranks divided by the total weight, which is in the result.
        In exact mode the ``aux`` of a pair is joined over this rank's microbatches by
        :func:`accelfn.tree.concatenate`, where a 0-d tensor counts as one row. Every rank of ``ctx`` must
        call it, with ``params`` of one structure. Except in exact mode, it can be differentiated again and
        mapped: by backward and ``torch.func``, on all ranks alike.

    Raises:
        ConfigurationError: (when called) Ranks share sequences, and the loss has no weight: their means are
            over different numbers of tokens.
        TypeError: (when called) A leaf of ``params`` is no floating-point tensor, or the loss no tensor of
            shape ``()``.
        ValueError: (when called) In exact mode, the batch can't be split into equal microbatches.
        MismatchError: (when called) The parameters differ in structure, shape or dtype between ranks.
        NotAvailableError: (when called) In exact mode, inside of a transform of ``torch.func``.

    >>> step = value_and_grad(Context(), lambda params, x: (params["w"] * x).sum())
    >>> step({"w": torch.tensor([1.0, 2.0])}, torch.tensor([3.0, 4.0]))
    (tensor(11.), {'w': tensor([3., 4.])})
    """

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
        is_mapped = ctx.num_processes > 1 and (has_transforms() or any(map(is_differentiated, leaves)))
        if is_mapped:
            leaves = keep(ctx, "value_and_grad", leaves)
        grads, value = _gradients(ctx, loss_fn, leaves, structure, args, kwargs)
        tensors = [*_averaged_parts(ctx, value), *grads]
        if is_mapped:
            tensors = average_differentiably(ctx.tagged("value_and_grad"), "value_and_grad", tensors)
        elif ctx.num_processes > 1:
            tensors = reduce(ctx.tagged("value_and_grad"), tensors, "mean")
        return cast("tuple[V, Params]", _finish(value, tensors, structure, ctx.num_processes))

    return call


def _gradients(
    ctx: Context, loss_fn: Callable[..., Any], leaves: list[Any], structure: TreeSpec, args: Any, kwargs: Any
) -> tuple[list[torch.Tensor], Any]:
    """Return the gradients of this rank's loss, and the complete result of ``loss_fn``."""
    rest: list[Any] = []  # torch.func only returns tensors, and only in its own containers

    def loss_and_tensors(flat: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        with autocast(ctx):
            value = loss_fn(structure.unflatten(flat), *args, **kwargs)
        found, form = flatten(value)
        places = [index for index, leaf in enumerate(found) if isinstance(leaf, torch.Tensor)]
        rest[:] = [form, places, found]
        return _loss_of(value), [found[index] for index in places]

    grads, tensors = torch.func.grad(loss_and_tensors, has_aux=True)(leaves)
    form, places, found = rest
    for index, tensor in zip(places, tensors, strict=True):
        found[index] = tensor
    return grads, form.unflatten(found)


def _averaged_parts(ctx: Context, value: Any) -> list[torch.Tensor]:
    """List what is averaged of the result of ``loss_fn``: the loss, and of a Loss its weight and ``aux``."""
    loss = _loss_of(value)
    if not isinstance(value, Loss) or value.weight is None:
        check_means(ctx, "value_and_grad")
    if not isinstance(value, Loss):
        return [loss]
    check_loss("value_and_grad", value.value, value.weight, needs_gradient=False)
    aux, structure = flatten(value.aux)
    for index, leaf in enumerate(aux):
        if not isinstance(leaf, (torch.Tensor, int, float)):
            raise TypeError(
                f"value_and_grad: {structure.paths('aux')[index]} is of type {type(leaf).__name__}, which "
                "can't be averaged. Loss.aux takes tensors and numbers; return a pair (loss, aux) for others."
            )
    parts = [*(() if value.weight is None else (value.weight,)), *aux]
    tensors = [torch.as_tensor(part, device=loss.device) for part in parts]
    return [loss, *(one if one.is_floating_point() else one.to(loss.dtype) for one in tensors)]


def _finish(value: Any, tensors: list[torch.Tensor], structure: TreeSpec, number: int) -> tuple[Any, Any]:
    """Return the averaged result of ``loss_fn`` and gradients; ``number`` is that of the averaged ones."""
    parts = tensors[: len(tensors) - structure.num_leaves]
    grads = tensors[len(parts) :]
    if not isinstance(value, Loss):
        return ((parts[0], value[1]) if _is_pair(value) else parts[0]), structure.unflatten(grads)
    loss, aux, weight = parts[0], parts[1:], None
    if value.weight is not None:
        mean, *aux = aux
        share, weight = inverse_of_weight(mean), mean * number
        loss, aux, grads = loss * share, [one * share for one in aux], [one * share for one in grads]
    return Loss(loss, weight, flatten(value.aux)[1].unflatten(aux)), structure.unflatten(grads)


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
    tensors = [[*_averaged_parts(ctx, value), *grads] for grads, value in results]
    means = mean_of_microbatches(ctx.tagged("value_and_grad"), tensors, error)
    value = results[0][1]
    if _is_pair(value):
        value = (value[0], concatenate([each[1] for _, each in results]))
    return _finish(value, means, structure, len(results) * ctx.num_processes)


def _loss_of(value: Any) -> torch.Tensor:
    loss = value.value if isinstance(value, Loss) else value[0] if _is_pair(value) else value
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
