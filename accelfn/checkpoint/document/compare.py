"""Compare a stored tree with the tree to load into, and find the state of each object.

Where there are tensors or objects, containers, keys, lengths, shapes and dtypes must be equal on both sides.
Subtrees of plain values may differ: they are loaded as they were stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch

from accelfn.checkpoint.document.nodes import (
    LEAVES,
    MAX_DEPTH,
    child_path,
    children_of,
    class_of,
    class_path,
    damaged,
    displayed,
    is_array,
    is_leaf,
    is_object,
    parts_of,
)
from accelfn.checkpoint.manifest import Json
from accelfn.errors import Misfit
from accelfn.weights.dtypes import dtype_name

Node = dict[str, Any]


class Shaped(Protocol):
    """A tensor, or the description of one in a file."""

    @property
    def dtype(self) -> Any:
        """Of torch, or the name of one."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Of the complete tensor."""
        ...


class Stored(NamedTuple):
    """The state of an object in a document, and the object at the same path in the tree to load into."""

    path: str
    thing: Any
    node: Json
    kind: str  # name of the class that was saved


class Match(NamedTuple):
    """Result of :func:`match`.

    Attributes:
        rows: One for each leaf that doesn't match, in the order of the trees.
        objects: Objects of the tree to load into, with their states.
        leaves: Leaves of the tree to load into, outside of objects, by the name of the stored tensor.
    """

    rows: list[Misfit]
    objects: list[Stored]
    leaves: dict[str, Any]


