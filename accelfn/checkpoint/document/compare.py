"""A stored tree beside the one to load into: what doesn't fit, and which object takes which state.

Where there are tensors or objects, containers, keys, lengths, shapes and dtypes have to be the same on both
sides. Subtrees of plain values are free: they come back as they were stored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch

from accelfn.checkpoint.document.nodes import (
    LEAVES,
    MAX_DEPTH,
    children_of,
    class_of,
    damaged,
    is_array,
    is_leaf,
    is_object,
    parts_of,
    shown,
    spell_class,
    step,
)
from accelfn.checkpoint.header import dtype_name
from accelfn.checkpoint.manifest import Json
from accelfn.errors import Misfit

Node = dict[str, Any]


class Shaped(Protocol):
    """What has a dtype, as torch has it or by its name, and a shape: a tensor, or what a file says of one."""

    @property
    def dtype(self) -> Any:
        """Of the elements."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole."""
        ...


class Stored(NamedTuple):
    """The state of an object in a document, and the object of the same place in the tree to load into."""

    path: str
    thing: Any
    node: Json
    kind: str  # name of the class that was saved


class Match(NamedTuple):
    """Result of :func:`match`.

    Attributes:
        rows: One for each leaf that doesn't fit, in the order of the trees.
        objects: Those of the tree to load into, with their states.
        leaves: What stands in the tree to load into, outside of objects, by the name of the stored tensor.
    """

    rows: list[Misfit]
    objects: list[Stored]
    leaves: dict[str, Any]


def describe(one: Shaped) -> str:
    """Return dtype and shape as errors have them."""
    return f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"


