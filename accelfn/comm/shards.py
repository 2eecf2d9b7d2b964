"""Differentiable collectives on trees: shard, unshard, psum, all_gather, reduce_scatter, all_to_all, permute.

A dimension of length ``n`` is split as evenly as possible: the first ``n % P`` of ``P`` ranks get one row
more than the others, as in :func:`accelfn.split_between_processes`. All leaves of one dtype are sent in one
buffer. The backward pass of each operation is another of them, which every rank must reach in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from accelfn.comm.agreement import Call, beneath_transforms, catch, check, tree_call
from accelfn.comm.moves import (
    Exchange,
    Join,
    Move,
    Permute,
    Pieces,
    Split,
    SumPieces,
    Total,
    apply_move,
    is_differentiated,
)
from accelfn.comm.objects import gather_bytes
from accelfn.comm.rows import split_sizes
from accelfn.comm.transfer import unwrap
from accelfn.context import Context, takes_context
from accelfn.tree import TreeSpec, flatten, is_packed_sequence, require_tensors

T = TypeVar("T")
Axis = str | tuple[str, ...] | None


@takes_context
def shard(ctx: Context, tree: T, axis: Axis = None, dim: int = 0) -> T:
    """Split each tensor along ``dim``, and return this rank's piece. The inverse of :func:`unshard`.

    The tree counts as one value that all ranks hold, and so does its gradient: backward gathers the pieces of
    the gradient on every rank. Forward sends no tensors.

    Ranks: every rank of ``ctx`` along ``axis``, with equal trees.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype that have dimension ``dim``; ``None`` stays ``None``.
        axis: Axis of the mesh, or several, to shard along; None: all ranks.
        dim: Dimension to split; negative counts from the last.

    Returns:
        The same types, with ``n // P`` of ``n`` rows, or one more. New memory if ``P > 1``, so that the full
        tensors can be freed; with one rank the tree itself.

    Raises:
        TypeError: A leaf isn't a dense tensor.
        ValueError: A tensor doesn't have dimension ``dim``.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ in structure, shapes or dtypes between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: shard(ctx, {"w": torch.arange(5)}), 2)
    [{'w': tensor([0, 1, 2])}, {'w': tensor([3, 4])}]
    """

    def prepare(ctx: Context) -> _FlatTree:
        return _flatten_tensors("shard", tree, dim)

    def split(ctx: Context, flat: _FlatTree, lengths: _Lengths) -> Move:
        return Split(ctx=ctx, operation="shard", plans=_split_evenly(ctx, flat))

    return _operate(ctx, "shard", axis, tree, f"dim={dim}", prepare, split)


@takes_context
def unshard(ctx: Context, tree: T, axis: Axis = None, dim: int = 0) -> T:
    """Concatenate the pieces of all ranks, on every rank, as one value that all ranks hold.

    All ranks must compute the same from the result, so backward keeps this rank's piece of its gradient. If
    each rank continues with its own data, use :func:`all_gather`, whose backward sums the gradients.

    Ranks: every rank of ``ctx`` along ``axis``; lengths along ``dim`` may differ.

    Args:
        ctx: The ranks.
        tree: The result of :func:`shard`, or what was computed from it.
        axis: As for :func:`shard`.
        dim: As for :func:`shard`.

    Returns:
        The same types. New memory if ``P > 1``; with one rank the tree itself.

    Raises:
        TypeError: A leaf isn't a dense tensor.
        ValueError: A tensor doesn't have dimension ``dim``.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ between ranks, other than in lengths along ``dim``.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: unshard(ctx, shard(ctx, torch.arange(3))), 2)
    [tensor([0, 1, 2]), tensor([0, 1, 2])]
    """
    return _join(ctx, "unshard", axis, tree, dim, is_shared=True)


@takes_context
def all_gather(ctx: Context, tree: T, axis: Axis = None, dim: int = 0) -> T:
    """Concatenate each tensor over all ranks along ``dim``, in rank order, on every rank.

    Backward is :func:`reduce_scatter`: each rank gets the sum of all ranks' gradients of its piece. So with a
    loss on each rank, the gradient is that of the sum of the losses.

    Ranks: every rank of ``ctx`` along ``axis``; lengths along ``dim`` may differ.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype; with ``dim`` 0, a 0-d tensor counts as one row; ``None`` stays ``None``.
        axis: Axis of the mesh, or several; None: all ranks.
        dim: Dimension to concatenate along; negative counts from the last.

    Returns:
        The same types. New memory if ``P > 1``; with one rank the tree itself, except for 0-d tensors.

    Raises:
        TypeError: A leaf isn't a dense tensor.
        ValueError: A tensor doesn't have dimension ``dim``.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ between ranks, other than in lengths along ``dim``.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: all_gather(ctx, torch.full((1, 2), ctx.rank), dim=1), 2)[0]
    tensor([[0, 0, 1, 1]])
    """
    return _join(ctx, "all_gather", axis, tree, dim, is_shared=False)


@takes_context
def reduce_scatter(ctx: Context, tree: T, axis: Axis = None, dim: int = 0, reduction: str = "sum") -> T:
    """Sum each tensor over all ranks, and return this rank's piece of the sum along ``dim``.

    Sums of float16, bfloat16 and float8 are computed in float32 and rounded once. Backward is
    :func:`all_gather`.

    Ranks: every rank of ``ctx`` along ``axis``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype that have dimension ``dim``; ``None`` stays ``None``.
        axis: Axis of the mesh, or several; None: all ranks.
        dim: Dimension to split; negative counts from the last.
        reduction: ``"sum"``, or ``"mean"`` to divide by the number of ranks.

    Returns:
        The same types, with ``n // P`` of ``n`` rows, or one more. New memory if ``P > 1``; with one rank the
        tree itself.

    Raises:
        TypeError: A leaf isn't a dense tensor, or a mean of integers or booleans was requested.
        ValueError: A tensor doesn't have dimension ``dim``, or the reduction is unknown.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees or options differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: reduce_scatter(ctx, torch.tensor([1.0, 2.0])), 2)
    [tensor([2.]), tensor([4.])]
    """

    def prepare(ctx: Context) -> _FlatTree:
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduce_scatter: reduction must be 'sum' or 'mean', got {reduction!r}.")
        flat = _flatten_tensors("reduce_scatter", tree, dim)
        if reduction == "mean":
            _check_means("reduce_scatter", flat, "reduction='sum'")
        return flat

    def sum_pieces(ctx: Context, flat: _FlatTree, lengths: _Lengths) -> Move:
        divisor = ctx.num_processes if reduction == "mean" else 1
        return SumPieces(ctx=ctx, operation="reduce_scatter", plans=_split_evenly(ctx, flat), divisor=divisor)

    options = f"dim={dim} reduction={reduction!r}"
    return _operate(ctx, "reduce_scatter", axis, tree, options, prepare, sum_pieces)


@takes_context
def psum(ctx: Context, tree: T, axis: Axis = None) -> T:
    """Sum each tensor over all ranks, on every rank.

    As :func:`accelfn.reduce`, but with gradients: backward sums the gradients of all ranks. So with a loss on
    each rank, the gradient is that of the sum of the losses.

    Ranks: every rank of ``ctx`` along ``axis``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype; ``None`` stays ``None``.
        axis: Axis of the mesh, or several; None: all ranks.

    Returns:
        The same types. New memory if ``P > 1``; with one rank the tree itself.

    Raises:
        TypeError: A leaf isn't a dense tensor.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: psum(ctx, torch.tensor(ctx.rank + 1.0)), 2)
    [tensor(3.), tensor(3.)]
    """
    return _total(ctx, "psum", axis, tree)


@takes_context
def pmean(ctx: Context, tree: T, axis: Axis = None) -> T:
    """Average each tensor over all ranks, on every rank: :func:`psum` divided by the number of ranks.

    Ranks: every rank of ``ctx`` along ``axis``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The ranks.
        tree: Floating-point or complex tensors; ``None`` stays ``None``.
        axis: Axis of the mesh, or several; None: all ranks.

    Raises:
        TypeError: A leaf isn't a dense tensor, or can't represent a mean.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: pmean(ctx, torch.tensor(ctx.rank + 1.0)), 2)
    [tensor(1.5000), tensor(1.5000)]
    """
    return _total(ctx, "pmean", axis, tree)


@takes_context
def all_to_all(ctx: Context, tree: T, split_dim: int, concat_dim: int, axis: Axis = None) -> T:
    """Split tensors along ``split_dim``, send each rank its piece, and concatenate along ``concat_dim``.

    So a tensor that is sharded along ``concat_dim`` becomes sharded along ``split_dim``. Backward is the same
    with both dimensions swapped.

    Ranks: every rank of ``ctx`` along ``axis``; lengths along ``concat_dim`` may differ, unless it is
        ``split_dim``.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype that have both dimensions; ``None`` stays ``None``.
        split_dim: Dimension to split; negative counts from the last.
        concat_dim: Dimension to concatenate along.
        axis: Axis of the mesh, or several; None: all ranks.

    Returns:
        The same types. New memory if ``P > 1``; with one rank the tree itself.

    Raises:
        TypeError: A leaf isn't a dense tensor.
        ValueError: A tensor doesn't have one of the dimensions.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees or options differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> rows = torch.arange(4).view(2, 2)
    >>> run_ranks(lambda ctx: all_to_all(ctx, shard(ctx, rows), split_dim=1, concat_dim=0), 2)[1]
    tensor([[1],
            [3]])
    """

    def prepare(ctx: Context) -> _FlatTree:
        joins = _flatten_tensors("all_to_all", tree, concat_dim).dims
        flat = _flatten_tensors("all_to_all", tree, split_dim)
        free = [None if split == joined else joined for split, joined in zip(flat.dims, joins, strict=True)]
        return flat._replace(free=free)

    def exchange(ctx: Context, flat: _FlatTree, lengths: _Lengths) -> Move:
        outgoing = _split_evenly(ctx, flat)
        incoming = [
            Pieces(cut.dim, (cut.lengths[ctx.rank],) * ctx.num_processes) if dim is None else Pieces(dim, own)
            for dim, own, cut in zip(flat.free or (), lengths, outgoing, strict=True)
        ]
        return Exchange(ctx=ctx, operation="all_to_all", plans=tuple(zip(outgoing, incoming, strict=True)))

    options = f"split_dim={split_dim} concat_dim={concat_dim}"
    return _operate(ctx, "all_to_all", axis, tree, options, prepare, exchange, uneven=True)


@takes_context
def permute(ctx: Context, tree: T, sources: Sequence[int], axis: Axis = None) -> T:
    """Send tensors to another rank: rank ``r`` receives those of rank ``sources[r]``.

    For a ring, where each rank receives from the previous one, use
    ``[(rank - 1) % size for rank in range(size)]``. Backward is the inverse permutation.

    Ranks: every rank of ``ctx`` along ``axis``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype and shape; ``None`` stays ``None``.
        sources: A permutation of the ranks along the axis.
        axis: Axis of the mesh, or several; None: all ranks.

    Returns:
        The same types. New memory if ``P > 1``; with one rank the tree itself.

    Raises:
        TypeError: A leaf isn't a dense tensor.
        ValueError: ``sources`` isn't a permutation.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees or ``sources`` differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: permute(ctx, torch.tensor(ctx.rank), [2, 0, 1]), 3)
    [tensor(2), tensor(0), tensor(1)]
    """

    def prepare(ctx: Context) -> _FlatTree:
        if sorted(sources) != list(range(ctx.num_processes)):
            raise ValueError(
                f"permute: sources must be a permutation of the ranks 0 to {ctx.num_processes - 1}, got "
                f"{list(sources)}."
            )
        return _flatten_tensors("permute", tree, None)._replace(options=f"sources={list(sources)}")

    def send(ctx: Context, flat: _FlatTree, lengths: _Lengths) -> Move:
        shapes = tuple([tuple(leaf.shape) for leaf in flat.leaves])
        return Permute(ctx=ctx, operation="permute", plans=shapes, sources=tuple(sources))

    return _operate(ctx, "permute", axis, tree, "", prepare, send)


class _FlatTree(NamedTuple):
    """A flattened tree of tensors."""

    leaves: list[torch.Tensor]
    structure: TreeSpec
    dims: list[int]  # of each leaf, from 0
    free: Sequence[int | None] | None = None  # dimension of each leaf whose length may differ between ranks
    are_new: bool = False  # whether some leaves aren't those of the tree
    options: str = ""  # validated options, which must be equal on every rank


# The length of each leaf along its free dimension, by rank.
_Lengths = Sequence[tuple[int, ...]]


def _operate(
    ctx: Context,
    operation: str,
    axis: Axis,
    tree: T,
    options: str,
    prepare: Callable[[Context], _FlatTree],
    plan: Callable[[Context, _FlatTree, _Lengths], Move],
    *,
    uneven: bool = False,
) -> T:
    """Carry out an operation on the leaves of a tree, after its ranks have agreed on it.

    Args:
        ctx: The ranks.
        operation: Name of the public function.
        axis: Axis of the mesh, or several.
        tree: Of tensors.
        options: Everything that must be equal on every rank besides the tree, as text.
        prepare: Flattens the tree; its errors are propagated to every rank.
        plan: Returns the move, from the lengths on all ranks.
        uneven: Lengths along free dimensions may differ between ranks, and are exchanged.
    """
    if axis is not None:
        ctx = ctx.along(*((axis,) if isinstance(axis, str) else axis))
    flat, error = catch(lambda: prepare(ctx))
    if ctx.num_processes == 1:
        flat = unwrap(flat, error)
        return flat.structure.unflatten(flat.leaves) if flat.are_new else tree
    call = Call(operation) if flat is None else _describe(operation, options + flat.options, flat)
    lengths: list[tuple[int, ...]] = []
    if uneven:
        free = () if flat is None else zip(flat.leaves, flat.free or (), strict=True)
        message = array("q", [0 if dim is None else leaf.shape[dim] for leaf, dim in free]).tobytes()
        with beneath_transforms():
            rows = [array("q", row[: len(message)]) for row in gather_bytes(ctx, call, message, error)]
        lengths = list(zip(*rows, strict=True))
    else:
        check(ctx, call, error)
    flat = unwrap(flat, error)
    return flat.structure.unflatten(apply_move(plan(ctx, flat, lengths), flat.leaves))


def _total(ctx: Context, operation: str, axis: Axis, tree: T) -> T:
    def prepare(ctx: Context) -> _FlatTree:
        flat = _flatten_tensors(operation, tree, None)
        if operation == "pmean":
            _check_means(operation, flat, "psum")
        return flat

    def add(ctx: Context, flat: _FlatTree, lengths: _Lengths) -> Move:
        divisor = ctx.num_processes if operation == "pmean" else 1
        plans = (None,) * len(flat.leaves)
        return Total(ctx=ctx, operation=operation, plans=plans, divisor=divisor, is_shared=False)

    return _operate(ctx, operation, axis, tree, "", prepare, add)


def _check_means(operation: str, flat: _FlatTree, instead: str) -> None:
    for index, leaf in enumerate(flat.leaves):
        if not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(
                f"{operation}: {flat.structure.paths()[index]} has dtype {leaf.dtype}, which can't represent "
                f"a mean. Convert it with .float(), or use {instead}."
            )


def _join(ctx: Context, operation: str, axis: Axis, tree: T, dim: int, *, is_shared: bool) -> T:
    def prepare(ctx: Context) -> _FlatTree:
        flat = _flatten_tensors(operation, tree, dim, has_rows=not is_shared)
        return flat._replace(free=flat.dims)

    def join(ctx: Context, flat: _FlatTree, lengths: _Lengths) -> Move:
        plans = tuple([Pieces(*plan) for plan in zip(flat.dims, lengths, strict=True)])
        return Join(ctx=ctx, operation=operation, plans=plans, is_shared=is_shared)

    return _operate(ctx, operation, axis, tree, f"dim={dim}", prepare, join, uneven=True)


def _flatten_tensors(operation: str, tree: Any, dim: int | None, *, has_rows: bool = False) -> _FlatTree:
    """Flatten a tree of tensors.

    Args:
        operation: For messages.
        tree: Of tensors.
        dim: A dimension that each leaf must have; None for any shape.
        has_rows: A 0-d tensor counts as one row.
    """
    leaves, structure = flatten(tree, is_packed_sequence)
    tensors = require_tensors(operation, leaves, structure)
    are_new = has_rows and not all(tensor.dim() for tensor in tensors)
    if are_new:
        tensors = [tensor if tensor.dim() else tensor.reshape(1) for tensor in tensors]
    if dim is None:
        return _FlatTree(tensors, structure, [0] * len(tensors))
    for index, leaf in enumerate(tensors):
        if not -leaf.dim() <= dim < leaf.dim():
            plural = "" if leaf.dim() == 1 else "s"
            raise ValueError(
                f"{operation}: {structure.paths()[index]} has {leaf.dim()} dimension{plural}, shape "
                f"{tuple(leaf.shape)}, but no dim {dim}. Reshape it, or leave it out of the tree."
            )
    return _FlatTree(tensors, structure, [dim % leaf.dim() for leaf in tensors], are_new=are_new)


def _describe(operation: str, options: str, flat: _FlatTree) -> Call:
    """Return the Call, with everything except the lengths along free dimensions."""

    def kind(leaf: torch.Tensor, dim: int | None) -> str:
        shape = ["any" if index == dim else length for index, length in enumerate(leaf.shape)]
        grad = " with gradient" if is_differentiated(leaf) else ""
        return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(map(str, shape))}){grad}"

    free = flat.free or [None] * len(flat.leaves)
    kinds = [kind(leaf, dim) for leaf, dim in zip(flat.leaves, free, strict=True)]
    return tree_call(operation, options, flat.structure, kinds, pairs=True)


def _split_evenly(ctx: Context, flat: _FlatTree) -> tuple[Pieces, ...]:
    return tuple(
        [
            Pieces(dim, tuple(split_sizes(leaf.shape[dim], ctx.num_processes)))
            for leaf, dim in zip(flat.leaves, flat.dims, strict=True)
        ]
    )
