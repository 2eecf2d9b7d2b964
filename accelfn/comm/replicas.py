"""Check that replicas are bit-identical on all ranks, and report where they differ."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.nn import Module
from torch.optim import Optimizer

from accelfn.comm.agreement import Call, agree, as_bytes, catch, layout_call
from accelfn.comm.objects import gather_bytes
from accelfn.comm.transfer import unwrap
from accelfn.context import AXES, JOINED, Context, check_context
from accelfn.errors import Drift, ReplicaDriftError
from accelfn.tree import (
    PackSpec,
    TreeSpec,
    digest_tensors,
    flatten,
    is_dtensor,
    local_of,
    plan_layout,
    require_tensors,
    split_flat,
)

_OPERATION = "check_replicas"
_DIGEST_BYTES = 16
# Unsharded tensors are the same on all ranks, except for the stages of a pipeline.
_ALL_AXES = tuple(axis for axis in AXES if axis != "pp")
# Number of leaves whose differences are measured, which takes a message as large as the leaf.
_MAX_COMPARED = 8
_CHUNK = 1 << 21  # elements compared at a time
# Number of differing elements, the largest difference, and the position of that element in logical order.
_AMOUNT = struct.Struct("<QdQ")
_UNKNOWN = -1.0  # a difference that can't be computed


class _Replica(NamedTuple):
    """This rank's tensors."""

    leaves: list[torch.Tensor]
    layout: PackSpec
    digests: bytes  # of all leaves, concatenated


class _Drifted(NamedTuple):
    """A leaf that differs between ranks."""

    leaf: int
    reference: int  # the lowest rank with the most common value
    ranks: tuple[int, ...]  # ranks with another value


