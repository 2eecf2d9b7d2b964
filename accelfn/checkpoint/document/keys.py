"""Keys of dicts and members of sets as JSON: plain values, and tuples and sets of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, cast

from accelfn.checkpoint.document.arrays import is_scalar, read_scalar, write_scalar
from accelfn.checkpoint.document.plain import LITERALS, PLAIN_KINDS, Refusal, read_plain, write_plain
from accelfn.checkpoint.files.manifest import Json

__all__ = ("read_key", "write_key", "write_members")

_MAX_DEPTH = 20


def write_key(value: Any, depth: int = 0) -> Json:
    """Write a key of a dict, or a member of a set.

    Raises:
        Refusal: It is of a class that can't be one in a checkpoint.
    """
    if depth > _MAX_DEPTH:
        raise Refusal(f"a key that nests deeper than {_MAX_DEPTH} levels")
    if type(value) is tuple:
        parts = cast("tuple[Any, ...]", value)
        return {"$": "tuple", "items": [write_key(part, depth + 1) for part in parts]}
    if type(value) is frozenset:
        return {"$": "frozenset", "items": write_members(cast("frozenset[Any]", value), depth + 1)}
    written = write_scalar(value) if is_scalar(value) else write_plain(value)
    if written is NotImplemented:
        raise Refusal(
            f"a {type(value).__qualname__} as a key or a member of a set; those can be plain values such as "
            "texts, numbers, enums, and tuples and frozensets of them"
        )
    return written


def write_members(members: Iterable[Any], depth: int = 0) -> list[Json]:
    """Write the members of a set, in an order that is the same in every process.

    Raises:
        Refusal: One is of a class that can't be one in a checkpoint.
    """
    return sorted((write_key(member, depth + 1) for member in members), key=json.dumps)


def read_key(node: Json, depth: int = 0) -> Any:
    """Read what :func:`write_key` wrote.

    Raises:
        Exception: Of any kind, where the node is malformed.
        CheckpointError: It is of a class that the program doesn't have.
    """
    if type(node) in LITERALS:
        return read_plain(node)
    if not isinstance(node, dict) or depth > _MAX_DEPTH:
        raise ValueError("no key")
    kind = node["$"]
    if kind in ("tuple", "frozenset", "set"):
        parts = [read_key(part, depth + 1) for part in node["items"]]
        return tuple(parts) if kind == "tuple" else frozenset(parts) if kind == "frozenset" else set(parts)
    if kind == "numpy":
        return read_scalar(node)
    if kind not in PLAIN_KINDS:
        raise ValueError(f"{kind!r} is no kind of key")
    return read_plain(node)
