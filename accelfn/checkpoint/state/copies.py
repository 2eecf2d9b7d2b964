"""Copies of parts: what a ``DTensor`` says that several ranks hold alike, and whether they still do."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from accelfn.checkpoint.files.manifest import leaf_path
from accelfn.checkpoint.state.plan import Box, volume
from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.errors import Drift, ReplicaDriftError
from accelfn.tree import local_of
from accelfn.tree.digest import digest_tensors

__all__ = ("boxes_from", "boxes_of", "check_copies", "find_drift", "has_copies")


def boxes_of(tensor: torch.Tensor) -> tuple[Box, ...] | None:
    """Return which parts of a sharded tensor this rank holds; None for a tensor that isn't sharded."""
    if type(tensor) is torch.Tensor:  # asking it for what it doesn't have takes long
        return None
    chunks = getattr(tensor, "__create_chunk_list__", None)
    if chunks is None:
        return None
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks()]
    return tuple(box for box in boxes if all(box.shape) or not tensor.numel())


def _all_of(tensor: torch.Tensor) -> tuple[Box, ...]:
    return (Box((0,) * tensor.dim(), tuple(tensor.shape)),)


def boxes_from(lists: Sequence[Any]) -> tuple[Box, ...]:
    """Return boxes that have been lists in JSON."""
    return tuple(Box(*map(tuple, box)) for box in lists)


def has_copies(tensor: torch.Tensor) -> bool:
    """Whether several ranks hold the same part of a tensor: it replicates along a dim of its mesh."""
    layout = cast("Any", tensor)
    placements = getattr(layout, "placements", None)
    if placements is None:
        return False
    sizes = cast("Sequence[int]", layout.device_mesh.shape)
    return any(one.is_replicate() and size > 1 for one, size in zip(placements, sizes, strict=True))


def find_drift(
    copies: Sequence[Mapping[str, str]], boxes: Sequence[Mapping[str, Sequence[Box]]], name: str = "tree"
) -> tuple[Drift, ...]:
    """Find the parts that ranks hold with different values. Pure.

    Args:
        copies: By rank, for each tensor that :func:`has_copies`, a text that differs where the values do.
        boxes: By rank, the parts of each such tensor that it holds.
        name: What errors call the tensors together.

    >>> part = {"w": (Box((0,), (2,)),)}
    >>> [(row.rank, row.path) for row in find_drift([{"w": "a"}, {"w": "b"}], [part, part])]
    [(1, "tree['w']")]
    """
    holders: dict[tuple[str, tuple[Box, ...]], dict[int, str]] = {}
    for rank, texts in enumerate(copies):
        for key, text in texts.items():
            holders.setdefault((key, tuple(boxes[rank][key])), {})[rank] = text
    rows: list[Drift] = []
    for (key, parts), texts in holders.items():
        usual = Counter(texts.values()).most_common(1)[0][0]
        reference = next(rank for rank, text in texts.items() if text == usual)
        count = sum(volume(one.shape) for one in parts)
        path = f"{name}[{leaf_path(key)!r}]"
        rows += [Drift(rank, path, reference, count) for rank, text in texts.items() if text != usual]
    return tuple(sorted(rows, key=lambda row: (row.path, row.rank)))


def check_copies(ctx: Context, operation: str, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    """Check that ranks that hold the same tensor, or part of a ``DTensor``, hold the same bits of it.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        operation: What errors call it.
        tensors: By key. ``DTensor``s may be on any mesh, and ranks may have different ones.
        name: What errors call the tensors together.

    Raises:
        ReplicaDriftError: Copies differ; the same error on every rank.
    """

    def describe() -> bytes:
        boxes = {key: boxes_of(one) for key, one in tensors.items()}
        parts = {key: local_of(one) for key, one in tensors.items() if boxes[key] is None or has_copies(one)}
        rows = cast("list[list[int]]", digest_tensors(list(parts.values())).tolist())  # pyright: ignore[reportUnknownMemberType]
        copies = {key: str(row) for key, row in zip(parts, rows, strict=True)}
        return json.dumps([copies, {key: boxes[key] or _all_of(one) for key, one in parts.items()}]).encode()

    own, error = catch(describe)
    ranks = [json.loads(one) for one in gather_bytes(ctx, Call(operation, "copies"), own or b"", error)]
    boxes = [{key: boxes_from(found) for key, found in one.items()} for _, one in ranks]
    rows = find_drift([copies for copies, _ in ranks], boxes, name)
    if rows:
        raise ReplicaDriftError(operation, rows)
