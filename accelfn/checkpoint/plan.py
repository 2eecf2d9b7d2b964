"""Plan which rank writes which tensors, each box once, and which stored pieces a rank reads.

The overlaps of stored pieces and shards are found by ``torch.distributed.checkpoint``'s planner.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.manifest import Piece, StoredTensor, leaf_path
from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import CheckpointError, Drift, ReplicaDriftError
from accelfn.tree import from_local, local_of
from accelfn.tree.digest import digest_tensors
from accelfn.weights.dtypes import dtype_from_name


class Box(NamedTuple):
    """A part of a tensor: where it begins, and how large it is, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


class Held(NamedTuple):
    """The part of a tensor that one rank holds.

    Attributes:
        dtype: As torch names it.
        shape: Of the complete tensor.
        itemsize: Bytes of an element.
        boxes: The parts that this rank holds; None for all of it.
        content: A digest of the values of an unsharded tensor; "" if they aren't compared.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    boxes: tuple[Box, ...] | None = None
    content: str = ""


Write = tuple[str, str, Box | None]
"""What a rank writes: the name in the checkpoint, the name on the rank, and the part; None for all of it.

A plain tuple, because a plan has one for each tensor and rank.
"""


class Version(NamedTuple):
    """The values of a tensor on some ranks, where other ranks may have other values under its name.

    Attributes:
        name: Its name on the ranks.
        tensor: The complete tensor.
        holders: The ranks that hold each part, in order; the part is None for all of it.
    """

    name: str
    tensor: Held
    holders: Mapping[Box | None, Sequence[int]]


class SavePlan(NamedTuple):
    """What each rank writes, and under which names.

    Attributes:
        writes: By rank.
        names: By rank: the stored name of each tensor whose values differ from those of the plain name.
        tensors: The complete tensors, by stored name.
    """

    writes: Sequence[Sequence[Write]]
    names: Sequence[Mapping[str, str]]
    tensors: Mapping[str, Held]


def plan_save(held: Sequence[Mapping[str, Held]]) -> SavePlan:
    """Decide which rank writes which tensors. Pure; the same on every rank.

    A tensor that all ranks hold with equal values is written by one rank. If values differ, each version is
    written, see :func:`find_holders`. A box is written by one of the ranks that hold it. The largest are
    assigned first, each to the rank that has the least to write so far.

    Args:
        held: What each rank holds, by rank.

    Raises:
        CheckpointError: Ranks hold shards of tensors of different dtypes or shapes, or a shard and all of it.

    >>> one = Held("float32", (2,), 4)
    >>> plan_save([{"a": one, "b": one}, {"a": one, "b": one}]).writes
    ((('a', 'a', None),), (('b', 'b', None),))
    """
    versions, names = find_holders(held)
    tensors = {stored: version.tensor for stored, version in versions.items()}
    return SavePlan(_deal(len(held), versions), names, tensors)


def find_holders(
    held: Sequence[Mapping[str, Held]],
) -> tuple[dict[str, Version], tuple[dict[str, str], ...]]:
    """List the ranks that hold each tensor, or each box of it. Pure.

    If values of a tensor differ, each version has a name with the lowest rank that has it, and the first one
    the plain name. Tensors that have the same layouts share their mapping of holders.

    Args:
        held: What each rank holds, by rank.

    Returns:
        The versions of all tensors, by stored name; and by rank the stored name of each tensor that isn't the
        plain one.

    Raises:
        CheckpointError: Ranks hold shards of tensors of different dtypes or shapes, or a shard and all of it.
    """
    versions: dict[str, Version] = {}
    names: list[dict[str, str]] = [{} for _ in held]
    layouts: dict[str, list[Held | None]] = {}
    for rank, tensors in enumerate(held):
        for name, one in tensors.items():
            if name not in layouts:
                layouts[name] = [None] * len(held)
            layouts[name][rank] = one
    known: dict[tuple[Held | None, ...], list[tuple[list[int], Version]]] = {}
    for name, by_rank in layouts.items():
        layout = tuple(by_rank)
        found = known.get(layout)
        if found is None:
            found = known[layout] = _versions_of(name, layout)
        for number, (ranks, version) in enumerate(found):
            stored = f"{name}@{ranks[0]}" if number else name
            while number and stored in layouts:
                stored += "'"
            versions[stored] = version._replace(name=name)
            for rank in ranks if number else ():
                names[rank][name] = stored
    return versions, tuple(names)


def _versions_of(name: str, layout: Sequence[Held | None]) -> list[tuple[list[int], Version]]:
    """Return the versions of a tensor, and the ranks that have each, from what each rank holds."""
    alike: dict[Held, list[int]] = {}
    for rank, one in enumerate(layout):
        if one is not None:
            alike.setdefault(one, []).append(rank)
    found: dict[Held, tuple[list[int], dict[Box | None, list[int]]]] = {}
    for one, ranks in alike.items():
        whole = one._replace(boxes=None)
        if whole not in found:
            if found and (one.boxes is not None or any(other.content == "" for other in found)):
                _refuse(name, ranks[0], one, next(iter(found)))
            found[whole] = ([], {})
        found[whole][0].extend(ranks)
        for box in one.boxes if one.boxes is not None else (None,):
            found[whole][1].setdefault(box, []).extend(ranks)
    versions: list[tuple[list[int], Version]] = []
    for whole, (ranks, holders) in found.items():
        in_order = {box: sorted(holders[box]) for box in sorted(holders, key=_order)}
        versions.append((sorted(ranks), Version(name, whole, in_order)))
    return versions


def _order(box: Box | None) -> Box:
    return box or Box((), ())


def _refuse(name: str, rank: int, one: Held, other: Held) -> None:
    raise CheckpointError(
        f"save_state: {leaf_path(name)!r} is {one.dtype} {one.shape} on rank {rank} and {other.dtype} "
        f"{other.shape} on another. A tensor that is sharded over ranks must have one layout on all of them."
    )


def _deal(num_ranks: int, versions: Mapping[str, Version]) -> tuple[tuple[Write, ...], ...]:
    """Choose the rank that writes each part, and list what each rank writes, in order of the names."""
    by_size: dict[int, list[tuple[str, list[Box | None]]]] = {}
    # Tensors of one layout and one size of an element have the same sizes.
    known: dict[tuple[int, tuple[int, ...], int], dict[int, list[Box | None]]] = {}
    in_order = sorted(versions)
    for stored in in_order:
        _, tensor, holders = versions[stored]
        key = (id(holders), tensor.shape, tensor.itemsize)
        if key not in known:
            known[key] = {}
            for box in holders:
                size = math.prod(tensor.shape if box is None else box.shape) * tensor.itemsize
                known[key].setdefault(size, []).append(box)
        for size, boxes in known[key].items():
            by_size.setdefault(size, []).append((stored, boxes))

    loads = [0] * num_ranks
    heap = [(0, rank) for rank in range(num_ranks)]  # for tensors that all ranks hold; may lag behind `loads`
    chosen: dict[tuple[str, Box | None], int] = {}
    for size in sorted(by_size, reverse=True):
        for stored, boxes in by_size[size]:
            holders = versions[stored].holders
            for box in boxes:
                ranks = holders[box]
                if len(ranks) == 1:
                    loads[ranks[0]] += size
                    continue
                if len(ranks) == num_ranks:
                    while heap[0][0] != loads[heap[0][1]]:
                        heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
                    writer = heap[0][1]
                else:
                    writer = min(ranks, key=loads.__getitem__)
                loads[writer] += size
                chosen[stored, box] = writer

    written: list[list[Write]] = [[] for _ in range(num_ranks)]
    for stored in in_order:
        name, _, holders = versions[stored]
        for box, ranks in holders.items():
            writer = ranks[0] if len(ranks) == 1 else chosen[stored, box]
            written[writer].append((stored, name, box))
    return tuple(map(tuple, written))


def boxes_of(tensor: torch.Tensor) -> tuple[Box, ...] | None:
    """Return which parts of a sharded tensor this rank holds; None for a tensor that isn't sharded."""
    if type(tensor) is torch.Tensor:  # looking up a missing attribute of a tensor is slow
        return None
    chunks = getattr(tensor, "__create_chunk_list__", None)
    if chunks is None:
        return None
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks()]
    return tuple(box for box in boxes if all(box.shape) or not tensor.numel())


