"""Join the documents of several ranks: equal parts are stored once, and other parts by rank.

Where the ranks' documents differ, the joined one has ``{"$": "by_rank", "values": [...], "of": [...]}``:
rank ``r`` of the world that saved has ``values[of[r]]``. Ranks that read the same data, because they differ
along "tp" or "pp" alone, have the same place (:func:`place_of`). A rank loads the document of a rank that had
its place, so that ranks of one place continue alike in any layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

from accelfn.checkpoint.document.nodes import LEAVES
from accelfn.checkpoint.manifest import Json, Manifest
from accelfn.context import Context
from accelfn.errors import DamagedCheckpointError

# Ranks that differ along other axes process the same rows, and must draw the same random numbers for them.
_AXES = ("loss",)


def join_documents(documents: Sequence[Json]) -> Json:
    """Join the documents of all ranks, in rank order. Pure.

    >>> join_documents([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    {'a': 1, 'b': {'$': 'by_rank', 'values': [2, 3], 'of': [0, 1]}}
    """
    return _join(documents, range(len(documents)))


def _join(documents: Sequence[Json], numbers: Sequence[int]) -> Json:
    """Join documents, whose number each rank has. Several may be one object."""
    shared = {id(document): document for document in documents}
    first = documents[0]
    if len(shared) == 1:
        return first
    if len(shared) < len(documents):
        places = {key: place for place, key in enumerate(shared)}
        numbers = [places[id(documents[number])] for number in numbers]
        documents = [*shared.values()]
    if len(set(map(type, documents))) == 1:
        if isinstance(first, dict):
            dicts = cast("Sequence[dict[str, Json]]", documents)
            if len({(*node, node.get("$")) for node in dicts}) == 1:
                return {key: _join([node[key] for node in dicts], numbers) for key in first}
        elif isinstance(first, list):
            lists = cast("Sequence[list[Json]]", documents)
            if len(set(map(len, lists))) == 1:
                return [_join(items, numbers) for items in zip(*lists, strict=True)]
        elif len(set(map(repr, documents))) == 1:  # not by ==, because 0.0 == -0.0
            return first
    texts = [json.dumps(document) for document in documents]
    distinct: dict[str, Json] = {}
    for text, document in zip(texts, documents, strict=True):
        distinct.setdefault(text, document)
    places = {text: place for place, text in enumerate(distinct)}
    return {
        "$": "by_rank",
        "values": [*distinct.values()],
        "of": [places[texts[number]] for number in numbers],
    }


Difference: TypeAlias = "tuple[list[str | int], Json]"
"""A place in a document, as keys and indices, and what is there."""


def differences(base: Json, other: Json) -> list[Difference]:
    """Return where a document differs from another one, and how. Pure.

    >>> differences({"a": [1, 2], "b": 3}, {"a": [1, 4], "b": 3})
    [(['a', 1], 4)]
    """
    if type(base) is type(other):
        pairs: list[tuple[str | int, Json, Json]] | None = None
        if isinstance(base, dict) and isinstance(other, dict) and [*base] == [*other]:
            pairs = [(key, base[key], other[key]) for key in base]
        elif isinstance(base, list) and isinstance(other, list) and len(base) == len(other):
            pairs = [(index, *pair) for index, pair in enumerate(zip(base, other, strict=True))]
        if pairs is not None:
            return [([key, *path], node) for key, *pair in pairs for path, node in differences(*pair)]
        if repr(base) == repr(other):  # as of _join
            return []
    return [([], other)]


def changed(base: Json, found: Sequence[Difference]) -> Json:
    """Return the document that differs so; it shares all other parts with ``base``. Pure.

    >>> changed({"a": [1, 2], "b": 3}, [(["a", 1], 4)])
    {'a': [1, 4], 'b': 3}
    """
    for path, node in found:
        base = _put(base, path, node)
    return base


def _put(document: Any, path: Sequence[str | int], node: Json) -> Json:
    if not path:
        return node
    copy = document.copy()
    copy[path[0]] = _put(document[path[0]], path[1:], node)
    return copy


def document_of(document: Json, rank: int) -> Json:
    """Return the document of one rank. Ranks beyond the world that saved take turns with its ranks. Pure.

    Raises:
        DamagedCheckpointError: A ``by_rank`` node is malformed.

    >>> joined = join_documents([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    >>> document_of(joined, 1), document_of(joined, 2)
    ({'a': 1, 'b': 3}, {'a': 1, 'b': 2})
    """
    if isinstance(document, list):
        return [document_of(node, rank) for node in document]
    if not isinstance(document, dict):
        return document
    if document.get("$") != "by_rank":
        return {key: document_of(node, rank) for key, node in document.items()}
    try:
        values, of = document["values"], document["of"]
        number = of[rank % len(of)]
        if type(number) is not int or number < 0:
            raise IndexError(number)
        return values[number]
    except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise DamagedCheckpointError(f"A part by rank of the tree is malformed: {document!r:.200}") from error


def place_of(ctx: Context) -> int:
    """Return this rank's place among those with their own data and random numbers, from 0.

    Ranks: local.

    >>> place_of(Context())
    0
    """
    return ctx.coordinate(*_AXES)


def stored_place(ctx: Context) -> dict[str, int]:
    """Return the entry that stores this rank's place; empty if every rank has its own place."""
    return {} if ctx.axis_size(*_AXES) == ctx.num_processes else {"place": place_of(ctx)}


class Source(NamedTuple):
    """The rank whose documents this rank loads.

    Attributes:
        rank: In the world that saved.
        is_own: Whether that rank had this rank's place. Otherwise several ranks load its documents.
    """

    rank: int
    is_own: bool


def find_source(ctx: Context, manifest: Manifest) -> Source:
    """Choose the rank whose documents this rank loads.

    If all ranks have the places that they had when the checkpoint was saved, a rank loads its own documents.
    Otherwise it loads those of the first rank of its place, the same for all ranks of that place.

    Ranks: local.

    Raises:
        DamagedCheckpointError: The stored places are malformed.
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
        raise DamagedCheckpointError(f"The checkpoint has no documents for place {wanted} of {count}.")
    return Source(places.index(wanted), place < count)


def _place_in(random: Json, rank: int, world_size: int) -> int:
    """Return the stored place of a rank."""
    document = document_of(random, rank)
    place = document.get("place", rank) if isinstance(document, dict) else rank
    if type(place) is not int or not 0 <= place < world_size:
        raise DamagedCheckpointError(f"The place of rank {rank} is malformed: {place!r:.200}")
    return place


def renamed(document: Json, names: Mapping[str, str]) -> Json:
    """Rename tensors in a document; ``names`` maps old names to new ones. Pure."""
    if not names:
        return document
    if isinstance(document, list):
        return [renamed(node, names) for node in document]
    if not isinstance(document, dict):
        return document
    result = {key: renamed(node, names) for key, node in document.items()}
    name = document.get("name")
    if isinstance(name, str) and document.get("$") in LEAVES:
        result["name"] = names.get(name, name)
    return result
