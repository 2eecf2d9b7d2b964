"""Pieces of trees on the ranks along an axis: cut them, join them, add them up, exchange them.

One rule for all: a dimension of length ``n`` is cut as equally as can be, and of ``P`` ranks the first
``n % P`` get one row more, as in :func:`accelfn.split_between_processes`. All leaves of one dtype travel
together. Each operation is linear, and differentiable where its leaves require gradients: its backward is
another of them, which every rank must come to, in the same order.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from accelfn.comm.agreement import Call, catch, check, tree_call
from accelfn.comm.moves import (
    Cut,
    Exchange,
    Join,
    Move,
    Permute,
    Pieces,
    SumPieces,
    apply_move,
    beneath_transforms,
    is_differentiated,
)
from accelfn.comm.objects import gather_bytes
from accelfn.comm.rows import split_sizes
from accelfn.comm.transfer import unwrap
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

    def cut(ctx: Context, taken: _Taken, lengths: _Lengths) -> Move:
        return Cut(ctx=ctx, operation="shard", plans=_cut_evenly(ctx, taken))

    return _operate(ctx, "shard", axis, tree, f"dim={dim}", lambda _: _take_apart("shard", tree, dim), cut)


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
    return _join(ctx, "unshard", axis, tree, dim, _take_apart, is_shared=True)


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
    return _join(ctx, "all_gather", axis, tree, dim, _take_rows, is_shared=False)


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

    def prepare(ctx: Context) -> _Taken:
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

    def sum_pieces(ctx: Context, taken: _Taken, lengths: _Lengths) -> Move:
        divisor = ctx.num_processes if reduction == "mean" else 1
        return SumPieces(ctx=ctx, operation="reduce_scatter", plans=_cut_evenly(ctx, taken), divisor=divisor)

    options = f"dim={dim} reduction={reduction!r}"
    return _operate(ctx, "reduce_scatter", axis, tree, options, prepare, sum_pieces)


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

    def prepare(ctx: Context) -> _Taken:
        joins = _take_apart("all_to_all", tree, concat_dim).dims
        taken = _take_apart("all_to_all", tree, split_dim)
        free = [None if split == joined else joined for split, joined in zip(taken.dims, joins, strict=True)]
        return taken._replace(free=free)

    def exchange(ctx: Context, taken: _Taken, lengths: _Lengths) -> Move:
        goes = _cut_evenly(ctx, taken)
        comes = [
            Pieces(cut.dim, (cut.lengths[ctx.rank],) * ctx.num_processes) if dim is None else Pieces(dim, own)
            for dim, own, cut in zip(taken.free or (), lengths, goes, strict=True)
        ]
        return Exchange(ctx=ctx, operation="all_to_all", plans=tuple(zip(goes, comes, strict=True)))

    options = f"split_dim={split_dim} concat_dim={concat_dim}"
    return _operate(ctx, "all_to_all", axis, tree, options, prepare, exchange, uneven=True)


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

    def prepare(ctx: Context) -> _Taken:
        if sorted(sources) != list(range(ctx.num_processes)):
            raise ValueError(
                f"permute: sources must name each of the ranks 0 to {ctx.num_processes - 1} once, got "
                f"{list(sources)}."
            )
        return _take_apart("permute", tree, None)._replace(options=f"sources={list(sources)}")

    def send(ctx: Context, taken: _Taken, lengths: _Lengths) -> Move:
        shapes = tuple([tuple(leaf.shape) for leaf in taken.leaves])
        return Permute(ctx=ctx, operation="permute", plans=shapes, sources=tuple(sources))

    return _operate(ctx, "permute", axis, tree, "", prepare, send)


class _Taken(NamedTuple):
    """A tree of tensors, taken apart."""

    leaves: list[torch.Tensor]
    structure: TreeSpec
    dims: list[int]  # the dimension that is meant, from 0, of each leaf
    free: Sequence[int | None] | None = None  # along which lengths may differ between ranks, where any may
    are_new: bool = False  # some leaves aren't those of the tree
    options: str = ""  # that must be equal on every rank, and that preparing has checked first

    def own_lengths(self) -> list[int]:
        """List the lengths along free dimensions; 0 where there is none."""
        free = self.free or ()
        return [0 if dim is None else leaf.shape[dim] for leaf, dim in zip(self.leaves, free, strict=True)]


# By leaf, of all ranks: its length along the free dimension.
_Lengths = Sequence[tuple[int, ...]]


def _operate(
    ctx: Context,
    operation: str,
    axis: Axis,
    tree: T,
    options: str,
    prepare: Callable[[Context], _Taken],
    plan: Callable[[Context, _Taken, _Lengths], Move],
    *,
    uneven: bool = False,
) -> T:
    """Move the leaves of a tree along an axis, once its ranks have agreed on what they do.

    Args:
        ctx: The ranks.
        operation: Name of the public function.
        axis: Along which.
        tree: Of tensors.
        options: All that must be equal on every rank besides the tree, as text.
        prepare: Takes the tree apart; what it refuses, every rank is told.
        plan: Gives the move, knowing the lengths on all ranks.
        uneven: Lengths along free dimensions may differ between ranks, and are exchanged.
    """
    check_context(operation, ctx)
    if axis is not None:
        ctx = ctx.along(*((axis,) if isinstance(axis, str) else axis))
    taken, error = catch(lambda: prepare(ctx))
    if ctx.num_processes == 1:
        taken = unwrap(taken, error)
        return taken.structure.unflatten(taken.leaves) if taken.are_new else tree
    call = Call(operation) if taken is None else _describe(operation, options + taken.options, taken)
    lengths: list[tuple[int, ...]] = []
    with beneath_transforms():
        if uneven:
            own = b"" if taken is None else array("q", taken.own_lengths()).tobytes()
            rows = [array("q", row[: len(own)]) for row in gather_bytes(ctx, call, own, error)]
            lengths = list(zip(*rows, strict=True))
        else:
            check(ctx, call, error)
    taken = unwrap(taken, error)
    return taken.structure.unflatten(apply_move(plan(ctx, taken, lengths), taken.leaves))


def _join(
    ctx: Context,
    operation: str,
    axis: Axis,
    tree: T,
    dim: int,
    take_apart: Callable[[str, Any, int], _Taken],
    *,
    is_shared: bool,
) -> T:
    def prepare(ctx: Context) -> _Taken:
        taken = take_apart(operation, tree, dim)
        return taken._replace(free=taken.dims)

    def join(ctx: Context, taken: _Taken, lengths: _Lengths) -> Move:
        plans = tuple([Pieces(*plan) for plan in zip(taken.dims, lengths, strict=True)])
        return Join(ctx=ctx, operation=operation, plans=plans, is_shared=is_shared)

    return _operate(ctx, operation, axis, tree, f"dim={dim}", prepare, join, uneven=True)


def _take_apart(operation: str, tree: Any, dim: int | None) -> _Taken:
    """Flatten a tree.

    Args:
        operation: For messages.
        tree: Of tensors.
        dim: That each leaf must have; None: any shape will do.
    """
    found, structure = flatten(tree, is_packed_sequence)
    return _with_dim(operation, require_tensors(operation, found, structure), structure, dim)


def _take_rows(operation: str, tree: Any, dim: int) -> _Taken:
    """Flatten a tree, in which a 0-d tensor counts as one row."""
    found, structure = flatten(tree, is_packed_sequence)
    leaves = [
        leaf if leaf.dim() else leaf.reshape(1) for leaf in require_tensors(operation, found, structure)
    ]
    are_new = any(leaf is not one for leaf, one in zip(leaves, found, strict=True))
    return _with_dim(operation, leaves, structure, dim)._replace(are_new=are_new)


def _with_dim(operation: str, leaves: list[torch.Tensor], structure: TreeSpec, dim: int | None) -> _Taken:
    if dim is None:
        return _Taken(leaves, structure, [0] * len(leaves))
    for index, leaf in enumerate(leaves):
        if not -leaf.dim() <= dim < leaf.dim():
            plural = "" if leaf.dim() == 1 else "s"
            raise ValueError(
                f"{operation}: {structure.paths()[index]} has {leaf.dim()} dimension{plural}, shape "
                f"{tuple(leaf.shape)}, and so no dim {dim}. Reshape it, or leave it out of the tree."
            )
    return _Taken(leaves, structure, [dim % leaf.dim() for leaf in leaves])


def _describe(operation: str, options: str, taken: _Taken) -> Call:
    """Describe what is the same on every rank: all but the lengths along free dimensions."""

    def kind(leaf: torch.Tensor, dim: int | None) -> str:
        shape = ["any" if place == dim else length for place, length in enumerate(leaf.shape)]
        grad = " with gradient" if is_differentiated(leaf) else ""
        return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(map(str, shape))}){grad}"

    free = taken.free or [None] * len(taken.leaves)
    kinds = [kind(leaf, dim) for leaf, dim in zip(taken.leaves, free, strict=True)]
    return tree_call(operation, options, taken.structure, kinds, pairs=True)


def _cut_evenly(ctx: Context, taken: _Taken) -> tuple[Pieces, ...]:
    return tuple(
        [
            Pieces(dim, tuple(split_sizes(leaf.shape[dim], ctx.num_processes)))
            for leaf, dim in zip(taken.leaves, taken.dims, strict=True)
        ]
    )
