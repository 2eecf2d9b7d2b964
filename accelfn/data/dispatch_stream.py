"""Read a stream on rank 0 alone, and send every rank its own part of each group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader

from accelfn.context import Context
from accelfn.data.cut import StreamPlan
from accelfn.data.deal import BatchSplitter, SliceFunction, hand_out
from accelfn.data.parts import BatchScatter
from accelfn.data.plan import EpochPlan, rows_in
from accelfn.data.reading import BatchInfo, EpochPass, ReadSettings, Resumable, UserState, rows_of, share_of
from accelfn.data.sources import count_shards
from accelfn.data.states import State
from accelfn.data.stream import Seen, StreamReader, length_of, pass_of, setting_of

__all__ = ("CollateParts", "StreamDispatch", "dispatch_stream")

T = TypeVar("T")


def dispatch_stream(
    ctx: Context, source: DataLoader[T], agree: Callable[[str], int], slice_fn: SliceFunction | None
) -> StreamDispatch[T]:
    """Let rank 0 read ``source``, a loader over an iterable dataset.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        source: The user's loader.
        agree: Compares what all ranks are about to read, and gives them one seed.
        slice_fn: As for :func:`accelfn.prepare_data_loader`.

    Raises:
        ConfigurationError: The dataset was split already, or the batch can't be split.
    """
    rank, size = ctx.coordinate("dp"), ctx.axis_size("dp")
    rows = rows_in(ctx.loading, size, source.batch_size)
    count_shards(source.dataset)  # refuses what was split between ranks already
    length = length_of(source.dataset, source.num_workers)
    last = ", the last one dropped" if source.drop_last else ""
    seed = agree(f"a stream of {length} samples, dispatched by rank 0: batches of {source.batch_size}{last}")
    even = ctx.loading.even_batches and size > 1  # alone, there is nobody to keep in step with
    cut = StreamPlan(rows=rows, rank=rank, size=size, even=even, drop_last=source.drop_last)
    return StreamDispatch(ctx, source, cut, seed, slice_fn)


class StreamDispatch(Resumable, Generic[T]):
    """Rank 0 reads the stream in groups, and each rank receives its part of each."""

    def __init__(
        self, ctx: Context, source: DataLoader[T], cut: StreamPlan, seed: int, slice_fn: SliceFunction | None
    ) -> None:
        """Read ``source``; ``cut`` says what each rank gets of it."""
        self.seed = seed
        self._ctx = ctx
        self._source = source
        self._cut = cut
        self._is_whole = source.batch_size is None
        self._dealer = BatchSplitter(ctx, slice_fn)
        self.length: int | None = self._length()
        self.batch_size: int | None = None if self._is_whole else cut.group
        self.setting: ReadSettings = setting_of(ctx, source, cut.group, False)
        self._reader: StreamReader[Any] | None = None
        if ctx.is_main_process:
            # To the reader, a group is one batch of a world of one.
            whole = replace(cut, rows=cut.group, rank=0, size=1)
            collate: Any = cast("Any", source).collate_fn
            if not self._dealer.cuts:
                collate = CollateParts(collate, cut.rows, self._is_whole)
            self._reader = StreamReader(ctx, source, source.dataset, whole, False, seed, collate=collate)

    def plan(self, start: int) -> EpochPlan | None:
        """Plan the samples from ``start`` on, where the stream has a length.

        Raises:
            ValueError: ``start`` is behind its end.
        """
        number = self._length()
        return None if number is None else self._cut.plan(number, start)

    def count(self, start: int) -> int | None:
        """Count this rank's batches from ``start`` on, where the stream has a length."""
        plan = self.plan(start)
        return None if plan is None else plan.num_batches(self._cut.rank)

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass."""
        self.length = self._length()
        plan = self.plan(start)
        groups: Iterator[tuple[Any, BatchInfo]] | None = None
        own, at = self._take_recalled()
        seen = Seen()
        if self._reader is not None:
            self._reader.seed = self.seed
            self._reader.recall(own, at)
            groups = self._reader.begin(epoch, start).batches
        way = BatchScatter(self._ctx, f"epoch {epoch} from sample {start}")
        return pass_of(self._read(way, groups, plan, seen), self._cut, plan, self._is_whole, seen)

    def can_recall(self, stream: State) -> bool:
        """Return whether the state of a stream is of this kind of loader; rank 0 alone has one."""
        return self._reader is not None and self._reader.can_recall(stream)

    def rest(self) -> UserState:
        """Return the state of the stream between passes; on rank 0."""
        return UserState() if self._reader is None else self._reader.rest()

    def finish(self) -> None:
        """Let the dataset see its end; on rank 0."""
        if self._reader is not None:
            self._reader.finish()

    def _read(
        self,
        way: BatchScatter,
        groups: Iterator[tuple[Any, BatchInfo]] | None,
        plan: EpochPlan | None,
        seen: Seen,
    ) -> Iterator[tuple[T, BatchInfo]]:
        rank = self._cut.rank
        steps = None if groups is None else self._steps(groups, plan, seen)
        step = 0
        while plan is None or step < plan.num_steps:
            received = hand_out(way, steps)
            if received is None:
                return
            facts: tuple[Any, ...] | None = received.facts
            share = share_of(cast("EpochPlan", plan), step, rank) if facts is None else self._share(facts)
            if received.parts:
                seen.share = share = share._replace(stream=seen.stream)
                yield received.parts[0], share
            else:
                seen.share = seen.share._replace(consumed=share.consumed)
            if share.is_last and plan is None:
                return
            step += 1

    def _steps(
        self, groups: Iterator[tuple[Any, BatchInfo]], plan: EpochPlan | None, seen: Seen
    ) -> Iterator[tuple[list[Any], Any]]:
        """Return the parts of each group, and what the other ranks can't know of it; on rank 0."""
        for content, share in groups:
            rows, valid = share.num_rows or 0, share.num_valid or 0
            seen.stream = share.stream
            if self._dealer.cuts:
                whole = self._cut.plan(rows)
                parts = self._dealer.cut(content, [whole.num_rows(0, rank) for rank in range(whole.size)])
            else:
                parts = cast("list[Any]", content)
            if share.is_last:
                # Sees that the stream doesn't go on where its length says that it ends.
                for _ in groups:
                    pass
            if self._is_whole:
                yield parts, (valid, [rows_of(part) for part in parts], share.is_last, share.consumed)
            else:
                yield parts, None if plan is not None else (valid, None, share.is_last, share.consumed)

    def _share(self, facts: tuple[Any, ...]) -> BatchInfo:
        """Describe this rank's batch by what rank 0 sent."""
        valid, rows, is_last, consumed = facts
        rank, in_step = self._cut.rank, self._cut.in_step
        if rows is not None and not in_step:
            # A rank without a part of the last group may repeat its batch: what it knew of others is over.
            own_rows = rows[rank] if rank < len(rows) else None
            own_valid = None if rank < valid else 0
            return BatchInfo(num_rows=own_rows, own_valid=own_valid, is_last=is_last, consumed=consumed)
        if rows is not None:
            return _share_of_items(rows, valid, rank)._replace(is_last=is_last, consumed=consumed)
        share = share_of(self._cut.plan(valid), 0, rank)
        # Ranks that have no part of the last group go on with what they know of the one before.
        num_valid = share.num_valid if in_step else None
        return share._replace(num_valid=num_valid, is_last=is_last, consumed=consumed)

    def _length(self) -> int | None:
        return length_of(self._source.dataset, self._source.num_workers)


