"""What a checkpoint holds, leaf by leaf. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

from accelfn.checkpoint.by_rank import document_of
from accelfn.checkpoint.document.decode import decode
from accelfn.checkpoint.document.nodes import LEAVES, children_of, step
from accelfn.checkpoint.header import dtype_from_name
from accelfn.checkpoint.manifest import Json, Manifest


def list_leaves(manifest: Manifest) -> Iterator[dict[str, Any]]:
    """List what the tree of a checkpoint holds, in its order.

    Returns:
        For each leaf its ``path`` (a JSON pointer without its first slash), and either ``kind``, ``dtype``,
        ``shape`` and ``bytes`` of a tensor; or ``same_as``, the path of the same tensor; or ``value``. And
        ``ranks``, where it is that of some ranks alone.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    yield from _leaves(manifest, manifest.tree, "", (), {})


def random_kinds(manifest: Manifest) -> list[str]:
    """List the generators whose states a checkpoint has.

    Raises:
        DamagedCheckpointError: The document is malformed.
    """
    ranks = range(0 if manifest.random is None else manifest.world_size)
    own = [document_of(manifest.random, rank) for rank in ranks]
    return list({kind: None for one in own if isinstance(one, dict) for kind in one})


def _leaves(
    manifest: Manifest, node: Json, path: str, ranks: Sequence[int], known: dict[str, str]
) -> Iterator[dict[str, Any]]:
    kind = node.get("$") if isinstance(node, dict) else None
    size = _num_ranks(node)
    if size and kind not in (None, "object") and not ranks:
        # It differs between ranks, here or inside of a leaf or a container that has a form of its own.
        own = [document_of(node, rank) for rank in range(size)]
        values: list[Json] = []
        for one in own:
            if one not in values:
                values.append(one)
        for value in values:
            yield from _leaves(
                manifest, value, path, [rank for rank, one in enumerate(own) if one == value], known
            )
        return
    head: dict[str, Any] = {"path": path[1:], **({"ranks": list(ranks)} if ranks else {})}
    children = children_of(node, path)
    if children is not None and (isinstance(node, dict) or not all(_is_plain(one) for _, one in children)):
        is_value = kind not in (None, "dict", "object") and all(_is_plain(one) for _, one in children)
        if children and not is_value:
            for key, child in children:
                yield from _leaves(manifest, child, step(path, key), ranks, known)
            return
    if isinstance(node, dict) and kind in LEAVES:
        first = known.setdefault(node["name"], path[1:])
        if first != path[1:]:
            yield {**head, "same_as": first}
            return
        stored = manifest.tensors[node["name"]]
        shape = list(stored.shape)
        size = math.prod(shape) * dtype_from_name(stored.dtype).itemsize
        yield {**head, "kind": kind, "dtype": stored.dtype, "shape": shape, "bytes": size}
    else:
        yield {**head, "value": _value(node)}


def _num_ranks(node: Json) -> int:
    """Return for how many ranks there are parts by rank in a node; 0 where there are none."""
    if isinstance(node, dict) and node.get("$") == "by_rank":
        return len(cast("list[int]", node["of"]))
    inside = list(node.values()) if isinstance(node, dict) else node if isinstance(node, list) else []
    return max((_num_ranks(one) for one in inside), default=0)


def _is_plain(node: Json) -> bool:
    """Whether a node is one value: no tensor, and nothing with values inside."""
    kind = node.get("$") if isinstance(node, dict) else None
    if kind in LEAVES or kind == "by_rank":
        return False
    return (
        not isinstance(node, list)
        and (kind is not None or not isinstance(node, dict))
        and (children_of(node, "") is None)
    )


def _value(node: Json) -> Any:
    """Return a plain value as JSON has it, and what JSON lacks as a text."""
    try:
        value = decode(node, {})
    except Exception:  # noqa: BLE001 -- of a class that isn't imported, or what a constructor says to a file
        return f"<{node.get('$') if isinstance(node, dict) else 'value'}>"
    return node if value == node else repr(value)
