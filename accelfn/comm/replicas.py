"""Find out whether all ranks still hold the same bits, and where they don't."""

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
# What isn't sharded is the same on all ranks, but for the stages of a pipeline.
_WHOLE = tuple(axis for axis in AXES if axis != "pp")
# Leaves whose amounts are found out, which takes a message as large as the leaf.
_MAX_COMPARED = 8
_PIECE = 1 << 21  # elements compared at a time
# Elements that differ, the greatest difference, and the place of that element in logical order.
_AMOUNT = struct.Struct("<QdQ")
_UNKNOWN = -1.0  # stands for a difference that can't be computed


class _Replica(NamedTuple):
    """What this rank holds."""

    leaves: list[torch.Tensor]
    layout: PackSpec
    digests: bytes  # of each leaf, end to end


class _Drifted(NamedTuple):
    """A leaf that isn't the same on all ranks."""

    leaf: int
    reference: int  # the lowest of the ranks that hold what most of them hold
    ranks: tuple[int, ...]  # those that hold something else


def check_replicas(ctx: Context, tree: Any, *, name: str = "tree") -> None:
    """Check that every rank holds the same bits, such as those of the parameters of a replicated model.

    Each rank takes a digest of its leaves where they are (:func:`accelfn.tree.digest_tensors`), and one short
    exchange compares the digests of all ranks: neither its size nor the number of waits for the device grows
    with the tree. A change of one bit of any leaf shows. Only when ranks differ, they send each other
    which leaves these are, and compare up to eight of them with a rank that holds what most ranks hold.

    Of a ``DTensor`` local tensors are compared, between ranks that should hold the same one: along the axes
    of the context's mesh that it isn't sharded along. Then errors number ranks along these axes.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: Tensors of any dtype and shape, modules and optimizers, alone or in any tree. Of a module its
            parameters and buffers are taken, by name; of an optimizer the tensors of its ``state_dict()``.
            Left as it is.
        name: What errors call ``tree``; the same on every rank.

    Raises:
        ReplicaDriftError: A leaf isn't the same on every rank; the same error on all that are compared
            (``RemoteRankError`` on those that hold other shards).
        MismatchError: Structures, shapes, dtypes or kinds of device differ; the same error on every rank.
        TypeError: A leaf is no dense tensor, or is sharded on another mesh than that of ``ctx``
            (``RemoteRankError`` on the ranks where all is well).

    >>> check_replicas(Context(), torch.nn.Linear(3, 2), name="model")
    """
    check_context("check_replicas", ctx)
    parts, error = catch(lambda: _by_axes(ctx, tree, name))
    if parts is None or (list(parts) == [_WHOLE] and ctx.along(*_WHOLE) is ctx):
        _check_part(ctx, None if parts is None else parts[_WHOLE], name, error)
        return
    # Stages of a pipeline have tensors of their own, which may be sharded along other axes.
    told = gather_bytes(ctx, Call(_OPERATION, "axes"), json.dumps(list(parts)).encode())
    wanted = {tuple(axes) for one in told for axes in json.loads(one)}
    for axes in sorted(wanted, reverse=True):
        part = parts.get(axes) or flatten({})
        _, error = catch(functools.partial(_check_part, ctx.along(*axes), part, name))
        agree(ctx, Call(_OPERATION, f"along {axes}"), error=error)


def _check_part(
    ctx: Context, part: tuple[list[Any], TreeSpec] | None, name: str, error: Exception | None = None
) -> None:
    """Check what all ranks of ``ctx`` should hold alike."""
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

    # From here on every rank knows that all are here, with trees of one form, and what comes next.
    drifted = _find(gather_bytes(ctx, Call(_OPERATION, "digests"), digests))
    leaves, layout, _ = cast("_Replica", replica)
    amounts = _compare_all(ctx, leaves, drifted[:_MAX_COMPARED])
    raise ReplicaDriftError(_OPERATION, _rows(drifted, amounts, layout, name))


