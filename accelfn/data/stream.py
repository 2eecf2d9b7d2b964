"""Read a stream (an iterable dataset): every rank the same, rank 0 for all, or each rank its own shards."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from accelfn.comm import failing_together
from accelfn.comm.objects import ObjectScatter
from accelfn.context import Context
from accelfn.data.dispatch import SliceFunction, scatter_batches, split_step, splits_steps
from accelfn.data.draws import read_isolated
from accelfn.data.groups import CollatePiece, GroupedStream, Piece, stream_ended
from accelfn.data.order import set_epoch_of
from accelfn.data.plan import BatchInfo, EpochPlan, plan_epoch
from accelfn.data.reader import (
    EVEN_BATCHES,
    EVEN_OR_DROP_LAST,
    EpochPass,
    PassStart,
    Reader,
    ReadSettings,
    UserState,
    length_of,
    rows_of,
    with_actual_rows,
)
from accelfn.data.rebuild import keeps_states, remake
from accelfn.data.states import State, TrackedStream, count_shards, select_shards
from accelfn.data.workers import begin_reading
from accelfn.errors import ConfigurationError

__all__ = ("StreamDispatch", "StreamReader", "read_stream")

T = TypeVar("T")


def read_stream(
    ctx: Context, source: DataLoader[T], by_source: bool, slice_fn: SliceFunction | None
) -> Reader[T]:
    """Return the reader of ``source``, a loader over an iterable dataset.

    Args:
        ctx: The world.
        source: The user's loader.
        by_source: Require shards for each rank; otherwise they are used if there are enough.
        slice_fn: As for :func:`accelfn.prepare_data_loader`.

    Raises:
        ConfigurationError: There are too few shards, the dataset was already split, the number of ranks
            doesn't divide the batch, or the workers return batches out of order.
    """
    size, dispatches = ctx.axis_size("dp"), ctx.loading.dispatch_batches
    plan = plan_epoch(  # of unknown length; if the loader makes no batches, each of its items is a sample
        0,
        source.batch_size or 1,
        size,
        split_batches=ctx.loading.split_batches,
        even_batches=ctx.loading.even_batches,
        drop_last=source.drop_last,
    )
    dataset: Any = source.dataset
    num_shards = count_shards(dataset)
    kind = "unsplit batches" if source.batch_size is None else f"batches of {plan.rank_batch} per rank"
    what = f"{kind}{', dropping the last' if source.drop_last else ''}, by {source.num_workers} workers"
    if by_source and (num_shards is None or num_shards < size):
        have = "no shards" if num_shards is None else f"{num_shards} shard{'' if num_shards == 1 else 's'}"
        raise ConfigurationError(
            f'sharding="by_source" reads different shards on each of {size} ranks, but '
            f"{type(dataset).__name__} has {have}. It needs num_shards, at least as many as ranks, and "
            'shard(num_shards, index); otherwise use sharding="global".'
        )
    if size > 1 and num_shards is not None and num_shards >= size and not dispatches:
        shards = select_shards(dataset, ctx.coordinate("dp"), size)
        own = StreamReader(ctx, source, shards, replace(plan, size=1, even=False), True)
        own.what = f"{num_shards} shards, {what}"
        return own
    if dispatches:
        dispatched = StreamDispatch(ctx, source, plan, slice_fn)
        dispatched.what = f"a stream of {dispatched.length} samples, dispatched by rank 0: {what}"
        return dispatched
    if size > 1 and source.num_workers > 1 and not getattr(source, "in_order", True):
        raise ConfigurationError(
            "in_order=False yields batches in the order in which workers finish them, but ranks that share a "
            "stream need the same order. Use in_order=True, or num_workers=1."
        )
    if size > 1 and ctx.is_main_process:
        warnings.warn(
            f"each of {size} ranks reads the full stream and keeps its part, so the data is read {size} "
            f"times. To read it once, give the dataset num_shards (at least {size}) and shard(num_shards, "
            'index), or give each rank its own part and use sharding="already_sharded".',
            stacklevel=5,
        )
    reader = StreamReader(ctx, source, dataset, plan, False)
    reader.what = f"a stream of {length_of(dataset)} samples, {what}"
    return reader


class _Stream(Reader[T]):
    """Base of the readers of streams. ``start`` and ``consumed`` count samples of the stream."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        dataset: Any,
        plan: EpochPlan,
        is_rank_local: bool,
    ) -> None:
        self._dataset = dataset
        self._plan = plan  # of unknown length
        self._rank = ctx.coordinate("dp") if plan.size > 1 else 0
        # Of this rank's batch of a full group.
        self._full_info = replace(plan, num_samples=plan.global_batch).batch_info(0, self._rank)
        self._is_rank_local = is_rank_local
        self._unbatched = source.batch_size is None
        self._num_workers = source.num_workers
        # The facts of the latest step of all ranks, even if this rank had no batch in it.
        self._latest = BatchInfo()
        self.length: int | None = self._length()
        group = plan.global_batch if source.num_workers > 1 else None
        size, rank = (ctx.axis_size("dp"), ctx.coordinate("dp")) if is_rank_local else (None, None)
        self.settings: ReadSettings = ReadSettings(source.num_workers, group, size, rank)

    def plan(self, start: int) -> EpochPlan | None:
        """Plan the samples from ``start`` on, if the stream has a length.

        Raises:
            ValueError: ``start`` is after its end.
        """
        number = self._length()
        if number is None:
            return None
        if start > number:
            raise ValueError(f"can't resume at sample {start}: the dataset has only {number} samples.")
        return replace(self._plan, num_samples=number, start=start)

    def _length(self) -> int | None:
        """Return the number of samples that all ranks read together, if known."""
        # Unknown with several workers, each of which may end its part early.
        return None if self._is_rank_local or self._num_workers > 1 else length_of(self._dataset)

    def _pass(self, batches: Iterator[tuple[T, BatchInfo]], plan: EpochPlan | None) -> EpochPass[T]:
        """Return a pass over ``batches``."""
        if self._is_rank_local:
            return EpochPass(None, batches, is_rank_local=True)
        return EpochPass(
            None if plan is None else plan.counts,
            batches,
            in_step=self._plan.in_step,
            info_at=functools.partial(self._info_at, plan),
            remedies=EVEN_BATCHES if self._unbatched else EVEN_OR_DROP_LAST,
        )

    def _info_at(self, plan: EpochPlan | None, step: int) -> BatchInfo:
        """Return the BatchInfo of a step in which this rank may have no batch."""
        if plan is None:
            return self._latest
        info = (
            BatchInfo(consumed=plan.consumed(step)) if self._unbatched else plan.batch_info(step, self._rank)
        )
        return info._replace(stream=self._latest.stream)

    def _info(
        self,
        content: Any,
        num_valid: int,
        is_last: bool | None,
        consumed: int,
        step: int,
        plan: EpochPlan | None,
    ) -> BatchInfo:
        """Return the BatchInfo of this rank's batch of a group of ``num_valid`` samples."""
        info = self._full_info
        if num_valid < self._plan.global_batch:
            info = replace(self._plan, num_samples=num_valid).batch_info(0, self._rank)
        if self._is_rank_local:
            # is_last stays unknown: the other ranks' streams may be longer.
            num_rows = rows_of(content) if self._unbatched else info.own_valid
            return BatchInfo(num_rows=num_rows, consumed=consumed)
        if plan is not None:
            is_last = step == plan.num_batches(self._rank) - 1
        info = info._replace(is_last=is_last, consumed=consumed)
        if self._unbatched:
            return with_actual_rows(content, info)
        # If ranks may end at different steps, those without a piece of the last group don't see its size.
        is_known = plan is not None or self._plan.in_step
        return info if is_known else info._replace(num_valid=None)


