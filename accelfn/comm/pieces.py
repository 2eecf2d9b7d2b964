"""Trees of pieces that know their place: which part of a whole tensor each rank holds."""

from __future__ import annotations

from array import array
from typing import Any, TypeVar, cast

import torch

from accelfn.comm.agreement import Call, catch, check, tree_call
from accelfn.comm.moves import Join, Pieces
from accelfn.comm.objects import gather_bytes
from accelfn.comm.rows import split_sizes
from accelfn.comm.shards import Axis
from accelfn.comm.transfer import unwrap
from accelfn.context import Context, takes_context
from accelfn.tree import Sharded, TreeSpec, flatten

T = TypeVar("T")


@takes_context
def sharded(ctx: Context, tree: T, axis: Axis = None, dim: int = 0) -> T:
    """Mark the tensors of a tree as this rank's pieces of tensors that are split over ranks along ``dim``.

    For :func:`accelfn.save_state` and :func:`accelfn.load_state`: the checkpoint has the whole tensors. And
    for :func:`accelfn.functional`, whose state for such parameters is marked too.

    Ranks: every rank of ``ctx`` along ``axis``; lengths along ``dim`` may differ. One exchange of lengths.

    Args:
        ctx: The ranks.
        tree: The pieces, such as of :func:`accelfn.shard`. Leaves that aren't tensors, tensors that lack
            dimension ``dim``, such as counts of steps, and those that are marked already stay as they are.
        axis: Axis of the mesh, or several, along which the tensors are split; None: all ranks.
        dim: The dimension; negative counts from the last.

    Returns:
        The tree with :class:`accelfn.tree.Sharded` leaves, whose ``local`` are the same memory.

    Raises:
        TypeError: A tensor isn't dense.
        ConfigurationError: The mesh has no such axis.
        MismatchError: The trees differ between ranks, other than in lengths along ``dim``.

    >>> from accelfn.comm import shard
    >>> from accelfn.testing import run_ranks
    >>> run_ranks(lambda ctx: sharded(ctx, shard(ctx, torch.arange(3))), 2)[1]
    Sharded(tensor([2]), split_dim=0, start=2, length=3)
    """
    if axis is not None:
        ctx = ctx.along(*((axis,) if isinstance(axis, str) else axis))
    leaves, structure = flatten(tree)
    found, error = catch(lambda: _split_tensors(leaves, structure, dim))
    call = Call("sharded") if found is None else _describe(leaves, structure, found, dim)
    message = array("q", [leaves[index].shape[at] for index, at in (found or {}).items()]).tobytes()
    rows = [message]
    if ctx.num_processes > 1:
        rows = gather_bytes(ctx, call, message, error)
    by_rank = [array("q", row[: len(message)]) for row in rows]
    for number, (index, at) in enumerate(unwrap(found, error).items()):
        lengths = [row[number] for row in by_rank]
        start = sum(lengths[: ctx.rank])
        leaves[index] = Sharded(_own_memory(leaves[index].detach()), at, start, sum(lengths))
    return cast("T", structure.unflatten(leaves))


def _split_tensors(leaves: list[Any], structure: TreeSpec, dim: int) -> dict[int, int]:
    """Return the dimension along which each tensor is split, by its index among the leaves."""
    plain = {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Sharded)
    }
    for index, leaf in plain.items():
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            raise TypeError(
                f"sharded: {structure.paths()[index]} must be a dense tensor, this rank's piece, got a "
                f"{type(leaf).__name__} of layout {leaf.layout}. Leave it out of the tree."
            )
    return {index: dim % leaf.dim() for index, leaf in plain.items() if leaf.dim() > max(dim, ~dim)}


def _describe(leaves: list[Any], structure: TreeSpec, found: dict[int, int], dim: int) -> Call:
    def kind(index: int, leaf: Any) -> str:
        at = found.get(index)
        if at is None:
            return "kept"
        shape = ["any" if place == at else length for place, length in enumerate(leaf.shape)]
        return f"{str(leaf.dtype).removeprefix('torch.')} ({', '.join(map(str, shape))})"

    kinds = [kind(index, leaf) for index, leaf in enumerate(leaves)]
    return tree_call("sharded", f"dim={dim}", structure, kinds, pairs=True)


def _own_memory(local: torch.Tensor) -> torch.Tensor:
    """Return a tensor; an empty one in new memory, since tensors are told apart by where they are."""
    return local if local.numel() else local.clone()


def cut(ctx: Context, tree: T) -> T:
    """Return this rank's pieces of tensors that all ranks hold, split evenly along their first dimension.

    Ranks: local.

    Returns:
        The tree with :class:`accelfn.tree.Sharded` leaves, which are views; 0-d tensors and pieces stay.
    """

    def piece(leaf: torch.Tensor) -> torch.Tensor:
        if not leaf.dim() or isinstance(leaf, Sharded):
            return leaf
        lengths = split_sizes(leaf.shape[0], ctx.num_processes)
        start = sum(lengths[: ctx.rank])
        local = leaf.narrow(0, start, lengths[ctx.rank])
        return Sharded(_own_memory(local), 0, start, leaf.shape[0])

    leaves, structure = flatten(tree)
    return structure.unflatten([piece(leaf) for leaf in leaves])


def join(ctx: Context, operation: str, tree: T) -> T:
    """Return the whole tensors, on every rank. The inverse of :func:`cut`.

    Ranks: every rank of ``ctx``, with pieces of the same tensors.
    """
    leaves, structure = flatten(tree)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Sharded)]
    found = [cast("Sharded", leaves[index]) for index in places]
    whole = [piece.local for piece in found]
    if ctx.num_processes > 1 and found:
        kinds = [f"{piece.dtype} {tuple(piece.shape)}" for piece in found]
        check(ctx, tree_call(operation, "pieces", flatten(found)[1], kinds))
        lengths = [split_sizes(piece.shape[piece.split_dim], ctx.num_processes) for piece in found]
        plans = [Pieces(one.split_dim, tuple(each)) for one, each in zip(found, lengths, strict=True)]
        whole = Join(ctx=ctx, operation=operation, plans=tuple(plans), is_shared=True).run(whole)
    for index, tensor in zip(places, whole, strict=True):
        leaves[index] = tensor
    return structure.unflatten(leaves)
