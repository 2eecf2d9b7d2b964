"""The form of a document: which nodes have children, and how a path names them.

A path is a JSON pointer (RFC 6901) without its first slash, such as ``model/0.weight``: the keys and indices
from the root, with ``~`` and ``/`` in a key written as ``~0`` and ``~1``.
"""

from __future__ import annotations

import enum
import functools
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from accelfn.checkpoint.document.keys import read_key
from accelfn.checkpoint.document.plain import PLAIN_KINDS
from accelfn.checkpoint.files.manifest import Json
from accelfn.errors import AccelfnError, DamagedCheckpointError

__all__ = ("LEAVES", "MAX_DEPTH", "Children", "below", "children_of", "damaged", "key_text", "shown", "step")

# Of containers in containers. A document nests up to four times as deep, and json recurses.
MAX_DEPTH = 64

# Kinds whose value is a tensor among the stored ones.
LEAVES = frozenset({"tensor", "array", "raw", "generator"})
# Kinds of one value that isn't a tensor.
_VALUES = PLAIN_KINDS | {"again", "numpy", "set", "frozenset"}
_SEQUENCES = frozenset({"tuple", "deque", "structseq"})
_SAME_PLACE = MappingProxyType({"object": "state", "ordereddict": "items", "defaultdict": "items"})


class Children(NamedTuple):
    """What is inside of a node.

    Attributes:
        keys: By which each is reached; None: it stands at the same place as the node.
        nodes: One for each key.
    """

    keys: list[Any]
    nodes: list[Json]


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
    if isinstance(key, enum.Enum):
        return f"{type(key).__name__}.{key.name}"
    try:
        return str(key)
    except ValueError:  # Python writes no int of thousands of digits
        return type(key).__name__


def damaged(path: str, why: str) -> DamagedCheckpointError:
    """Make the error for a node that is malformed."""
    return DamagedCheckpointError(
        f"The tree of the checkpoint is damaged at {shown(path)!r}: {why}. Take an older checkpoint."
    )


def children_of(node: Json, path: str) -> Children | None:
    """List what is inside of a node; None where it is a leaf or a plain value.

    Raises:
        DamagedCheckpointError: The node is malformed.
    """
    if isinstance(node, list):
        return Children(list(range(len(node))), node)
    if not isinstance(node, dict):
        return None
    kind = node.get("$")
    if kind is None:
        if any(key[:1] == "$" for key in node):
            raise damaged(path, "a key begins with '$'")
        return Children(list(node), list(node.values()))
    if type(kind) is not str:
        raise damaged(path, "a node has no kind")
    if kind in LEAVES or kind in _VALUES:
        return None
    if kind in _SEQUENCES:
        items = _list(node, "items", path)
        return Children(list(range(len(items))), items)
    if kind in _SAME_PLACE:
        return Children([None], [node[_SAME_PLACE[kind]]]) if _SAME_PLACE[kind] in node else Children([], [])
    if kind == "dict":
        keys = [_key(key, path) for key in _list(node, "keys", path)]
        return Children(keys, _same_length(keys, _list(node, "values", path), path))
    if kind in ("namedtuple", "sparse"):
        parts = node.get("fields")
        if not isinstance(parts, dict):
            raise damaged(path, f"a {kind} has no fields")
        fields = cast("dict[str, Any]", parts)
        return Children(list(fields), list(fields.values()))
    if kind == "node":
        items = _list(node, "children", path)
        names = _list(node, "names", path) if "names" in node else list(range(len(items)))
        if not all(type(name) in (str, int) for name in names):
            raise damaged(path, "a name of a child is no text")
        return Children(names, _same_length(names, items, path))
    raise damaged(path, f"there is no kind {kind!r}")


def _key(node: Json, path: str) -> Any:
    try:
        key = read_key(node)
        hash(key)
    except AccelfnError:
        raise
    except Exception as error:  # whatever a constructor says to the content of a file
        raise damaged(path, f"a key can't be read ({error})") from error
    return key


def _list(node: dict[str, Any], field: str, path: str) -> list[Any]:
    items = node.get(field)
    if not isinstance(items, list):
        raise damaged(path, f"a {node['$']} has no {field}")
    return cast("list[Any]", items)


def _same_length(keys: list[Any], nodes: list[Any], path: str) -> list[Any]:
    if len(keys) != len(nodes):
        raise damaged(path, f"{len(keys)} keys for {len(nodes)} values")
    return nodes
