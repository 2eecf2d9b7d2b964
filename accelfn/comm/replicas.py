"""Check that replicas are bit-identical on all ranks, and name the leaves that aren't."""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn import Module
from torch.optim import Optimizer

from accelfn.comm.agreement import Call, agree, as_bytes, catch, layout_call
from accelfn.comm.objects import gather_bytes
from accelfn.comm.transfer import unwrap
from accelfn.context import AXES, JOINED, Context, takes_context
from accelfn.errors import Drift, ReplicaDriftError
from accelfn.tree import (
    TreeSpec,
    digest_tensors,
    flatten,
    is_dtensor,
    local_of,
    plan_layout,
    require_tensors,
)

_OPERATION = "check_replicas"
_DIGEST_BYTES = 16
# Unsharded tensors are the same on all ranks, except for the stages of a pipeline.
_ALL_AXES = tuple(axis for axis in AXES if axis != "pp")


@takes_context
def check_replicas(ctx: Context, tree: Any, *, name: str = "tree") -> None:
    """Check that a tree has the same bits on every rank, such as the parameters of a replicated model.

    Each rank computes a digest of its leaves on their devices (:func:`accelfn.tree.digest_tensors`), and one
    short exchange compares the digests: neither its size nor the number of device synchronisations grows with
    the tree. A single differing bit is detected. Only if ranks differ, they exchange the digests of all
    leaves, which tell the leaves and ranks that differ.

    The local tensors of a ``DTensor`` are compared between the ranks that should hold the same shard: along
    the axes of the context's mesh that it isn't sharded along. Ranks in errors are numbered along these axes.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: Tensors of any dtype and shape, modules and optimizers, or a tree of them. Modules are compared
            by their named parameters and buffers, optimizers by the tensors of their ``state_dict()``.
        name: What errors call ``tree``; the same on every rank.

    Raises:
        ReplicaDriftError: A leaf differs between ranks; the same error on all ranks that are compared
            (``RemoteRankError`` on ranks with other shards).
        MismatchError: Structures, shapes, dtypes or device types differ; the same error on every rank.
        TypeError: A leaf isn't a dense tensor, or is sharded on another mesh than that of ``ctx``
            (``RemoteRankError`` on the other ranks).

    >>> check_replicas(Context(), torch.nn.Linear(3, 2), name="model")
    """
    parts, error = catch(lambda: _by_axes(ctx, tree, name))
    if parts is None or (list(parts) == [_ALL_AXES] and ctx.along(*_ALL_AXES) is ctx):
        _check_part(ctx, None if parts is None else parts[_ALL_AXES], name, error)
        return
    # The stages of a pipeline may be sharded along different axes.
    messages = gather_bytes(ctx, Call(_OPERATION, "axes"), json.dumps(list(parts)).encode())
    all_axes = {tuple(axes) for message in messages for axes in json.loads(message)}
    for axes in sorted(all_axes, reverse=True):
        part = parts.get(axes) or flatten({})
        _, error = catch(functools.partial(_check_part, ctx.along(*axes), part, name))
        agree(ctx, Call(_OPERATION, f"along {axes}"), error=error)


def _check_part(
    ctx: Context, part: tuple[list[Any], TreeSpec] | None, name: str, error: Exception | None = None
) -> None:
    """Check tensors that should be the same on all ranks of ``ctx``."""
    prepared = None
    if part is not None:
        prepared, error = catch(lambda: _prepare(ctx, *part, name))
    if ctx.world.size == 1:
        unwrap(prepared, error)
        return
    call, digests = prepared or (Call(_OPERATION), b"")
    summary = hashlib.blake2b(digests, digest_size=_DIGEST_BYTES).digest()
    if len(set(gather_bytes(ctx, call, summary, error))) == 1:
        return

    # Now all ranks are known to take part, with equally structured trees.
    by_rank = gather_bytes(ctx, Call(_OPERATION, "digests"), digests)
    raise ReplicaDriftError(_OPERATION, _find_drifted(by_rank, list(call.leaves())))


