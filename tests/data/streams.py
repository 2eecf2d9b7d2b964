"""Streams of numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

__all__ = ("Numbers", "Sized")


class Numbers(IterableDataset[Any]):
    """Counts; with several workers, each takes its turn."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.number, step))


class Sized(Numbers):
    """Says how long it is, or something else."""

    def __init__(self, number: int, length: int | None = None) -> None:
        super().__init__(number)
        self.length = number if length is None else length

    def __len__(self) -> int:
        return self.length
