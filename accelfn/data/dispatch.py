"""Read on rank 0 alone, and send every rank its own part of each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Generic, TypeAlias, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import broadcast_object_list, failing_together
from accelfn.context import Context
from accelfn.data.asked import (
    BatchSamplerSpec,
    SamplerSpec,
    batch_sampler_of,
    read_asked,
    share_of_batches,
)
from accelfn.data.deal import BatchSplitter, SliceFunction, check_slice_function, hand_out
from accelfn.data.dispatch_stream import StreamDispatch, dispatch_stream
from accelfn.data.draws import read_apart
from accelfn.data.order import draw_here, take_from
from accelfn.data.parts import BatchScatter
from accelfn.data.plan import EpochPlan
from accelfn.data.reading import (
    EVENED,
    EVENED_OR_DROPPED,
    BatchInfo,
    EpochPass,
    ReadSettings,
    Resumable,
    share_of,
    with_rows,
)
from accelfn.data.sampled import Batches, Keyed, rebuild, whole_batches
from accelfn.data.states import State, sampler_state
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
        TypeError: ``slice_fn`` can't be called as it has to be.
    """
    if slice_fn is not None:
        with failing_together(ctx, "prepare_data_loader"):  # that of rank 0 is called, and it may be another
            check_slice_function(slice_fn)
    is_stream = isinstance(source.dataset, IterableDataset)
    if slice_fn is not None and (source.batch_size if is_stream else batch_sampler_of(source)) is None:
        raise ConfigurationError(
            "slice_fn cuts the batch of a whole step, and with batch_size=None the loader makes no batches. "
            "Leave slice_fn out, or give the loader a batch size."
        )
    if is_stream:
        return dispatch_stream(ctx, source, agree, slice_fn)
    asked = read_asked(ctx.loading, ctx.axis_size("dp"), source)
    seed = agree(f"dispatched by rank 0: {asked.what}")
    if isinstance(asked, BatchSamplerSpec):
        return BatchedDispatch(ctx, source, asked, seed, slice_fn)
    return OrderedDispatch(ctx, source, asked, seed, slice_fn)


