"""Shard the sequences of a batch among ranks, and gather them again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch

from accelfn.comm import unshard
from accelfn.context import Context, takes_context
from accelfn.tree import flatten

__all__ = ("gather_sequence", "sequence_sharder", "shard_sequence")

T = TypeVar("T")
Key = str | int
Dims = Mapping[str, int] | Mapping[int, int] | int
Padding = Mapping[str, float] | Mapping[int, float]


@takes_context
def shard_sequence(ctx: Context, batch: T, dims: Dims, padding: Padding | None = None) -> T:
    """Return this rank's shard of the sequences of a batch, which all ranks along ``"seq"`` hold in full.

    Along ``"cp"`` a sequence is split into ``2 * P`` chunks, and rank ``r`` of ``P`` gets chunks ``r`` and
    ``2 * P - 1 - r``: this balances causal attention, where late tokens cost more than early ones. Along
    ``"sp"`` rank ``r`` gets chunk ``r`` of ``P``. :func:`microbatches`, and any loop over a prepared loader,
    call it if the context has ``DataLoaderConfiguration(sequence=dims)``.

    The batch must contain position ids, and labels that are already shifted, since a shard doesn't include
    the neighbours of its ends.

    Ranks: local.

    Args:
        ctx: The mesh; without several ranks along ``"seq"`` the batch is returned unchanged.
        batch: A mapping, list or tuple; or any tree of tensors if ``dims`` is an int.
        dims: The sequence dimension of each tensor that is sharded, by key of a mapping or index of a list or
            tuple; other values stay unsharded. Or one dimension for all tensors.
        padding: The value that pads a tensor at its end if its length isn't divisible, by the same keys.

    Returns:
        The same types, with new tensors; ``batch`` isn't changed.

    Raises:
        ValueError: A length isn't divisible and has no padding (the error suggests lengths), a tensor
            doesn't have that dimension, or the batch doesn't have that key.
        TypeError: A named value isn't a tensor, or the batch isn't a mapping, list or tuple.

    >>> from accelfn import ParallelismConfig, plan_context
    >>> ctx = plan_context(2, parallelism_config=ParallelismConfig(cp_size=2))
    >>> shard_sequence(ctx, {"ids": torch.arange(8), "row": 1}, {"ids": 0})
    {'ids': tensor([0, 1, 6, 7]), 'row': 1}
    """
    size, rank, is_ring = ctx.axis_size("seq"), ctx.coordinate("seq"), ctx.axis_size("cp") > 1
    if size == 1:
        return batch

    def shard(tensor: torch.Tensor, dim: int, name: Key) -> torch.Tensor:
        number = 2 * size if is_ring else size
        tensor = _pad_to_multiple(tensor, dim, name, number, padding or {})
        chunks = tensor.chunk(number, dim)
        if is_ring:
            return torch.cat([chunks[rank], chunks[number - 1 - rank]], dim)
        return chunks[rank].contiguous()

    return _map_tensors("shard_sequence", batch, dims, shard)


def sequence_sharder(ctx: Context) -> Callable[[Any], Any] | None:
    """Return a function that shards batches as the context configures; None if sequences aren't sharded."""
    dims = ctx.loading.sequence if ctx.axis_size("seq") > 1 else None
    if dims is None:
        return None
    return lambda batch: shard_sequence(ctx, batch, dims, ctx.loading.sequence_padding)


