"""A part of a stored tree: what of it a program asks for, without the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from accelfn.checkpoint.document.nodes import damaged, step
from accelfn.checkpoint.files.manifest import Json

__all__ = ("choose_part", "may_leave_out")


def may_leave_out(partial: bool | Sequence[str], operation: str = "load_state") -> Callable[[str], bool]:
    """Read the option ``partial`` of ``load_state``: return whether a path needn't be asked for.

    Raises:
        TypeError: It is neither a bool nor a sequence of texts.

    >>> may_leave_out(["ema", "models/critic"])("models/critic")
    True
    """
    if isinstance(partial, bool):
        return lambda path: partial
    if isinstance(partial, str) or not all(isinstance(cast("object", one), str) for one in partial):
        raise TypeError(f"{operation}: partial must be a bool or a list of paths, got {partial!r}.")
    return frozenset(partial).__contains__


def choose_part(document: Json, like: Any, may_leave: Callable[[str], bool]) -> Json:
    """Leave out of a stored tree what ``like`` hasn't, where that is allowed. Pure.

    Only entries of dicts are left out. What was shared with one of them stands by itself then.

    Args:
        document: Of one rank.
        like: The tree to load into.
        may_leave: Whether the entry at a path may be left out.

    >>> choose_part({"model": 1, "ema": 2}, {"model": None}, lambda path: path == "ema")
    {'model': 1}
    """
    chosen = _choose(document, like, may_leave, "")
    if chosen == document:
        return document
    definitions = {node["id"]: node for node in _nodes(document) if _defines(node)}
    return _with_definitions(chosen, definitions, set())


def _choose(node: Json, like: Any, may_leave: Callable[[str], bool], path: str) -> Json:
    if not isinstance(node, dict) or not isinstance(like, Mapping) or "$" in node:
        return node
    wished = cast("Mapping[Any, Any]", like)
    kept: dict[str, Json] = {}
    for key, child in node.items():
        place = step(path, key)
        if key in wished:
            kept[key] = _choose(child, wished[key], may_leave, place)
        elif not may_leave(place[1:]):
            kept[key] = child
    return kept


def _nodes(document: Json) -> Iterator[dict[str, Any]]:
    """Return all nodes of a kind, each before what is in it."""
    inner: Sequence[Json] = ()
    if isinstance(document, dict):
        if "$" in document:
            yield document
        inner = list(document.values())
    elif isinstance(document, list):
        inner = document
    for one in inner:
        yield from _nodes(one)


def _defines(node: Mapping[str, Any]) -> bool:
    return type(node.get("id")) is int and node.get("$") != "again"


def _with_definitions(node: Json, definitions: Mapping[int, dict[str, Any]], known: set[int]) -> Json:
    """Put what is shared where it is referred to first."""
    if isinstance(node, list):
        return [_with_definitions(one, definitions, known) for one in node]
    if not isinstance(node, dict):
        return node
    number = node.get("id") if "$" in node else None
    if type(number) is int:
        if node.get("$") == "again" and number not in known:
            if number not in definitions:
                raise damaged("", "it refers to nothing")
            node = definitions[number]
        known.add(number)
    return {key: _with_definitions(one, definitions, known) for key, one in node.items()}