def _prepare(ctx: Context, leaves: list[Any], structure: TreeSpec, name: str) -> _Replica:
    leaves = require_tensors(_OPERATION, leaves, structure, name)
    digests = b"" if ctx.world.size == 1 else as_bytes(digest_tensors(leaves).view(torch.uint8))
    return _Replica(leaves, plan_layout(leaves, structure), digests)


def _take_apart(tree: Any) -> tuple[list[Any], TreeSpec]:
    leaves, structure = flatten(tree)
    if not any(isinstance(leaf, (Module, Optimizer)) for leaf in leaves):
        return leaves, structure
    return flatten(structure.unflatten([_tensors_of(leaf) for leaf in leaves]))


def _tensors_of(leaf: Any) -> Any:
    """Return the tensors of a module or an optimizer as a tree, and anything else as it is."""
    if isinstance(leaf, Module):
        return {**dict(leaf.named_parameters()), **dict(leaf.named_buffers())}
    if isinstance(leaf, Optimizer):
        parts, structure = flatten(leaf.state_dict())
        return structure.unflatten([part if isinstance(part, torch.Tensor) else None for part in parts])
    return leaf


def _by_axes(ctx: Context, tree: Any, name: str) -> dict[tuple[str, ...], tuple[list[Any], TreeSpec]]:
    """Flatten a tree, and sort what this rank holds by the axes along which it should be the same.

    Raises:
        TypeError: A leaf is sharded, and it is unknown along which axes.
    """
    if not isinstance(cast("object", name), str):
        raise TypeError(f"{_OPERATION}: name must be a string, got {name!r}.")
    leaves, structure = _take_apart(tree)
    axes = [_WHOLE] * len(leaves)
    for index, leaf in enumerate(leaves):
        if is_dtensor(leaf):
            axes[index] = _axes_of(ctx, leaf, lambda: structure.paths(name)[index])  # noqa: B023 -- called at once
            leaves[index] = local_of(leaf)
    wanted = sorted(set(axes), reverse=True) or [_WHOLE]
    if wanted == [_WHOLE]:
        return {_WHOLE: (leaves, structure)}
    return {
        # None is no leaf, so each part keeps its paths.
        one: flatten(
            structure.unflatten(
                [leaf if own == one else None for leaf, own in zip(leaves, axes, strict=True)]
            )
        )
        for one in wanted
    }


def _axes_of(ctx: Context, leaf: Any, path: Callable[[], str]) -> tuple[str, ...]:
    """Return along which axes ranks hold the same part of a ``DTensor``."""
    names = leaf.device_mesh.mesh_dim_names or ("",) * leaf.device_mesh.ndim
    dims = zip(names, leaf.placements, strict=True)
    cut = [dim for dim, placement in dims if not placement.is_replicate()]
    if (ctx.mesh is None and cut) or any(dim not in (*AXES, *JOINED, "ep") for dim in cut):
        raise TypeError(
            f"{_OPERATION}: {path()} is sharded: a DTensor with placements {leaf.placements}, of which ranks "
            "hold different parts, on a mesh that isn't the context's. Leave it out, or pass its "
            "full_tensor()."
        )
    parts = {axis for dim in cut for axis in JOINED.get(dim, (dim,))}
    gone = {"dp_shard" if part in ("edp", "ep") else part for part in parts}
    return tuple(axis for axis in _WHOLE if axis not in gone)


