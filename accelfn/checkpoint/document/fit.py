"""Whether a stored tree fits the one to load into, and which leaf each stored tensor is for.

Both are looked at as documents. Where there are tensors or objects, containers, keys, lengths, shapes and
dtypes have to be the same on both sides. Subtrees of plain values are free: they come back
as they were stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

from accelfn.checkpoint.document.encoder import Convert, Encoder
from accelfn.checkpoint.document.nodes import LEAVES, MAX_DEPTH, children_of, damaged, shown, step
from accelfn.checkpoint.files.manifest import Json
from accelfn.errors import Misfit

__all__ = ("Target", "Wanted", "compare", "describe_like", "targets")

Node = dict[str, Any]


class Wanted(NamedTuple):
    """Result of :func:`describe_like`: the form of a tree to load into.

    Attributes:
        document: As of ``encode``, but it doesn't say how tensors are stored, and not what is in objects.
        leaves: Tensors, arrays and generators, by path.
    """

    document: Json
    leaves: dict[str, Any]


class Target(NamedTuple):
    """A tensor of a stored tree, and where it goes.

    Attributes:
        path: Its place in the tree.
        name: Of the stored tensor. Several targets have the same where they share memory.
        leaf: What stands there in the tree to load into: a tensor, DTensor, array or generator; or None.
        whole: Whether the stored tensor is this one; else it is memory that this one is a view of.
    """

    path: str
    name: str
    leaf: Any
    whole: bool


def describe_like(
    like: Any,
    *,
    convert: Convert | None = None,
    namespace: str = "",
    inside: Callable[[str, Any], bool] | None = None,
) -> Wanted:
    """Describe the form of a tree to load into. Its tensors may be on the meta device.

    Args:
        like: The tree.
        convert: As for ``encode``.
        namespace: As for ``encode``.
        inside: Called as ``inside(path, object)``: whether the state of the object is compared too, and not
            only that there is one. None: of no object, since an optimizer that made no step yet has less
            than a stored one.

    Raises:
        TypeError: Something in it can't be stored.
    """
    encoder = Encoder(convert, namespace, inside or _never)
    return Wanted(encoder.document(like), encoder.leaves)


def compare(document: Json, wanted: Wanted) -> tuple[Misfit, ...]:
    """List what of a stored tree doesn't fit the one to load into: missing, extra, of another shape or dtype.

    Args:
        document: Of the stored tree.
        wanted: The form of the other.

    Returns:
        A row for each leaf that doesn't fit, in the order of the trees. None: all fit.

    Raises:
        DamagedCheckpointError: The document is malformed.

    >>> import torch
    >>> from accelfn.checkpoint.document.document import encode
    >>> compare(encode({"w": torch.zeros(2)}).document, describe_like({"w": torch.zeros(3)}))
    (Misfit(path='w', stored='float32 [2]', wanted='float32 [3]'),)
    """
    return tuple(_Comparison(document, wanted.document).rows())


def targets(document: Json, wanted: Wanted | None = None) -> tuple[Target, ...]:
    """List the tensors of a stored tree, and which leaf of the tree to load into each is for.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    leaves = {} if wanted is None else wanted.leaves
    return tuple(
        Target(path[1:], _name(node, path), leaves.get(path[1:]), "offset" not in node)
        for path, node in _leaves(document, "", 0)
    )


def _never(path: str, value: Any) -> bool:
    return False


def _leaves(node: Json, path: str, depth: int) -> Iterator[tuple[str, Node]]:
    if depth > 2 * MAX_DEPTH + 2:
        raise damaged(path, "it nests too deep")
    children = children_of(node, path)
    if children is not None:
        for key, child in zip(*children, strict=True):
            yield from _leaves(child, step(path, key), depth + 1)
    elif isinstance(node, dict) and node["$"] in LEAVES:
        yield path, node


def _name(node: Node, path: str) -> str:
    name = node.get("name")
    if type(name) is not str:
        raise damaged(path, "a tensor has no name")
    return name


