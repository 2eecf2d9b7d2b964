"""What a loader over a map-style dataset asks for, before anybody reads: samples in an order, or batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias, cast

from torch.utils.data import BatchSampler, DataLoader

from accelfn.context.config import DataLoaderConfiguration
from accelfn.data.order import IndexFn, Order, check_length, read_order, refuse_sharded, take_from
from accelfn.data.plan import EpochPlan, Planner, plan_epoch, planner, rows_in
from accelfn.data.reading import BatchInfo

__all__ = (
    "Asked",
    "BatchSamplerSpec",
    "SamplerSpec",
    "batch_sampler_of",
    "read_asked",
    "sampler_of",
    "share_of_batches",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSpec:
    """Samples in an order, in batches of one size.

    Attributes:
        dataset: They are read from.
        order: Theirs.
        sampler: Draws the order, where it is the user's own; else None.
        make_plan: For a number of samples, and the one to start at.
        are_items: The loader makes no batches: each sample is one already.
    """

    dataset: Any
    order: Order
    sampler: Any
    make_plan: Callable[[int, int], EpochPlan]
    are_items: bool

    @property
    def what(self) -> str:
        """What all ranks have to ask for alike."""
        return f"{self.order}, each a batch" if self.are_items else repr(self.plan(0))

    @property
    def batch_size(self) -> int | None:
        """Samples of all ranks in a step; None where each is a batch."""
        return None if self.are_items else self.plan(0).global_batch

    def plan(self, start: int) -> EpochPlan:
        """Plan the samples from ``start`` on."""
        return self.make_plan(self.order.num_samples, start)

    def check(self) -> None:
        """See that the dataset is as long as it was.

        Raises:
            ValueError: It isn't.
        """
        check_length(self.dataset, self.order)

    def take(self, seed: int, epoch: int, drawn: Sequence[Any] | None = None) -> IndexFn:
        """Learn what stands where in an epoch; ``drawn`` is what the sampler of the user's own gave.

        Raises:
            ValueError: The sampler drew another number of samples than it has promised.
        """
        if drawn is None:
            return self.order.taker(seed, epoch)
        if len(drawn) != self.order.num_samples:
            raise ValueError(
                f"the sampler {type(self.sampler).__name__} has a length of {self.order.num_samples}, "
                f"and drew {len(drawn)} samples. Its __len__ must count what its __iter__ gives."
            )
        return take_from(drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSamplerSpec:
    """The batches of the user's own batch sampler.

    Batches of the size that it names (the last may be shorter) are samples in an order, and are shared out as
    such; batches of different sizes are taken as they are, one a rank.

    Attributes:
        sampler: Draws them.
        named: The batch size that it names, if it does.
        size: Ranks that read different data.
        split_batches: Each batch is shared out between the ranks.
        even_batches: Fill the last step up from the first batches.
        drop_last: Leave out a step in which not all ranks have one.
        make_plan: For batches of one size.
    """

    sampler: Any
    named: int | None
    size: int
    split_batches: bool
    even_batches: bool
    drop_last: bool
    make_plan: Planner

    @property
    def what(self) -> str:
        """What all ranks have to ask for alike."""
        return f"batches of {self.named}"

    @property
    def batch_size(self) -> int | None:
        """Samples of all ranks in a step, where the sampler says so."""
        return None if self.named is None else self.make_plan(0, 0, self.named).global_batch

    def count(self, start: int, rank: int, even: bool) -> int | None:
        """Count the batches of ``rank``, where the sampler has a length and nothing is read yet.

        Args:
            start: Samples that are read already.
            rank: Whose.
            even: As ``even_batches``, instead of it.
        """
        if start or not hasattr(self.sampler, "__len__"):
            return None
        number = len(self.sampler)
        return number if self.split_batches else self._by_batch(number, 0).evened(even).num_batches(rank)

    def are_samples(self, drawn: Sequence[Sequence[Any]]) -> bool:
        """Return whether drawn batches are of the size that the sampler names, but for a shorter last one."""
        if self.named is None:
            return False
        return all(len(batch) == self.named for batch in drawn[:-1]) and (
            not drawn or len(drawn[-1]) <= self.named
        )

    def plan_samples(self, number: int, start: int) -> EpochPlan:
        """Plan ``number`` samples that lie in batches of the named size, from ``start`` on."""
        assert self.named is not None
        return self.make_plan(number, start, self.named)

    def plan_batches(self, lengths: Sequence[int], start: int, num_steps: int = 0) -> EpochPlan:
        """Plan batches of different sizes, one a rank and step.

        Args:
            lengths: Samples in each.
            start: Samples that are read already: a batch that they end inside of is read again.
            num_steps: Steps that are left out behind them.
        """
        ends = accumulate(lengths)
        first = next((number for number, end in enumerate(ends) if end > start), len(lengths))
        return self._by_batch(len(lengths), min(len(lengths), first + num_steps * self.size))

    def _by_batch(self, number: int, start: int) -> EpochPlan:
        return plan_epoch(
            number,
            1,
            self.size,
            even_batches=self.even_batches,
            drop_last=self.drop_last and self.size > 1,
            start=start,
        )


Asked: TypeAlias = SamplerSpec | BatchSamplerSpec


def read_asked(loading: DataLoaderConfiguration, size: int, source: DataLoader[Any]) -> Asked:
    """Return what ``source``, a loader over a map-style dataset, asks for.

    Args:
        loading: How data is to be shared out.
        size: Ranks that read different data.
        source: The user's loader.

    Raises:
        ConfigurationError: A sampler already deals out the samples between ranks, or a batch can't be split.
        TypeError: The dataset or the sampler has no length.
    """
    batch_sampler = batch_sampler_of(source)
    if batch_sampler is None:
        rows_in(loading, size, None)  # refuses what makes batches only

        def make_plan(number: int, start: int) -> EpochPlan:
            return plan_epoch(number, 1, size, even_batches=loading.even_batches, start=start)

        return _samples(source, make_plan, are_items=True)
    drop_last = bool(getattr(batch_sampler, "drop_last", False))
    planned = planner(loading, size, drop_last)
    if type(batch_sampler) is BatchSampler:
        batch_size = int(batch_sampler.batch_size)
        return _samples(source, lambda number, start: planned(number, start, batch_size), are_items=False)
    refuse_sharded(getattr(batch_sampler, "sampler", None))
    named = getattr(batch_sampler, "batch_size", None)
    if named is not None:
        planned(0, 0, int(named))  # refuses a batch that can't be split
    return BatchSamplerSpec(
        sampler=batch_sampler,
        named=None if named is None else int(named),
        size=size,
        split_batches=loading.split_batches,
        even_batches=loading.even_batches,
        drop_last=drop_last,
        make_plan=planned,
    )


def _samples(
    source: DataLoader[Any], make_plan: Callable[[int, int], EpochPlan], are_items: bool
) -> SamplerSpec:
    sampler = sampler_of(source)
    order = read_order(sampler, source.dataset, 0)
    return SamplerSpec(
        dataset=source.dataset,
        order=order,
        sampler=sampler if order.kind == "sampler" else None,
        make_plan=make_plan,
        are_items=are_items,
    )


def batch_sampler_of(source: DataLoader[Any]) -> Any:
    """Return what draws the batches of ``source``, None where its items are batches.

    With ``batch_size=None`` it may stand in the sampler's place: the dataset is asked for a list of indices.
    """
    loader = cast("Any", source)
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def sampler_of(source: DataLoader[Any]) -> Any:
    """Return what draws the samples of ``source``.

    That of its batch sampler, where it has one: a loader that was given a batch sampler has another sampler,
    which nobody asked for, beside.
    """
    return getattr(batch_sampler_of(source), "sampler", cast("Any", source).sampler)


def share_of_batches(
    plan: EpochPlan, step: int, rank: int, lengths: Sequence[int], ends: Sequence[int]
) -> BatchInfo:
    """Describe the batch that ``rank`` reads in ``step`` of a plan that counts batches. Pure.

    Args:
        plan: Of batches, one a rank and step.
        step: From 0.
        rank: That reads it.
        lengths: Samples in each batch.
        ends: Samples in the batches up to each one.
    """
    here = [plan.positions(step, one) for one in range(plan.size)]
    rows = [lengths[positions[0]] if positions else 0 for positions in here]
    new = plan.num_valid(step)  # in rank order; batches behind it are repeated
    valid = tuple(number if one < new else 0 for one, number in enumerate(rows))
    return BatchInfo(
        num_rows=rows[rank],
        max_rows=max(rows),
        num_valid=sum(valid),
        valid_by_rank=valid,
        own_valid=valid[rank],
        is_last=step == plan.num_batches(rank) - 1,
        consumed=ends[plan.consumed(step) - 1],
    )
