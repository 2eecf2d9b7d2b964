"""Copies of parts: what a ``DTensor`` says that several ranks hold alike, and whether they still do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from accelfn.checkpoint.files.manifest import leaf_path
from accelfn.checkpoint.state.plan import Box, volume
from accelfn.errors import Drift

__all__ = ("find_drift", "has_copies")


def has_copies(tensor: torch.Tensor) -> bool:
    """Whether several ranks hold the same part of a tensor: it replicates along a dim of its mesh."""
    layout = cast("Any", tensor)
    placements = getattr(layout, "placements", None)
    if placements is None:
        return False
    sizes = cast("Sequence[int]", layout.device_mesh.shape)
    return any(one.is_replicate() and size > 1 for one, size in zip(placements, sizes, strict=True))


def find_drift(
    copies: Sequence[Mapping[str, str]], boxes: Sequence[Mapping[str, Sequence[Box]]]
) -> tuple[Drift, ...]:
    """Find the parts that ranks hold with different values. Pure.

    Args:
        copies: By rank, for each tensor that :func:`has_copies`, a text that differs where the values do.
        boxes: By rank, the parts of each such tensor that it holds.

    >>> part = {"w": (Box((0,), (2,)),)}
    >>> [(row.rank, row.path) for row in find_drift([{"w": "a"}, {"w": "b"}], [part, part])]
    [(1, "tree['w']")]
    """
    holders: dict[tuple[str, tuple[Box, ...]], dict[int, str]] = {}
    for rank, texts in enumerate(copies):
        for name, text in texts.items():
            holders.setdefault((name, tuple(boxes[rank][name])), {})[rank] = text
    rows: list[Drift] = []
    for (name, parts), texts in holders.items():
        usual = Counter(texts.values()).most_common(1)[0][0]
        reference = next(rank for rank, text in texts.items() if text == usual)
        count = sum(volume(one.shape) for one in parts)
        path = f"tree[{leaf_path(name)!r}]"
        rows += [Drift(rank, path, reference, count) for rank, text in texts.items() if text != usual]
    return tuple(sorted(rows, key=lambda row: (row.path, row.rank)))
