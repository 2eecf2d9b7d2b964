"""Read on rank 0 alone, and send every rank its own part of each step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar, cast

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelfn.comm import broadcast_object_list
from accelfn.context import Context
from accelfn.data.deal import Dealer, SliceFunction, hand_out
from accelfn.data.dispatch_stream import StreamDispatch, dispatch_stream
from accelfn.data.items import plan_items, share_of_item, with_rows
from accelfn.data.order import Order, Take, check_length, draw_here, read_order, take_from
from accelfn.data.parts import Parts
from accelfn.data.plan import EpochPlan, Planner, plan_epoch, planner
from accelfn.data.reading import Pass, Remembering, Share, share_of
from accelfn.data.sampled import (
    Batches,
    Keyed,
    are_even,
    batch_sampler_of,
    rebuild,
    sampler_of,
    share_of_batches,
)
from accelfn.data.states import State, sampler_state
from accelfn.data.stream import rows_in
from accelfn.errors import ConfigurationError

__all__ = ("BatchedDispatch", "DispatchReader", "OrderedDispatch", "dispatch")

T = TypeVar("T")


# One for each kind of data.
DispatchReader: TypeAlias = "OrderedDispatch[T] | BatchedDispatch[T] | StreamDispatch[T]"


def dispatch(
    ctx: Context,
    source: DataLoader[T],
    agree: Callable[[str], int],
    slice_fn: SliceFunction | None = None,
) -> DispatchReader[T]:
    """Choose how rank 0 reads ``source``.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        source: The user's loader.
        agree: Compares what all ranks are about to read, and gives them one seed.
        slice_fn: Cuts the batch of a step; None cuts tensors along their first dimension.

    Raises:
        ConfigurationError: The batch can't be split, or the sampler already deals out the samples.
    """
    sampler = batch_sampler_of(source)
    is_stream = isinstance(source.dataset, IterableDataset)
    if slice_fn is not None and (source.batch_size if is_stream else sampler) is None:
        raise ConfigurationError(
            "slice_fn cuts the batch of a whole step, and with batch_size=None the loader makes no batches. "
            "Leave slice_fn out, or give the loader a batch size."
        )
    if is_stream:
        return dispatch_stream(ctx, source, agree, slice_fn)
    if sampler is None:
        rows_in(ctx, None)  # refuses what makes batches only
        order = read_order(sampler_of(source), source.dataset, 0)
        order = replace(order, seed=agree(f"dispatched by rank 0: {order}, each a batch"))
        return OrderedDispatch(ctx, source, order, functools.partial(plan_items, ctx), None)
    size = ctx.num_processes
    make_plan = planner(ctx.loading, size, bool(getattr(sampler, "drop_last", False)))
    if type(sampler) is BatchSampler:
        rows = int(sampler.batch_size)
        order = read_order(cast("Any", sampler).sampler, source.dataset, 0)
        seed = agree(f"dispatched by rank 0: {make_plan(order.num_samples, 0, rows)!r}")
        order = replace(order, seed=seed)
        return OrderedDispatch(ctx, source, order, functools.partial(make_plan, batch_size=rows), slice_fn)
    named = getattr(sampler, "batch_size", None)
    if named is not None:
        make_plan(0, 0, int(named))  # refuses a batch that can't be split
    seed = agree(f"dispatched by rank 0: batches of {named}")
    return BatchedDispatch(ctx, source, seed, named, make_plan, slice_fn)


class OrderedDispatch(Remembering, Generic[T]):
    """Rank 0 reads a map-style dataset by an order of its samples."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        order: Order,
        make_plan: Callable[[int, int], EpochPlan],
        slice_fn: SliceFunction | None,
    ) -> None:
        """Read ``source``; ``make_plan`` is for the number of samples and the one to start at."""
        self.length: int | None = order.num_samples
        self.seed = order.seed
        self._ctx = ctx
        self._order = order
        self._make_plan = make_plan
        self._dataset: Any = source.dataset
        self._sampler = sampler_of(source) if order.kind == "sampler" else None
        self._is_whole = batch_sampler_of(source) is None
        self._dealer = Dealer(ctx, slice_fn)
        self._batches = Batches()
        self._loader = rebuild(source, self._batches) if ctx.is_main_process else None
        self.batch_size: int | None = None if self._is_whole else self.plan(0).global_batch

    def plan(self, start: int) -> EpochPlan:
        """Plan the samples from ``start`` on."""
        return self._make_plan(self._order.num_samples, start)

    def count(self, start: int) -> int:
        """Count this rank's batches from ``start`` on."""
        return self.plan(start).num_batches(self._ctx.rank)

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Begin a pass.

        Raises:
            ValueError: The dataset has another length than it had when the loader was prepared.
        """
        check_length(self._dataset, self._order)
        plan = self.plan(start)
        steps: Iterator[tuple[list[Any], None]] | None = None
        own, _ = self._take_recalled()
        before: State | None = None
        if self._loader is not None:
            key = (self.seed, epoch)
            take, before = self._take(epoch, own.sampler)
            self._batches.begin(lambda: self._dealer.lists(plan, take, key))
            steps = _steps(self._dealer, plan, iter(self._loader))
        share_at = functools.partial(share_of, plan, rank=self._ctx.rank)
        begun = _planned(self._ctx, plan, steps, share_at, f"epoch {epoch} from sample {start}")
        if self._sampler is not None:
            told = [before, sampler_state(self._sampler)] if self._ctx.is_main_process else []
            before, self._sampler_after = broadcast_object_list(self._ctx.tagged("a sampler"), told)
            begun = begun._replace(sampler=before)
        if not self._is_whole:
            return begun
        share_at = functools.partial(share_of_item, plan)
        return begun._replace(batches=with_rows(begun.batches), share_at=share_at)

    def _take(self, epoch: int, state: State | None) -> tuple[Take, State | None]:
        """Learn what stands where; a sampler of the user's own is asked on rank 0 alone."""
        if self._sampler is None:
            return self._order.taker(self.seed, epoch), None
        drawn, before = draw_here(self._sampler, epoch, state)
        if len(drawn) != self._order.num_samples:
            raise ValueError(
                f"the sampler {type(self._sampler).__name__} has a length of {self._order.num_samples}, "
                f"and drew {len(drawn)} samples. Its __len__ must count what its __iter__ gives."
            )
        return take_from(drawn), before