class StreamReader(_Stream[T]):
    """Reads the stream in groups, and yields this rank's piece of each; or reads this rank's own stream."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        dataset: Any,
        plan: EpochPlan,
        is_rank_local: bool,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Read ``dataset``, which is that of ``source`` or some shards of it.

        Args:
            ctx: The world.
            source: The user's loader.
            dataset: The stream to read.
            plan: Divides each group among the ranks; of unknown length.
            is_rank_local: No other rank reads this stream.
            collate: Makes a batch from the samples of a piece; None for that of ``source``.
        """
        super().__init__(ctx, source, dataset, plan, is_rank_local)
        self._unbatched = source.batch_size is None and collate is None
        if not self._unbatched:
            self.batch_size: int | None = plan.rank_batch * (
                ctx.axis_size("dp") if is_rank_local else plan.size
            )
        # In shared memory for persistent workers, which read the next pass's epoch and start from it.
        self._position = torch.zeros(3, dtype=torch.int64, device="cpu")
        if source.persistent_workers:
            self._position.share_memory_()
        # Weak: a pass that was left early, and its workers, must end when the loop drops its iterator.
        self._unfinished: weakref.ref[Generator[Piece, None, None]] | None = None
        self._tracked = TrackedStream(dataset, source.num_workers, keeps_states(ctx, source))
        self._grouped = GroupedStream(
            self._tracked,
            plan,
            self._rank,
            self._position,
            ctx.coordinate("dp") if is_rank_local else None,
        )
        self._loader: Any = remake(
            source,
            self._grouped,
            stateful=self._tracked.of_workers,
            collate_fn=CollatePiece(collate or cast("Any", source).collate_fn, self._unbatched),
        )

    def begin(self, at: PassStart) -> EpochPass[T]:
        """Begin a pass."""
        start, restored = at.sample, at.states.stream
        self._tracked.rewind()
        set_epoch_of(self._dataset, at.epoch)  # shards are another object than the loader's dataset
        self._position.copy_(torch.tensor([self.seed, at.epoch, start], device="cpu"))
        self.length: int | None = self._length()
        plan = self.plan(start)
        self._latest = BatchInfo()
        pieces = self._pieces(restored, at.states_at, start > 0)
        self._unfinished = None if self._is_rank_local else weakref.ref(pieces)
        first = start
        if self._tracked.of_workers and restored is not None:
            first = at.states_at
        elif self._num_workers > 1:  # they read from the stream's start, and this process counts their groups
            first = 0
        return self._pass(self._read(pieces, first, start, plan), plan).after(at.num_skipped)

    def can_restore(self, stream: State) -> bool:
        """Return whether a stream's state belongs to this kind of loader."""
        return self._tracked.can_restore(stream)

    def idle_state(self) -> UserState:
        """Return the state of the stream between passes, if this process reads it."""
        return UserState(stream=self._tracked.idle_state())

    def finish(self) -> None:
        """Exhaust a stateful dataset's iterator, since a loop that knows its length stops before its end.

        At its end the dataset prepares for the next pass, in the same way on all ranks that read it.
        """
        pieces = None if self._unfinished is None else self._unfinished()
        if pieces is not None and not self._num_workers and self._tracked.has_state:
            for _ in pieces:
                pass

    def _pieces(self, restored: State | None, at: int, is_resumed: bool) -> Generator[Piece, None, None]:
        if not self._tracked.of_workers:
            self._grouped.restore(restored, at)
            yield from read_isolated(self._loader, is_resumed=is_resumed, continues=True)
            return
        if restored is not None:
            self._loader.load_state_dict(restored)
        pieces: Any = begin_reading(self._loader, is_resumed=is_resumed)
        for piece in pieces:
            yield piece._replace(stream=pieces.state_dict())

    def _read(
        self, pieces: Iterator[Piece], first: int, start: int, plan: EpochPlan | None
    ) -> Iterator[tuple[T, BatchInfo]]:
        """Yield the batches of ``pieces``, which begin at sample ``first``, from sample ``start`` on."""
        consumed = first
        step = 0
        for piece in pieces:
            before, consumed = consumed, consumed + piece.num_valid
            if before < start < consumed:
                raise ConfigurationError(
                    f"can't resume at sample {start}, which is within a group that one of "
                    f"{self._num_workers} workers reads: samples {before} to {consumed - 1}. Resume with the "
                    "same batch size and numbers of ranks and workers, or with num_workers=1."
                )
            if plan is not None and consumed > plan.num_samples:
                raise self._wrong_length(plan, "yields more")
            if plan is not None and piece.at_end and consumed < plan.num_samples:
                raise self._wrong_length(plan, f"ended after {consumed}")
            if consumed <= start:
                continue
            if not piece.num_rows:
                self._latest = self._latest._replace(consumed=consumed, stream=piece.stream)
                continue
            is_last = True if piece.at_end and self._num_workers <= 1 else None
            info = self._info(piece.content, piece.num_valid, is_last, consumed, step, plan)
            self._latest = info = info._replace(stream=piece.stream)
            yield cast("T", piece.content), info
            step += 1
        if plan is not None and step < plan.num_batches(self._rank):
            raise self._wrong_length(plan, f"ended after {consumed}")
        if consumed < start:
            raise stream_ended(start, consumed)

    def _wrong_length(self, plan: EpochPlan, what: str) -> ValueError:
        return ValueError(
            f"the dataset {type(self._dataset).__name__} has length {plan.num_samples}, but {what}. Its "
            "__len__ must return what its __iter__ yields; omit __len__ if that is unknown."
        )


