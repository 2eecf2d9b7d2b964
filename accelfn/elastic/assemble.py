"""Put the newest whole snapshot together from what the ranks of a new world hold, and restore it.

Those that hold the same tensors form a group, as in a save. So what a rank is told and plans grows with the
tensors, and with ranks times layouts, but not with ranks times tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch

from accelfn.checkpoint.background import CollectivePhases, paused_collection
from accelfn.checkpoint.by_rank import join_documents, renamed
from accelfn.checkpoint.collect import collect_state, contents, parse_boxes, parse_held
from accelfn.checkpoint.document.nodes import stored_names
from accelfn.checkpoint.groups import digest_of, exchange_documents, group_equal, rename_trees
from accelfn.checkpoint.manifest import Json, Manifest, Part, StoredTensor
from accelfn.checkpoint.overlaps import Known, Overlap, find_overlaps, memory_for, part_of
from accelfn.checkpoint.plan import Boxes, Group, Held, Version, all_of, find_holders
from accelfn.checkpoint.restore import Read, ReadPlan, Request, begin_load, plan_read, restore
from accelfn.checkpoint.stages import join_stages
from accelfn.comm import catch
from accelfn.comm.agreement import as_bytes, as_tensor
from accelfn.context import Context
from accelfn.elastic.memory import Key, Memory, Share
from accelfn.weights.dtypes import contiguous_copy, copyable, dtype_from_name

T = TypeVar("T")

# A rank gets what many others hold from so many of them: all ranks take part in each exchange.
_MOST_SOURCES = 8


class Offer(NamedTuple):
    """What a rank holds of a snapshot, in short.

    Attributes:
        key: Of the snapshot.
        owner: As of :class:`~accelfn.elastic.memory.Share`.
        size: Number of ranks of the world that took it.
        is_copy: As of ``Share``.
        needs_all: As of ``Share``.
        held: A digest of the tensors that it held, or held parts of.
        boxes: Which parts, by layout.
    """

    key: Key
    owner: int
    size: int
    is_copy: bool
    needs_all: bool
    held: str
    boxes: Boxes


class _Summary(NamedTuple):
    """What all ranks must know of a share.

    Attributes:
        held: A digest of its tensors, but for those of the random states, with their values.
        tree: A digest of it.
        stages: As of ``Share``.
        random: As of ``Share``.
        random_held: Tensors of the random states.
    """

    held: str
    tree: str
    stages: tuple[int, ...]
    random: Json
    random_held: Mapping[str, Held]


class _Snapshot(NamedTuple):
    """A snapshot that is whole. The ranks that took it have numbers, in their order.

    Attributes:
        key: Of it.
        ranks: By number, the rank of the new world that has the share.
        owners: By number, the rank that took it.
        summaries: By number.
        groups: Those that hold the same tensors, by number.
        trees: By number; equal ones are one object.
        shares: Those that are here, by number.
    """

    key: Key
    ranks: Sequence[int]
    owners: Sequence[int]
    summaries: Sequence[_Summary]
    groups: Sequence[Group]
    trees: Sequence[Json]
    shares: Mapping[int, Share]


class _Plan(NamedTuple):
    """What this rank needs of a snapshot.

    Attributes:
        manifest: Of the snapshot; its ranks are numbers.
        plain: The name of each tensor on those that hold it, by stored name.
        read: The part that is needed.
        overlaps: The parts of each tensor.
    """

    manifest: Manifest
    plain: Mapping[str, str]
    read: ReadPlan
    overlaps: Mapping[str, Sequence[Overlap]]


def choose_snapshot(offers: Iterable[Offer], held: Mapping[str, Mapping[str, Held]]) -> Key | None:
    """Return the newest snapshot that is whole: with all parts of each sharded tensor. Pure.

    Args:
        offers: Of all ranks.
        held: The tensors, by digest.

    >>> from accelfn.checkpoint.plan import Box
    >>> def half(owner, step):
    ...     return Offer(Key(step, 0), owner, 2, False, False, "digest", ((Box((2 * owner,), (2,)),),))
    >>> held = {"digest": {"w": Held("float32", (4,), 4, layout=0)}}
    >>> choose_snapshot([half(0, 10), half(1, 10), half(0, 20)], held)
    Key(step=10, generation=0)
    """
    by_key: dict[Key, list[Offer]] = {}
    for offer in offers:
        by_key.setdefault(offer.key, []).append(offer)
    return next((key for key in sorted(by_key, reverse=True) if _is_whole(by_key[key], held)), None)


def _is_whole(offers: Sequence[Offer], held: Mapping[str, Mapping[str, Held]]) -> bool:
    if offers[0].needs_all and len({offer.owner for offer in offers}) < offers[0].size:
        return False
    alike: dict[str, list[Offer]] = {}
    for offer in offers:
        alike.setdefault(offer.held, []).append(offer)
    shapes: dict[str, tuple[int, ...]] = {}
    layouts: dict[str, list[tuple[str, int]]] = {}
    for digest in alike:
        for name, one in held[digest].items():
            if one.layout is not None:
                shapes[name] = one.shape
                layouts.setdefault(name, []).append((digest, one.layout))
    # Many tensors have the same layouts.
    for of, shape in {(tuple(layouts[name]), shape) for name, shape in shapes.items()}:
        boxes = {box for digest, layout in of for offer in alike[digest] for box in offer.boxes[layout]}
        if sum(math.prod(box.shape) for box in boxes) != math.prod(shape):
            return False
    return True


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
    snapshot = _find_snapshot(phases, memory.shares())
    if snapshot is None:
        return None
    request = begin_load(ctx, phases, ".", state, strict=True, partial=False)
    with paused_collection():
        plan, error = catch(lambda: _plan(ctx, state, request, snapshot))
        phases.gather("plan", "", error)
        assert plan is not None
        parts = _fetch(phases, snapshot, plan)
        tensors: dict[str, torch.Tensor] = {}
        for name, laps in plan.overlaps.items():
            tensors[name] = memory_for(plan.manifest.tensors[name], plan.read.wanted[name])
            for lap, part in zip(laps, parts.pop(name), strict=True):
                copyable(part_of(tensors[name], lap)).copy_(copyable(part))
    read = Read(plan.manifest, plan.read, tensors, read_in_place=_nothing_is_left)
    value, _ = restore(ctx, phases, state, request, read, random_state=True)
    memory.go_on_from(snapshot.key)
    return value


def _nothing_is_left(tensors: Mapping[str, torch.Tensor]) -> None:
    """Read in place what wasn't fetched: nothing."""