def match(document: Json, tensors: Mapping[str, Shaped], like: Any, *, namespace: str = "") -> Match:
    """Walk a document and the tree to load into side by side. What is in objects is not looked at.

    Args:
        document: Of the stored tree.
        tensors: What it names.
        like: The other tree. Its tensors may be on the meta device.
        namespace: In which classes are registered with optree, besides the global one.

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


# Rows of misfits, and whether there are tensors or objects in the subtree.
_Found = tuple[list[Misfit], bool]


class _Match:
    def __init__(self, tensors: Mapping[str, Shaped], namespace: str) -> None:
        self.objects: list[Stored] = []
        self.leaves: dict[str, Any] = {}
        self._tensors = tensors
        self._namespace = namespace

    def pair(self, node: Json, like: Any, path: str, depth: int) -> _Found:
        if depth > MAX_DEPTH + 2:
            raise damaged(path, "it nests too deep")
        kind = _kind(node, path)
        if kind in LEAVES or is_leaf(like):
            if kind == "tensor" and isinstance(like, torch.Tensor) and self._is_like(node, like):
                return [], True
            stored, wanted = self._say_node(node, path), self._say(like)
            if stored != wanted:
                return [Misfit(shown(path), stored, wanted)], True
            self.leaves.setdefault(cast("Node", node)["name"], like)
            return [], True
        inner = children_of(node, path)
        is_thing = is_object(like, self._namespace)
        if kind == "object" and inner is not None:
            if is_thing:
                of = str(cast("Node", node).get("of")).rpartition(":")[2].rpartition(".")[2]
                self.objects.append(Stored(path[1:], like, inner[0][1], of))
                return [], True
            if like is not None and parts_of(like, self._namespace) is not None:
                return self.pair(inner[0][1], like, path, depth + 1)  # a tree like the object's state
        parts = parts_of(like, self._namespace)
        if inner is None and parts is None and not is_thing:
            return [], False
        if kind == "object" or is_thing or inner is None or parts is None or _head(node) != self._head(like):
            carries = self._only(node, path, True)[1] or self._only(like, path, False)[1]
            row = Misfit(shown(path), self._say_node(node, path), self._say(like))
            return ([row] if carries else []), carries
        here = dict(zip(parts.keys, parts.children, strict=True))
        found = [
            self.pair(child, here.pop(key), step(path, key), depth + 1)
            if key in here
            else self._only(child, step(path, key), True)
            for key, child in inner
        ]
        for key, child in here.items():
            # A namedtuple may have got a field since, which is filled in.
            if child is not None or parts.kind != "namedtuple":
                found.append(self._only(child, step(path, key), False))
        return _joined(found)

    def _is_like(self, node: Json, like: torch.Tensor) -> bool:
        """Compare a tensor without making texts of it, as most do fit."""
        name = cast("Node", node)["name"]
        held = self._tensors.get(name)
        if held is None or tuple(held.shape) != like.shape or dtype_name(like.dtype) != held.dtype:
            return False
        self.leaves.setdefault(name, like)
        return True

    def _only(self, one: Any, path: str, is_stored: bool) -> _Found:
        """List the leaves of a subtree that the other side doesn't have."""
        if is_stored:
            is_end = _kind(one, path) in (*LEAVES, "object")
            inner = [] if is_end else children_of(one, path) or []
        else:
            parts = parts_of(one, self._namespace)
            is_end = parts is None and (is_leaf(one) or is_object(one, self._namespace))
            inner = [] if parts is None else list(zip(parts.keys, parts.children, strict=True))
        rows, carries = _joined([self._only(child, step(path, key), is_stored) for key, child in inner])
        if carries:
            return rows, True
        said = self._say_node(one, path) if is_stored else self._say(one)
        there, here = (said, "nothing") if is_stored else ("nothing", said)
        return [Misfit(shown(path), there, here)], is_end

    def _say_node(self, node: Json, path: str) -> str:
        """Describe a node in a row of an error."""
        if not isinstance(node, dict) or "$" not in node:
            return _say_plain(node)
        kind = node["$"]
        if kind == "tensor" or kind == "array":
            if node["name"] not in self._tensors:
                raise damaged(path, f"there is no tensor {node['name']!r}")
            text = describe(self._tensors[node["name"]])
            return text if kind == "tensor" else f"array {text}"
        children_of(node, path)  # is there such a kind?
        return _named(kind, str(node.get("of", "")))

    def _say(self, like: Any) -> str:
        if is_array(like):
            return f"array {describe(like)}"
        if hasattr(like, "dtype") and is_leaf(like):
            return describe(like)
        if is_leaf(like):
            return "a generator"
        kind, of = self._head(like)
        if kind == "object" or of:
            return _named(kind, of or spell_class(class_of(like)))
        return _say_plain(like) if kind in ("list", "dict", "") else _named(kind, "")

    def _head(self, like: Any) -> tuple[str, str]:
        """Return what the document of a container has to have in common with it, besides its keys."""
        parts = parts_of(like, self._namespace)
        if parts is None:
            return ("object" if is_object(like, self._namespace) else ""), ""
        return parts.kind, spell_class(class_of(like)) if parts.kind in ("namedtuple", "node") else ""


def _kind(node: Json, path: str) -> str | None:
    """Return the kind of a node that has one, and check what of it is relied on."""
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


def _say_plain(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {class_of(cast('object', value)).__name__} of {len(cast('list[Any]', value))}"
    return "None" if value is None else type(value).__name__


def _named(kind: str, of: str) -> str:
    return f"{'an' if kind[:1] in 'aeio' else 'a'} {kind} {of.rpartition(':')[2]}".rstrip()


def _joined(found: Sequence[_Found]) -> _Found:
    carries = any(one for _, one in found)
    return [row for rows, _ in found for row in rows] if carries else [], carries


def choose_part(document: Json, like: Any, may_leave: Callable[[str], bool], path: str = "") -> Json:
    """Leave entries of dicts out of a stored tree that ``like`` hasn't, where that is allowed. Pure.

    Args:
        document: Of one rank.
        like: The tree to load into.
        may_leave: Whether the entry at a path may be left out.
        path: Where the document stands.

    >>> choose_part({"model": 1, "ema": 2}, {"model": None}, lambda path: path == "ema")
    {'model': 1}
    """
    if not isinstance(document, dict) or not isinstance(like, Mapping) or "$" in document:
        return document
    wished = cast("Mapping[Any, Any]", like)
    return {
        key: choose_part(child, wished.get(key), may_leave, step(path, key))
        for key, child in document.items()
        if key in wished or not may_leave(step(path, key)[1:])
    }