def describe(tensor: Shaped) -> str:
    """Return dtype and shape, for errors."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def match(document: Json, tensors: Mapping[str, Shaped], like: Any, *, namespace: str = "") -> Match:
    """Walk a document and the tree to load into side by side, without looking into objects.

    Args:
        document: Of the stored tree.
        tensors: By the names in the document.
        like: The tree to load into. Its tensors may be on the meta device.
        namespace: Of classes registered with optree, besides the global one.

    Raises:
        DamagedCheckpointError: The document is malformed.

    >>> import torch
    >>> match({"w": {"$": "tensor", "name": "w"}}, {"w": torch.zeros(2)}, {"w": torch.zeros(3)}).rows
    [Misfit(path='w', stored='float32 [2]', wanted='float32 [3]')]
    """
    walk = _Match(tensors, namespace)
    try:
        rows, _ = walk.pair(document, like, "", 0)
    except RecursionError as error:
        raise damaged("", "it nests too deep") from error
    return Match(rows, walk.objects, walk.leaves)


# Rows of misfits, and whether the subtree contains tensors or objects.
_Found = tuple[list[Misfit], bool]


class _Match:
    """One walk over a document and a tree."""

    def __init__(self, tensors: Mapping[str, Shaped], namespace: str) -> None:
        self.objects: list[Stored] = []
        self.leaves: dict[str, Any] = {}
        self._tensors = tensors
        self._namespace = namespace

    def pair(self, node: Json, like: Any, path: str, depth: int) -> _Found:
        """Compare a node with the value at the same path."""
        if depth > MAX_DEPTH + 2:
            raise damaged(path, "it nests too deep")
        kind = _kind(node, path)
        if kind in LEAVES or is_leaf(like):
            return self._pair_leaves(node, kind, like, path), True
        children = children_of(node, path)
        is_thing = is_object(like, self._namespace)
        parts = parts_of(like, self._namespace)
        if kind == "object" and children is not None:
            state = children[0][1]
            if is_thing:
                of = str(cast("Node", node).get("of")).rpartition(":")[2].rpartition(".")[2]
                self.objects.append(Stored(path[1:], like, state, of))
                return [], True
            if parts is not None:
                return self.pair(state, like, path, depth + 1)  # a tree like the object's state
        if children is None and parts is None and not is_thing:
            return [], False
        if children is None or parts is None or _head(node) != self._head(like):
            carries = self._one_sided(node, path, True)[1] or self._one_sided(like, path, False)[1]
            row = Misfit(displayed(path), self._describe_node(node, path), self._describe(like))
            return ([row] if carries else []), carries
        remaining = dict(zip(parts.keys, parts.children, strict=True))
        found = [
            self.pair(child, remaining.pop(key), child_path(path, key), depth + 1)
            if key in remaining
            else self._one_sided(child, child_path(path, key), True)
            for key, child in children
        ]
        for key, child in remaining.items():
            # A field that a namedtuple got after the save is filled in.
            if child is not None or parts.kind != "namedtuple":
                found.append(self._one_sided(child, child_path(path, key), False))
        return _joined(found)

    def _pair_leaves(self, node: Json, kind: str | None, like: Any, path: str) -> list[Misfit]:
        # Most tensors match; comparing texts would be slow.
        if kind != "tensor" or not isinstance(like, torch.Tensor) or not self._is_like(node, like):
            stored, wanted = self._describe_node(node, path), self._describe(like)
            if stored != wanted:
                return [Misfit(displayed(path), stored, wanted)]
        self.leaves.setdefault(cast("Node", node)["name"], like)
        return []

    def _is_like(self, node: Json, like: torch.Tensor) -> bool:
        stored = self._tensors.get(cast("Node", node)["name"])
        return (
            stored is not None
            and tuple(stored.shape) == like.shape
            and dtype_name(like.dtype) == stored.dtype
        )

    def _one_sided(self, tree: Any, path: str, is_stored: bool) -> _Found:
        """List the leaves of a subtree that the other side lacks."""
        if is_stored:
            is_end = _kind(tree, path) in (*LEAVES, "object")
            children = [] if is_end else children_of(tree, path) or []
        else:
            parts = parts_of(tree, self._namespace)
            is_end = parts is None and (is_leaf(tree) or is_object(tree, self._namespace))
            children = [] if parts is None else list(zip(parts.keys, parts.children, strict=True))
        rows, carries = _joined(
            [self._one_sided(child, child_path(path, key), is_stored) for key, child in children]
        )
        if carries:
            return rows, True
        text = self._describe_node(tree, path) if is_stored else self._describe(tree)
        stored, wanted = (text, "nothing") if is_stored else ("nothing", text)
        return [Misfit(displayed(path), stored, wanted)], is_end

    def _describe_node(self, node: Json, path: str) -> str:
        if not isinstance(node, dict) or "$" not in node:
            return _describe_plain(node)
        kind = node["$"]
        if kind in ("tensor", "array"):
            if node["name"] not in self._tensors:
                raise damaged(path, f"there is no tensor {node['name']!r}")
            text = describe(self._tensors[node["name"]])
            return text if kind == "tensor" else f"array {text}"
        children_of(node, path)  # checks that the kind exists
        return _with_article(kind, str(node.get("of", "")))

    def _describe(self, like: Any) -> str:
        if is_array(like):
            return f"array {describe(like)}"
        if hasattr(like, "dtype") and is_leaf(like):
            return describe(like)
        if is_leaf(like):
            return "a generator"
        kind, of = self._head(like)
        if kind == "object" or of:
            return _with_article(kind, of or class_path(class_of(like)))
        return _describe_plain(like) if kind in ("list", "dict", "") else _with_article(kind, "")

    def _head(self, like: Any) -> tuple[str, str]:
        """Return what the document of a container must have in common with it, besides the keys."""
        parts = parts_of(like, self._namespace)
        if parts is None:
            return ("object" if is_object(like, self._namespace) else ""), ""
        return parts.kind, class_path(class_of(like)) if parts.kind in ("namedtuple", "node") else ""


def _kind(node: Json, path: str) -> str | None:
    """Return the kind of a node; None for JSON that represents itself."""
    if not isinstance(node, dict) or "$" not in node:
        return None
    kind = node["$"]
    if type(kind) is not str or (kind in LEAVES and type(node.get("name")) is not str):
        raise damaged(path, "a node has no kind or no name")
    return kind


def _head(node: Json) -> tuple[str, str]:
    if not isinstance(node, dict):
        return "list", ""
    return str(node.get("$", "dict")), str(node.get("of", "")) if "$" in node else ""


def _describe_plain(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {class_of(cast('object', value)).__name__} of {len(cast('list[Any]', value))}"
    return "None" if value is None else type(value).__name__


def _with_article(kind: str, of: str) -> str:
    return f"{'an' if kind[:1] in 'aeio' else 'a'} {kind} {of.rpartition(':')[2]}".rstrip()


def _joined(found: Sequence[_Found]) -> _Found:
    carries = any(has_leaves for _, has_leaves in found)
    return [row for rows, _ in found for row in rows] if carries else [], carries


def choose_part(document: Json, like: Any, may_leave: Callable[[str], bool], path: str = "") -> Json:
    """Remove entries of dicts from a document that ``like`` lacks, where that is allowed. Pure.

    Args:
        document: Of one rank.
        like: The tree to load into.
        may_leave: Whether the entry at a path may be removed.
        path: Of the document.

    >>> choose_part({"model": 1, "ema": 2}, {"model": None}, lambda path: path == "ema")
    {'model': 1}
    """
    if not isinstance(document, dict) or not isinstance(like, Mapping) or "$" in document:
        return document
    wanted = cast("Mapping[Any, Any]", like)
    return {
        key: choose_part(child, wanted.get(key), may_leave, child_path(path, key))
        for key, child in document.items()
        if key in wanted or not may_leave(child_path(path, key)[1:])
    }
