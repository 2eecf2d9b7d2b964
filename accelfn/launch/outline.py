"""What a checkpoint holds, as an outline for people and as a list for programs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from accelfn.checkpoint.document.keys import read_key
from accelfn.checkpoint.document.nodes import LEAVES, children_of, key_text, step
from accelfn.checkpoint.document.plain import PLAIN_KINDS, read_plain
from accelfn.checkpoint.files.manifest import Json, Manifest
from accelfn.checkpoint.files.stored_dtype import dtype_from_name
from accelfn.checkpoint.state.by_rank import document_of
from accelfn.tree.sizes import size_text

__all__ = ("Row", "draw_rows", "outline", "random_kinds", "row_leaves")

_MOST_ROWS = 12
_MOST_CHARACTERS = 60


class Row(NamedTuple):
    """A line of an outline.

    Attributes:
        name: Key in what is above it.
        path: From the root of the tree, as tensors are named.
        about: What it is.
        num_tensors: In it.
        num_bytes: Of these.
        children: What is shown below it.
        leaf: What a program is told of it; None of a container.
        num_ranks: For how many ranks one of its own is stored; 0 where all have the same.
    """

    name: str
    path: str
    about: str
    num_tensors: int = 0
    num_bytes: int = 0
    children: tuple[Row, ...] = ()
    leaf: Mapping[str, Any] | None = None
    num_ranks: int = 0


def outline(manifest: Manifest, node: Json, name: str, path: str = "") -> Row:
    """Describe a part of a checkpoint's tree.

    Args:
        manifest: Of the checkpoint.
        node: Document of the part; it may have parts by rank.
        name: What the part is called.
        path: Of the part.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    return _Outline(manifest).row(node, name, path and f"/{path}")


def draw_rows(row: Row, *, everything: bool = False, indent: int = 0) -> Iterator[str]:
    """Return the lines of what is below a row; of long ones only the first, without ``everything``."""
    shown = row.children if everything or len(row.children) <= _MOST_ROWS + 1 else row.children[:_MOST_ROWS]
    width = max((len(one.name) for one in shown), default=0)
    for one in shown:
        facts = [one.about] if one.about else []
        if one.children and one.num_tensors:
            count = "1 tensor" if one.num_tensors == 1 else f"{one.num_tensors} tensors"
            facts.append(f"{count}, {size_text(one.num_bytes)}")
        elif one.num_tensors:
            facts.append(size_text(one.num_bytes))
        if one.num_ranks:
            facts.append(f"of its own on {one.num_ranks} ranks")
        yield f"{'  ' * indent}{one.name:<{width}}  {', '.join(facts)}".rstrip()
        yield from draw_rows(one, everything=everything, indent=indent + 1)
    if len(shown) < len(row.children):
        yield f"{'  ' * indent}... and {len(row.children) - len(shown)} more"


def row_leaves(row: Row) -> Iterator[dict[str, Any]]:
    """Return what a program is told of all leaves below a row, and of itself."""
    if row.leaf is not None:
        yield {"path": row.path.lstrip("/"), **row.leaf}
        return
    for one in row.children:
        yield from row_leaves(one)


def random_kinds(manifest: Manifest) -> list[str]:
    """List the generators whose states a checkpoint has.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    ranks = range(0 if manifest.random is None else manifest.world_size)
    return list({kind: None for rank in ranks for kind in _keys(manifest.random, rank)})


def _keys(document: Json, rank: int) -> list[str]:
    own = document_of(document, rank)
    return list(own) if isinstance(own, dict) else []


class _Outline:
    """Walks a document with parts by rank."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._shared: dict[Any, str] = {}

    def row(self, node: Json, name: str, path: str) -> Row:
        """Describe one node and all in it."""
        node = _lifted(node)
        kind = node.get("$") if isinstance(node, dict) else None
        if kind == "by_rank":
            return self._by_rank(cast("dict[str, Any]", node), name, path)
        if isinstance(node, dict) and kind in LEAVES:
            return self._tensor(node, name, path)
        if isinstance(node, dict) and kind == "again":
            first = self._shared.get(node.get("id"), "another")
            return Row(name, path, f"same as {first}", leaf={"kind": "again", "same_as": first})
        about = str(node.get("of", "")).rpartition(":")[2] if isinstance(node, dict) else ""
        plain, is_short = _plain_text(node)
        if plain is not None and (is_short or _is_row(node)):
            return Row(name, path, plain, leaf={"kind": "value", "value": _json_value(node)})
        children = children_of(node, path)
        if children is None:
            return Row(name, path, f"<{kind}>", leaf={"kind": kind})
        rows: list[Row] = []
        for key, child in zip(children.keys, children.nodes, strict=True):
            if key is None:  # the state of an object stands where the object does
                inner = self.row(child, name, path)
                rows += inner.children or ((inner._replace(name="state"),) if inner.leaf else ())
            else:
                rows.append(self.row(child, key_text(key), step(path, key)))
        empty: dict[str, Any] = {"kind": "value", "value": [] if isinstance(node, list) else {}}
        if not about:
            about = _container(kind, node, len(rows))
        return Row(
            name,
            path,
            about,
            sum(one.num_tensors for one in rows),
            sum(one.num_bytes for one in rows),
            tuple(rows),
            None if rows else empty,
        )

    def _tensor(self, node: Mapping[str, Any], name: str, path: str) -> Row:
        if "id" in node:
            self._shared.setdefault(node["id"], path[1:])
        kind, dtype, shape = (
            str(node["$"]),
            str(node.get("dtype")),
            cast("list[int]", node.get("shape") or []),
        )
        if kind == "raw":
            dtype, shape = str(node.get("numpy")), cast("list[int]", node.get("sides") or [])
            stored = self._manifest.tensors[node["name"]]
            size = math.prod(stored.shape) * dtype_from_name(stored.dtype).itemsize
        else:
            size = math.prod(shape) * dtype_from_name(dtype).itemsize
        what = {"tensor": "", "generator": "generator ", "raw": "array "}.get(kind, f"{kind} ")
        leaf = {"kind": kind, "dtype": dtype, "shape": shape, "bytes": size}
        return Row(name, path, f"{what}{dtype} {shape}", 1, size, leaf=leaf)

    def _by_rank(self, node: Mapping[str, Any], name: str, path: str) -> Row:
        values, of = cast("list[Json]", node["values"]), cast("list[int]", node["of"])
        ranks = [[rank for rank, one in enumerate(of) if one == number] for number in range(len(values))]
        rows = [self.row(value, _ranks_text(own), path) for value, own in zip(values, ranks, strict=True)]
        first = rows[0]
        size = sum(one.num_tensors for one in rows), sum(one.num_bytes for one in rows)
        if all(one.leaf is not None and one.num_tensors and one.about == first.about for one in rows):
            leaf = {**cast("Mapping[str, Any]", first.leaf), "ranks": len(of)}
            return Row(name, path, first.about, *size, leaf=leaf, num_ranks=len(of))
        if all(one.leaf is not None and one.leaf["kind"] == "value" for one in rows):
            # One value for each rank, in order.
            told = [cast("Mapping[str, Any]", rows[number].leaf)["value"] for number in of]
            text = ", ".join(f"{one.about} ({one.name})" for one in rows)
            leaf = {"kind": "value", "by_rank": told}
            return Row(name, path, _cut(text, f"{len(values)} values"), leaf=leaf)
        return Row(name, path, "", *size, children=tuple(rows), num_ranks=len(of))


