"""Put the newest whole snapshot together from what the ranks of a new world hold, and restore it."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from accelfn.checkpoint.background import CollectivePhases, paused_collection
from accelfn.checkpoint.by_rank import join_documents, renamed
from accelfn.checkpoint.collect import collect_state, contents, parse_boxes, parse_held
from accelfn.checkpoint.manifest import Json, Manifest, Part, StoredTensor
from accelfn.checkpoint.overlaps import Known, Overlap, find_overlaps, memory_for, part_of
from accelfn.checkpoint.plan import Box, Boxes, Group, Held, all_of, boxes_from, find_holders
from accelfn.checkpoint.restore import Read, ReadPlan, begin_load, plan_read, restore
from accelfn.checkpoint.stages import join_stages
from accelfn.comm import catch
from accelfn.context import Context
from accelfn.elastic.snapshot import Key, Memory, Share
from accelfn.weights.dtypes import contiguous_copy, copyable, dtype_from_name

T = TypeVar("T")


class Offer(NamedTuple):
    """What a rank holds of a snapshot, in short.

    Attributes:
        key: Of the snapshot.
        owner: As of :class:`~accelfn.elastic.snapshot.Share`.
        size: Number of ranks of the world that took it.
        needs_all: As of ``Share``.
        sharded: The shape of each sharded tensor, and the parts that are here.
    """

    key: Key
    owner: int
    size: int
    needs_all: bool
    sharded: Mapping[str, tuple[tuple[int, ...], tuple[Box, ...]]]


class _Holder(NamedTuple):
    """A share, and the rank of the new world that has it."""

    rank: int
    owner: int
    stages: tuple[int, ...]
    tree: Json
    random: Json
    held: Mapping[str, Held]
    boxes: Boxes


def choose_snapshot(offers: Iterable[Offer]) -> Key | None:
    """Return the newest snapshot that is whole: with all parts of each sharded tensor. Pure.

    >>> def half(owner, step):
    ...     boxes = (Box((2 * owner,), (2,)),)
    ...     return Offer(Key(step, 0), owner, 2, False, {"w": ((4,), boxes)})
    >>> choose_snapshot([half(0, 10), half(1, 10), half(0, 20)])
    Key(step=10, generation=0)
    """
    by_key: dict[Key, list[Offer]] = {}
    for offer in offers:
        by_key.setdefault(offer.key, []).append(offer)
    return next((key for key in sorted(by_key, reverse=True) if _is_whole(by_key[key])), None)


def _is_whole(offers: Sequence[Offer]) -> bool:
    parts: dict[str, set[Box]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for offer in offers:
        for name, (shape, boxes) in offer.sharded.items():
            shapes[name] = shape
            parts.setdefault(name, set()).update(boxes)
    if offers[0].needs_all and len({offer.owner for offer in offers}) < offers[0].size:
        return False
    return all(
        sum(math.prod(box.shape) for box in parts[name]) == math.prod(shape) for name, shape in shapes.items()
    )


def restore_snapshot(ctx: Context, memory: Memory, state: T) -> T | None:
    """Restore the newest snapshot that the ranks hold whole, and count steps from it.

    Nothing is changed on any rank if one of them raises.

    Ranks: every rank of ``ctx``, also those that hold nothing.

    Returns:
        The state, as :func:`accelfn.load_state` returns it; None on all ranks if no snapshot is whole.

    Raises:
        CheckpointMismatchError: The snapshot doesn't fit the state.
        RemoteRankError: This happened on another rank.
    """
    phases = CollectivePhases(ctx, "run_elastic")
    own = memory.shares()
    texts = phases.gather("offers", json.dumps([_offer(share) for share in own]))
    key = choose_snapshot(_parse_offer(one) for text in texts for one in json.loads(text))
    if key is None:
        return None
    request = begin_load(ctx, phases, ".", state, strict=True, partial=False)
    shares = {share.owner: share for share in own if share.key == key and not share.is_copy}
    copies = {share.owner: share for share in own if share.key == key and share.is_copy}
    described, error = catch(lambda: [_describe(share) for share in {**copies, **shares}.values()])
    texts = phases.gather("shares", json.dumps(described), error)
    holders = _choose_holders([json.loads(text) for text in texts])

    def plan() -> tuple[Manifest, Mapping[str, str], ReadPlan, dict[str, list[Overlap]]]:
        manifest, plain = _manifest(ctx, state, key, holders)
        wanted = plan_read(ctx, state, request, manifest, f"the snapshot of step {key.step}")
        known: Known = {}
        overlaps = {
            name: find_overlaps(manifest.tensors[name], one, known) for name, one in wanted.wanted.items()
        }
        return manifest, plain, wanted, overlaps

    with paused_collection():
        planned, error = catch(plan)
        phases.gather("plan", "", error)
        assert planned is not None
        manifest, plain, wanted, overlaps = planned
        mine = {
            number: (shares if holder.owner in shares else copies)[holder.owner].tensors
            for number, holder in enumerate(holders)
            if holder.rank == ctx.rank
        }
        parts = _fetch(ctx, phases, overlaps, plain, holders, mine)
        tensors: dict[str, torch.Tensor] = {}
        for name, laps in overlaps.items():
            tensors[name] = memory_for(manifest.tensors[name], wanted.wanted[name])
            for lap, part in zip(laps, parts.pop(name), strict=True):
                copyable(part_of(tensors[name], lap)).copy_(copyable(part))
    read = Read(manifest, wanted, tensors, read_in_place=_nothing_is_left)
    value, _ = restore(ctx, phases, state, request, read, random_state=True)
    memory.go_on_from(key)
    return value


def _nothing_is_left(tensors: Mapping[str, torch.Tensor]) -> None:
    """Read in place what wasn't fetched: nothing."""