def check_replicas(ctx: Context, tree: Any, *, name: str = "tree") -> None:
    """Check that a tree has the same bits on every rank, such as the parameters of a replicated model.

    Each rank computes a digest of its leaves on their devices (:func:`accelfn.tree.digest_tensors`), and one
    short exchange compares the digests: neither its size nor the number of device synchronisations grows with
    the tree. A single differing bit is detected. Only if ranks differ, they exchange the digests of all
    leaves, and compare up to eight differing leaves with those of a rank that has the most common value.

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
    check_context("check_replicas", ctx)
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
    replica = None
    if part is not None:
        replica, error = catch(lambda: _prepare(ctx, *part, name))
    if ctx.world.size == 1:
        unwrap(replica, error)
        return
    call = Call(_OPERATION)
    if replica is not None:
        call = layout_call(_OPERATION, f"name={name!r}", replica.layout, pairs=False, name=name)
    digests = b"" if replica is None else replica.digests
    summary = hashlib.blake2b(digests, digest_size=_DIGEST_BYTES).digest()
    if len(set(gather_bytes(ctx, call, summary, error))) == 1:
        return

    # Now all ranks are known to take part, with equally structured trees.
    drifted = _find_drifted(gather_bytes(ctx, Call(_OPERATION, "digests"), digests))
    leaves, layout, _ = cast("_Replica", replica)
    amounts = _compare_all(ctx, leaves, drifted[:_MAX_COMPARED])
    raise ReplicaDriftError(_OPERATION, _rows(drifted, amounts, layout, name))


def _prepare(ctx: Context, leaves: list[Any], structure: TreeSpec, name: str) -> _Replica:
    leaves = require_tensors(_OPERATION, leaves, structure, name)
    digests = b"" if ctx.world.size == 1 else as_bytes(digest_tensors(leaves).view(torch.uint8))
    return _Replica(leaves, plan_layout(leaves, structure), digests)


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


def _find_drifted(digests: list[bytes]) -> list[_Drifted]:
    """Return the leaves that differ, from the digests of all ranks. Pure."""
    drifted: list[_Drifted] = []
    for start in range(0, len(digests[0]), _DIGEST_BYTES):
        column = [digest[start : start + _DIGEST_BYTES] for digest in digests]
        # Among equally common digests, that of the lowest rank.
        expected = Counter(column).most_common(1)[0][0]
        ranks = tuple(rank for rank, digest in enumerate(column) if digest != expected)
        if ranks:
            drifted.append(_Drifted(start // _DIGEST_BYTES, column.index(expected), ranks))
    return drifted


def _compare_all(
    ctx: Context, leaves: list[torch.Tensor], drifted: list[_Drifted]
) -> list[list[tuple[int, float, int]]]:
    """Compare the leaves of all ranks with those of the reference ranks; return the differences by rank."""
    amounts: list[tuple[int, float, int]] = []
    error: Exception | None = None
    for item in drifted:
        amount, failure = _compare(ctx, leaves[item.leaf], item.reference)
        amounts.append(amount)
        error = error or failure
    message = b"".join(_AMOUNT.pack(*amount) for amount in amounts)
    messages = gather_bytes(ctx, Call(_OPERATION, "amounts"), message, error)
    return [list(_AMOUNT.iter_unpack(message)) for message in messages]


def _compare(
    ctx: Context, leaf: torch.Tensor, reference: int
) -> tuple[tuple[int, float, int], Exception | None]:
    """Compare a leaf with that of rank ``reference``, in chunks.

    An error is returned rather than raised, since all chunks must be sent first.
    """
    total, largest, position = 0, -math.inf, 0
    error: Exception | None = None
    for number, chunk in enumerate(split_flat(leaf, _CHUNK)):
        other = chunk if ctx.world.rank == reference else torch.empty_like(chunk)
        ctx.collectives.broadcast(other.view(torch.uint8), reference)
        measured, failure = catch(functools.partial(_measure, chunk, other))
        error = error or failure
        if measured is not None:
            total += measured[0]
            if measured[1] > largest or (math.isnan(measured[1]) and not math.isnan(largest)):
                largest, position = measured[1], number * _CHUNK + measured[2]
    return (total, largest, position), error


def _measure(chunk: torch.Tensor, other: torch.Tensor) -> tuple[int, float, int] | None:
    """Return the number of differing elements of flat tensors, the largest difference and its position."""
    size = chunk.dtype.itemsize
    differ = (chunk.view(torch.uint8) != other.view(torch.uint8)).view(-1, size).any(1)
    positions = differ.nonzero().view(-1)
    if not len(positions):
        return None
    try:
        amounts = _distance(chunk[positions], other[positions])
    except NotImplementedError:  # a dtype that torch can store but not compute with, such as float4
        return len(positions), _UNKNOWN, int(positions[0])
    first = int(amounts.argmax())  # a NaN counts as the largest
    return len(positions), float(amounts[first]), int(positions[first])


def _distance(chunk: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of each element, float64."""
    if chunk.is_complex():
        return (chunk.to(torch.complex128) - other.to(torch.complex128)).abs()
    amounts = (chunk.double() - other.double()).abs()
    if chunk.is_floating_point():
        return amounts
    # float64 can't represent the last bits of large integers; for larger differences int64 would wrap.
    exact = (chunk.long() - other.long()).abs().double()
    return torch.where(amounts < 2.0**62, exact, amounts)


def _rows(
    drifted: list[_Drifted], amounts: list[list[tuple[int, float, int]]], layout: PackSpec, name: str
) -> tuple[Drift, ...]:
    """Return a row for each differing leaf and rank. Pure."""
    paths = layout.structure.paths(name)
    rows: list[Drift] = []
    for number, item in enumerate(drifted):
        shape = layout.shapes[item.leaf]
        for rank in item.ranks:
            row = Drift(rank, paths[item.leaf], item.reference, math.prod(shape))
            if number < _MAX_COMPARED:
                count, largest, position = amounts[rank][number]
                row = row._replace(
                    num_differing=count,
                    largest=None if largest == _UNKNOWN else largest,
                    position=_unravel(position, shape),
                )
            rows.append(row)
    return tuple(rows)


def _unravel(position: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of the element at ``position`` in logical order."""
    indices: list[int] = []
    for length in reversed(shape):
        position, index = divmod(position, length)
        indices.append(index)
    return tuple(reversed(indices))
