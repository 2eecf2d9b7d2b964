"""Gather, reduce and broadcast trees of tensors.

Small trees on the CPU are sent in the exchange that opens the operation; larger ones as one buffer per dtype,
and leaves of 1 MiB or more separately, without a copy. With one process each operation returns its input.
None of them is differentiable: results have no gradients, on any rank. None writes into its input.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch

from accelfn.comm.agreement import catch, check, check_rank, layout_call
from accelfn.comm.transfer import (
    REDUCED_HERE,
    REDUCTIONS,
    PackedTree,
    all_gather_rows,
    check_arithmetic,
    combine,
    detached,
    open_call,
    prepare_tree,
    read_groups,
    scale_,
    stack_buffers,
    unwrap,
)
from accelfn.context import Context, ReduceOp, takes_context
from accelfn.tree import Packed, flatten_group, is_packed_sequence, unpack

T = TypeVar("T")


@takes_context
def gather(ctx: Context, tree: T) -> T:
    """Concatenate each tensor of ``tree`` over all ranks along its first dimension, in rank order.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: Tensors of any dtype, shape ``(n, ...)`` or ``()``; ``None`` stays ``None``.

    Returns:
        On every rank a tree of the same types, with leaves of shape ``(P * n, ...)``, or ``(P,)`` for a 0-d
        tensor. New memory if ``P > 1``; with one process the tree itself, not copied.

    Raises:
        TypeError: A leaf isn't a dense tensor (``RemoteRankError`` on the other ranks).
        MismatchError: The trees differ; the same error on every rank, with rank and path. For tensors of
            different lengths, see :func:`pad_across_processes`.

    >>> gather(Context(), {"x": torch.ones(2), "loss": torch.tensor(0.5)})
    {'x': tensor([1., 1.]), 'loss': tensor([0.5000])}
    """
    size = ctx.world.size
    prepared, error = catch(lambda: prepare_tree("gather", tree, is_packed_sequence))
    if size == 1:
        leaves, layout = unwrap(prepared, error)
        if all(leaf.dim() and not leaf.requires_grad for leaf in leaves):
            return tree
        return layout.structure.unflatten([_rows(leaf.detach()) for leaf in leaves])

    (leaves, layout), rows = open_call(ctx, "gather", "", prepared, error)
    if rows is not None:
        by_group = stack_buffers(rows, layout)
    else:
        by_group = [all_gather_rows(ctx, flatten_group(group, leaves)) for group in layout.groups]
    gathered: list[Any] = [None] * len(layout.shapes)
    for group, block in zip(layout.groups, by_group, strict=True):
        for index, part in zip(group.leaves, torch.split(block, list(group.sizes), dim=1), strict=True):
            shape = layout.shapes[index]
            # Copies, unless the leaf is alone in its buffer, whose rows are then contiguous.
            gathered[index] = part.reshape((size * shape[0], *shape[1:]) if shape else (size,))
    return layout.structure.unflatten(gathered)


@takes_context
def reduce(ctx: Context, tree: T, reduction: str = "sum", scale: float = 1.0) -> T:
    """Reduce each tensor of ``tree`` over all ranks, element by element.

    float16, bfloat16 and float8 are reduced in float32 and rounded once; except that 16-bit leaves too large
    for the opening exchange are summed in their own dtype, and divided before the sum for a mean.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: Tensors of any dtype and shape; ``None`` stays ``None``.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"none"`` for no reduction. The sum and
            the maximum of booleans are their "or", the minimum their "and".
        scale: Factor applied after the reduction.

    Returns:
        On every rank the same tree, of the same shapes and dtypes. With one process and ``scale=1``, the tree
        itself.

    Raises:
        ValueError: ``reduction`` is unknown.
        TypeError: A leaf isn't a dense tensor, or is of integers or booleans and a mean or a scale was
            requested, or is complex and a maximum or minimum was requested.
        MismatchError: The trees or options differ between ranks.

    >>> reduce(Context(), torch.tensor([1.0, 2.0]), "mean")
    tensor([1., 2.])
    """
    size = ctx.world.size

    def prepare() -> PackedTree:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduce: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
        if not isinstance(cast("object", scale), (int, float)):
            raise TypeError(f"reduce: scale must be a number, got {scale!r}.")
        prepared = prepare_tree("reduce", tree, is_packed_sequence)
        check_arithmetic(prepared, reduction, scale)
        return prepared

    prepared, error = catch(prepare)
    if size > 1 and error is None and reduction == "none":  # the other ranks may pass another reduction
        check(ctx, layout_call("reduce", "reduction='none'", unwrap(prepared, error).layout))
    if size == 1 or (error is None and reduction == "none"):
        leaves, layout = prepared = unwrap(prepared, error)
        if scale == 1.0:
            return detached(tree, prepared)
        return layout.structure.unflatten([scale_(leaf.detach().clone(), scale) for leaf in leaves])

    op: ReduceOp = "max" if reduction == "max" else "min" if reduction == "min" else "sum"
    divisor = size if reduction == "mean" else 1
    options = f"reduction={reduction!r} scale={scale!r}"
    (leaves, layout), rows = open_call(ctx, "reduce", options, prepared, error)
    if rows is not None:
        buffers = [combine(block, op, divisor, scale) for block in stack_buffers(rows, layout)]
    else:
        buffers = [
            _all_reduce(ctx, flatten_group(group, leaves, copy=True), op, divisor, scale)
            for group in layout.groups
        ]
    return unpack(Packed(tuple(buffers), layout))


@takes_context
def broadcast(ctx: Context, tree: T, from_process: int = 0) -> T:
    """Send every rank the tensors of rank ``from_process``.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: On ``from_process`` the tree to send; elsewhere one of the same structure, shapes and dtypes.
        from_process: The rank that sends.

    Returns:
        On ``from_process`` the tree itself, detached if it has gradients; elsewhere a new tree, on the
        devices of this rank's leaves.

    Raises:
        ValueError: ``from_process`` isn't a rank.
        TypeError: A leaf isn't a dense tensor.
        MismatchError: The trees or ``from_process`` differ between ranks.

    >>> broadcast(Context(), [torch.tensor(1)])
    [tensor(1)]
    """

    def prepare() -> PackedTree:
        check_rank(ctx, "broadcast", "from_process", from_process)
        return prepare_tree("broadcast", tree)

    prepared, error = catch(prepare)
    if ctx.world.size == 1:
        return detached(tree, unwrap(prepared, error))
    options = f"from {from_process}"
    sends = ctx.world.rank == from_process
    prepared, rows = open_call(ctx, "broadcast", options, prepared, error, pairs=False, sends=sends)
    leaves, layout = prepared
    buffers: list[torch.Tensor] = []
    if rows is None:
        for group in layout.groups:
            buffer = (
                flatten_group(group, leaves)
                if sends
                else torch.empty(sum(group.sizes), dtype=group.dtype, device=group.device)
            )
            ctx.collectives.broadcast(buffer.view(torch.uint8), from_process)
            buffers.append(buffer)
    elif not sends:
        buffers = [buffer.clone() for buffer in read_groups(rows[from_process], layout.groups)]
    return detached(tree, prepared) if sends else unpack(Packed(tuple(buffers), layout))


def _rows(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.dim() else leaf.reshape(1)


def _all_reduce(
    ctx: Context, buffer: torch.Tensor, op: ReduceOp, divisor: int, factor: float
) -> torch.Tensor:
    """Reduce a buffer over all ranks, in place if possible."""
    if buffer.dtype in REDUCED_HERE:
        return combine(all_gather_rows(ctx, buffer), op, divisor, factor)
    if buffer.dtype == torch.bool:
        ctx.collectives.all_reduce(buffer.view(torch.uint8), "min" if op == "min" else "max")
        return buffer
    divide_first = divisor != 1 and buffer.dtype in (torch.float16, torch.bfloat16)  # the sum may overflow
    if divide_first:
        buffer.div_(divisor)
    ctx.collectives.all_reduce(buffer, op)
    if divisor != 1 and not divide_first:
        buffer.div_(divisor)
    return buffer.mul_(factor) if factor != 1.0 else buffer
