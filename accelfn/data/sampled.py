"""Read a map-style dataset, by an order of its samples or by the batches of a custom batch sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from accelfn.context import Context
from accelfn.data.dispatch import SliceFunction, dispatch_steps, splits_steps
from accelfn.data.draws import read_isolated
from accelfn.data.order import IndexFn, draw_together, index_list, read_order, refuse_sharded
from accelfn.data.plan import BatchInfo, EpochPlan, plan_epoch
from accelfn.data.reader import (
    EVEN_BATCHES,
    EVEN_OR_DROP_LAST,
    EpochPass,
    PassStart,
    Reader,
    ReadSettings,
    UserState,
    with_actual_rows,
)
from accelfn.data.rebuild import Batches, Keyed, ListsOf, batch_sampler_of, may_draw, rebuild, sampler_of
from accelfn.data.states import State
from accelfn.errors import ConfigurationError

__all__ = ("BatchedReader", "SampledReader")

T = TypeVar("T")

# Number of samples whose indices are computed at once: large enough for cheap arithmetic, but smaller at the
# start of an epoch, to begin without delay.
_BLOCK = 16_384
_FIRST_BLOCK = 256


class SampledReader(Reader[T]):
    """Reads by an order of samples, whose positions are computed in constant time without a list.

    If the loader makes no batches, each rank reads one item per step; ``start`` and ``consumed`` then count
    items.
    """

    def __init__(self, ctx: Context, source: DataLoader[T], slice_fn: SliceFunction | None = None) -> None:
        """Read ``source``.

        Args:
            ctx: The world.
            source: The user's loader, over a map-style dataset.
            slice_fn: As for :func:`accelfn.prepare_data_loader`.

        Raises:
            ConfigurationError: A sampler already shards the samples, or a batch can't be split.
            TypeError: The dataset or the sampler has no length.
        """
        self.even_batches: bool | None = ctx.loading.even_batches
        # Ranks that receive their batches from rank 0 can't end at different steps.
        self.can_choose_even: bool = not ctx.loading.dispatch_batches
        self._ctx, self._rank, self._size = ctx, ctx.coordinate("dp"), ctx.axis_size("dp")
        self._slice_fn = slice_fn
        self._indices = Batches()
        # With dispatch_batches, rank 0 reads for all.
        reads = ctx.is_main_process or not ctx.loading.dispatch_batches
        self._loader = rebuild(source, self._indices) if reads else None
        self._draws = may_draw(source)
        self._dataset: Any = source.dataset
        self._batching: Any = batch_sampler_of(source)
        self._drop_last = bool(getattr(self._batching, "drop_last", False))
        size_of_batch = getattr(self._batching, "batch_size", None)
        self._rows: int | None = None if size_of_batch is None else int(size_of_batch)
        self._sampler_after: State | None = None
        prefix = "dispatched by rank 0: " if ctx.loading.dispatch_batches else ""
        self.what: str = f"{prefix}{self._read_source(source)}"

    def _read_source(self, source: DataLoader[T]) -> str:
        """Configure the reader by the loader's sampler, and return its description."""
        sampler = sampler_of(source)
        self._order = read_order(sampler, source.dataset, 0)
        self._sampler = sampler if self._order.kind == "sampler" else None
        self.length: int | None = self._order.num_samples
        self.settings: ReadSettings = ReadSettings(order=self._order.kind)
        if self._rows is None:
            return f"{self._order}, each item a batch"
        plan = self._plan(self.length, 0)
        self.batch_size: int | None = plan.global_batch
        return repr(plan)

    def plan(self, start: int) -> EpochPlan | None:
        """Plan the samples from ``start`` on."""
        return self._plan(self._order.num_samples, start)

    def idle_state(self) -> UserState:
        """Return the sampler's state after the latest epoch."""
        return UserState(self._sampler_after)

    def begin(self, at: PassStart) -> EpochPass[T]:
        """Begin a pass.

        Raises:
            ValueError: The dataset's length has changed since the loader was prepared, or a sampler drew
                another number of samples than its length.
        """
        order = self._order
        if len(self._dataset) != order.num_items:
            raise ValueError(
                f"the dataset {type(self._dataset).__name__} had length {order.num_items} when its loader "
                f"was prepared, and now has length {len(self._dataset)}. Prepare a new loader."
            )
        if self._sampler is None:
            before, index_fn = None, order.index_fn(self.seed, at.epoch)
        else:
            drawn, before = self._draw(self._sampler, at)
            if len(drawn) != order.num_samples:
                raise ValueError(
                    f"the sampler {type(self._sampler).__name__} has length {order.num_samples} but drew "
                    f"{len(drawn)} samples. Its __len__ must return what its __iter__ yields."
                )
            index_fn = index_list(drawn)
        plan = self._plan(order.num_samples, at.sample)
        begun = self._begin_samples(plan, index_fn, at.epoch)
        if self._rows is None:  # each item is a batch, whose number of rows is known only after reading it

            def info_at(step: int) -> BatchInfo:
                return BatchInfo(consumed=plan.consumed(step))

            begun = begun._replace(
                batches=((batch, with_actual_rows(batch, info)) for batch, info in begun.batches),
                info_at=info_at,
                remedies=EVEN_BATCHES,
            )
        return begun._replace(sampler=before)

    def _begin_samples(self, plan: EpochPlan, index_fn: IndexFn, epoch: int) -> EpochPass[T]:
        """Begin a pass over samples in the order of ``index_fn``."""
        rank = self._rank
        lists = partial(_batches_of, index_fn=index_fn, key=(self.seed, epoch))
        batches = self._begin_steps(plan, lists, plan.batch_infos(rank), epoch)
        return EpochPass(
            plan.counts, batches, info_at=partial(plan.batch_info, rank=rank), remedies=EVEN_OR_DROP_LAST
        )

    def _begin_steps(
        self, plan: EpochPlan, lists: ListsOf, infos: Iterator[BatchInfo], epoch: int
    ) -> Iterator[tuple[T, BatchInfo]]:
        """Return this rank's batches of a plan, each with its BatchInfo."""
        ctx, read, ranks = self._ctx, plan, range(self._rank, self._rank + 1)
        if ctx.loading.dispatch_batches:
            # The pieces of a step are consecutive: together they are the batch of a world of one.
            read = plan.of_one_rank() if splits_steps(ctx, self._slice_fn) else plan
            ranks = range(read.size)
        batches: Any = None
        if self._loader is not None:
            self._indices.begin(epoch, partial(lists, read, ranks))
            batches = read_isolated(self._loader, is_resumed=plan.start > 0, draws=self._draws)
        if not ctx.loading.dispatch_batches:
            return zip(batches, infos, strict=True)
        steps = dispatch_steps(ctx, plan, epoch, batches, self._slice_fn)
        return ((parts[0], next(infos)) for parts in steps if parts)

    def _draw(self, sampler: Any, at: PassStart) -> tuple[list[Any], State | None]:
        """Draw an epoch from a custom sampler; return it with the sampler's state before."""
        drawn, before, self._sampler_after = draw_together(
            self._ctx, sampler, self.seed, at.epoch, at.states.sampler
        )
        return drawn, before

    def _plan(self, number: int, start: int, *, by_batch: bool = False) -> EpochPlan:
        """Plan samples, or the batches of a batch sampler, which aren't split."""
        return plan_epoch(
            number,
            1 if by_batch else self._rows or 1,
            self._size,
            split_batches=self._ctx.loading.split_batches,
            even_batches=bool(self.even_batches),
            drop_last=self._drop_last and (self._size > 1 or not by_batch),
            start=start,
        )


