"""Read a stream (an iterable dataset): all ranks the same one, rank 0 for all, or each its own shards."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from accelfn.context import Context
from accelfn.data.dispatch import BatchSplitter, SliceFunction, hand_out
from accelfn.data.draws import read_apart
from accelfn.data.groups import CollatePiece, GroupedStream, Piece, stream_ended
from accelfn.data.order import tell
from accelfn.data.plan import BatchInfo, EpochPlan, plan_stream
from accelfn.data.reader import (
    EVENED,
    EVENED_OR_DROPPED,
    EpochPass,
    Reader,
    ReadSettings,
    StreamStates,
    UserState,
    length_of,
    rows_of,
)
from accelfn.data.rebuild import remake
from accelfn.data.scatter import BatchScatter
from accelfn.data.states import State, count_shards, take_shards
from accelfn.data.workers import begin_reading
from accelfn.errors import ConfigurationError

__all__ = ("StreamDispatch", "StreamReader", "read_stream")

T = TypeVar("T")


def read_stream(
    ctx: Context,
    source: DataLoader[T],
    by_source: bool,
    slice_fn: SliceFunction | None,
    agree: Callable[[str], int],
) -> Reader[T]:
    """Choose how ``source``, a loader over an iterable dataset, is sharded.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        source: The user's loader.
        by_source: Each rank must get its own shards; otherwise it does where there are enough.
        slice_fn: As for :func:`accelfn.prepare_data_loader`.
        agree: Compares what all ranks are about to read, and returns one seed.

    Raises:
        ConfigurationError: Too few shards, the dataset was split already, the batch can't be split, or the
            workers don't keep to an order.
    """
    size, dispatches = ctx.axis_size("dp"), ctx.loading.dispatch_batches
    plan = plan_stream(ctx.loading, size, source.batch_size, source.drop_last)
    dataset: Any = source.dataset
    num_shards = count_shards(dataset)
    kind = "batches as they are" if source.batch_size is None else f"batches of {plan.rank_batch} a rank"
    what = f"{kind}{', the last one dropped' if source.drop_last else ''}, by {source.num_workers} workers"
    if by_source and (num_shards is None or num_shards < size):
        have = "offers none" if num_shards is None else f"has {num_shards}"
        raise ConfigurationError(
            f'sharding="by_source" gives each of {size} ranks its own shards of the dataset, and '
            f"{type(dataset).__name__} {have}. It needs num_shards, at least as many as ranks, and "
            'shard(num_shards, index); otherwise use sharding="global".'
        )
    if size > 1 and num_shards is not None and num_shards >= size and not dispatches:
        seed = agree(f"{num_shards} shards, {what}")
        own = take_shards(dataset, ctx.coordinate("dp"), size)
        return StreamReader(ctx, source, own, replace(plan, size=1, even=False), True, seed)
    if dispatches:
        length = None if source.num_workers > 1 else length_of(dataset)
        seed = agree(f"a stream of {length} samples, dispatched by rank 0: {what}")
        return StreamDispatch(ctx, source, plan, seed, slice_fn)
    if size > 1 and source.num_workers > 1 and not getattr(source, "in_order", True):
        raise ConfigurationError(
            "in_order=False yields batches as workers come by them, and ranks that read one stream must "
            "hand them out in the same order. Use in_order=True, or num_workers=1."
        )
    seed = agree(f"a stream of {length_of(dataset)} samples, {what}")
    if size > 1 and ctx.is_main_process:
        warnings.warn(
            f"each of {size} ranks reads the whole stream and keeps its part, so the data is read {size} "
            f"times. A dataset that offers num_shards, at least {size}, and shard(num_shards, index) is read "
            'once; one that gives each rank its own part goes with sharding="already_sharded".',
            stacklevel=4,
        )
    return StreamReader(ctx, source, dataset, plan, False, seed)


class _Stream(Reader[T]):
    """What readers of a stream have in common. ``start`` and ``consumed`` count samples of it."""

    def __init__(
        self, ctx: Context, source: DataLoader[T], dataset: Any, plan: EpochPlan, is_own: bool, seed: int
    ) -> None:
        self.seed = seed
        self._dataset = dataset
        self._plan = plan  # of unknown length
        self._rank = ctx.coordinate("dp") if plan.size > 1 else 0
        self._is_own = is_own
        self._is_whole = source.batch_size is None
        self._num_workers = source.num_workers
        # How far the ranks have come together, whether this one has a batch there or not.
        self._latest = BatchInfo()
        self.length: int | None = self._length()
        self.settings: ReadSettings = ReadSettings(
            num_workers=source.num_workers,
            group=plan.global_batch if source.num_workers > 1 else None,
            num_processes=ctx.axis_size("dp") if is_own else None,
            rank=ctx.coordinate("dp") if is_own else None,
        )

    def plan(self, start: int) -> EpochPlan | None:
        """Plan the samples from ``start`` on, where the stream has a length.

        Raises:
            ValueError: ``start`` is behind its end.
        """
        number = self._length()
        if number is None:
            return None
        if start > number:
            raise ValueError(f"the pass is to go on at sample {start}, and the dataset has only {number}.")
        return replace(self._plan, num_samples=number, start=start)

    def count(self) -> int | None:
        """Count this rank's batches, where the stream has a length."""
        plan = self.plan(0)
        return None if plan is None else plan.num_batches(self._rank)

    def _length(self) -> int | None:
        """Count the samples that all ranks read."""
        # Nobody can say of several workers: each may cut its part short.
        return None if self._is_own or self._num_workers > 1 else length_of(self._dataset)

    def _pass(self, batches: Iterator[tuple[T, BatchInfo]], plan: EpochPlan | None) -> EpochPass[T]:
        """Make a pass of ``batches``."""
        if self._is_own:
            return EpochPass(None, batches, is_own=True)
        return EpochPass(
            None if plan is None else plan.counts,
            batches,
            in_step=self._plan.in_step,
            info_at=functools.partial(self._info_at, plan),
            evened_by=EVENED if self._is_whole else EVENED_OR_DROPPED,
        )

    def _info_at(self, plan: EpochPlan | None, step: int) -> BatchInfo:
        """Describe a step in which this rank may have no batch."""
        if plan is None:
            return self._latest
        info = (
            BatchInfo(consumed=plan.consumed(step)) if self._is_whole else plan.batch_info(step, self._rank)
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
        """Describe this rank's batch of a group of ``num_valid`` samples."""
        rank, rows, even = self._rank, self._plan.rank_batch, self._plan.even
        own_valid = max(0, min(rows, num_valid - rank * rows))
        if self._is_own:
            # That a rank with a stream of its own has no more doesn't say that of the others.
            num_rows = rows_of(content) if self._is_whole else own_valid
            return BatchInfo(num_rows=num_rows, consumed=consumed)
        if plan is not None:
            is_last = step == plan.num_batches(rank) - 1
        if self._is_whole:  # how many rows a batch of the user's own has shows in the batch only
            padding = None if own_valid else 0
            return BatchInfo(rows_of(content), own_valid=padding, is_last=is_last, consumed=consumed)
        return BatchInfo(
            num_rows=rows if even else own_valid,
            max_rows=rows if even else min(rows, num_valid),
            # Where ranks may end apart, those that have no piece of the last group don't learn of it.
            num_valid=num_valid if plan is not None or self._plan.in_step else None,
            own_valid=own_valid,
            is_last=is_last,
            consumed=consumed,
        )


class StreamReader(_Stream[T]):
    """Reads the stream in groups, a piece of each for every rank, or this rank's own stream."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        dataset: Any,
        plan: EpochPlan,
        is_own: bool,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Read ``dataset``, as it is in ``source`` or some shards of it.

        Args:
            ctx: The world.
            source: The user's loader.
            dataset: What is read.
            plan: How it is shared out; its length is unknown.
            is_own: No other rank reads the same.
            seed: Of randomness in workers.
            collate: Makes a batch of the samples of a piece; None: as ``source`` does.
        """
        super().__init__(ctx, source, dataset, plan, is_own, seed)
        self._is_whole = source.batch_size is None and collate is None
        if not self._is_whole:
            self.batch_size: int | None = plan.rank_batch * (ctx.axis_size("dp") if is_own else plan.size)
        # In shared memory for workers that outlive a pass: they learn of the next one by it.
        self._place = torch.zeros(3, dtype=torch.int64)
        if source.persistent_workers:
            self._place.share_memory_()
        # Weak: what is left of a pass, and its workers with it, ends when nobody goes through it.
        self._to_end: weakref.ref[Generator[Piece, None, None]] | None = None
        self._states = StreamStates(ctx, source, dataset)
        self._grouped = GroupedStream(
            self._states.follower, plan, self._rank, self._place, ctx.coordinate("dp") if is_own else None
        )
        self._loader: Any = remake(
            source,
            self._grouped,
            stateful=self._states.of_workers,
            collate_fn=CollatePiece(collate or cast("Any", source).collate_fn, self._is_whole),
        )

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass."""
        self._states.follower.rewind()
        tell(self._dataset, epoch)  # shards are another object than the dataset that the loader tells
        self._place.copy_(torch.tensor([self.seed, epoch, start]))
        self.length: int | None = self._length()
        plan = self.plan(start)
        own, at = self._take_recalled()
        recalled = own.stream if own.stream is not None and self.can_recall(own.stream) else None
        self._latest = BatchInfo()
        pieces = self._pieces(recalled, at, start > 0)
        self._to_end = None if self._is_own else weakref.ref(pieces)
        first = start
        if self._states.of_workers and recalled is not None:
            first = at
        elif self._num_workers > 1:  # they have read from the stream's start, and say how long each group was
            first = 0
        return self._pass(self._read(pieces, first, start, plan), plan)

    def can_recall(self, stream: State) -> bool:
        """Return whether the state of a stream is of this kind of loader."""
        return self._states.can_recall(stream)

    def rest(self) -> UserState:
        """Return the state of the stream between passes, where this process reads it."""
        return UserState(stream=self._states.rest())

    def finish(self) -> None:
        """Let the dataset see its end, for which a loop that knows its length doesn't ask.

        Behind it, the dataset makes itself ready for the next pass, alike on ranks that have read the same.
        """
        left = None if self._to_end is None else self._to_end()
        if left is not None and not self._num_workers and self._states.follower.has_state:
            for _ in left:
                pass

    def _pieces(self, recalled: State | None, at: int, goes_on: bool) -> Generator[Piece, None, None]:
        if not self._states.of_workers:
            self._grouped.recall(recalled, at)
            yield from read_apart(self._loader, is_resumed=goes_on, goes_on=True)
            return
        if recalled is not None:
            self._loader.load_state_dict(recalled)
        pieces: Any = begin_reading(self._loader, goes_on=goes_on)
        for piece in pieces:
            yield piece._replace(stream=pieces.state_dict())

    def _read(
        self, pieces: Iterator[Piece], first: int, start: int, plan: EpochPlan | None
    ) -> Iterator[tuple[T, BatchInfo]]:
        """Return the batches of ``pieces``, which begin at sample ``first``, from sample ``start`` on."""
        consumed = first
        step = 0
        for piece in pieces:
            before, consumed = consumed, consumed + piece.num_valid
            if before < start < consumed:
                raise ConfigurationError(
                    f"the pass is to go on at sample {start}, which is inside of a group that one of "
                    f"{self._num_workers} workers reads: samples {before} to {consumed - 1}. Go on with the "
                    "same batch size and as many ranks and workers as before, or with num_workers=1."
                )
            if plan is not None and consumed > plan.num_samples:
                raise self._wrong_length(plan, "gives more")
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
            f"the dataset {type(self._dataset).__name__} has a length of {plan.num_samples}, and {what}. Its "
            "__len__ must count what its __iter__ gives; leave it out where it is unknown."
        )


class StreamDispatch(_Stream[T]):
    """Rank 0 reads the stream in groups, and each rank receives its part of each."""

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        plan: EpochPlan,
        seed: int,
        slice_fn: SliceFunction | None,
    ) -> None:
        """Read ``source``; ``plan`` says what each rank gets of it."""
        super().__init__(ctx, source, source.dataset, plan, False, seed)
        self.batch_size: int | None = None if self._is_whole else plan.global_batch
        self._ctx = ctx
        self._splitter = BatchSplitter(ctx, slice_fn)
        self._reader: Reader[Any] = Reader()  # which reads nothing
        if ctx.is_main_process:
            collate: Any = cast("Any", source).collate_fn
            if not self._splitter.cuts:
                collate = functools.partial(_collate_parts, collate, plan.rank_batch, self._is_whole)
            # To the reader, a group is one batch of a world of one.
            self._reader = StreamReader(
                ctx, source, source.dataset, plan.of_one_rank(), False, seed, collate=collate
            )

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass."""
        self.length: int | None = self._length()
        plan = self.plan(start)
        self._latest = BatchInfo()
        own, at = self._take_recalled()
        steps: Iterator[tuple[list[Any], Any]] | None = None
        if self._ctx.is_main_process:
            self._reader.seed = self.seed
            self._reader.recall(own, at)
            steps = self._steps(self._reader.begin(epoch, start).batches)
        scatter = BatchScatter(self._ctx, f"epoch {epoch} from sample {start}")
        return self._pass(self._read(scatter, steps, plan), plan)

    def can_recall(self, stream: State) -> bool:
        """Return whether the state of a stream is of this kind of loader; rank 0 alone has one."""
        return self._reader.can_recall(stream)

    def rest(self) -> UserState:
        """Return the state of the stream between passes; on rank 0."""
        return self._reader.rest()

    def finish(self) -> None:
        """Let the dataset see its end; on rank 0."""
        self._reader.finish()

    def _read(
        self,
        scatter: BatchScatter,
        steps: Iterator[tuple[list[Any], Any]] | None,
        plan: EpochPlan | None,
    ) -> Iterator[tuple[T, BatchInfo]]:
        step = 0
        while plan is None or step < plan.num_steps:
            received = hand_out(scatter, steps)
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
        """Return the parts of each group, and what the other ranks can't know of it; on rank 0."""
        for content, info in groups:
            parts: list[Any] = content
            if self._splitter.cuts:
                group = replace(self._plan, num_samples=info.num_rows or 0)
                parts = self._splitter.cut(content, [group.num_rows(0, rank) for rank in range(group.size)])
            self._latest = self._latest._replace(stream=info.stream)
            if info.is_last:
                # Sees that the stream doesn't go on where its length says that it ends.
                for _ in groups:
                    pass
            yield parts, (info.num_valid or 0, info.is_last, info.consumed)


def _collate_parts(
    collate: Callable[[Any], Any], rows: int, is_whole: bool, samples: Sequence[Any]
) -> list[Any]:
    """Collate a group to one batch for each rank."""
    if is_whole:
        return [collate(sample) for sample in samples]
    return [collate(samples[start : start + rows]) for start in range(0, len(samples), rows)]