# --- what the ranks hold ---------------------------------------------------------------------------


@paused_collection()
def _find_snapshot(phases: CollectivePhases, own: Sequence[Share]) -> _Snapshot | None:
    """Return what the ranks hold of the newest snapshot that is whole; None if there is none."""
    offers = [_offer(share) for share in own]
    texts = phases.gather("offers", json.dumps(offers))
    by_rank = [[_parse_offer(one) for one in json.loads(text)] for text in texts]
    documents = {offer.held: share.held for offer, share in zip(offers, own, strict=True)}
    found = exchange_documents(phases, "held", [[one.held for one in some] for some in by_rank], documents)
    held = {digest: parse_held(one) for digest, one in found.items()}
    key = choose_snapshot(chain.from_iterable(by_rank), held)
    if key is None:
        return None
    places = _choose_shares(by_rank, key)
    shares = {number: own[place] for number, (rank, place) in enumerate(places) if rank == phases.ctx.rank}
    described, error = catch(lambda: [_describe(share) for share in shares.values()])
    described = described or []
    texts = phases.gather("shares", json.dumps([one for one, _ in described]), error)
    summaries = [[_parse_summary(one) for one in json.loads(text)] for text in texts]
    documents = {one.held: held for one, held in described}
    found = exchange_documents(
        phases, "details", [[one.held for one in some] for some in summaries], documents
    )
    documents = {one.tree: share.tree for (one, _), share in zip(described, shares.values(), strict=True)}
    trees = exchange_documents(phases, "tree", [[one.tree for one in some] for some in summaries], documents)
    left = [iter(some) for some in summaries]
    in_order = [next(left[rank]) for rank, _ in places]
    offered = [by_rank[rank][place] for rank, place in places]
    return _Snapshot(
        key=key,
        ranks=[rank for rank, _ in places],
        owners=[one.owner for one in offered],
        summaries=in_order,
        groups=group_equal(
            [one.held for one in in_order],
            {digest: parse_held(one) for digest, one in found.items()},
            [one.boxes for one in offered],
        ),
        trees=[trees[one.tree] for one in in_order],
        shares=shares,
    )