class StreamDispatch(_Stream[T]):
    """Rank 0 reads the stream in groups, and sends each rank its part of each group."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        plan: EpochPlan,
        slice_fn: SliceFunction | None,
    ) -> None:
        """Read ``source``; ``plan`` divides each group among the ranks."""
        super().__init__(ctx, source, source.dataset, plan, False)
        self.batch_size: int | None = None if self._unbatched else plan.global_batch
        self._ctx = ctx
        self._slice_fn = slice_fn
        self._reader: Reader[Any] = Reader()  # without data, on the other ranks
        if ctx.is_main_process:
            collate: Any = cast("Any", source).collate_fn
            if not splits_steps(ctx, slice_fn):
                collate = functools.partial(_collate_parts, collate, plan.rank_batch, self._unbatched)
            # For this reader, a group is one batch of a world of one.
            self._reader = StreamReader(
                ctx, source, source.dataset, plan.of_one_rank(), False, collate=collate
            )

    def begin(self, at: PassStart) -> EpochPass[T]:
        """Begin a pass."""
        self.length: int | None = self._length()
        plan = self.plan(at.sample)
        self._latest = BatchInfo()
        steps: Iterator[tuple[list[Any], Any]] | None = None
        if self._ctx.is_main_process:
            self._reader.seed = self.seed
            steps = self._steps(self._reader.begin(at._replace(num_skipped=0)).batches)
        scatter = scatter_batches(self._ctx, f"epoch {at.epoch} from sample {at.sample}")
        return self._pass(self._read(scatter, steps, plan), plan).after(at.num_skipped)

    def can_restore(self, stream: State) -> bool:
        """Return whether a stream's state belongs to this kind of loader; False on all ranks but 0."""
        return self._reader.can_restore(stream)

    def idle_state(self) -> UserState:
        """Return the state of the stream between passes; empty on all ranks but 0."""
        return self._reader.idle_state()

    def finish(self) -> None:
        """Exhaust the dataset's iterator, on rank 0."""
        self._reader.finish()

    def _read(
        self,
        scatter: ObjectScatter,
        steps: Iterator[tuple[list[Any], Any]] | None,
        plan: EpochPlan | None,
    ) -> Iterator[tuple[T, BatchInfo]]:
        step = 0
        if plan is not None and not plan.num_steps:  # resumed at its end, whose state the stream gets so
            with failing_together(self._ctx, "a data loader"):
                for _ in steps or ():
                    pass
        while plan is None or step < plan.num_steps:
            received = scatter.exchange(steps)
            if received is None:
                return
            parts, (num_valid, is_last, consumed) = received
            stream = self._latest.stream
            if parts:
                info = self._info(parts[0], num_valid, is_last, consumed, step, plan)
                self._latest = info = info._replace(stream=stream)
                yield parts[0], info
            else:
                self._latest = self._latest._replace(consumed=consumed)
            if is_last and plan is None:
                return
            step += 1

    def _steps(
        self, groups: Iterator[tuple[Any, BatchInfo]]
    ) -> Iterator[tuple[list[Any], tuple[int, bool | None, int]]]:
        """Yield the parts of each group, with num_valid, is_last and consumed; on rank 0."""
        for content, info in groups:
            parts: list[Any] = content
            if splits_steps(self._ctx, self._slice_fn):
                group = replace(self._plan, num_samples=info.num_rows or 0)
                rows = [group.num_rows(0, rank) for rank in range(group.size)]
                parts = split_step(content, rows, self._slice_fn)
            self._latest = self._latest._replace(stream=info.stream)
            if info.is_last:
                # Checks that the stream ends where its length says.
                for _ in groups:
                    pass
            yield parts, (info.num_valid or 0, info.is_last, info.consumed)


def _collate_parts(
    collate: Callable[[Any], Any], rows: int, unbatched: bool, samples: Sequence[Any]
) -> list[Any]:
    """Collate a group into one batch for each rank."""
    if unbatched:
        return [collate(sample) for sample in samples]
    return [collate(samples[start : start + rows]) for start in range(0, len(samples), rows)]
