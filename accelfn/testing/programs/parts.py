"""What programs share besides the model: data that isn't a map, and batches that a user deals by hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch.utils.data
from torch.utils.data import IterableDataset

default_collate: Any = cast("Any", torch.utils.data).default_collate


class Stream(IterableDataset[Any]):
    """Rows as a stream."""

    def __init__(self, rows: Sequence[Any]) -> None:
        """Yield ``rows``."""
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        """Yield them from the start."""
        return iter(self.rows)


def batches_of(rows: Sequence[Any], ctx: Any, size: int) -> list[Any]:
    """Return the batches of this rank, dealt to the ranks in turn."""
    world, rank = ctx.axis_size("dp"), ctx.coordinate("dp")
    return [
        default_collate([*rows[start : start + size]])
        for start in range(rank * size, len(rows), world * size)
    ]


SCOPE: Mapping[str, Any] = MappingProxyType({"Stream": Stream, "batches_of": batches_of})