class _Comparison:
    """Two documents side by side."""

    def __init__(self, stored: Json, wanted: Json) -> None:
        self._documents = stored, wanted
        self._shared: tuple[dict[Any, Node], dict[Any, Node]] = ({}, {})
        self._carrying: dict[int, bool] = {}
        for side, document in enumerate(self._documents):
            self._carries(document, "", 0, self._shared[side])

    def rows(self) -> Iterator[Misfit]:
        return self._compare(*self._documents, "")

    def _carries(self, node: Json, path: str, depth: int, shared: dict[Any, Node]) -> bool:
        """Find out of all containers whether tensors or objects are in them."""
        if depth > 2 * MAX_DEPTH + 2:
            raise damaged(path, "it nests too deep")
        children = children_of(node, path)
        if children is None:
            found = isinstance(node, dict) and (node["$"] in LEAVES or node["$"] == "again")
        else:
            # A list, since all are to be looked at.
            inner = [
                self._carries(child, step(path, key), depth + 1, shared)
                for key, child in zip(*children, strict=True)
            ]
            found = any(inner) or (isinstance(node, dict) and node.get("$") in ("object", "sparse"))
        if isinstance(node, (dict, list)):
            self._carrying[id(node)] = found
        if isinstance(node, dict) and type(node.get("id")) is int and node.get("$") not in (None, "again"):
            shared[node["id"]] = node
        return found

    def _compare(self, stored: Json, wanted: Json, path: str) -> Iterator[Misfit]:
        one, other = self._resolve(stored, 0, path), self._resolve(wanted, 1, path)
        if not self._carrying.get(id(one)) and not self._carrying.get(id(other)):
            return
        if _kind(other) == "object":
            if _kind(one) != "object":
                yield Misfit(shown(path), _say(one), _say(other))
                return
            if "state" not in cast("Node", other):
                return
        elif _kind(one) == "object" and "state" in cast(
            "Node", one
        ):  # to be loaded into a tree like its state
            yield from self._compare(cast("Node", one)["state"], other, path)
            return
        inner, wished = children_of(one, path), children_of(other, path)
        if inner is None or wished is None or _head(one) != _head(other):
            if inner is not None or wished is not None or _say(one) != _say(other):
                yield Misfit(shown(path), _say(one), _say(other))
            return
        there, here = dict(zip(*inner, strict=True)), dict(zip(*wished, strict=True))
        for key, child in there.items():
            place = step(path, key)
            if key in here:
                yield from self._compare(child, here[key], place)
            else:
                yield from (Misfit(shown(at), what, "nothing") for at, what in self._listed(child, 0, place))
        for key, child in here.items():
            # A namedtuple may have got a field since, which the decoder fills in.
            if key not in there and not (child is None and _kind(other) == "namedtuple"):
                listed = self._listed(child, 1, step(path, key))
                yield from (Misfit(shown(at), "nothing", what) for at, what in listed)

    def _resolve(self, node: Json, side: int, path: str) -> Json:
        if _kind(node) != "again":
            return node
        found = self._shared[side].get(cast("Node", node).get("id"))
        if found is None:
            raise damaged(path, "it refers to nothing")
        return found

    def _listed(self, node: Json, side: int, path: str) -> Iterator[tuple[str, str]]:
        """List the leaves of a subtree that the other side doesn't have."""
        node = self._resolve(node, side, path)
        children = children_of(node, path)
        if children is None or not self._carrying.get(id(node)) or _kind(node) in ("object", "sparse"):
            yield path, _say(node)
            return
        for key, child in zip(*children, strict=True):
            yield from self._listed(child, side, step(path, key))


def _kind(node: Json) -> Any:
    return node.get("$") if isinstance(node, dict) else None


def _head(node: Json) -> tuple[Any, ...]:
    """Return what containers on both sides have to have in common, besides their keys."""
    if not isinstance(node, dict):
        return ("list",)
    kind = node.get("$", "dict")
    if kind == "dict":
        return (kind,)  # without "$", all keys are those of the tree
    return (kind, node.get("of") if kind != "object" else None, node.get("layout"), str(node.get("shape")))


def _say(node: Json) -> str:
    """Describe a node in a row of an error."""
    if isinstance(node, list):
        return f"a list of {len(node)}"
    if not isinstance(node, dict):
        return type(node).__name__ if node is not None else "None"
    kind = node.get("$")
    if kind is None or kind == "dict":
        return f"a dict of {len(node if kind is None else node['keys'])}"
    if kind == "tensor":
        return f"{node.get('dtype')} {node.get('shape')}"
    if kind == "array":
        return f"array {node.get('dtype')} {node.get('shape')}"
    if kind == "raw":
        return f"array {node.get('numpy')} {node.get('sides')}"
    if kind == "sparse":
        return f"{node.get('layout')} {node.get('shape')}"
    of = str(node["of"]).rpartition(":")[2] if "of" in node else ""
    return f"{'an' if kind[0] in 'aeio' else 'a'} {kind}{f' {of}' if of else ''}"
