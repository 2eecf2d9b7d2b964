"""Who reads which samples: the plan of an epoch, as arithmetic on positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch

from accelfn.context import plan_mesh
from accelfn.context.config import DataLoaderConfiguration, ParallelismConfig
from accelfn.data.states import State
from accelfn.errors import ConfigurationError

__all__ = (
    "BatchInfo",
    "DataRank",
    "EpochPlan",
    "data_rank",
    "plan_epoch",
    "plan_stream",
    "refuse_unsplittable",
)


class BatchInfo(NamedTuple):
    """What is known of one batch of one rank. The first five are those of a MicroBatch, in its order.

    Attributes:
        num_rows: Samples in it, padding included; None where nobody says.
        max_rows: Samples in the batch of the rank that has most.
        num_valid: Samples of all ranks that are no padding; the first ones, in rank order, unless
            ``valid_by_rank`` says otherwise.
        valid_by_rank: The same by rank, where batches have different lengths; each rank's first ones.
        own_valid: Of this rank alone, its first ones; None for all its rows.
        is_last: Whether no batch follows; None where that shows only when the next one is asked for.
        consumed: Samples of the epoch that have been read, on all ranks, when this batch is done.
        stream: State of a stream of the user's own then, where it has one.
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
    """How one pass over the data is shared out. Holds no list: any batch is reached in constant time.

    Positions count along the order of the epoch; which sample stands at a position is another matter. Step
    ``k`` of the world covers ``global_batch`` consecutive positions, and rank ``r`` reads the ``r``-th of
    ``size`` equal pieces. Ranks that share a batch, such as those of one tensor-parallel group, are one rank
    here (:func:`data_rank`).

    Attributes:
        num_samples: Length of the order.
        rank_batch: Samples of one rank in one step.
        size: Number of ranks that read different data.
        even: Fill the last step up from the start of the order, so that all ranks have full batches.
        drop_last: Leave out the last step when it isn't full.
        start: Position at which the pass begins: what comes before has been read already.
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
        """Count the batches of ``rank``; they differ between ranks only when the data is left uneven."""
        full, rest = divmod(self.num_left, self.global_batch)
        if self.drop_last or not rest:
            return full
        return full + 1 if self.even or rest > rank * self.rank_batch else full

    @property
    def in_step(self) -> bool:
        """Whether all ranks have equally many batches, however many samples there are."""
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
        """Return the positions of ``ranks`` in steps ``first`` to ``last``, that one not included.

        Returns:
            ``(n,)`` int64: of each step ``rank_batch`` positions a rank, of an uneven last one fewer.
        """
        starts = torch.arange(first, last) * self.global_batch + (self.start + ranks.start * self.rank_batch)
        positions = (starts[:, None] + torch.arange(len(ranks) * self.rank_batch)).reshape(-1)
        if self.start + (last - 1) * self.global_batch + ranks.stop * self.rank_batch <= self.num_samples:
            return positions
        if self.even:
            return positions.remainder_(self.num_samples)
        return positions[positions < self.num_samples]

    def num_rows(self, step: int, rank: int) -> int:
        """Count the samples that ``rank`` reads in ``step``, padding included."""
        if self.even:
            return self.rank_batch
        first = self.start + step * self.global_batch + rank * self.rank_batch
        return max(0, min(self.rank_batch, self.num_samples - first))

    def num_valid(self, step: int) -> int:
        """Count the samples of ``step``, over all ranks, that no earlier step or rank has read."""
        return min(self.global_batch, self.num_left - step * self.global_batch)

    def consumed(self, step: int) -> int:
        """Count the samples of the order that have been read when ``step`` is over."""
        return self.start + step * self.global_batch + self.num_valid(step)

    def batch_info(self, step: int, rank: int) -> BatchInfo:
        """Describe the batch that ``rank`` reads in ``step``.

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
        """Describe the batches that ``rank`` reads, one after the other, as :meth:`batch_info` does.

        >>> plan = plan_epoch(9, 2, 2)
        >>> list(plan.batch_infos(1)) == [plan.batch_info(step, 1) for step in range(3)]
        True
        """
        num_batches = self.num_batches(rank)
        rows, group, consumed = self.rank_batch, self.global_batch, self.start
        # Full steps but for a last one differ in their places only.
        full = max(0, min(num_batches - 1, self.num_left // group))
        # What BatchInfo(...) calls, at half of its cost, which each batch pays.
        make = cast("Callable[..., BatchInfo]", cast("Any", tuple).__new__)
        for _ in range(full):
            consumed += group
            yield make(BatchInfo, (rows, rows, group, None, rows, False, consumed, None))
        for step in range(full, num_batches):
            yield self.batch_info(step, rank)

    def of_one_rank(self) -> EpochPlan:
        """Return the plan of a world of one whose batches are whole steps of this one."""
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
        size: Ranks that read different data.
        split_batches: ``batch_size`` is that of the whole world, and each rank gets a piece of it.
        even_batches: Fill the last step up from the start of the order.
        drop_last: Leave out an incomplete last step.
        start: Samples that an earlier part of the pass has read, in any world.

    Raises:
        ConfigurationError: A number is out of range, or a batch that is to be split isn't divisible by the
            number of ranks.

    >>> plan = plan_epoch(num_samples=11, batch_size=2, size=2)
    >>> [plan.positions(step, rank=1) for step in range(plan.num_steps)]
    [[2, 3], [6, 7], [10, 0]]
    """
    if batch_size < 1 or size < 1 or not 0 <= start <= num_samples:
        raise ConfigurationError(
            "an epoch needs batches and ranks of at least 1, and starts within its samples: got "
            f"batch_size={batch_size}, {size} ranks, num_samples={num_samples} and start={start}."
        )
    if split_batches and batch_size % size:
        smaller = batch_size // size * size
        raise ConfigurationError(
            "split_batches shares each batch out between the ranks, so the batch size must be divisible by "
            "their number: "
            f"got batch_size={batch_size} and {size} ranks. Use "
            f"{smaller + size}{f' or {smaller}' if smaller else ''}."
        )
    return EpochPlan(
        num_samples=num_samples,
        rank_batch=batch_size // size if split_batches else batch_size,
        size=size,
        even=even_batches and size > 1,  # alone, there is nobody to keep in step with
        drop_last=drop_last,
        start=start,
    )


class DataRank(NamedTuple):
    """Which part of the data a rank reads.

    Attributes:
        rank: Number of the group of ranks that share each batch; the ``rank`` of an :class:`EpochPlan`.
        size: Number of groups; its ``size``.
        sharing: Ranks in a group.
    """

    rank: int
    size: int
    sharing: int


def data_rank(parallelism: ParallelismConfig, rank: int) -> DataRank:
    """Return which part of the data ``rank`` reads in a mesh. Pure.

    Ranks that differ only along the axes of pipeline, tensor, context or sequence parallelism work on one
    batch together, so they read the same.

    Args:
        parallelism: Sizes of the axes.
        rank: In ``range(total_size)``.

    Raises:
        ValueError: There is no such rank in the mesh.

    >>> mesh = ParallelismConfig(dp_shard_size=2, tp_size=2)
    >>> [data_rank(mesh, rank).rank for rank in range(4)]
    [0, 0, 1, 1]
    """
    if not 0 <= rank < parallelism.total_size:
        raise ValueError(
            f"data_rank: the mesh has ranks 0 to {parallelism.total_size - 1}, and there is no rank {rank}."
        )
    mesh = plan_mesh(parallelism, parallelism.total_size)
    size = mesh.size("dp")
    return DataRank(mesh.coordinate(rank, "dp"), size, mesh.num_ranks // size)


def plan_stream(
    loading: DataLoaderConfiguration, size: int, batch_size: int | None, drop_last: bool
) -> EpochPlan:
    """Plan how ranks share a stream of unknown length, which counts as 0. Pure.

    Where the loader doesn't make batches, each of its items counts as one sample.

    Args:
        loading: How the user wants data to be shared out.
        size: Ranks that read different data.
        batch_size: Of the user's loader.
        drop_last: Of the user's loader.

    Raises:
        ConfigurationError: The batch is to be split and can't be.
    """
    refuse_unsplittable(loading, batch_size)
    return plan_epoch(
        0,
        batch_size or 1,
        size,
        split_batches=loading.split_batches,
        even_batches=loading.even_batches,
        drop_last=drop_last,
    )


def refuse_unsplittable(loading: DataLoaderConfiguration, batch_size: int | None) -> None:
    """Refuse to split batches of a loader that makes none."""
    if loading.split_batches and batch_size is None:
        raise ConfigurationError(
            "split_batches cuts each batch that the loader makes, and with batch_size=None the loader makes "
            "none. Use split_batches=False, or give the loader a batch size."
        )