def _offer(share: Share) -> Offer:
    digest = digest_of(share.held)
    return Offer(share.key, share.owner, share.size, share.is_copy, share.needs_all, digest, share.boxes)


def _parse_offer(lists: Sequence[Any]) -> Offer:
    key, owner, size, is_copy, needs_all, held, boxes = lists
    return Offer(Key(*key), owner, size, is_copy, needs_all, held, parse_boxes(boxes))


def _choose_shares(ranks: Sequence[Sequence[Offer]], key: Key) -> list[tuple[int, int]]:
    """Choose who gives the share of each rank that took the snapshot: itself, or the neighbour. Pure.

    Returns:
        For each of these ranks, in order: the rank of the new world, and the place among its offers.
    """
    found: dict[int, tuple[bool, int, int]] = {}
    for rank, offers in enumerate(ranks):
        for place, offer in enumerate(offers):
            if offer.key == key:
                this = (offer.is_copy, rank, place)
                found[offer.owner] = min(found.get(offer.owner, this), this)
    return [found[owner][1:] for owner in sorted(found)]


def _describe(share: Share) -> tuple[_Summary, dict[str, Held]]:
    """Describe a share, with digests of its unsharded tensors, which tell whether ranks had equal ones."""
    whole = {name: share.tensors[name] for name, one in share.held.items() if one.layout is None}
    digests = contents(whole, {}, is_copied=False)
    held = {name: one._replace(content=digests.get(name, "")) for name, one in share.held.items()}
    randoms = {name: held.pop(name) for name in dict.fromkeys(stored_names(share.random))}
    return _Summary(digest_of(held), digest_of(share.tree), share.stages, share.random, randoms), held


def _parse_summary(lists: Sequence[Any]) -> _Summary:
    held, tree, stages, random, random_held = lists
    return _Summary(held, tree, tuple(stages), random, parse_held(random_held))


# --- what this rank needs --------------------------------------------------------------------------


def _plan(ctx: Context, state: Any, request: Request, snapshot: _Snapshot) -> _Plan:
    """Plan which parts this rank gets from which share."""
    groups, summaries = snapshot.groups, snapshot.summaries
    randoms = [Group((number,), one.random_held, ((),)) for number, one in enumerate(summaries)]
    versions, names = find_holders([*groups, *randoms])
    trees = rename_trees(groups, names[: len(groups)], snapshot.trees)
    pipelines = sorted({one.stages for one in summaries})
    if len(pipelines[0]) > 1:
        found = collect_state(ctx, state, "run_elastic")
        places = {owner: number for number, owner in enumerate(snapshot.owners)}
        numbers = [[places[owner] for owner in group] for group in pipelines]
        trees = join_stages(trees, numbers, found.staged, found.order)
    random_names = zip(summaries, names[len(groups) :], strict=True)
    manifest = Manifest(
        tree=join_documents(trees),
        tensors=_parts_of(versions, snapshot.shares, ctx.rank),
        files={},
        random=join_documents([renamed(one.random, names_of) for one, names_of in random_names]),
        step=snapshot.key.step,
        world_size=len(summaries),
    )
    read = plan_read(ctx, state, request, manifest, f"the snapshot of step {snapshot.key.step}")
    known: Known = {}
    overlaps = {name: find_overlaps(manifest.tensors[name], one, known) for name, one in read.wanted.items()}
    return _Plan(manifest, {stored: one.name for stored, one in versions.items()}, read, overlaps)


