"""Parts of a stored tree, by path. Pure: nothing but the document is looked at."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, cast

from accelfn.checkpoint.document.nodes import children_of, step
from accelfn.checkpoint.files.manifest import Json

__all__ = ("Part", "find_part", "split_parts", "with_shared")


class Part(NamedTuple):
    """A part of a stored tree.

    Attributes:
        path: Keys with slashes between them; "" is the whole tree.
        node: Its document.
    """

    path: str
    node: Json


def with_shared(document: Json) -> Json:
    """Put what is stored once in all the places that refer to it, so that each part stands by itself.

    >>> with_shared([{"$": "tensor", "name": "a", "id": 0}, {"$": "again", "id": 0}])
    [{'$': 'tensor', 'name': 'a', 'id': 0}, {'$': 'tensor', 'name': 'a', 'id': 0}]
    """
    shared = {node["id"]: node for node in _objects(document) if "id" in node and node.get("$") != "again"}

    def put(node: Json) -> Json:
        if isinstance(node, list):
            return [put(child) for child in node]
        if not isinstance(node, dict):
            return node
        if node.get("$") == "again" and node.get("id") in shared:
            return shared[node["id"]]
        return {key: put(child) for key, child in node.items()}

    return put(document) if shared else document


def _objects(node: Json) -> Iterator[dict[str, Any]]:
    """Walk all JSON objects that are nodes of a kind."""
    if isinstance(node, dict):
        if isinstance(node.get("$"), str):
            yield node
        for child in node.values():
            yield from _objects(child)
    elif isinstance(node, list):
        for child in node:
            yield from _objects(child)


def find_part(document: Json, path: str) -> Part | None:
    """Find what stands at a path; None where nothing does.

    Args:
        document: Of the tree.
        path: Keys and indices with slashes between them. A slash in a key may be written as ``~1`` or stand
            as it is, as in ``optimizer/state/model/0.weight``.

    >>> find_part({"a": {"b/c": [1, 2]}}, "a/b/c/1").node
    2
    """
    found = _find(document, path.strip("/"), "")
    return None if found is None else Part(found.path.strip("/"), found.node)


def _find(node: Json, path: str, at: str) -> Part | None:
    if not path:
        return Part(at, node)
    if isinstance(node, dict) and node.get("$") == "by_rank":
        values = cast("list[Json]", node.get("values"))
        return next((found for one in values if (found := _find(one, path, at)) is not None), None)
    children = children_of(node, at)
    if children is None:
        return None
    for key, child in zip(children.keys, children.nodes, strict=True):
        if key is None:
            found = _find(child, path, at)
            if found is not None:
                return found
            continue
        place = step(at, key)
        for text in (step("", key)[1:], str(key)):
            if path == text or path.startswith(f"{text}/"):
                found = _find(child, path[len(text) + 1 :], place)
                if found is not None:
                    return found
    return None


def split_parts(document: Json, wanted: Collection[str], without: Collection[str]) -> list[Part]:
    """Cut a tree into the parts that are asked for, and what is left beside them, in the tree's order.

    Args:
        document: Of the tree.
        wanted: Paths, none of them within another.
        without: Paths of what is dropped.

    Returns:
        The parts. What nobody asked for is there by the shortest paths that hold no part.

    >>> [part.path for part in split_parts({"a": {"b": 1, "c": 2}, "d": 3, "e": 4}, ["a/b"], ["e"])]
    ['a/b', 'a/c', 'd']
    """
    return list(_split(document, "", frozenset(wanted), frozenset(without)))


def _split(node: Json, path: str, wanted: frozenset[str], without: frozenset[str]) -> Iterator[Part]:
    if path in without:
        return
    inner = [one for one in (*wanted, *without) if one.startswith(f"{path}/" if path else "")]
    children = children_of(node, f"/{path}") if path not in wanted and (inner or not path) else None
    if children is None:
        yield Part(path, node)
        return
    for key, child in zip(children.keys, children.nodes, strict=True):
        place = path if key is None else f"{path}/{key}".lstrip("/")
        yield from _split(child, place, wanted, without)