def _share_of_items(rows: Sequence[int | None], valid: int, rank: int) -> BatchInfo:
    """Describe a rank's batch where the samples are batches; the first ``valid`` are no padding."""
    own = rows[rank] if rank < len(rows) else 0
    known = [number for number in rows if number is not None]
    if len(known) < len(rows):
        return BatchInfo(num_rows=own, own_valid=None if rank < valid else 0)
    by_rank = tuple(number if one < valid else 0 for one, number in enumerate(known))
    return BatchInfo(
        num_rows=own,
        max_rows=max(known),
        num_valid=sum(by_rank),
        valid_by_rank=by_rank,
        own_valid=by_rank[rank] if rank < len(by_rank) else 0,
    )


class CollateParts:
    """Collates a group to one batch for each rank."""

    def __init__(self, collate: Callable[[Any], Any], rows: int, is_whole: bool) -> None:
        """Collate ``rows`` samples at a time with ``collate``, or each by itself when ``is_whole``."""
        self._collate = collate
        self._rows = rows
        self._is_whole = is_whole

    def __call__(self, samples: list[Any]) -> list[Any]:
        """Collate."""
        if self._is_whole:
            return [self._collate(sample) for sample in samples]
        starts = range(0, len(samples), self._rows)
        return [self._collate(samples[start : start + self._rows]) for start in starts]
