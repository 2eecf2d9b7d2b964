"""Sequences that several ranks share: each rank's piece of a batch, and the whole again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch

from accelfn.comm import unshard
from accelfn.context import Context, MeshPlan, check_context, plan_mesh
from accelfn.tree import flatten

__all__ = ("gather_sequence", "sequence_sharder", "shard_sequence")

T = TypeVar("T")
Key = str | int
Dims = Mapping[str, int] | Mapping[int, int] | int
Padding = Mapping[str, float] | Mapping[int, float]


def shard_sequence(ctx: Context, batch: T, dims: Dims, padding: Padding | None = None) -> T:
    """Return this rank's piece of the sequences of a batch, which all ranks along ``"seq"`` hold whole.

    Along ``"cp"`` a sequence is cut into ``2 * P`` chunks, of which rank ``r`` of ``P`` gets chunk ``r`` and
    chunk ``2 * P - 1 - r``: where attention is causal, late tokens are more work than early ones. Along
    ``"sp"`` rank ``r`` gets chunk ``r`` of ``P``. :func:`microbatches`, and any loop over a prepared
    loader, do it where the context has ``DataLoaderConfiguration(sequence=dims)``.

    Where a token stands must be in the batch, as positions beside the ids, and labels be shifted before: a
    piece doesn't show what is next to its ends.

    Ranks: local.

    Args:
        ctx: The mesh; without ranks along ``"seq"`` the batch is returned as it is.
        batch: A mapping, list or tuple, or with one dim for all any tree of tensors.
        dims: The sequence's dimension of the tensor under a key of a mapping, or at a place of a list or
            tuple; what isn't named stays whole. Or one for all tensors.
        padding: By what a tensor is lengthened at its end where ranks can't have equal pieces.

    Returns:
        The same types, with new tensors; ``batch`` stays as it is.

    Raises:
        ValueError: A length can't be cut into equal pieces, and there is no padding for it; says which could.
            A tensor doesn't have that dimension, or the batch no such key.
        TypeError: What is named is no tensor, or the batch neither a mapping nor a list or tuple.

    >>> from accelfn import ParallelismConfig, plan_context
    >>> ctx = plan_context(2, parallelism_config=ParallelismConfig(cp_size=2))
    >>> shard_sequence(ctx, {"ids": torch.arange(8), "row": 1}, {"ids": 0})
    {'ids': tensor([0, 1, 6, 7]), 'row': 1}
    """
    check_context("shard_sequence", ctx)
    plan = _plan_of(ctx)
    if plan.size("seq") == 1:
        return batch

    def cut(tensor: torch.Tensor, dim: int, name: Key) -> torch.Tensor:
        size, place = plan.size("seq"), ctx.coordinate("seq")
        is_ring = plan.size("cp") > 1
        number = 2 * size if is_ring else size
        tensor = _lengthened(tensor, dim, name, number, padding or {})
        chunks = tensor.chunk(number, dim)
        if is_ring:
            return torch.cat([chunks[place], chunks[number - 1 - place]], dim)
        return chunks[place].contiguous()

    return _map_named("shard_sequence", batch, dims, cut)


def sequence_sharder(ctx: Context) -> Callable[[Any], Any] | None:
    """Return what shards batches as the context's loading names; None where no sequence is shared."""
    dims = ctx.loading.sequence if ctx.axis_size("seq") > 1 else None
    return (
        None if dims is None else lambda batch: shard_sequence(ctx, batch, dims, ctx.loading.sequence_padding)
    )


