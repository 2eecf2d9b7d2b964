"""The form of trees and of their documents: what is in a container, and how a path names it.

A path is a JSON pointer (RFC 6901) without its first slash, such as ``model/0.weight``: the keys and indices
from the root, with ``~`` and ``/`` in a key written as ``~0`` and ``~1``.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import optree
import torch

from accelfn.checkpoint.document.values import PLAIN_KINDS, class_of, is_plain, read_plain
from accelfn.checkpoint.manifest import Json
from accelfn.errors import AccelfnError, DamagedCheckpointError

# Of containers in containers. A document nests up to four times as deep, and json recurses.
MAX_DEPTH = 64

# Kinds whose value is a tensor among the stored ones.
LEAVES = frozenset({"tensor", "array", "generator"})
KINDS = MappingProxyType(
    {
        list: "list",
        tuple: "tuple",
        deque: "deque",
        dict: "dict",
        OrderedDict: "ordereddict",
        defaultdict: "defaultdict",
        Counter: "counter",
    }
)
_CONTAINERS = frozenset({*KINDS.values(), "namedtuple", "node"} - {"list"})


class Parts(NamedTuple):
    """What is in a container of a tree.

    Attributes:
        kind: As its document has it.
        keys: By which each child is reached.
        children: One for each key.
        metadata: What a class that is registered with optree keeps beside its children.
    """

    kind: str
    keys: Sequence[Any]
    children: Sequence[Any]
    metadata: Any = None


def parts_of(value: Any, namespace: str = "") -> Parts | None:
    """List what is in a container: one of Python, or registered with optree; None for any other value."""
    of = class_of(value)
    kind = KINDS.get(of)
    if kind is not None:
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value)
            return Parts(kind, list(items), list(items.values()))
        return Parts(kind, range(len(value)), value)
    if value is None or isinstance(value, torch.Tensor):
        return None
    if isinstance(value, tuple):
        named = cast("Any", value) if optree.is_namedtuple_class(of) else None
        return None if named is None else Parts("namedtuple", named._fields, named)
    entry = registry_entry(of, namespace)
    if entry is None:
        return None
    children, metadata, *names = entry.flatten_func(value)
    children = list(children)
    keys = list(names[0]) if names and names[0] is not None else range(len(children))
    return Parts("node", keys, children, metadata)


def registry_entry(kind: type, namespace: str) -> Any:
    """Return how optree flattens and unflattens a class registered with it; None for another one."""
    return cast("Any", optree).register_pytree_node.get(kind, namespace=namespace)


def is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of numpy, and of no subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_leaf(value: Any) -> bool:
    """Return whether a value of a tree is stored as a tensor."""
    return isinstance(value, (torch.Tensor, torch.Generator)) or is_array(value)


def is_object(value: Any, namespace: str = "") -> bool:
    """Return whether a value of a tree is stored by its state: no leaf, plain value or container."""
    return not (is_leaf(value) or is_plain(value) or parts_of(value, namespace) is not None)


def leaves_of(tree: Any, path: str = "", namespace: str = "") -> Iterator[tuple[str, Any]]:
    """List the leaves and objects of a tree with their paths."""
    parts = parts_of(tree, namespace)
    if parts is not None:
        for key, child in zip(parts.keys, parts.children, strict=True):
            yield from leaves_of(child, step(path, key), namespace)
    elif not is_plain(tree):
        yield path[1:], tree


def step(path: str, key: Any) -> str:
    """Append a key to a path that begins with a slash. For None the place is the same."""
    if key is None:
        return path
    text = key if type(key) is str else key_text(key)
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()  # a name in a file has no lone surrogates
    if "~" in text or "/" in text:
        text = text.replace("~", "~0").replace("/", "~1")
    return f"{path}/{text}"


def below(path: str, *keys: Any) -> str:
    """Append keys to a path as tensors are named by it: without the first slash; "" for the root.

    >>> below("", "model", "a/b"), below("model", 0)
    ('model/a~1b', 'model/0')
    """
    return functools.reduce(step, keys, f"/{path}" if path else "")[1:]


def shown(path: str) -> str:
    """Return a path as people see it and tensors are named by it: without the first slash."""
    return path[1:] or "tree"


def key_text(key: Any) -> str:
    """Name a key of a dict in paths."""
    return f"{type(key).__name__}.{key.name}" if isinstance(key, enum.Enum) else str(key)


def damaged(path: str, why: str) -> DamagedCheckpointError:
    """Make the error for a node that is malformed."""
    return DamagedCheckpointError(
        f"The tree of the checkpoint is damaged at {shown(path)!r}: {why}. Take an older checkpoint."
    )


def children_of(node: Json, path: str) -> list[tuple[Any, Json]] | None:
    """List what is inside of a node of a document, by key; None where it is a leaf or a plain value.

    What stands at the same place as the node, as the state of an object does, has the key None.

    Raises:
        DamagedCheckpointError: The node is malformed.
    """
    if isinstance(node, list):
        return list(enumerate(node))
    if not isinstance(node, dict):
        return None
    kind = node.get("$")
    if kind is None:
        return list(node.items())
    try:
        if kind in LEAVES or kind in PLAIN_KINDS:
            return None
        if kind == "object":
            return [(None, node["state"])]
        if kind in _CONTAINERS:
            items = node["items"]
            if "keys" not in node:
                return list(enumerate(cast("list[Json]", items)))
            keys = [read_plain(key) for key in node["keys"]]
            if len(set(keys)) != len(items):
                raise ValueError(f"{len(keys)} keys for {len(items)} values")
            return list(zip(keys, items, strict=True))
    except AccelfnError:
        raise
    except Exception as error:  # whatever a constructor says to the content of a file
        raise damaged(path, f"a {kind} can't be read ({error!r})") from error
    raise damaged(path, f"there is no kind {kind!r}")


def stored_names(document: Json) -> Iterator[str]:
    """List the names of the stored tensors that a document has need of; several times if it has."""
    if isinstance(document, list):
        for one in document:
            yield from stored_names(one)
    elif isinstance(document, dict):
        name = document.get("name")
        if isinstance(name, str) and document.get("$") in LEAVES:
            yield name
        else:
            for one in document.values():
                yield from stored_names(one)