class OrderedDispatch(Resumable, Generic[T]):
    """Rank 0 reads a map-style dataset by an order of its samples."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        asked: SamplerSpec,
        seed: int,
        slice_fn: SliceFunction | None,
    ) -> None:
        """Read what ``source`` asks for."""
        self.length: int | None = asked.order.num_samples
        self.batch_size: int | None = asked.batch_size
        self.seed = seed
        self.setting: ReadSettings = ReadSettings(order=asked.order.kind)
        self._ctx = ctx
        self._asked = asked
        self._rank = ctx.coordinate("dp")
        self._steps = _Steps(ctx, source, slice_fn)

    def plan(self, start: int) -> EpochPlan:
        """Plan the samples from ``start`` on."""
        return self._asked.plan(start)

    def count(self, start: int) -> int:
        """Count this rank's batches from ``start`` on."""
        return self.plan(start).num_batches(self._rank)

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass.

        Raises:
            ValueError: The dataset has another length than it had when the loader was prepared.
        """
        ctx, asked = self._ctx, self._asked
        asked.check()
        plan = self.plan(start)
        recalled, _ = self._take_recalled()
        before: State | None = None
        lists: Callable[[], Iterator[Keyed]] | None = None
        if ctx.is_main_process:  # a sampler of the user's own is asked here alone
            drawn: list[Any] | None = None
            if asked.sampler is not None:
                drawn, before = draw_here(asked.sampler, epoch, recalled.sampler)
            take = asked.take(self.seed, epoch, drawn)
            lists = partial(self._steps.dealer.lists, plan, take, (self.seed, epoch))
        begun = self._steps.begin(plan, lists, partial(share_of, plan, rank=self._rank), epoch, start)
        if asked.sampler is not None:
            told = [before, sampler_state(asked.sampler)] if ctx.is_main_process else []
            before, self._sampler_after = broadcast_object_list(ctx.tagged("a sampler"), told)
            begun = begun._replace(sampler=before)
        return with_rows(begun) if asked.are_items else begun


class BatchedDispatch(Resumable, Generic[T]):
    """Rank 0 reads the batches of the user's own batch sampler, which is asked there alone."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        asked: BatchSamplerSpec,
        seed: int,
        slice_fn: SliceFunction | None,
    ) -> None:
        """Read what ``source`` asks for."""
        self.length: int | None = None
        self.batch_size: int | None = asked.batch_size
        self.seed = seed
        self._ctx = ctx
        self._asked = asked
        self._rank = ctx.coordinate("dp")
        self._steps = _Steps(ctx, source, slice_fn)

    def plan(self, start: int) -> None:
        """Return None: nothing is known before the batches are drawn."""
        del start

    def count(self, start: int) -> int | None:
        """Count this rank's batches, where the batch sampler has a length and nothing is read yet."""
        return self._asked.count(start, self._rank, self._asked.even_batches)

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Draw the batches on rank 0, tell all how long they are, and begin a pass."""
        ctx, asked, dealer = self._ctx, self._asked, self._steps.dealer
        drawn: list[list[Any]] = []
        recalled, _ = self._take_recalled()
        before: State | None = None
        if ctx.is_main_process:
            items, before = draw_here(asked.sampler, epoch, recalled.sampler)
            drawn = [list(batch) for batch in items]
        # Lengths alone: the samples are rank 0's business. Equal ones as one number.
        own = [len(batch) for batch in drawn]
        are_samples = asked.are_samples(drawn)
        states = before, sampler_state(asked.sampler)
        told: list[Any] = [are_samples, sum(own), [] if are_samples else own, states]
        are_samples, number, by_batch, states = broadcast_object_list(ctx.tagged("a batch sampler"), told)
        before, self._sampler_after = cast("tuple[State | None, State | None]", states)
        key = (self.seed, epoch)
        lists: Callable[[], Iterator[Keyed]]
        if are_samples:
            plan = asked.plan_samples(number, start)
            lists = partial(dealer.lists, plan, take_from([index for batch in drawn for index in batch]), key)
            share_at = partial(share_of, plan, rank=self._rank)
        else:
            if dealer.cuts:
                raise ConfigurationError(
                    "split_batches and slice_fn cut each batch into equal parts, and the batch sampler "
                    f"{type(asked.sampler).__name__} gives batches of different sizes. Leave them out."
                )
            lengths = cast("list[int]", by_batch)
            plan = asked.plan_batches(lengths, start)
            lists = partial(whole_batches, plan, range(plan.size), drawn, key)
            ends = list(accumulate(lengths))
            share_at = partial(share_of_batches, plan, rank=self._rank, lengths=lengths, ends=ends)
        begun = self._steps.begin(plan, lists if ctx.is_main_process else None, share_at, epoch, start)
        return begun._replace(evened_by=EVENED, sampler=before)


class _Steps:
    """Carries out planned steps: rank 0 reads lists of samples, and hands out what comes of them."""

    def __init__(self, ctx: Context, source: DataLoader[Any], slice_fn: SliceFunction | None) -> None:
        self.dealer = BatchSplitter(ctx, slice_fn)
        self._ctx = ctx
        self._batches = Batches()
        self._loader = rebuild(source, self._batches) if ctx.is_main_process else None

    def begin(
        self,
        plan: EpochPlan,
        lists: Callable[[], Iterator[Keyed]] | None,
        share_at: Callable[[int], BatchInfo],
        epoch: int,
        start: int,
    ) -> EpochPass[Any]:
        """Begin a pass through steps that all ranks know; ``lists`` on rank 0."""
        steps: Iterator[tuple[list[Any], None]] | None = None
        if self._loader is not None and lists is not None:
            self._batches.begin(lists)
            batches = read_apart(self._loader, is_resumed=start > 0)
            steps = ((self.dealer.parts(plan, step, batches), None) for step in range(plan.num_steps))
        own = plan.num_batches(self._ctx.coordinate("dp"))

        def read() -> Iterator[tuple[Any, BatchInfo]]:
            way = BatchScatter(self._ctx, f"epoch {epoch} from sample {start}")
            for step in range(plan.num_steps):
                received = hand_out(way, steps)
                if received is not None and step < own:
                    yield received.parts[0], share_at(step)

        return EpochPass(plan.counts, read(), share_at=share_at, evened_by=EVENED_OR_DROPPED)
