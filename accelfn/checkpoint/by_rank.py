"""One document for several ranks: what all have in common once, and what differs by rank.

Where the ranks' documents differ, the joined one has ``{"$": "by_rank", "values": [...], "of": [...]}``:
rank ``r`` of the world that saved has ``values[of[r]]``. Ranks of a mesh that share their data, and differ
along "tp" or "pp" alone, have one place in it (:func:`place_of`); whoever loads takes up what a rank of the
same place has saved, so that those ranks go on alike in any layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

from accelfn.checkpoint.document.nodes import LEAVES
from accelfn.checkpoint.manifest import Json, Manifest
from accelfn.context import Context
from accelfn.errors import DamagedCheckpointError

# Along other axes ranks work on the same rows together, and have to draw the same random numbers for them.
_AXES = ("loss",)


def join_documents(documents: Sequence[Json]) -> Json:
    """Join the documents of all ranks, in rank order. Pure.

    >>> join_documents([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    {'a': 1, 'b': {'$': 'by_rank', 'values': [2, 3], 'of': [0, 1]}}
    """
    first = documents[0]
    if all(one is first for one in documents):
        return first
    if len(set(map(type, documents))) == 1:
        if isinstance(first, dict):
            dicts = cast("Sequence[dict[str, Json]]", documents)
            if len({(*one, one.get("$")) for one in dicts}) == 1:
                return {key: join_documents([one[key] for one in dicts]) for key in first}
        elif isinstance(first, list):
            lists = cast("Sequence[list[Json]]", documents)
            if len(set(map(len, lists))) == 1:
                return [join_documents(places) for places in zip(*lists, strict=True)]
        elif len(set(map(repr, documents))) == 1:  # 0.0 and -0.0 are equal
            return first
    texts = [json.dumps(one) for one in documents]
    distinct = list(dict.fromkeys(texts))
    return {
        "$": "by_rank",
        "values": [documents[texts.index(text)] for text in distinct],
        "of": [distinct.index(text) for text in texts],
    }


def document_of(document: Json, rank: int) -> Json:
    """Return a rank's own document. A rank beyond the world that saved takes that of another, in turn. Pure.

    Raises:
        DamagedCheckpointError: The document is of no form that :func:`join_documents` gives.

    >>> joined = join_documents([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    >>> document_of(joined, 1), document_of(joined, 2)
    ({'a': 1, 'b': 3}, {'a': 1, 'b': 2})
    """
    if isinstance(document, list):
        return [document_of(one, rank) for one in document]
    if not isinstance(document, dict):
        return document
    if document.get("$") != "by_rank":
        return {key: document_of(one, rank) for key, one in document.items()}
    try:
        values, of = document["values"], document["of"]
        number = of[rank % len(of)]
        if type(number) is not int or number < 0:
            raise IndexError(number)
        return values[number]
    except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise DamagedCheckpointError(
            f"The tree has a part by rank of no sound form: {document!r:.200}"
        ) from error


def place_of(ctx: Context) -> int:
    """Return this rank's place among those that have data and random numbers of their own, from 0.

    Ranks: local.

    >>> place_of(Context())
    0
    """
    return ctx.coordinate(*_AXES)


def stored_place(ctx: Context) -> dict[str, int]:
    """Return what a save keeps of this rank's place: nothing where each rank has its own."""
    return {} if ctx.axis_size(*_AXES) == ctx.num_processes else {"place": place_of(ctx)}


class Source(NamedTuple):
    """Whose documents a rank takes up.

    Attributes:
        rank: Of the world that saved.
        is_own: Whether it had this rank's place. Otherwise several ranks take up the same.
    """

    rank: int
    is_own: bool


def find_source(ctx: Context, manifest: Manifest) -> Source:
    """Choose the rank whose documents this one takes up: itself where all ranks have the places of then.

    Otherwise the first one of this rank's place, so that ranks of one place have all from one.

    Ranks: local.

    Raises:
        DamagedCheckpointError: The documents are of no form that a save gives.
    """
    size = manifest.world_size
    places = [_place_in(manifest.random, rank, size) for rank in range(size)]
    place = place_of(ctx)
    count = max(places) + 1
    wanted = place % count
    mesh = ctx.mesh
    now = [rank if mesh is None else mesh.plan.coordinate(rank, *_AXES) for rank in range(ctx.num_processes)]
    if now == places:
        return Source(ctx.rank, is_own=True)
    if wanted not in places:
        raise DamagedCheckpointError(f"No rank has saved for the place {wanted} of {count}.")
    return Source(places.index(wanted), place < count)


def _place_in(random: Json, rank: int, world_size: int) -> int:
    """Return the place of a rank that saved."""
    own = document_of(random, rank)
    place = own.get("place", rank) if isinstance(own, dict) else rank
    if type(place) is not int or not 0 <= place < world_size:
        raise DamagedCheckpointError(f"The place of rank {rank} is malformed: {place!r:.200}")
    return place


def renamed(document: Json, names: Mapping[str, str]) -> Json:
    """Call tensors by other names, where ``names`` has one. Pure."""
    if not names:
        return document
    if isinstance(document, list):
        return [renamed(one, names) for one in document]
    if not isinstance(document, dict):
        return document
    return {key: _name(key, one, document, names) for key, one in document.items()}


def _name(key: str, value: Any, within: Mapping[str, Any], names: Mapping[str, str]) -> Json:
    if key == "name" and within.get("$") in LEAVES and isinstance(value, str):
        return names.get(value, value)
    return renamed(value, names)