@takes_context
def gather_sequence(ctx: Context, tree: T, dims: Dims) -> T:
    """Gather the sequences that :func:`shard_sequence` sharded, in their order, on every rank.

    Use it for results per token, such as logits or metrics, before :func:`gather_for_metrics`.
    Differentiable: the gathered tensor counts as one value that all ranks hold.

    Ranks: every rank of ``ctx`` along ``"seq"``.

    Args:
        ctx: The mesh.
        tree: Shards, of equal lengths on all ranks; as ``batch`` of :func:`shard_sequence`.
        dims: As for :func:`shard_sequence`.

    Returns:
        The same types; padding isn't removed.

    Raises:
        ValueError: A tensor doesn't have that dimension, or the tree doesn't have that key.
        TypeError: As for :func:`shard_sequence`.
        MismatchError: The trees differ between ranks.
    """
    size = ctx.axis_size("seq")
    if size == 1:
        return tree
    shards: list[torch.Tensor] = []

    def collect(tensor: torch.Tensor, dim: int, name: Key) -> torch.Tensor:
        shards.append(tensor.movedim(dim, 0))
        return tensor

    _map_tensors("gather_sequence", tree, dims, collect)
    gathered = iter(unshard(ctx, shards, "seq"))

    def join(tensor: torch.Tensor, dim: int, name: Key) -> torch.Tensor:
        del tensor, name
        joined = next(gathered)
        if ctx.axis_size("cp") > 1:  # where chunk c is among the ranks' chunks
            order = [2 * c if c < size else 2 * (2 * size - 1 - c) + 1 for c in range(2 * size)]
            chunks = joined.chunk(2 * size)
            joined = torch.cat([chunks[index] for index in order])
        return joined.movedim(0, dim)

    return _map_tensors("gather_sequence", tree, dims, join)


def _pad_to_multiple(
    tensor: torch.Tensor, dim: int, name: Key, number: int, padding: Mapping[Any, float]
) -> torch.Tensor:
    """Return the tensor, padded if its length isn't divisible by ``number``."""
    length = tensor.shape[dim]
    missing = -length % number
    if not missing:
        return tensor
    if name not in padding:
        below, above = length - length % number, length + missing
        divisible = f"{below} or {above}" if below else str(above)
        raise ValueError(
            f"shard_sequence: the sequences of {name!r} have {length} tokens, which isn't divisible into "
            f"{number} equal chunks. Use a length of {divisible}, or padding: "
            f"DataLoaderConfiguration(sequence_padding={{{name!r}: 0}}), with -100 for labels."
        )
    shape = list(tensor.shape)
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, padding[name])], dim)


def _map_tensors(operation: str, tree: T, dims: Dims, apply: Any) -> T:
    """Return a tree with ``apply`` applied to each tensor that ``dims`` names."""

    def applied(value: object, name: Key, dim: int) -> torch.Tensor:
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{operation}: {name!r} is a {type(value).__name__}, which has no dimension {dim}. Name only "
                "tensors."
            )
        if not -value.dim() <= dim < value.dim():
            raise ValueError(
                f"{operation}: {name!r} has shape {tuple(value.shape)} and no dimension {dim}. Name its "
                "sequence dimension."
            )
        return apply(value, dim % value.dim(), name)

    if isinstance(dims, int):
        leaves, structure = flatten(tree)
        paths = structure.paths("batch")
        return structure.unflatten(
            [applied(leaf, path, dims) for leaf, path in zip(leaves, paths, strict=True)]
        )
    if isinstance(tree, Mapping):
        result: Any = copy.copy(cast("MutableMapping[Key, Any]", tree))
        keys = list(cast("Mapping[Key, Any]", tree))
    elif isinstance(tree, (list, tuple)):
        result = list(cast("list[Any]", tree))
        keys = list(range(len(result)))
    else:
        raise TypeError(
            f"{operation}: {type(tree).__name__} has no keys, but dims names {', '.join(map(repr, dims))}. "
            "Make the loader yield mappings, lists or tuples of tensors."
        )
    for name, dim in dims.items():
        if name not in keys:
            raise ValueError(
                f"{operation}: the batch has no {name!r}; it has {', '.join(map(repr, keys))}. Use its keys "
                "in DataLoaderConfiguration(sequence={...})."
            )
        result[name] = applied(result[name], name, dim)
    if not isinstance(tree, tuple):
        return result
    kind = cast("Any", type(cast("object", tree)))
    return getattr(kind, "_make", kind)(result)
