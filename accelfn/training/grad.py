"""Value and gradient of a function of a pytree, averaged over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from accelfn.comm import catch, reduce
from accelfn.context import Context, check_context
from accelfn.training.exact import cut_into_microbatches, mean_of_microbatches
from accelfn.training.loss import check_means
from accelfn.training.precision import autocast
from accelfn.tree import TreeSpec, concatenate, flatten, require_tensors

__all__ = ("value_and_grad",)

P = ParamSpec("P")
V = TypeVar("V")
Params = TypeVar("Params")


def value_and_grad(
    ctx: Context, loss_fn: Callable[Concatenate[Params, P], V]
) -> Callable[Concatenate[Params, P], tuple[V, Params]]:
    """Make a function that gives the value of ``loss_fn`` and its gradient, averaged over all ranks.

    For models whose parameters are a pytree. With a mean loss and equal batches, ``n`` ranks of ``b`` samples
    each get the gradient of one rank with all ``n * b``.

    No loss is scaled: with float16 small gradients vanish, so scale the loss in ``loss_fn``, or use
    :func:`accelfn.make_train_step`, which does.

    In exact mode the batch of each rank is cut along its first dimension into as many equal microbatches as
    the accumulation window has batches, and loss and gradients are means over the microbatches of all ranks,
    formed in their order: the same bits at any number of ranks that share one global batch out in rank order.
    It holds the gradients of all of a rank's microbatches at once.

    Args:
        ctx: The world, and the precision that ``loss_fn`` computes in.
        loss_fn: ``loss_fn(params, *args, **kwargs)`` gives a loss of shape ``()``, or a pair ``(loss, aux)``.
            It is differentiated by ``torch.func``, so it must be pure.

    Returns:
        A function with the arguments of ``loss_fn``, which returns ``(value, grads)``: ``value`` is what
        ``loss_fn`` returned, with the loss averaged over ranks and ``aux`` as on this rank; ``grads`` is a
        tree like ``params``, in their dtypes. In exact mode ``aux`` has been joined over this rank's
        microbatches by :func:`accelfn.tree.concatenate`, where a 0-d tensor counts as one row. Every rank of
        ``ctx`` must call it, with ``params`` of one structure.

    Raises:
        ConfigurationError: Ranks share sequences, where the mean of each is of other numbers of tokens.
        TypeError: (when called) A leaf of ``params`` is no floating-point tensor, or the loss no tensor of
            shape ``()``.
        ValueError: (when called) In exact mode, the batch can't be cut into equal microbatches.
        MismatchError: (when called) The parameters differ in structure, shape or dtype between ranks.

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
                    "gradient. "
                    "Close over it, or pass it as another argument."
                )

        if ctx.reduction is not None:
            return cast("tuple[V, Params]", _exactly(ctx, loss_fn, leaves, structure, args, kwargs))
        loss, grads, value = _gradients(ctx, loss_fn, leaves, structure, args, kwargs)
        loss, grads = reduce(ctx.tagged("value_and_grad"), (loss, grads), "mean")
        averaged = (loss, value[1]) if _is_pair(value) else loss
        return cast("V", averaged), cast("Params", structure.unflatten(grads))

    return call


def _gradients(
    ctx: Context, loss_fn: Callable[..., Any], leaves: list[Any], structure: TreeSpec, args: Any, kwargs: Any
) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
    """Return this rank's loss, its gradients, and all that ``loss_fn`` has returned."""
    rest: list[Any] = []  # torch.func lets only tensors out, and in no containers but its own

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
    """Return value and gradients as means over the microbatches of all ranks, in their order."""
    microbatches, error = catch(lambda: cut_into_microbatches(ctx, (args, kwargs)))
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