def _prepare(ctx: Context, leaves: list[Any], structure: TreeSpec, name: str) -> tuple[Call, bytes]:
    """Return the call, and the digests of all leaves, concatenated."""
    leaves = require_tensors(_OPERATION, leaves, structure, name)
    digests = b"" if ctx.world.size == 1 else as_bytes(digest_tensors(leaves).view(torch.uint8))
    layout = plan_layout(leaves, structure)
    return layout_call(_OPERATION, f"name={name!r}", layout, pairs=False, name=name), digests


def _flatten_tensors(tree: Any) -> tuple[list[Any], TreeSpec]:
    leaves, structure = flatten(tree)
    if not any(isinstance(leaf, (Module, Optimizer)) for leaf in leaves):
        return leaves, structure
    return flatten(structure.unflatten([_tensors_of(leaf) for leaf in leaves]))


def _tensors_of(leaf: Any) -> Any:
    """Return the tensors of a module or an optimizer as a tree, and anything else unchanged."""
    if isinstance(leaf, Module):
        return {**dict(leaf.named_parameters()), **dict(leaf.named_buffers())}
    if isinstance(leaf, Optimizer):
        parts, structure = flatten(leaf.state_dict())
        return structure.unflatten([part if isinstance(part, torch.Tensor) else None for part in parts])
    return leaf


def _by_axes(ctx: Context, tree: Any, name: str) -> dict[tuple[str, ...], tuple[list[Any], TreeSpec]]:
    """Flatten a tree, and group its leaves by the axes along which they should be the same.

    Raises:
        TypeError: A leaf is sharded along unknown axes.
    """
    if not isinstance(cast("object", name), str):
        raise TypeError(f"{_OPERATION}: name must be a string, got {name!r}.")
    leaves, structure = _flatten_tensors(tree)
    axes = [_ALL_AXES] * len(leaves)
    for index, leaf in enumerate(leaves):
        if is_dtensor(leaf):
            axes[index] = _axes_of(ctx, leaf, lambda: structure.paths(name)[index])  # noqa: B023 -- called at once
            leaves[index] = local_of(leaf)
    groups = sorted(set(axes), reverse=True) or [_ALL_AXES]
    if groups == [_ALL_AXES]:
        return {_ALL_AXES: (leaves, structure)}
    by_axes: dict[tuple[str, ...], tuple[list[Any], TreeSpec]] = {}
    for group in groups:  # None isn't a leaf, so that each part keeps its paths
        part = [leaf if own == group else None for leaf, own in zip(leaves, axes, strict=True)]
        by_axes[group] = flatten(structure.unflatten(part))
    return by_axes


def _axes_of(ctx: Context, leaf: Any, path: Callable[[], str]) -> tuple[str, ...]:
    """Return the axes along which ranks hold the same shard of a ``DTensor``."""
    names = leaf.device_mesh.mesh_dim_names or ("",) * leaf.device_mesh.ndim
    dims = zip(names, leaf.placements, strict=True)
    sharded = [dim for dim, placement in dims if not placement.is_replicate()]
    if (ctx.mesh is None and sharded) or any(dim not in (*AXES, *JOINED, "ep") for dim in sharded):
        raise TypeError(
            f"{_OPERATION}: {path()} is a DTensor that is sharded on another mesh than the context's, with "
            f"placements {leaf.placements}. Leave it out, or pass its full_tensor()."
        )
    parts = {axis for dim in sharded for axis in JOINED.get(dim, (dim,))}
    excluded = {"dp_shard" if part in ("edp", "ep") else part for part in parts}
    return tuple(axis for axis in _ALL_AXES if axis not in excluded)


def _find_drifted(digests: list[bytes], paths: Sequence[str]) -> tuple[Drift, ...]:
    """Return a row for each rank and leaf that differs, from the digests of all ranks. Pure."""
    rows: list[Drift] = []
    for index, path in enumerate(paths):
        place = slice(index * _DIGEST_BYTES, (index + 1) * _DIGEST_BYTES)
        column = [digest[place] for digest in digests]
        # Among equally common digests, that of the lowest rank.
        expected = Counter(column).most_common(1)[0][0]
        reference = column.index(expected)
        rows += [Drift(rank, path, reference) for rank, digest in enumerate(column) if digest != expected]
    return tuple(rows)