def _offer(share: Share) -> Offer:
    sharded = {
        name: (one.shape, share.boxes[one.layout])
        for name, one in share.held.items()
        if one.layout is not None and (not share.is_copy or name in share.tensors)
    }
    return Offer(share.key, share.owner, share.size, share.needs_all, sharded)


def _parse_offer(lists: Sequence[Any]) -> Offer:
    key, owner, size, needs_all, sharded = lists
    parts = {name: (tuple(shape), boxes_from(boxes)) for name, (shape, boxes) in sharded.items()}
    return Offer(Key(*key), owner, size, needs_all, parts)


def _describe(share: Share) -> list[Any]:
    """Describe a share with the digests of its unsharded tensors, which tell whether ranks had equal ones."""
    held = {name: one for name, one in share.held.items() if name in share.tensors}
    whole = {name: share.tensors[name] for name, one in held.items() if one.layout is None}
    digests = contents(whole, {}, is_copied=False)
    held = {name: one._replace(content=digests.get(name, "")) for name, one in held.items()}
    return [share.owner, share.is_copy, share.stages, share.tree, share.random, held, share.boxes]


def _choose_holders(ranks: Sequence[Sequence[Any]]) -> list[_Holder]:
    """Choose who gives the share of each rank that took the snapshot: itself, or the neighbour. Pure."""
    found: dict[int, tuple[bool, _Holder]] = {}
    for rank, shares in enumerate(ranks):
        for owner, is_copy, stages, tree, random, held, boxes in shares:
            described = parse_held(held), parse_boxes(boxes)
            holder = _Holder(rank, owner, tuple(stages), tree, random, *described)
            if owner not in found or (found[owner][0] and not is_copy):
                found[owner] = (is_copy, holder)
    return [found[owner][1] for owner in sorted(found)]