class BatchedDispatch(Remembering, Generic[T]):
    """Rank 0 reads the batches of the user's own batch sampler, which is asked there alone.

    As everywhere, batches of the size that it names are samples in an order, and are shared out as such;
    batches of different sizes are taken as they are, one a rank.
    """

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        seed: int,
        named: int | None,
        make_plan: Planner,
        slice_fn: SliceFunction | None,
    ) -> None:
        """Read ``source``, whose batch sampler names ``named`` as its batch size."""
        self.length: int | None = None
        self.seed = seed
        self._ctx = ctx
        self._sampler: Any = batch_sampler_of(source)
        self._named = named
        self._make_plan = make_plan
        self._dealer = Dealer(ctx, slice_fn)
        self._batches = Batches()
        self._loader = rebuild(source, self._batches) if ctx.is_main_process else None
        self.batch_size: int | None = None if named is None else make_plan(0, 0, named).global_batch

    def plan(self, start: int) -> None:
        """Know nothing before the batches are drawn."""
        del start

    def count(self, start: int) -> int | None:
        """Count this rank's batches, where the batch sampler has a length and nothing is read yet."""
        if start or not hasattr(self._sampler, "__len__"):
            return None
        number = len(self._sampler)
        return (
            number if self._ctx.loading.split_batches else self._by_batch(number).num_batches(self._ctx.rank)
        )

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Draw the batches on rank 0, tell all how long they are, and begin a pass."""
        ctx, dealer = self._ctx, self._dealer
        drawn: list[list[Any]] = []
        recalled, _ = self._take_recalled()
        before: State | None = None
        if self._loader is not None:
            items, before = draw_here(self._sampler, epoch, recalled.sampler)
            drawn = [list(batch) for batch in items]
        # Lengths alone: the samples are rank 0's business. Equal ones as one number.
        own = [len(batch) for batch in drawn]
        is_even = self._named is not None and are_even(drawn, self._named)
        states = before, sampler_state(self._sampler)
        told: list[Any] = [is_even, sum(own), [] if is_even else own, states]
        is_even, number, by_batch, states = broadcast_object_list(ctx.tagged("a batch sampler"), told)
        before, self._sampler_after = cast("tuple[State | None, State | None]", states)
        lengths = cast("list[int]", by_batch)
        key = (self.seed, epoch)
        name = f"epoch {epoch} from sample {start}"
        steps: Iterator[tuple[list[Any], None]] | None = None
        if is_even and self._named is not None:
            plan = self._make_plan(number, start, self._named)
            if self._loader is not None:
                take = take_from([index for batch in drawn for index in batch])
                self._batches.begin(lambda: dealer.lists(plan, take, key))
                steps = _steps(dealer, plan, iter(self._loader))
            share_at = functools.partial(share_of, plan, rank=ctx.rank)
            return _planned(ctx, plan, steps, share_at, name)._replace(sampler=before)
        if dealer.cuts:
            raise ConfigurationError(
                "split_batches and slice_fn cut each batch into equal parts, and the batch sampler "
                f"{type(self._sampler).__name__} gives batches of different sizes. Leave them out."
            )
        ends = list(accumulate(lengths))
        first = next((number for number, end in enumerate(ends) if end > start), len(ends))
        plan = self._by_batch(len(ends), first)
        if self._loader is not None:
            self._batches.begin(lambda: _one_a_rank(plan, drawn, key))
            steps = _steps(dealer, plan, iter(self._loader))
        share_at = functools.partial(share_of_batches, plan, rank=ctx.rank, ends=ends, lengths=lengths)
        return _planned(ctx, plan, steps, share_at, name)._replace(sampler=before)

    def _by_batch(self, number: int, start: int = 0) -> EpochPlan:
        size = self._ctx.num_processes
        return plan_epoch(
            number,
            1,
            size,
            even_batches=self._ctx.loading.even_batches,
            drop_last=bool(getattr(self._sampler, "drop_last", False)) and size > 1,
            start=start,
        )


def _one_a_rank(plan: EpochPlan, drawn: Sequence[Sequence[Any]], key: tuple[int, int]) -> Iterator[Keyed]:
    for step in range(plan.num_steps):
        for rank in range(plan.size):
            for position in plan.positions(step, rank):
                yield Keyed(drawn[position], (*key, plan.start + step * plan.size + rank))


def _steps(dealer: Dealer, plan: EpochPlan, batches: Iterator[Any]) -> Iterator[tuple[list[Any], None]]:
    """Give the parts of each step of a plan; on rank 0."""
    return ((dealer.parts(plan, step, batches), None) for step in range(plan.num_steps))


def _planned(
    ctx: Context,
    plan: EpochPlan,
    steps: Iterator[tuple[list[Any], None]] | None,
    share_at: Callable[[int], Share],
    name: str,
) -> Pass[Any]:
    """Go through steps that all ranks know; ``steps`` on rank 0."""
    counts = tuple(plan.num_batches(rank) for rank in range(plan.size))

    def read() -> Iterator[tuple[Any, Share]]:
        way = Parts(ctx, name)
        for step in range(plan.num_steps):
            received = hand_out(way, steps)
            if received is not None and step < counts[ctx.rank]:
                yield received.parts[0], share_at(step)

    return Pass(counts, read(), share_at=share_at)