def _ranks_text(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _lifted(node: Json) -> Json:
    """Let a leaf or a container of a special form differ between ranks as a whole, not in its inside."""
    if not isinstance(node, dict) or node.get("$") in (None, "object", "by_rank"):
        return node
    size = _num_ranks(node)
    if not size:
        return node
    own = [document_of(node, rank) for rank in range(size)]
    values: list[Json] = []
    for one in own:
        if one not in values:
            values.append(one)
    return {"$": "by_rank", "values": values, "of": [values.index(one) for one in own]}


def _num_ranks(node: Json) -> int:
    """Return for how many ranks there are parts by rank in a node; 0 where there are none."""
    if isinstance(node, dict) and node.get("$") == "by_rank":
        return len(cast("list[int]", node["of"]))
    inside = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return max((_num_ranks(one) for one in inside), default=0)


def _container(kind: Any, node: Json, size: int) -> str:
    if kind is None:
        return (f"list of {size}" if isinstance(node, list) else "") if size else repr(type(node)())
    return "" if kind in ("object", "dict") else str(kind)


def _plain_text(node: Json) -> tuple[str | None, bool]:
    """Write a value without tensors; None where there are some. And whether nothing of it was cut."""
    value = _value(node)
    if value is NotImplemented:
        return None, False
    text = repr(value)
    cut = _cut(text, f"{len(node)} in all" if isinstance(node, list) else f"{len(text)} characters")
    # A container is a tree like any other where it doesn't fit into a line.
    is_container = isinstance(node, list) or (isinstance(node, dict) and node.get("$") in (None, "tuple"))
    is_short = cut == text or not is_container
    return cut, is_short


def _is_row(node: Json) -> bool:
    """Whether it is a list that may be cut: of numbers or texts, and not of containers."""
    return isinstance(node, list) and not any(isinstance(one, (dict, list)) for one in node)


def _cut(text: str, whole: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}... ({whole})"


class _Spelled(str):
    """A text whose representation is itself."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _value(node: Json) -> Any:
    """Build a value that has no tensors, objects or parts by rank in it; NotImplemented of others."""
    if isinstance(node, list):
        items = [_value(one) for one in node]
        return NotImplemented if any(one is NotImplemented for one in items) else items
    if not isinstance(node, dict):
        return node
    kind = node.get("$")
    if kind is None:
        values = {key: _value(one) for key, one in node.items()}
        return NotImplemented if any(one is NotImplemented for one in values.values()) else values
    if kind == "tuple":
        items = _value(cast("Json", node.get("items")))
        return NotImplemented if items is NotImplemented else tuple(items)
    if kind == "enum":
        of = str(node.get("of")).rpartition(":")[2]
        return _Spelled(f"{of}.{node['name']}" if "name" in node else f"{of}({node.get('value')})")
    try:
        if kind in PLAIN_KINDS:
            return read_plain(node)
        if kind in ("set", "frozenset"):
            return read_key(node)
    except Exception:  # noqa: BLE001 -- whatever a constructor says to the content of a file
        return _Spelled(f"<{kind}>")
    return _Spelled(f"<number of numpy: {node.get('dtype')}>") if kind == "numpy" else NotImplemented


def _json_value(node: Json) -> Any:
    """Return a plain value as JSON has it, and what JSON lacks as a text."""
    value = _value(node)
    return node if value == node else repr(value)
