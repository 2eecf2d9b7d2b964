"""One document for several ranks: what all have in common once, and what differs by rank.

Where the ranks' documents differ, the joined one has ``{"$": "by_rank", "values": [...], "of": [...]}``:
rank ``r`` of the world that saved has ``values[of[r]]``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from accelfn.checkpoint.document.nodes import LEAVES
from accelfn.checkpoint.files.manifest import Json
from accelfn.errors import DamagedCheckpointError

__all__ = ("document_of", "join_documents", "renamed")


def join_documents(documents: Sequence[Json]) -> Json:
    """Join the documents of all ranks, in rank order. Pure.

    >>> join_documents([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    {'a': 1, 'b': {'$': 'by_rank', 'values': [2, 3], 'of': [0, 1]}}
    """
    first = documents[0]
    if all(one is first for one in documents):
        return first
    texts = [json.dumps(one) for one in documents]  # so that 1, 1.0 and True aren't equal
    if len(set(texts)) == 1:
        return first
    if all(isinstance(one, dict) for one in documents):
        dicts = cast("Sequence[dict[str, Json]]", documents)
        if len({tuple(one) for one in dicts}) == 1 and len({json.dumps(one.get("$")) for one in dicts}) == 1:
            return {key: join_documents([one[key] for one in dicts]) for key in dicts[0]}
    if all(isinstance(one, list) for one in documents):
        lists = cast("Sequence[list[Json]]", documents)
        if len({len(one) for one in lists}) == 1:
            return [join_documents(places) for places in zip(*lists, strict=True)]
    distinct = list(dict.fromkeys(texts))
    return {
        "$": "by_rank",
        "values": [documents[texts.index(text)] for text in distinct],
        "of": [distinct.index(text) for text in texts],
    }


def document_of(document: Json, rank: int) -> Json:
    """Give a rank's own document. A rank beyond the world that saved takes that of another, in turn. Pure.

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