class BatchedReader(SampledReader[T]):
    """Reads the batches of a custom batch sampler, which rank 0 draws for all.

    If all batches but the last have its ``batch_size``, their samples are sharded as an order; batches of
    different sizes aren't split, and each rank reads one of them per step.
    """

    def _read_source(self, source: DataLoader[T]) -> str:
        refuse_sharded(getattr(self._batching, "sampler", None))
        if self._rows is not None:
            self.batch_size: int | None = self._plan(0, 0).global_batch  # raises if it can't be split
        return f"batches of {self._rows}"

    def plan(self, start: int) -> None:
        """Return None, since the batches aren't known before they are drawn."""
        del start

    def count(self) -> int | None:
        """Count this rank's batches, if the batch sampler has a length."""
        if not hasattr(self._batching, "__len__"):
            return None
        number = len(self._batching)
        splits = self._ctx.loading.split_batches
        return number if splits else self._plan(number, 0, by_batch=True).num_batches(self._rank)

    def begin(self, at: PassStart) -> EpochPass[T]:
        """Draw the batches and begin a pass, without reading what is skipped."""
        items, before = self._draw(self._batching, at)
        drawn, rows = [list(batch) for batch in items], self._rows
        if rows and all(len(batch) == rows for batch in drawn[:-1]) and len((drawn or [[]])[-1]) <= rows:
            samples = [index for batch in drawn for index in batch]
            plan = self._plan(len(samples), at.sample).after(at.num_skipped)
            begun = self._begin_samples(plan, index_list(samples), at.epoch)
        elif splits_steps(self._ctx, self._slice_fn):
            raise ConfigurationError(
                "split_batches and slice_fn divide each batch into equal parts, but the batch sampler "
                f"{type(self._batching).__name__} yields batches of different sizes. Leave them out."
            )
        else:
            lengths = [len(batch) for batch in drawn]
            ends = list(accumulate(lengths))
            # If it starts within a batch, that batch is read again.
            first = next((number for number, end in enumerate(ends) if end > at.sample), len(ends))
            plan = self._plan(len(ends), first, by_batch=True).after(at.num_skipped)
            info_at = partial(_batch_info, plan, self._rank, lengths, ends)
            infos = map(info_at, range(plan.num_batches(self._rank)))
            lists = partial(_user_batches, drawn=drawn, key=(self.seed, at.epoch))
            batches = self._begin_steps(plan, lists, infos, at.epoch)
            begun = EpochPass(plan.counts, batches, info_at=info_at)
        return begun._replace(remedies=EVEN_BATCHES, sampler=before)


