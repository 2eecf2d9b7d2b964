"""Pieces of trees on the ranks along an axis: cut them, join them, add them up, exchange them.

One rule for all: a dimension of length ``n`` is cut as equally as can be, and of ``P`` ranks the first
``n % P`` get one row more, as in :func:`accelfn.split_between_processes`. All leaves of one dtype travel
together. Each operation is linear, and differentiable where its leaves require gradients: its backward is
another of them, which every rank must come to, in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.comm.agreement import Call, catch, check
from accelfn.comm.moves import (
    Cut,
    Exchange,
    Join,
    Permute,
    Pieces,
    SumPieces,
    apply_move,
    beneath_transforms,
    is_differentiated,
)
from accelfn.comm.objects import gather_bytes
from accelfn.comm.rows import split_sizes
from accelfn.context import Context, check_context
from accelfn.tree import TreeSpec, flatten, is_packed_sequence, require_tensors

T = TypeVar("T")
Axis = str | tuple[str, ...] | None


def shard(ctx: Context, tree: T, axis: Axis = None, dim: int = 0) -> T:
    """Cut each tensor along ``dim``, and keep this rank's piece. :func:`unshard` gives the whole back.

    The tree counts as one value that all ranks hold: so does its gradient, and backward joins the pieces of
    it on every rank. Forward, no tensor travels.

    Ranks: every rank of ``ctx`` along ``axis``, with equal trees.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype that have dimension ``dim``; ``None`` stays ``None``.
        axis: Axis of the mesh, or several, that the pieces are shared out along; None: all ranks.
        dim: Dimension to cut; negative counts from the last.

    Returns:
        The same types; of ``n`` rows ``n // P``, or one more. New memory where ``P > 1``, so that the
        whole can be released; with one rank the tree itself.

    Raises:
        TypeError: A leaf is no dense tensor.
        ValueError: A tensor doesn't have dimension ``dim``.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ in structure, shapes or dtypes between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: shard(ctx, {"w": torch.arange(5)}), 2)
    [{'w': tensor([0, 1, 2])}, {'w': tensor([3, 4])}]
    """
    check_context("shard", ctx)
    ctx = _along(ctx, axis)
    taken, error = catch(lambda: _take_apart("shard", tree, dim))
    if ctx.num_processes == 1:
        return _alone(taken, error, tree)
    leaves, structure, dims = _open(ctx, "shard", f"dim={dim}", taken, error)
    plans = _cut_evenly(ctx, leaves, dims)
    return structure.unflatten(apply_move(Cut(ctx=ctx, operation="shard", plans=plans), leaves))


def unshard(ctx: Context, tree: T, axis: Axis = None, dim: int = 0) -> T:
    """Join the pieces of all ranks to the whole, on every rank, as one value that all ranks hold.

    What all ranks compute from it must be the same, and backward keeps this rank's piece of its gradient.
    Where each rank goes on with data of its own, take :func:`all_gather`, whose backward adds gradients up.

    Ranks: every rank of ``ctx`` along ``axis``; lengths along ``dim`` may differ.

    Args:
        ctx: The ranks.
        tree: What :func:`shard` gave, or what was computed from it.
        axis: As it was for :func:`shard`.
        dim: As it was for :func:`shard`.

    Returns:
        The same types. New memory where ``P > 1``; with one rank the tree itself.

    Raises:
        TypeError: A leaf is no dense tensor.
        ValueError: A tensor doesn't have dimension ``dim``.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ between ranks in anything but lengths along ``dim``.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: unshard(ctx, shard(ctx, torch.arange(3))), 2)
    [tensor([0, 1, 2]), tensor([0, 1, 2])]
    """
    check_context("unshard", ctx)
    ctx = _along(ctx, axis)
    taken, error = catch(lambda: _take_apart("unshard", tree, dim))
    if ctx.num_processes == 1:
        return _alone(taken, error, tree)
    return _join(ctx, "unshard", dim, taken, error, is_shared=True)


def all_gather(ctx: Context, tree: T, axis: Axis = None, dim: int = 0) -> T:
    """Join each tensor over all ranks along ``dim``, in rank order, on every rank.

    Backward is :func:`reduce_scatter`: each rank gets the sum of what all ranks have for its piece. So with a
    loss on each rank, the gradient is that of their sum.

    Ranks: every rank of ``ctx`` along ``axis``; lengths along ``dim`` may differ.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype; a 0-d one counts as one row where ``dim`` is 0; ``None`` stays.
        axis: Axis of the mesh, or several; None: all ranks.
        dim: Dimension to join along; negative counts from the last.

    Returns:
        The same types. New memory where ``P > 1``; with one rank the tree itself, but for 0-d tensors.

    Raises:
        TypeError: A leaf is no dense tensor.
        ValueError: A tensor doesn't have dimension ``dim``.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ between ranks in anything but lengths along ``dim``.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: all_gather(ctx, torch.full((1, 2), ctx.rank), dim=1), 2)[0]
    tensor([[0, 0, 1, 1]])
    """
    check_context("all_gather", ctx)
    ctx = _along(ctx, axis)
    taken, error = catch(lambda: _take_apart("all_gather", tree, dim, as_rows=True))
    if ctx.num_processes == 1:
        if taken is None or all(one.dim() for one in flatten(tree)[0]):
            return _alone(taken, error, tree)
        return taken.structure.unflatten(taken.leaves)
    return _join(ctx, "all_gather", dim, taken, error, is_shared=False)


def reduce_scatter(ctx: Context, tree: T, axis: Axis = None, dim: int = 0, reduction: str = "sum") -> T:
    """Add each tensor up over all ranks, and keep this rank's piece of the sum along ``dim``.

    Sums of float16, bfloat16 and float8 are formed in float32 and rounded once. Backward is
    :func:`all_gather`.

    Ranks: every rank of ``ctx`` along ``axis``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype that have dimension ``dim``; ``None`` stays ``None``.
        axis: Axis of the mesh, or several; None: all ranks.
        dim: Dimension to cut; negative counts from the last.
        reduction: ``"sum"``, or ``"mean"`` to divide by the number of ranks.

    Returns:
        The same types; of ``n`` rows ``n // P``, or one more. New memory where ``P > 1``; with one rank the
        tree itself.

    Raises:
        TypeError: A leaf is no dense tensor; or a mean of integers or booleans is asked for.
        ValueError: A tensor doesn't have dimension ``dim``, or the reduction is unknown.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees or options differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: reduce_scatter(ctx, torch.tensor([1.0, 2.0])), 2)
    [tensor([2.]), tensor([4.])]
    """
    check_context("reduce_scatter", ctx)
    ctx = _along(ctx, axis)

    def prepare() -> _Taken:
        if reduction not in ("sum", "mean"):
            raise ValueError(f"reduce_scatter: reduction must be 'sum' or 'mean', got {reduction!r}.")
        taken = _take_apart("reduce_scatter", tree, dim)
        for index, leaf in enumerate(taken.leaves):
            if reduction == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
                raise TypeError(
                    f"reduce_scatter: {taken.structure.paths()[index]} is of dtype {leaf.dtype}, which can't "
                    "hold a mean. Convert it with .float(), or take reduction='sum'."
                )
        return taken

    taken, error = catch(prepare)
    if ctx.num_processes == 1:
        return _alone(taken, error, tree)
    options = f"dim={dim} reduction={reduction!r}"
    leaves, structure, dims = _open(ctx, "reduce_scatter", options, taken, error)
    plans = _cut_evenly(ctx, leaves, dims)
    divisor = ctx.num_processes if reduction == "mean" else 1
    move = SumPieces(ctx=ctx, operation="reduce_scatter", plans=plans, divisor=divisor)
    return structure.unflatten(apply_move(move, leaves))


def all_to_all(ctx: Context, tree: T, split_dim: int, concat_dim: int, axis: Axis = None) -> T:
    """Cut tensors along ``split_dim``, send each rank its piece, and join what comes along ``concat_dim``.

    So a tensor that is sharded along ``concat_dim`` becomes one that is sharded along ``split_dim``. Backward
    is the same with both dimensions swapped.

    Ranks: every rank of ``ctx`` along ``axis``; lengths along ``concat_dim`` may differ, where that isn't
        ``split_dim``.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype that have both dimensions; ``None`` stays ``None``.
        split_dim: Dimension to cut; negative counts from the last.
        concat_dim: Dimension to join along.
        axis: Axis of the mesh, or several; None: all ranks.

    Returns:
        The same types. New memory where ``P > 1``; with one rank the tree itself.

    Raises:
        TypeError: A leaf is no dense tensor.
        ValueError: A tensor doesn't have one of the dimensions.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees or options differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> rows = torch.arange(4).view(2, 2)
    >>> run_ranks(lambda ctx: all_to_all(ctx, shard(ctx, rows), split_dim=1, concat_dim=0), 2)[1]
    tensor([[1],
            [3]])
    """
    check_context("all_to_all", ctx)
    ctx = _along(ctx, axis)

    def prepare() -> tuple[_Taken, _Taken]:
        return _take_apart("all_to_all", tree, split_dim), _take_apart("all_to_all", tree, concat_dim)

    both, error = catch(prepare)
    taken, joins = both if both is not None else (None, None)
    if ctx.num_processes == 1:
        return _alone(taken, error, tree)
    options = f"split_dim={split_dim} concat_dim={concat_dim}"
    free = (
        None
        if taken is None or joins is None
        else [
            None if split == joined else joined for split, joined in zip(taken.dims, joins.dims, strict=True)
        ]
    )
    lengths = _exchange_lengths(ctx, "all_to_all", options, taken, free, error)
    leaves, structure, dims = cast("_Taken", taken)
    goes = _cut_evenly(ctx, leaves, dims)
    comes = [
        Pieces(dim, own) if dim != cut.dim else Pieces(dim, (cut.lengths[ctx.rank],) * ctx.num_processes)
        for dim, own, cut in zip(cast("_Taken", joins).dims, lengths, goes, strict=True)
    ]
    move = Exchange(ctx=ctx, operation="all_to_all", plans=tuple(zip(goes, comes, strict=True)))
    return structure.unflatten(apply_move(move, leaves))


def permute(ctx: Context, tree: T, sources: Sequence[int], axis: Axis = None) -> T:
    """Send tensors to another rank: rank ``r`` gets those of rank ``sources[r]``.

    A ring, where each rank gets what the one before it has: ``[(rank - 1) % size for rank in range(size)]``.
    Backward sends the gradients back where the tensors came from.

    Ranks: every rank of ``ctx`` along ``axis``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The ranks.
        tree: Tensors of any dtype and shape; ``None`` stays ``None``.
        sources: Each rank along the axis once.
        axis: Axis of the mesh, or several; None: all ranks.

    Returns:
        The same types. New memory where ``P > 1``; with one rank the tree itself.

    Raises:
        TypeError: A leaf is no dense tensor.
        ValueError: ``sources`` doesn't name each rank once.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees or ``sources`` differ between ranks.

    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: permute(ctx, torch.tensor(ctx.rank), [2, 0, 1]), 3)
    [tensor(2), tensor(0), tensor(1)]
    """
    check_context("permute", ctx)
    ctx = _along(ctx, axis)

    def prepare() -> _Taken:
        if sorted(sources) != list(range(ctx.num_processes)):
            raise ValueError(
                f"permute: sources must name each of the ranks 0 to {ctx.num_processes - 1} once, got "
                f"{list(sources)}."
            )
        return _take_apart("permute", tree, None)

    taken, error = catch(prepare)
    if ctx.num_processes == 1:
        return _alone(taken, error, tree)
    leaves, structure, _ = _open(ctx, "permute", f"sources={list(sources)}", taken, error)
    shapes = tuple([tuple(leaf.shape) for leaf in leaves])
    move = Permute(ctx=ctx, operation="permute", plans=shapes, sources=tuple(sources))
    return structure.unflatten(apply_move(move, leaves))


class _Taken(NamedTuple):
    """A tree of tensors, taken apart."""

    leaves: list[torch.Tensor]
    structure: TreeSpec
    dims: list[int]  # the dimension that is meant, from 0, of each leaf


def _along(ctx: Context, axis: Axis) -> Context:
    if axis is None:
        return ctx
    return ctx.along(*((axis,) if isinstance(axis, str) else axis))


def _take_apart(operation: str, tree: Any, dim: int | None, *, as_rows: bool = False) -> _Taken:
    """Flatten a tree.

    Args:
        operation: For messages.
        tree: Of tensors.
        dim: That each leaf must have; None: any shape will do.
        as_rows: Let a 0-d tensor count as one row.
    """
    found, structure = flatten(tree, is_packed_sequence)
    leaves = require_tensors(operation, found, structure)
    if dim is None:
        return _Taken(leaves, structure, [0] * len(leaves))
    if as_rows:
        leaves = [leaf if leaf.dim() else leaf.reshape(1) for leaf in leaves]
    for index, leaf in enumerate(leaves):
        if not -leaf.dim() <= dim < leaf.dim():
            plural = "" if leaf.dim() == 1 else "s"
            raise ValueError(
                f"{operation}: {structure.paths()[index]} has {leaf.dim()} dimension{plural}, shape "
                f"{tuple(leaf.shape)}, and so no dim {dim}. Reshape it, or leave it out of the tree."
            )
    return _Taken(leaves, structure, [dim % leaf.dim() for leaf in leaves])


def _alone(taken: Any, error: Exception | None, tree: T) -> T:
    del taken
    if error is not None:
        raise error
    return tree


def _describe(operation: str, options: str, taken: _Taken, free: Sequence[int | None]) -> Call:
    """Describe what is the same on every rank: all but the lengths along ``free`` dimensions."""

    def kind(leaf: torch.Tensor, dim: int | None) -> str:
        shape = ["any" if place == dim else length for place, length in enumerate(leaf.shape)]
        grad = " with gradient" if is_differentiated(leaf) else ""
        return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(map(str, shape))}){grad}"

    kinds = [kind(leaf, dim) for leaf, dim in zip(taken.leaves, free, strict=True)]
    return Call(
        operation,
        f"{options}\0{taken.structure.describe()}{kinds}",
        lambda: dict(zip(taken.structure.paths(), kinds, strict=True)),
        pairs=True,
    )


def _open(
    ctx: Context, operation: str, options: str, taken: _Taken | None, error: Exception | None
) -> _Taken:
    """Open an operation on tensors whose shapes are the same on every rank."""
    call = Call(operation)
    if taken is not None:
        call = _describe(operation, options, taken, [None] * len(taken.leaves))
    with beneath_transforms():
        check(ctx, call, error)
    return cast("_Taken", taken)


def _exchange_lengths(
    ctx: Context,
    operation: str,
    options: str,
    taken: _Taken | None,
    free: Sequence[int | None] | None,
    error: Exception | None,
) -> list[tuple[int, ...]]:
    """Open an operation on tensors whose lengths may differ along ``free``: by leaf, those of all ranks."""
    call, blob = Call(operation), b""
    if taken is not None and free is not None:
        call = _describe(operation, options, taken, free)
        own = [0 if dim is None else leaf.shape[dim] for leaf, dim in zip(taken.leaves, free, strict=True)]
        blob = array("q", own).tobytes()
    with beneath_transforms():
        rows = [array("q", row[: len(blob)]) for row in gather_bytes(ctx, call, blob, error)]
    return list(zip(*rows, strict=True))


def _join(
    ctx: Context, operation: str, dim: int, taken: _Taken | None, error: Exception | None, *, is_shared: bool
) -> Any:
    free = None if taken is None else taken.dims
    lengths = _exchange_lengths(ctx, operation, f"dim={dim}", taken, free, error)
    leaves, structure, dims = cast("_Taken", taken)
    plans = tuple([Pieces(*plan) for plan in zip(dims, lengths, strict=True)])
    move = Join(ctx=ctx, operation=operation, plans=plans, is_shared=is_shared)
    return structure.unflatten(apply_move(move, leaves))


def _cut_evenly(ctx: Context, leaves: Sequence[torch.Tensor], dims: Sequence[int]) -> tuple[Pieces, ...]:
    size = ctx.num_processes
    return tuple(
        [
            Pieces(dim, tuple(split_sizes(leaf.shape[dim], size)))
            for leaf, dim in zip(leaves, dims, strict=True)
        ]
    )
