"""Data that tests read: streams of numbers, and batches of each kind of source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

__all__ = ("Numbers", "Shards", "Sized", "make_source")


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


class Shards(Numbers):
    """Offers each of its ``shards`` by itself: the numbers from ten times that on."""

    def __init__(self, shards: list[int], rows: int = 4) -> None:
        self.shards = shards
        self.rows = rows
        self.epoch = 0

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Shards:
        return Shards(self.shards[index::num_shards], self.rows)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for shard in self.shards:
            yield from range(10 * shard + 1000 * self.epoch, 10 * shard + 1000 * self.epoch + self.rows)


def _own_loader(batches: list[torch.Tensor]) -> DataLoader[Any]:
    """A loader that gives these batches."""
    items = [row for batch in batches for row in batch]
    ends = [sum(map(len, batches[: number + 1])) for number in range(len(batches))]
    indices = [list(range(end - len(batch), end)) for end, batch in zip(ends, batches, strict=True)]
    return DataLoader(cast("Any", items), batch_sampler=indices)


def make_source(kind: str, batches: list[torch.Tensor], reads: list[int]) -> Any:
    """A list, a generator that notes in ``reads`` what it has given, or a loader."""

    def read() -> Iterator[torch.Tensor]:
        for batch in batches:
            reads.append(len(reads))
            yield batch

    if kind == "generator":
        return read()
    return batches if kind == "list" else _own_loader(batches)