def _batch_info(
    plan: EpochPlan, rank: int, lengths: Sequence[int], ends: Sequence[int], step: int
) -> BatchInfo:
    """Return the BatchInfo of what ``rank`` reads in ``step`` of a plan that counts batches. Pure."""
    by_rank = [plan.positions(step, rank) for rank in range(plan.size)]
    rows = [lengths[positions[0]] if positions else 0 for positions in by_rank]
    num_new = plan.num_valid(step)  # in rank order; later ranks repeat batches
    valid = tuple(number if index < num_new else 0 for index, number in enumerate(rows))
    return BatchInfo(
        num_rows=rows[rank],
        max_rows=max(rows),
        num_valid=sum(valid),
        valid_by_rank=valid,
        own_valid=valid[rank],
        is_last=step == plan.num_batches(rank) - 1,
        consumed=ends[plan.consumed(step) - 1],
    )


def _user_batches(
    plan: EpochPlan, ranks: range, drawn: Sequence[Sequence[Any]], key: tuple[int, int]
) -> Iterator[Keyed]:
    """Yield the batches that ``ranks`` read in a plan that counts batches, step by step.

    Args:
        plan: One batch per rank and step.
        ranks: The ranks whose batches are yielded.
        drawn: All batches, by position.
        key: Seed and epoch.
    """
    for alone in _batches_of(plan, ranks, index_list(drawn), key):
        batch = Keyed(alone[0])
        batch.key = alone.key
        yield batch


def _batches_of(plan: EpochPlan, ranks: range, index_fn: IndexFn, key: tuple[int, int]) -> Iterator[Keyed]:
    """Yield the batches of ``ranks``, step by step, as lists of indices with the key of the batch.

    Computed in blocks of steps, so that neither memory nor the time to the first batch grows with the epoch.
    """
    steps, first, rows, group = plan.num_batches(ranks.start), 0, plan.rank_batch, plan.global_batch
    step_rows = rows * len(ranks)
    samples = _BLOCK if steps * step_rows <= _BLOCK else _FIRST_BLOCK
    while first < steps:
        last = min(steps, first + max(1, samples // step_rows))
        items = index_fn(plan.block(first, last, ranks))
        for begin in range(0, len(items), rows):
            batch = Keyed(items[begin : begin + rows])
            step, place = divmod(begin, step_rows)
            batch.key = (*key, plan.start + (first + step) * group + ranks.start * rows + place)
            yield batch
        first, samples = last, _BLOCK