def all_of(shape: tuple[int, ...]) -> Box:
    """Return the box of a complete tensor."""
    return Box((0,) * len(shape), shape)


def boxes_from(lists: Sequence[Any]) -> tuple[Box, ...]:
    """Return boxes from their lists in JSON."""
    return tuple(Box(*map(tuple, box)) for box in lists)


def has_copies(tensor: torch.Tensor) -> bool:
    """Return whether several ranks hold the same part of a tensor: it is replicated along a mesh dim."""
    layout = cast("Any", tensor)
    placements = getattr(layout, "placements", None)
    if placements is None:
        return False
    sizes = cast("Sequence[int]", layout.device_mesh.shape)
    return any(one.is_replicate() and size > 1 for one, size in zip(placements, sizes, strict=True))


def find_drift(
    copies: Sequence[Mapping[str, str]], boxes: Sequence[Mapping[str, Sequence[Box]]], name: str = "tree"
) -> tuple[Drift, ...]:
    """Find the parts that ranks hold with different values. Pure.

    Args:
        copies: By rank, a digest of each tensor for which :func:`has_copies`.
        boxes: By rank, the parts of each such tensor that it holds.
        name: Of the tree of these tensors, for errors.

    >>> part = {"w": (Box((0,), (2,)),)}
    >>> [(row.rank, row.path) for row in find_drift([{"w": "a"}, {"w": "b"}], [part, part])]
    [(1, "tree['w']")]
    """
    holders: dict[tuple[str, tuple[Box, ...]], dict[int, str]] = {}
    for rank, texts in enumerate(copies):
        for key, text in texts.items():
            holders.setdefault((key, tuple(boxes[rank][key])), {})[rank] = text
    rows: list[Drift] = []
    for (key, _), texts in holders.items():
        usual = Counter(texts.values()).most_common(1)[0][0]
        reference = next(rank for rank, text in texts.items() if text == usual)
        path = f"{name}[{leaf_path(key)!r}]"
        rows += [Drift(rank, path, reference) for rank, text in texts.items() if text != usual]
    return tuple(sorted(rows, key=lambda row: (row.path, row.rank)))


