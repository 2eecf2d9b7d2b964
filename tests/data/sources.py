"""Data that tests read: numbers in order, by every kind of loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

__all__ = ("Counting", "Listed", "Numbers", "Shards", "Sized", "consecutive", "make_source", "numbers")


class Counting(Dataset[Any]):
    """The numbers below ``num``; remembers which were read."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


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


class Listed:
    """A batch sampler of one's own: the batches of a list, and what it says of them."""

    def __init__(
        self, batches: Sequence[list[int]], batch_size: int | None = None, drop_last: bool | None = None
    ) -> None:
        self.batches = batches
        self.drawn = 0
        if batch_size is not None:
            self.batch_size = batch_size
        if drop_last is not None:
            self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn += 1
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def numbers(num: int, batch_size: int | None = 2, **options: Any) -> DataLoader[Any]:
    """A loader of the numbers below ``num``, which torch refuses to shuffle where there are none."""
    if num == 0:
        options.pop("shuffle", None)
    return DataLoader(cast("Any", torch.arange(num)), batch_size=batch_size, **options)


def consecutive(sizes: Iterable[int]) -> list[list[int]]:
    """Cut the numbers from 0 on into lists of these sizes."""
    batches: list[list[int]] = []
    first = 0
    for size in sizes:
        batches.append(list(range(first, first + size)))
        first += size
    return batches


def make_source(kind: str, batches: list[torch.Tensor], reads: list[int]) -> Any:
    """A list, a generator that notes in ``reads`` what it has given, or a loader."""

    def read() -> Iterator[torch.Tensor]:
        for batch in batches:
            reads.append(len(reads))
            yield batch

    if kind == "generator":
        return read()
    if kind == "list":
        return batches
    items = [row for batch in batches for row in batch]
    return DataLoader(cast("Any", items), batch_sampler=consecutive(map(len, batches)))
