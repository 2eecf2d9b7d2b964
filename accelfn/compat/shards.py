"""The share of one rank: of the batches that a sampler draws, or of a stream that every rank reads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

from accelfn.data.plan import plan_epoch
from accelfn.data.rebuild import sampler_of
from accelfn.errors import ConfigurationError


class SeedableRandomSampler(RandomSampler):
    """Shuffles by a seed and the number of the epoch."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        """Take a RandomSampler's arguments, and the seed: torch's by default."""
        cast("Any", super()).__init__(*args, **kwargs)
        self.initial_seed: int = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch: int = 0

    def __iter__(self) -> Iterator[int]:
        self.generator: torch.Generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch next."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """The batches of one rank, of those that a batch sampler draws on every rank.

    The batch sampler is drawn from as batches are read, and may have no end. An incomplete last round is
    completed from the first one, unless ``even_batches`` is False.
    """

    def __init__(
        self,
        batch_sampler: BatchSampler,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        """Read batches of ``batch_sampler`` as rank ``process_index`` of ``num_processes``."""
        self.batch_sampler: BatchSampler = batch_sampler
        self.num_processes: int = num_processes
        self.process_index: int = process_index
        self.split_batches: bool = split_batches
        self.even_batches: bool = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        # Raises if a batch can't be split.
        plan_epoch(0, self.batch_size or 1, num_processes, split_batches=split_batches)

    def __len__(self) -> int:
        return self._counts()[self.process_index]

    def _counts(self) -> tuple[int, ...]:
        number = len(self.batch_sampler)
        if self.split_batches:
            return (number,) * self.num_processes
        plan = plan_epoch(
            number, 1, self.num_processes, even_batches=self.even_batches, drop_last=self.drop_last
        )
        return plan.counts

    @property
    def counts_by_rank(self) -> tuple[int, ...] | None:
        """Batches of each rank, where each rank knows them: all read one fixed order. None elsewhere."""
        is_fixed = type(self.batch_sampler) is BatchSampler and type(self.sampler) is SequentialSampler
        return self._counts() if is_fixed else None

    def __iter__(self) -> Iterator[list[Any]]:
        rows, rank, size = self.batch_size or 0, self.process_index, self.num_processes
        batches = map(list[Any], cast("Any", self.batch_sampler))
        number = 1 if self.split_batches else size  # batches in a round, in which each rank reads one
        joins, own = rows > 0, rows * number // size
        start: list[list[Any]] = []  # the first round, which completes the last one
        while drawn := list(islice(batches, number)):
            start = start or drawn
            if joins and any(len(batch) != rows for batch in drawn):
                (*full, last), following = drawn, list(islice(batches, 1))
                batches = chain(following, batches)
                # Only the last batch of all may be short.
                joins = not following and len(last) < rows and all(len(batch) == rows for batch in full)
            if not joins:  # batches of different sizes aren't taken apart, which raises if they should be
                plan_epoch(1, 1, size, split_batches=self.split_batches)
                own = 1
            items = _joined(drawn) if joins else drawn
            if len(items) < own * size:
                if not items or (self.drop_last and size > 1):
                    return
                if self.even_batches and size > 1:
                    first = cycle(_joined(start) if joins else start)
                    items = list(islice(chain(items, first), own * size))
            mine = items[rank * own : (rank + 1) * own]
            if mine:
                yield mine if joins else mine[0]

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on."""
        for thing in (self.batch_sampler, self.sampler):
            if hasattr(thing, "set_epoch"):
                cast("Any", thing).set_epoch(epoch)


def _joined(batches: list[list[Any]]) -> list[Any]:
    return [index for batch in batches for index in batch]


def get_sampler(dataloader: Any) -> Any:
    """Return the sampler of a loader, also of its batch sampler."""
    return sampler_of(dataloader)


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one rank, of a stream that every rank reads.

    Each rank takes a batch in turn, or with ``split_batches`` a part of each batch. An incomplete last round
    is completed from the start of the stream, unless ``drop_last``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        """Read samples of ``dataset`` as rank ``process_index`` of ``num_processes``.

        Raises:
            ConfigurationError: A batch can't be split into equal parts.
        """
        if split_batches and batch_size > 1 and batch_size % num_processes:
            raise ConfigurationError(
                f"IterableDatasetShard: batch_size={batch_size} can't be split into parts for "
                f"{num_processes} processes. Make it a multiple of that."
            )
        self.dataset: Any = dataset
        self.batch_size: int = batch_size
        self.drop_last: bool = drop_last
        self.num_processes: int = num_processes
        self.process_index: int = process_index
        self.split_batches: bool = split_batches

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on."""
        self.epoch: int = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    @property
    def _round(self) -> int:
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self._round)
        return (whole if self.drop_last or not rest else whole + 1) * self._round // self.num_processes

    def __iter__(self) -> Iterator[Any]:
        share = self._round // self.num_processes
        own = slice(self.process_index * share, (self.process_index + 1) * share)
        samples, first = iter(self.dataset), list[Any]()
        while taken := [*islice(samples, self._round)]:
            first = first or taken
            if len(taken) < self._round:
                if self.drop_last:
                    return
                taken += islice(cycle(first), self._round - len(taken))
            yield from taken[own]