def check_copies(ctx: Context, operation: str, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Check that ranks that hold the same tensor, or part of a ``DTensor``, hold the same bits of it.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        operation: Named in errors.
        tensors: By key. ``DTensor``s may be on any mesh, and ranks may have different ones.
        name: Of the tree of these tensors, for errors.

    Raises:
        ReplicaDriftError: Copies differ; the same error on every rank.
    """

    def describe() -> bytes:
        boxes = {key: boxes_of(one) for key, one in tensors.items()}
        parts = {key: local_of(one) for key, one in tensors.items() if boxes[key] is None or has_copies(one)}
        rows = cast("list[list[int]]", digest_tensors(list(parts.values())).tolist())  # pyright: ignore[reportUnknownMemberType]
        copies = {key: str(row) for key, row in zip(parts, rows, strict=True)}
        return json.dumps(
            [copies, {key: boxes[key] or [all_of(tuple(one.shape))] for key, one in parts.items()}]
        ).encode()

    own, error = catch(describe)
    ranks = [json.loads(one) for one in gather_bytes(ctx, Call(operation, "copies"), own or b"", error)]
    boxes = [{key: boxes_from(found) for key, found in one.items()} for _, one in ranks]
    rows = find_drift([copies for copies, _ in ranks], boxes, name)
    if rows:
        raise ReplicaDriftError(operation, rows)


# --- reading ---------------------------------------------------------------------------------------


class Overlap(NamedTuple):
    """The overlap of a stored piece and a tensor to load.

    Attributes:
        piece: The stored piece.
        offset: Of the overlap in the piece, by dimension; None for all of the piece.
        shape: Of the overlap; None for all of the piece.
        target: Its offset in the tensor to load.
    """

    piece: Piece
    offset: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    target: tuple[int, ...]


def find_overlaps(stored: StoredTensor, target: torch.Tensor | None) -> list[Overlap]:
    """Return the parts of stored pieces that make up a tensor.

    Args:
        stored: The tensor, in its pieces.
        target: A sharded tensor, to load this rank's part of it; any other, or None, to load all of it.
    """
    cut = None if target is None else getattr(target, "__create_chunk_list__", None)
    if cut is None:
        return [Overlap(piece, None, None, piece.offset) for piece in stored.pieces]
    # Not at the top: this imports torch.distributed.checkpoint, which few programs need.
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    known = TensorStorageMetadata(
        TensorProperties(dtype_from_name(stored.dtype)),
        torch.Size(stored.shape),
        [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)) for one in stored.pieces],
    )
    chunks = [one for one in cut() if all(one.sizes) or not stored.shape]
    found: list[Overlap] = []
    for item in create_read_items_for_chunk_list("", known, chunks):
        piece = stored.pieces[cast("int", item.storage_index.index)]
        offset, shape = tuple(item.storage_offsets), tuple(item.lengths)
        is_whole = shape == piece.shape
        found.append(
            Overlap(
                piece, None if is_whole else offset, None if is_whole else shape, tuple(item.dest_offsets)
            )
        )
    return found


def memory_for(stored: StoredTensor, target: torch.Tensor | None) -> torch.Tensor:
    """Return new memory for a tensor to load: like ``target`` on its device, and sharded like it.

    Args:
        stored: The tensor.
        target: None, or a tensor on the meta device: memory on the CPU.
    """
    dtype = dtype_from_name(stored.dtype)
    is_sharded = hasattr(target, "__create_chunk_list__")
    local = None if target is None else local_of(target)
    # XLA would compile each of the many copies into parts of a tensor.
    device = "cpu" if local is None or local.device.type in ("meta", "xla") else local.device
    shape = tuple(local.shape) if local is not None and is_sharded else stored.shape
    if dtype == torch.complex32:  # torch warns about new tensors of this dtype, and not about views
        memory = torch.empty(shape, dtype=torch.float32, device=device).view(dtype)
    else:
        memory = torch.empty(shape, dtype=dtype, device=device)
    return memory if target is None else from_local(memory, like=target)


def part_of(tensor: torch.Tensor, overlap: Overlap) -> torch.Tensor:
    """Return the view of a tensor to load, or of this rank's part of it, for one of its overlaps."""
    shape = overlap.piece.shape if overlap.shape is None else overlap.shape
    bounds = zip(overlap.target, shape, strict=True)
    return local_of(tensor).detach()[tuple(slice(start, start + size) for start, size in bounds)]
