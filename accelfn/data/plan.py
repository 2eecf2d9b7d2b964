"""The plan of an epoch: which rank reads which samples, as arithmetic on positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, repeat
from typing import Any, NamedTuple, cast

import torch

from accelfn.config import ParallelismConfig
from accelfn.context import plan_mesh
from accelfn.data.states import State
from accelfn.errors import ConfigurationError

__all__ = (
    "BatchInfo",
    "DataRank",
    "EpochPlan",
    "data_rank",
    "plan_epoch",
)


class BatchInfo(NamedTuple):
    """Facts of one batch of one rank. The first five fields are those of MicroBatch, in its order.

    Attributes:
        num_rows: Samples in the batch, padding included; None if unknown.
        max_rows: Samples in the largest batch of all ranks in this step.
        num_valid: Samples of all ranks that aren't padding.
        valid_by_rank: The same by rank, if the ranks' batches have different lengths.
        own_valid: Samples of this rank that aren't padding; None for all its rows.
        is_last: Whether no batch follows; None if that is unknown before the next batch is requested.
        consumed: Samples of the epoch that all ranks have read after this batch.
        stream: State of a stateful stream after this batch.
    """

    num_rows: int | None = None
    max_rows: int | None = None
    num_valid: int | None = None
    valid_by_rank: tuple[int, ...] | None = None
    own_valid: int | None = None
    is_last: bool | None = None
    consumed: int = 0
    stream: State | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Divides one pass over the data among the ranks. Holds no list: any batch is computed in constant time.

    Positions count along the order of the epoch, which determines the sample at each position. Step ``k`` of
    the world covers ``global_batch`` consecutive positions, and rank ``r`` reads the ``r``-th of ``size``
    equal pieces. Ranks that share a batch, such as those of one tensor-parallel group, are one rank here
    (:func:`data_rank`).

    Attributes:
        num_samples: Length of the order.
        rank_batch: Samples of one rank in one step.
        size: Number of ranks that read different data.
        even: Pad the last step from the start of the order, so that all ranks have full batches.
        drop_last: Drop the last step if it isn't full.
        start: Position at which the pass begins; earlier positions have been read before.
    """

    num_samples: int
    rank_batch: int
    size: int = 1
    even: bool = True
    drop_last: bool = False
    start: int = 0

    @property
    def global_batch(self) -> int:
        """Samples of all ranks in one step."""
        return self.rank_batch * self.size

    @property
    def num_left(self) -> int:
        """Samples from ``start`` to the end of the order."""
        return self.num_samples - self.start

    @property
    def num_steps(self) -> int:
        """Steps in which at least one rank has a batch."""
        full, rest = divmod(self.num_left, self.global_batch)
        return full if self.drop_last or not rest else full + 1

    def num_batches(self, rank: int) -> int:
        """Return the number of batches of ``rank``, which differs between ranks only without ``even``."""
        full, rest = divmod(self.num_left, self.global_batch)
        if self.drop_last or not rest:
            return full
        return full + 1 if self.even or rest > rank * self.rank_batch else full

    @property
    def in_step(self) -> bool:
        """Whether all ranks have equally many batches for any number of samples."""
        return self.even or self.drop_last or self.size == 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Batches of each rank."""
        return tuple(self.num_batches(rank) for rank in range(self.size))

    def positions(self, step: int, rank: int) -> list[int]:
        """Return the positions that ``rank`` reads in ``step``, in order."""
        first = self.start + step * self.global_batch + rank * self.rank_batch
        if self.even:
            return [position % self.num_samples for position in range(first, first + self.rank_batch)]
        return list(range(first, min(first + self.rank_batch, self.num_samples)))

    def block(self, first: int, last: int, ranks: range) -> torch.Tensor:
        """Return the positions of ``ranks`` in steps ``first`` to ``last``, excluding ``last``.

        Returns:
            ``(n,)`` int64: ``rank_batch`` positions per step and rank, fewer in an uneven last step.
        """
        starts = torch.arange(first, last, device="cpu") * self.global_batch + (
            self.start + ranks.start * self.rank_batch
        )
        positions = (starts[:, None] + torch.arange(len(ranks) * self.rank_batch, device="cpu")).reshape(-1)
        if self.start + (last - 1) * self.global_batch + ranks.stop * self.rank_batch <= self.num_samples:
            return positions
        if self.even:
            return positions.remainder_(self.num_samples)
        return positions[positions < self.num_samples]

    def num_rows(self, step: int, rank: int) -> int:
        """Return the number of samples that ``rank`` reads in ``step``, padding included."""
        if self.even:
            return self.rank_batch
        first = self.start + step * self.global_batch + rank * self.rank_batch
        return max(0, min(self.rank_batch, self.num_samples - first))

    def num_valid(self, step: int) -> int:
        """Return the number of samples of ``step``, over all ranks, that aren't padding."""
        return min(self.global_batch, self.num_left - step * self.global_batch)

    def consumed(self, step: int) -> int:
        """Return the number of samples of the order that have been read after ``step``."""
        return self.start + step * self.global_batch + self.num_valid(step)

    def batch_info(self, step: int, rank: int) -> BatchInfo:
        """Return the BatchInfo of the batch that ``rank`` reads in ``step``.

        >>> info = plan_epoch(5, 2, 2).batch_info(1, 1)
        >>> info.num_rows, info.own_valid, info.is_last, info.consumed
        (2, 0, True, 5)
        """
        return BatchInfo(
            num_rows=self.num_rows(step, rank),
            max_rows=self.num_rows(step, 0),
            num_valid=self.num_valid(step),
            own_valid=max(0, min(self.rank_batch, self.num_valid(step) - rank * self.rank_batch)),
            is_last=step == self.num_batches(rank) - 1,
            consumed=self.consumed(step),
        )

    def batch_infos(self, rank: int) -> Iterator[BatchInfo]:
        """Return :meth:`batch_info` of each batch that ``rank`` reads.

        >>> plan = plan_epoch(9, 2, 2)
        >>> list(plan.batch_infos(1)) == [plan.batch_info(step, 1) for step in range(3)]
        True
        """
        num_batches = self.num_batches(rank)
        rows, group = self.rank_batch, self.global_batch
        # Full steps before the last differ only in `consumed`.
        full = max(0, min(num_batches - 1, self.num_left // group))
        consumed = range(self.start + group, self.start + (full + 1) * group, group)
        alike = (rows, rows, group, None, rows, False)
        fields = zip(*map(repeat, alike), consumed, repeat(None))
        # As BatchInfo(...), without a call for every batch.
        infos = map(partial(cast("Any", tuple).__new__, BatchInfo), fields)
        return chain(infos, map(partial(self.batch_info, rank=rank), range(full, num_batches)))

    def of_one_rank(self) -> EpochPlan:
        """Return the plan of a world of one whose batches are the steps of this plan."""
        return replace(self, rank_batch=self.global_batch, size=1)

    def after(self, num_steps: int) -> EpochPlan:
        """Return the plan of the epoch without its first steps.

        >>> [plan_epoch(9, 2, 2).after(num_steps).start for num_steps in range(5)]
        [0, 4, 8, 9, 9]
        """
        if num_steps == 0:
            return self
        start = self.consumed(num_steps - 1) if num_steps < self.num_steps else self.num_samples
        return replace(self, start=start)


def plan_epoch(
    num_samples: int,
    batch_size: int,
    size: int = 1,
    *,
    split_batches: bool = False,
    even_batches: bool = True,
    drop_last: bool = False,
    start: int = 0,
) -> EpochPlan:
    """Plan one pass over ``num_samples`` samples. Pure.

    Args:
        num_samples: Samples in the epoch.
        batch_size: Of the user's loader.
        size: Number of ranks that read different data.
        split_batches: ``batch_size`` is that of all ranks together, and each rank gets a piece of it.
        even_batches: Pad the last step from the start of the order.
        drop_last: Drop an incomplete last step.
        start: Number of samples that an earlier part of the pass has read, in any world.

    Raises:
        ConfigurationError: A number is out of range, or ``split_batches`` is set and ``batch_size`` isn't
            divisible by the number of ranks.

    >>> plan = plan_epoch(num_samples=11, batch_size=2, size=2)
    >>> [plan.positions(step, rank=1) for step in range(plan.num_steps)]
    [[2, 3], [6, 7], [10, 0]]
    """
    if batch_size < 1 or size < 1 or not 0 <= start <= num_samples:
        raise ConfigurationError(
            "batch_size and the number of ranks must be at least 1, and start between 0 and num_samples: got "
            f"batch_size={batch_size}, {size} ranks, num_samples={num_samples} and start={start}."
        )
    if split_batches and batch_size % size:
        smaller = batch_size // size * size
        raise ConfigurationError(
            "split_batches divides each batch among the ranks, so the batch size must be divisible by their "
            f"number: got batch_size={batch_size} and {size} ranks. Use "
            f"{smaller + size}{f' or {smaller}' if smaller else ''}."
        )
    return EpochPlan(
        num_samples=num_samples,
        rank_batch=batch_size // size if split_batches else batch_size,
        size=size,
        even=even_batches and size > 1,  # a single rank needs no padding
        drop_last=drop_last,
        start=start,
    )


class DataRank(NamedTuple):
    """The part of the data that a rank reads.

    Attributes:
        rank: Index of the group of ranks that share each batch: the ``rank`` of an :class:`EpochPlan`.
        size: Number of groups: the ``size`` of an :class:`EpochPlan`.
        sharing: Number of ranks in a group.
    """

    rank: int
    size: int
    sharing: int


def data_rank(parallelism: ParallelismConfig, rank: int) -> DataRank:
    """Return the part of the data that ``rank`` reads in a mesh. Pure.

    Ranks that differ only along the axes of pipeline, tensor, context or sequence parallelism read the same
    batches.

    Args:
        parallelism: Sizes of the axes.
        rank: In ``range(total_size)``.

    Raises:
        ValueError: The mesh doesn't have that rank.

    >>> mesh = ParallelismConfig(dp_shard_size=2, tp_size=2)
    >>> [data_rank(mesh, rank).rank for rank in range(4)]
    [0, 0, 1, 1]
    """
    if not 0 <= rank < parallelism.total_size:
        raise ValueError(f"data_rank: the mesh has ranks 0 to {parallelism.total_size - 1}, got rank {rank}.")
    mesh = plan_mesh(parallelism, parallelism.total_size)
    size = mesh.size("dp")
    return DataRank(mesh.coordinate(rank, "dp"), size, mesh.num_ranks // size)