def gather_sequence(ctx: Context, tree: T, dims: Dims) -> T:
    """Join the pieces of sequences that :func:`shard_sequence` cut, in their order, on every rank.

    For results of tokens: metrics of them, or logits, come back whole, and :func:`gather_for_metrics` can
    have them then. Differentiable: the whole counts as one value that all ranks hold.

    Ranks: every rank of ``ctx`` along ``"seq"``.

    Args:
        ctx: The mesh.
        tree: Pieces, of equal lengths on all ranks; as ``batch`` of :func:`shard_sequence`.
        dims: As there.

    Returns:
        The same types; of padding nothing is taken off.

    Raises:
        ValueError: A tensor doesn't have that dimension, or the tree no such key.
        TypeError: As :func:`shard_sequence`.
        MismatchError: The trees differ between ranks.
    """
    check_context("gather_sequence", ctx)
    plan = _plan_of(ctx)
    size = plan.size("seq")
    if size == 1:
        return tree
    pieces: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor, dim: int, name: Key) -> torch.Tensor:
        pieces.append(tensor.movedim(dim, 0))
        return tensor

    _map_named("gather_sequence", tree, dims, collect)
    whole = iter(unshard(ctx, pieces, "seq"))

    def join(tensor: torch.Tensor, dim: int, name: Key) -> torch.Tensor:
        del tensor, name
        joined = next(whole)
        if plan.size("cp") > 1:  # chunk c of all, in the order in which ranks have them
            order = [2 * c if c < size else 2 * (2 * size - 1 - c) + 1 for c in range(2 * size)]
            chunks = joined.chunk(2 * size)
            joined = torch.cat([chunks[place] for place in order])
        return joined.movedim(0, dim)

    return _map_named("gather_sequence", tree, dims, join)


def _plan_of(ctx: Context) -> MeshPlan:
    return plan_mesh(None, ctx.num_processes) if ctx.mesh is None else ctx.mesh.plan


def _lengthened(
    tensor: torch.Tensor, dim: int, name: Key, number: int, padding: Mapping[Any, float]
) -> torch.Tensor:
    """Return a tensor whose length can be cut into ``number`` equal chunks."""
    length = tensor.shape[dim]
    missing = -length % number
    if not missing:
        return tensor
    if name not in padding:
        below, above = length - length % number, length + missing
        fitting = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"shard_sequence: the sequences of {name!r} have {length} tokens, which can't be cut into "
            f"{number} equal chunks. Fitting: {fitting}. Or let them be padded: "
            f"DataLoaderConfiguration(sequence_padding={{{name!r}: 0}}), with -100 for labels."
        )
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, padding[name])], dim)


def _map_named(operation: str, tree: T, dims: Dims, apply: Any) -> T:
    """Return a tree with what ``apply`` gives of each tensor that is named."""

    def applied(value: object, name: Key, dim: int) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{operation}: {name!r} is to be cut along dimension {dim} and is a {type(value).__name__}. "
                "Name tensors."
            )
        if not -value.dim() <= dim < value.dim():
            raise ValueError(
                f"{operation}: {name!r} has shape {tuple(value.shape)}, without a dimension {dim}. Name the "
                "one of its tokens."
            )
        return apply(value, dim % value.dim(), name)

    if isinstance(dims, int):
        leaves, structure = flatten(tree)
        paths = structure.paths("batch")
        return structure.unflatten(
            [applied(leaf, path, dims) for leaf, path in zip(leaves, paths, strict=True)]
        )
    if isinstance(tree, Mapping):
        found: Any = copy.copy(cast("MutableMapping[Key, Any]", tree))
        keys = list(cast("Mapping[Key, Any]", tree))
    elif isinstance(tree, (list, tuple)):
        found = list(cast("list[Any]", tree))
        keys = list(range(len(found)))
    else:
        raise TypeError(
            f"{operation}: {type(tree).__name__} has no keys, and dims name {', '.join(map(repr, dims))}. "
            "Let the loader give mappings, lists or tuples of tensors."
        )
    for name, dim in dims.items():
        if name not in keys:
            raise ValueError(
                f"{operation}: the batch has no {name!r}; it has {', '.join(map(repr, keys))}. Name what it "
                "has in DataLoaderConfiguration(sequence={...})."
            )
        found[name] = applied(found[name], name, dim)
    if not isinstance(tree, tuple):
        return found
    kind = cast("Any", type(cast("object", tree)))
    return getattr(kind, "_make", kind)(found)