def _find(digests: list[bytes]) -> list[_Drifted]:
    """Find the leaves that differ, from the digests of all ranks. Pure."""
    drifted: list[_Drifted] = []
    for start in range(0, len(digests[0]), _DIGEST_BYTES):
        column = [one[start : start + _DIGEST_BYTES] for one in digests]
        # Of equally common ones this gives the one that comes first: that of the lowest rank.
        usual = Counter(column).most_common(1)[0][0]
        ranks = tuple(rank for rank, one in enumerate(column) if one != usual)
        if ranks:
            drifted.append(_Drifted(start // _DIGEST_BYTES, column.index(usual), ranks))
    return drifted


def _compare_all(
    ctx: Context, leaves: list[torch.Tensor], drifted: list[_Drifted]
) -> list[list[tuple[int, float, int]]]:
    """Let every rank compare its leaves with those of the reference ranks: by rank, what each found."""
    found: list[tuple[int, float, int]] = []
    error: Exception | None = None
    for one in drifted:
        amount, failure = _compare(ctx, leaves[one.leaf], one.reference)
        found.append(amount)
        error = error or failure
    blob = b"".join(_AMOUNT.pack(*amount) for amount in found)
    blobs = gather_bytes(ctx, Call(_OPERATION, "amounts"), blob, error)
    return [list(_AMOUNT.iter_unpack(one)) for one in blobs]


def _compare(
    ctx: Context, leaf: torch.Tensor, reference: int
) -> tuple[tuple[int, float, int], Exception | None]:
    """Compare a leaf with that of rank ``reference``, piece by piece.

    A failure is kept: the other ranks are notified once all pieces have been sent.
    """
    total, largest, place = 0, -math.inf, 0
    error: Exception | None = None
    for number, mine in enumerate(split_flat(leaf, _PIECE)):
        theirs = mine if ctx.world.rank == reference else torch.empty_like(mine)
        ctx.collectives.broadcast(theirs.view(torch.uint8), reference)
        measured, failure = catch(functools.partial(_measure, mine, theirs))
        error = error or failure
        if measured is not None:
            total += measured[0]
            if measured[1] > largest or (math.isnan(measured[1]) and not math.isnan(largest)):
                largest, place = measured[1], number * _PIECE + measured[2]
    return (total, largest, place), error


def _measure(mine: torch.Tensor, theirs: torch.Tensor) -> tuple[int, float, int] | None:
    """Return the number of differing elements of two flat tensors, the largest difference and its place."""
    size = mine.dtype.itemsize
    differ = (mine.view(torch.uint8) != theirs.view(torch.uint8)).view(-1, size).any(1)
    places = differ.nonzero().view(-1)
    if not len(places):
        return None
    try:
        amounts = _distance(mine[places], theirs[places])
    except NotImplementedError:  # a dtype that torch can store but not compute with, such as float4
        return len(places), _UNKNOWN, int(places[0])
    first = int(amounts.argmax())  # a NaN counts as the greatest
    return len(places), float(amounts[first]), int(places[first])


def _distance(mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the absolute difference of each element, float64."""
    if mine.is_complex():
        return (mine.to(torch.complex128) - theirs.to(torch.complex128)).abs()
    amounts = (mine.double() - theirs.double()).abs()
    if mine.is_floating_point():
        return amounts
    # float64 doesn't hold the last bits of large integers; their int64 difference wraps where it is larger.
    exact = (mine.long() - theirs.long()).abs().double()
    return torch.where(amounts < 2.0**62, exact, amounts)


def _rows(
    drifted: list[_Drifted], amounts: list[list[tuple[int, float, int]]], layout: PackSpec, name: str
) -> tuple[Drift, ...]:
    """Return how each leaf on each rank differs. Pure."""
    paths = layout.structure.paths(name)
    rows: list[Drift] = []
    for number, one in enumerate(drifted):
        shape = layout.shapes[one.leaf]
        for rank in one.ranks:
            row = Drift(rank, paths[one.leaf], one.reference, math.prod(shape))
            if number < _MAX_COMPARED:
                count, largest, place = amounts[rank][number]
                row = row._replace(
                    num_differing=count,
                    largest=None if largest == _UNKNOWN else largest,
                    position=_unravel(place, shape),
                )
            rows.append(row)
    return tuple(rows)


def _unravel(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the indices of the element that comes at ``place`` in logical order."""
    indices: list[int] = []
    for length in reversed(shape):
        place, index = divmod(place, length)
        indices.append(index)
    return tuple(reversed(indices))
