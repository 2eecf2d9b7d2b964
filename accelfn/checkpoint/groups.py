"""Group ranks that hold the same, and tell all ranks what each group holds: what is equal is sent once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from accelfn.checkpoint.background import CollectivePhases
from accelfn.checkpoint.by_rank import changed, differences, renamed
from accelfn.checkpoint.manifest import Json
from accelfn.checkpoint.plan import Boxes, Group, Held


def digest_of(document: Any) -> str:
    """Return a digest of what can be written as JSON. Pure."""
    return hashlib.sha256(json.dumps(document).encode()).hexdigest()[:32]


def exchange_documents(
    phases: CollectivePhases, phase: str, digests: Sequence[Sequence[str]], own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the documents of all ranks, by digest; those of other ranks share their equal parts.

    The first rank that has a document sends it. All but the first are sent as what differs from that one,
    such as a number of a rank's own. Nothing is sent if every rank has all of them.

    Ranks: every rank of ``phases``.

    Args:
        phases: Of the operation.
        phase: Name of this one.
        digests: By rank, of the documents that it has.
        own: The documents of this rank, by digest.
    """
    senders: dict[str, int] = {}
    for rank, some in enumerate(digests):
        for digest in some:
            senders.setdefault(digest, rank)
    if all(senders.keys() == {*some} for some in digests):
        return {**own}
    rank = phases.ctx.rank
    first, sender = next(iter(senders.items()))
    base = json.loads(phases.gather(phase, json.dumps(own[first]) if rank == sender else "")[sender])
    others = [digest for digest, one in senders.items() if one == rank and digest != first]
    mine = {digest: differences(base, json.loads(json.dumps(own[digest]))) for digest in others}
    texts = phases.gather(f"{phase} differences", json.dumps(mine) if mine else "")
    found = {digest: changed(base, one) for text in texts if text for digest, one in json.loads(text).items()}
    return {first: base, **found}


def group_equal(
    digests: Sequence[str], held: Mapping[str, Mapping[str, Held]], boxes: Sequence[Boxes]
) -> list[Group]:
    """Return the groups of those that hold the same tensors, in the order of their first members. Pure.

    Args:
        digests: Of what each holds.
        held: The tensors, by digest.
        boxes: Which parts each holds, by layout.
    """
    members: dict[str, list[int]] = {}
    for number, digest in enumerate(digests):
        members.setdefault(digest, []).append(number)
    return [Group(some, held[digest], [boxes[number] for number in some]) for digest, some in members.items()]


def rename_trees(
    groups: Sequence[Group], names: Sequence[Mapping[str, str]], trees: Sequence[Json]
) -> list[Json]:
    """Return the trees of all ranks with the stored names of their tensors. Pure.

    Args:
        groups: Of all ranks.
        names: By group, as of :func:`accelfn.checkpoint.plan.find_holders`.
        trees: By rank; ranks may share one, and those of a group share what becomes of it.
    """
    found = [*trees]
    for group, names_of in zip(groups, names, strict=True):
        known = {id(trees[rank]): trees[rank] for rank in group.ranks}
        known = {number: renamed(tree, names_of) for number, tree in known.items()}
        for rank in group.ranks:
            found[rank] = known[id(trees[rank])]
    return found