def _parts_of(
    versions: Mapping[str, Version], here: Mapping[int, Share], rank: int
) -> dict[str, StoredTensor]:
    """Choose from which share this rank gets each part of each tensor, by stored name."""
    known: dict[int, list[tuple[Part, ...]]] = {}  # by layout, which many tensors share
    tensors: dict[str, StoredTensor] = {}
    for turn, (stored, (_, tensor, holders)) in enumerate(versions.items()):
        parts = known.get(id(holders))
        if parts is None:
            sources = [
                (box or all_of(tensor.shape), _sources(some, here, rank)) for box, some in holders.items()
            ]
            count = max((len(some) for _, some in sources), default=1)
            parts = known[id(holders)] = [
                tuple(Part(some[number % len(some)], *box) for box, some in sources)
                for number in range(count)
            ]
        tensors[stored] = StoredTensor(tensor.dtype, tensor.shape, parts[turn % len(parts)])
    return tensors


def _sources(numbers: Sequence[int], here: Mapping[int, Share], rank: int) -> list[int]:
    """Choose from whom to get tensors, in turn: from this rank itself, otherwise from some that hold them."""
    own = [number for number in here if number in numbers]
    count = min(len(numbers), _MOST_SOURCES)
    return own[:1] or [numbers[(rank + turn) % len(numbers)] for turn in range(count)]


# --- fetching from other ranks ---------------------------------------------------------------------


class _Request(NamedTuple):
    """A part of a tensor that one rank asks another for."""

    number: int  # of the share
    name: str  # of the tensor, on that rank
    offset: tuple[int, ...] | None  # of the part in what that rank holds; None for all of it
    shape: tuple[int, ...] | None


def _fetch(phases: CollectivePhases, snapshot: _Snapshot, plan: _Plan) -> dict[str, list[torch.Tensor]]:
    """Return each part of each tensor in new memory; from this rank itself, or sent by another."""
    ctx, size, permute = phases.ctx, phases.ctx.num_processes, phases.ctx.collectives.permute
    parts: dict[str, list[torch.Tensor]] = {}
    asked: dict[int, list[_Request]] = {}
    incoming: dict[int, list[torch.Tensor]] = {}
    for name, laps in plan.overlaps.items():
        parts[name] = []
        for lap in laps:
            request = _Request(lap.part.rank, plan.plain[name], lap.offset, lap.shape)
            rank = snapshot.ranks[request.number]
            if rank == ctx.rank:
                part = contiguous_copy(_part(snapshot.shares, request))
            else:
                dtype = dtype_from_name(plan.manifest.tensors[name].dtype)
                part = torch.empty(lap.shape or lap.part.shape, dtype=dtype, device="cpu")
                asked.setdefault(rank, []).append(request)
                incoming.setdefault(rank, []).append(part)
            parts[name].append(part)
    requests = {rank: as_tensor(json.dumps(some).encode()) for rank, some in asked.items()}
    sizes = [(rank, one.numel()) for rank, one in requests.items()]
    by_rank: list[dict[int, int]] = [
        dict(json.loads(text)) for text in phases.gather("requests", json.dumps(sizes))
    ]
    # All ranks take part in an exchange, so there are only those in which any of them gets something.
    for distance in sorted({(rank - other) % size for rank, some in enumerate(by_rank) for other in some}):
        to, source = ((ctx.rank + one) % size for one in (distance, -distance))
        request = torch.empty(by_rank[to].get(ctx.rank, 0), dtype=torch.uint8, device="cpu")
        permute(requests.get(source, request[:0]), request, source, to)
        wanted = [_Request(*one) for one in json.loads(as_bytes(request) or b"[]")]
        served = [_bytes_of(contiguous_copy(_part(snapshot.shares, one))) for one in wanted]
        received = [_bytes_of(part) for part in incoming.get(source, ())]
        buffer = torch.empty(sum(one.numel() for one in received), dtype=torch.uint8, device="cpu")
        permute(torch.cat([request[:0], *served]), buffer, to, source)
        place = 0
        for part in received:
            part.copy_(buffer[place : place + part.numel()])
            place += part.numel()
    return parts


def _part(shares: Mapping[int, Share], request: _Request) -> torch.Tensor:
    tensor = shares[request.number].tensors[request.name]
    if request.offset is None or request.shape is None:
        return tensor
    bounds = zip(request.offset, request.shape, strict=True)
    return tensor[tuple(slice(start, start + size) for start, size in bounds)]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
