"""Plan which rank writes which tensors, each part once.

Ranks that hold the same tensors in the same layouts form a group, and tensors of one layout are planned
together. So a plan takes as long as there are tensors, and ranks times layouts, not ranks times tensors.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from accelfn.checkpoint.manifest import Part, StoredTensor, leaf_path
from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import CheckpointError, Drift, ReplicaDriftError
from accelfn.tree import Sharded, local_of
from accelfn.tree.digest import digest_tensors


class Box(NamedTuple):
    """A part of a tensor: where it begins, and how large it is, by dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


Boxes: TypeAlias = tuple[tuple[Box, ...], ...]
"""The parts that a rank holds of a tensor, by the number of the tensor's layout."""


class Held(NamedTuple):
    """A tensor of which ranks hold all or parts.

    Attributes:
        dtype: As torch names it.
        shape: Of the complete tensor.
        itemsize: Bytes of an element.
        layout: Number of the layout that says which parts a rank holds; None where each has all of it.
        content: A digest of the values of an unsharded tensor; "" if they aren't compared.
    """

    dtype: str
    shape: tuple[int, ...]
    itemsize: int
    layout: int | None = None
    content: str = ""


class Group(NamedTuple):
    """Ranks that hold the same tensors in the same layouts.

    Attributes:
        ranks: In order.
        held: Their tensors, by name.
        boxes: Which parts each of them holds, in the order of ``ranks``.
    """

    ranks: Sequence[int]
    held: Mapping[str, Held]
    boxes: Sequence[Boxes]


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
        tensors: By stored name, with the ranks that write their parts.
        plain: The name of each on the ranks that have it.
        names: By group: the stored name of each tensor that isn't the plain one.
    """

    tensors: Mapping[str, StoredTensor]
    plain: Mapping[str, str]
    names: Sequence[Mapping[str, str]]

    def written_by(self, rank: int) -> list[tuple[str, Part]]:
        """List the parts that a rank writes: by stored name, in order."""
        known: dict[int, list[Part]] = {}  # by layout, which many tensors share
        found: list[tuple[str, Part]] = []
        for stored, (_, _, parts) in self.tensors.items():
            if len(parts) == 1:
                own = [*parts] if parts[0].rank == rank else []
            else:
                if id(parts) not in known:
                    known[id(parts)] = [part for part in parts if part.rank == rank]
                own = known[id(parts)]
            found += [(stored, part) for part in own]
        return found


def plan_save(num_ranks: int, groups: Sequence[Group]) -> SavePlan:
    """Decide which rank writes which tensors. Pure; the same on every rank.

    A tensor that all ranks hold with equal values is written by one rank. If values differ, each version is
    written, see :func:`find_holders`. A part is written by one of the ranks that hold it. Of whole tensors
    the largest are assigned first, each to the rank that has the least to write so far.

    Args:
        num_ranks: Of the world.
        groups: What ranks hold. A rank may be in several groups, which have different tensors.

    Raises:
        CheckpointError: Ranks hold shards of tensors of different dtypes or shapes, or a shard and all of it.

    >>> one = Held("float32", (2,), 4)
    >>> plan = plan_save(2, [Group((0, 1), {"a": one, "b": one}, ((), ()))])
    >>> {name: tensor.parts[0].rank for name, tensor in plan.tensors.items()}
    {'a': 0, 'b': 1}
    """
    versions, names = find_holders(groups)
    parts = _deal(num_ranks, versions)
    tensors = {
        stored: StoredTensor(versions[stored].tensor.dtype, versions[stored].tensor.shape, parts[stored])
        for stored in sorted(versions)
    }
    return SavePlan(tensors, {stored: one.name for stored, one in versions.items()}, names)


def find_holders(groups: Sequence[Group]) -> tuple[dict[str, Version], list[dict[str, str]]]:
    """List the ranks that hold each tensor, or each part of it. Pure.

    If values of a tensor differ, each version has a name with the lowest rank that has it, and the first one
    the plain name. Tensors of one layout share their mapping of holders.

    Args:
        groups: What ranks hold, in the order of their first ranks.

    Returns:
        The versions of all tensors, by stored name; and by group the stored name of each tensor that isn't
        the plain one.

    Raises:
        CheckpointError: Ranks hold shards of tensors of different dtypes or shapes, or a shard and all of it.
    """
    versions: dict[str, Version] = {}
    names: list[dict[str, str]] = [{} for _ in groups]
    # Only of those groups that have the tensor: each rank's random states are a group too.
    by_name: dict[str, list[tuple[int, Held]]] = {}
    for number, group in enumerate(groups):
        for name, one in group.held.items():
            by_name.setdefault(name, []).append((number, one))
    known: dict[tuple[tuple[int, Held], ...], list[_Found]] = {}
    together: dict[tuple[int, ...], Sequence[int]] = {
        (number,): group.ranks for number, group in enumerate(groups)
    }
    for name, by_group in by_name.items():
        key = tuple(by_group)
        found = known.get(key)
        if found is None:
            found = known[key] = _versions_of(name, dict(key), groups, together)
        for place, (numbers, whole, holders) in enumerate(found):
            lowest = min(groups[number].ranks[0] for number in numbers)
            stored = f"{name}@{lowest}" if place else name
            while place and stored in by_name:
                stored += "'"
            versions[stored] = Version(name, whole, holders)
            for number in numbers if place else ():
                names[number][name] = stored
    return versions, names


_Found: TypeAlias = "tuple[list[int], Held, Mapping[Box | None, Sequence[int]]]"
"""Numbers of the groups that have a version, the tensor, and the holders of its parts."""


def _versions_of(
    name: str,
    by_group: Mapping[int, Held],
    groups: Sequence[Group],
    together: dict[tuple[int, ...], Sequence[int]],
) -> list[_Found]:
    """Return the versions of a tensor, from what groups hold of it, by their numbers."""
    alike: dict[Held, list[int]] = {}
    for number, one in by_group.items():
        alike.setdefault(one._replace(layout=None), []).append(number)
    found: list[_Found] = []
    for whole, numbers in alike.items():
        is_cut = {by_group[number].layout is not None for number in numbers}
        if len(is_cut) > 1 or (found and (True in is_cut or found[0][1].content == "")):
            _refuse(name, groups[numbers[-1]].ranks[0], whole, next(iter(alike)))
        if True not in is_cut:
            key = tuple(numbers)
            if key not in together:
                together[key] = sorted(chain.from_iterable(groups[number].ranks for number in numbers))
            found.append((numbers, whole, {None: together[key]}))
            continue
        holders: dict[Box, list[int]] = {}
        for number in numbers:
            group, layout = groups[number], cast("int", by_group[number].layout)
            for rank, boxes in zip(group.ranks, group.boxes, strict=True):
                for box in boxes[layout]:
                    holders.setdefault(box, []).append(rank)
        found.append((numbers, whole, {box: sorted(holders[box]) for box in sorted(holders)}))
    return found


def _refuse(name: str, rank: int, one: Held, other: Held) -> None:
    raise CheckpointError(
        f"save_state: {leaf_path(name)!r} is {one.dtype} {one.shape} on rank {rank} and {other.dtype} "
        f"{other.shape} on another. A tensor that is sharded over ranks must have one layout on all of them."
    )


def _deal(num_ranks: int, versions: Mapping[str, Version]) -> dict[str, tuple[Part, ...]]:
    """Choose the ranks that write the parts of each tensor."""
    loads = [0] * num_ranks
    found = _deal_shards(versions, loads)
    whole = [stored for stored, one in versions.items() if None in one.holders]
    sizes = {stored: _size(versions[stored].tensor) for stored in whole}
    # For tensors that all ranks hold; may lag behind `loads`.
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for stored in sorted(whole, key=lambda stored: (-sizes[stored], stored)):
        shape, ranks = versions[stored].tensor.shape, versions[stored].holders[None]
        if len(ranks) == num_ranks:
            while heap[0][0] != loads[heap[0][1]]:
                heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
            writer = heap[0][1]
        else:
            writer = min(ranks, key=loads.__getitem__)
        loads[writer] += sizes[stored]
        found[stored] = (Part(writer, (0,) * len(shape), shape),)
    return found


def _size(tensor: Held) -> int:
    return math.prod(tensor.shape) * tensor.itemsize


def _deal_shards(versions: Mapping[str, Version], loads: list[int]) -> dict[str, tuple[Part, ...]]:
    """Choose the ranks that write sharded tensors, and add what they write to ``loads``.

    Where several ranks hold each part, all parts of a tensor are written by the same one of these, the first,
    the second and so on, in turn: so the tensors of a layout have few lists of parts.
    """
    by_layout: dict[int, list[str]] = {}
    for stored in sorted(versions):
        if None not in versions[stored].holders:
            by_layout.setdefault(id(versions[stored].holders), []).append(stored)
    found: dict[str, tuple[Part, ...]] = {}
    for stored_names in by_layout.values():
        _, tensor, holders = versions[stored_names[0]]
        count = max(map(len, holders.values()), default=1)
        for turn in range(count):
            names = stored_names[turn::count]
            parts = tuple(Part(ranks[turn % len(ranks)], *cast("Box", box)) for box, ranks in holders.items())
            for rank, _, shape in parts:
                loads[rank] += math.prod(shape) * tensor.itemsize * len(names)
            found.update(dict.fromkeys(names, parts))
    return found


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
    """Return whether several ranks may hold the same part of a tensor: it is replicated along a mesh dim."""
    if isinstance(tensor, Sharded):
        return True  # it doesn't know over which ranks it is split
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
