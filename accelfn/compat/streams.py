"""The share of one rank in a stream that every rank reads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from accelfn.errors import ConfigurationError


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
        while taken := [*itertools.islice(samples, self._round)]:
            first = first or taken
            if len(taken) < self._round:
                if self.drop_last:
                    return
                taken += itertools.islice(itertools.cycle(first), self._round - len(taken))
            yield from taken[own]