def _manifest(
    ctx: Context, state: Any, key: Key, holders: Sequence[_Holder]
) -> tuple[Manifest, Mapping[str, str]]:
    """Return the manifest of the snapshot, where ranks are numbers of ``holders``.

    Returns:
        The manifest; and the name of each tensor on those that hold it, by stored name.
    """
    groups = [Group((number,), holder.held, [holder.boxes]) for number, holder in enumerate(holders)]
    versions, names_of = find_holders(groups)
    trees = [renamed(holder.tree, names) for holder, names in zip(holders, names_of, strict=True)]
    groups = sorted({holder.stages for holder in holders})
    if len(groups[0]) > 1:
        found = collect_state(ctx, state, "run_elastic")
        places = {holder.owner: number for number, holder in enumerate(holders)}
        numbers = [[places[owner] for owner in group] for group in groups]
        trees = join_stages(trees, numbers, found.staged, found.order)
    turns = itertools.count()
    tensors: dict[str, StoredTensor] = {}
    for stored, (_, tensor, holders_of) in versions.items():
        parts = tuple(
            Part(_nearest(having, holders, ctx.rank, next(turns)), *(box or all_of(tensor.shape)))
            for box, having in holders_of.items()
        )
        tensors[stored] = StoredTensor(tensor.dtype, tensor.shape, parts)
    randoms = [renamed(holder.random, names) for holder, names in zip(holders, names_of, strict=True)]
    manifest = Manifest(
        tree=join_documents(trees),
        tensors=tensors,
        files={},
        random=join_documents(randoms),
        step=key.step,
        world_size=len(holders),
    )
    return manifest, {stored: version.name for stored, version in versions.items()}


def _nearest(numbers: Sequence[int], holders: Sequence[_Holder], rank: int, turn: int) -> int:
    """Choose from whom to get a part: from this rank itself, otherwise from its holders in turn."""
    own = [number for number in numbers if holders[number].rank == rank]
    return own[0] if own else numbers[turn % len(numbers)]


# --- fetching from other ranks ---------------------------------------------------------------------


class _Request(NamedTuple):
    """A part of a tensor that one rank asks another for."""

    number: int  # of the holder
    name: str  # of the tensor, on that rank
    offset: tuple[int, ...] | None  # of the part in what that rank holds; None for all of it
    shape: tuple[int, ...] | None


def _fetch(
    ctx: Context,
    phases: CollectivePhases,
    overlaps: Mapping[str, Sequence[Overlap]],
    plain: Mapping[str, str],
    holders: Sequence[_Holder],
    mine: Mapping[int, Mapping[str, torch.Tensor]],
) -> dict[str, list[torch.Tensor]]:
    """Return each part of each tensor in new memory; from this rank itself, or sent by its holder."""
    parts: dict[str, list[torch.Tensor]] = {}
    asked: list[list[_Request]] = [[] for _ in range(ctx.num_processes)]
    incoming: list[list[torch.Tensor]] = [[] for _ in range(ctx.num_processes)]
    for name, laps in overlaps.items():
        parts[name] = []
        for lap in laps:
            request = _Request(lap.part.rank, plain[name], lap.offset, lap.shape)
            holder = holders[request.number]
            if holder.rank == ctx.rank:
                part = contiguous_copy(_part(mine, request))
            else:
                dtype = dtype_from_name(holder.held[request.name].dtype)
                part = torch.empty(lap.shape or lap.part.shape, dtype=dtype, device="cpu")
                asked[holder.rank].append(request)
                incoming[holder.rank].append(part)
            parts[name].append(part)
    ranks = [json.loads(text) for text in phases.gather("requests", json.dumps(asked))]
    if any(of for one in ranks for of in one):
        for distance in range(1, ctx.num_processes):
            to, source = ((ctx.rank + one) % ctx.num_processes for one in (distance, -distance))
            served = [_bytes_of(contiguous_copy(_part(mine, _Request(*one)))) for one in ranks[to][ctx.rank]]
            outgoing = torch.cat([torch.empty(0, dtype=torch.uint8), *served])
            received = [_bytes_of(part) for part in incoming[source]]
            buffer = torch.empty(sum(one.numel() for one in received), dtype=torch.uint8, device="cpu")
            ctx.collectives.permute(outgoing, buffer, to, source)
            place = 0
            for part in received:
                part.copy_(buffer[place : place + part.numel()])
                place += part.numel()
    return parts


def _part(mine: Mapping[int, Mapping[str, torch.Tensor]], request: _Request) -> torch.Tensor:
    tensor = mine[request.number][request.name]
    if request.offset is None or request.shape is None:
        return tensor
    bounds = zip(request.offset, request.shape, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in bounds)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
