"""Read a stream, that is an iterable dataset: all ranks the same one, or each rank its own shards."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sized
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from accelfn.context import Context
from accelfn.data.cut import Piece, StreamPlan
from accelfn.data.draws import read_apart
from accelfn.data.grouped import CollatePiece, GroupedStream, tell
from accelfn.data.plan import EpochPlan, rows_in
from accelfn.data.reading import (
    EVENED,
    EVENED_OR_DROPPED,
    BatchInfo,
    EpochPass,
    ReadSettings,
    Resumable,
    UserState,
    rows_of,
    share_of,
)
from accelfn.data.sampled import remake
from accelfn.data.signals import begin_reading
from accelfn.data.sources import count_shards, take_shards
from accelfn.data.stateful import is_stateful, num_workers_of, remake_stateful
from accelfn.data.states import State, StatefulIterator
from accelfn.errors import ConfigurationError

__all__ = ("Seen", "StreamReader", "length_of", "pass_of", "read_stream", "setting_of")

T = TypeVar("T")


class StreamReader(Resumable, Generic[T]):
    """Reads the stream in groups, a piece of each for every rank, or this rank's own stream.

    ``start`` and ``consumed`` count samples of the stream; of an own stream, those of this rank.
    """

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        dataset: Any,
        cut: StreamPlan,
        is_own: bool,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Read ``dataset``, as it is in ``source`` or some shards of it.

        Args:
            ctx: The world.
            source: The user's loader.
            dataset: What is read.
            cut: How it is cut.
            is_own: No other rank reads the same.
            seed: Of randomness in workers.
            collate: Makes a batch of the samples of a piece; None: as ``source`` does.
        """
        self.seed = seed
        self._dataset = dataset
        self._cut = cut
        self._is_own = is_own
        self._is_whole = source.batch_size is None and collate is None
        self._num_workers = source.num_workers
        self.length: int | None = self._length()
        self.batch_size: int | None = None
        if not self._is_whole:
            self.batch_size = cut.rows * (ctx.axis_size("dp") if is_own else cut.size)
        # In shared memory for workers that outlive a pass: they learn of the next one by it.
        self._place = torch.zeros(3, dtype=torch.int64)
        if source.persistent_workers:
            self._place.share_memory_()
        # Weak: what is left of a pass, and its workers with it, ends when nobody goes through it.
        self._to_end: weakref.ref[Generator[Piece, None, None]] | None = None
        rank = ctx.coordinate("dp") if is_own else None
        self.setting: ReadSettings = setting_of(ctx, source, cut.group, is_own)
        # Workers read ahead, so of theirs only torchdata knows which state belongs to a batch.
        self._is_stateful = source.num_workers > 0 and is_stateful(ctx, source)
        follows = source.num_workers == 0 or self._is_stateful
        self._follower = StatefulIterator(dataset) if follows else None
        self._grouped = GroupedStream(dataset, cut, self._place, rank, self._follower)
        self._loader: Any = (remake_stateful if self._is_stateful else remake)(
            source,
            self._grouped,
            collate_fn=CollatePiece(collate or cast("Any", source).collate_fn, self._is_whole),
        )

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
        if self._follower is not None:
            self._follower.rewind()
        tell(self._dataset, epoch)  # shards are another object than the dataset that the loader tells
        self._place.copy_(torch.tensor([self.seed, epoch, start]))
        self.length = self._length()
        plan = self.plan(start)
        own, at = self._take_recalled()
        recalled = own.stream if own.stream is not None and self.can_recall(own.stream) else None
        seen = Seen()
        pieces = self._pieces(recalled, at, start > 0)
        self._to_end = None if self._is_own else weakref.ref(pieces)
        first = start
        if self._is_stateful and recalled is not None:
            first = at
        elif self._num_workers > 1:  # they have read from the stream's start, and say how long each group was
            first = 0
        batches = self._read(pieces, first, start, plan, seen)
        if self._is_own:
            return EpochPass(None, batches, is_own=True)
        return pass_of(batches, self._cut, plan, self._is_whole, seen)

    def can_recall(self, stream: State) -> bool:
        """Return whether the state of a stream is of this kind of loader."""
        if self._is_stateful:
            return num_workers_of(stream) == self._num_workers
        return self._follower is not None and self._follower.can_take(stream)

    def rest(self) -> UserState:
        """Return the state of the stream between passes, where this process reads it."""
        if self._num_workers or self._follower is None:
            return UserState()
        return UserState(stream=self._follower.rest())

    def finish(self) -> None:
        """Let the dataset see its end, for which a loop that knows its length doesn't ask.

        Behind it, the dataset makes itself ready for the next pass, alike on ranks that have read the same.
        """
        left = None if self._to_end is None else self._to_end()
        if left is None or self._num_workers or self._follower is None or not self._follower.has_state:
            return
        for _ in left:
            pass

    def _pieces(self, recalled: State | None, at: int, goes_on: bool) -> Generator[Piece, None, None]:
        if not self._is_stateful:
            self._grouped.recall(recalled, at)
            yield from read_apart(self._loader, is_resumed=goes_on, goes_on=True)
            return
        if recalled is not None:
            self._loader.load_state_dict(recalled)
        pieces: Any = begin_reading(self._loader, goes_on=goes_on)
        for piece in pieces:
            yield piece._replace(stream=pieces.state_dict())

    def _read(
        self, pieces: Iterator[Piece], first: int, start: int, plan: EpochPlan | None, seen: Seen
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
                seen.share = seen.share._replace(consumed=consumed, stream=piece.stream)
                continue
            share = seen.share = self._share(piece, step, plan, consumed)
            yield cast("T", piece.content), share
            step += 1
        if plan is not None and step < plan.num_batches(self._cut.rank):
            raise self._wrong_length(plan, f"ended after {consumed}")
        if consumed < start:
            raise ValueError(
                f"the pass is to go on at sample {start}, and the stream ended after {consumed}. Is it the "
                "stream that the position was taken from?"
            )

    def _share(self, piece: Piece, step: int, plan: EpochPlan | None, consumed: int) -> BatchInfo:
        cut = self._cut
        # Where ranks may end apart, those that have no piece of the last group don't learn of it.
        planned = plan is not None or cut.in_step
        is_last = None
        if plan is not None:
            is_last = step == plan.num_batches(cut.rank) - 1
        elif piece.at_end and self._num_workers <= 1:
            is_last = True
        own_valid = max(0, min(cut.rows, piece.num_valid - cut.rank * cut.rows))
        if self._is_whole:  # how many rows a batch of the user's own has shows in the batch only
            rows = rows_of(piece.content)
            share = BatchInfo(num_rows=rows, own_valid=None if own_valid else 0)
        elif self._is_own:
            share = BatchInfo(num_rows=piece.num_rows)
        else:
            share = BatchInfo(
                num_rows=piece.num_rows,
                max_rows=cut.rows if cut.even else min(cut.rows, piece.num_valid),
                num_valid=piece.num_valid if planned else None,
                own_valid=own_valid,
            )
        if self._is_own:  # that this rank has no more doesn't say that of the others
            is_last = None
        return share._replace(is_last=is_last, consumed=consumed, stream=piece.stream)

    def _length(self) -> int | None:
        """Count the samples that all ranks read."""
        return None if self._is_own else length_of(self._dataset, self._num_workers)

    def _wrong_length(self, plan: EpochPlan, what: str) -> ValueError:
        return ValueError(
            f"the dataset {type(self._dataset).__name__} has a length of {plan.num_samples}, and {what}. Its "
            "__len__ must count what its __iter__ gives; leave it out where it is unknown."
        )


class Seen:
    """What was known last of what is read.

    Attributes:
        share: How far the ranks have come together, whether this one has a batch there or not.
        stream: State of the stream, on the rank that reads it for all.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.share: BatchInfo = BatchInfo()
        self.stream: State | None = None

    def share_at(self, step: int) -> BatchInfo:
        """Report it in a step behind this rank's last."""
        del step
        return self.share


def setting_of(ctx: Context, source: DataLoader[Any], group: int | None, is_own: bool) -> ReadSettings:
    """Return what a place in a stream holds for.

    Args:
        ctx: The world.
        source: The user's loader.
        group: Samples of all that read the stream together, in a step.
        is_own: Each rank has data of its own.
    """
    return ReadSettings(
        num_workers=source.num_workers,
        group=group if source.num_workers > 1 else None,
        num_processes=ctx.axis_size("dp") if is_own else None,
        rank=ctx.coordinate("dp") if is_own else None,
    )


def read_stream(
    ctx: Context, source: DataLoader[T], by_source: bool, agree: Callable[[str], int]
) -> StreamReader[T]:
    """Choose how ``source``, a loader over an iterable dataset, is shared out.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        source: The user's loader.
        by_source: Each rank must get its own shards; otherwise it does where there are enough.
        agree: Compares what all ranks are about to read, and gives them one seed.

    Raises:
        ConfigurationError: Too few shards, the dataset was split already, the batch can't be split, or the
            workers don't keep to an order.
    """
    rank, size = ctx.coordinate("dp"), ctx.axis_size("dp")
    rows = rows_in(ctx.loading, size, source.batch_size)
    dataset: Any = source.dataset
    num_shards = count_shards(dataset)
    if by_source and (num_shards is None or num_shards < size):
        have = "offers none" if num_shards is None else f"has {num_shards}"
        raise ConfigurationError(
            f'sharding="by_source" gives each of {size} ranks its own shards of the dataset, and '
            f"{type(dataset).__name__} {have}. It needs num_shards, at least as many as ranks, and "
            'shard(num_shards, index); otherwise use sharding="global".'
        )
    is_own = size > 1 and num_shards is not None and num_shards >= size
    drop_last = source.drop_last
    if is_own:
        seed = agree(f"{num_shards} shards, {_batches_of(rows, source)}")
        cut = StreamPlan(rows=rows, drop_last=drop_last)
        return StreamReader(ctx, source, take_shards(dataset, rank, size), cut, True, seed)
    if size > 1 and source.num_workers > 1 and not getattr(source, "in_order", True):
        raise ConfigurationError(
            "in_order=False yields batches as workers come by them, and ranks that read one stream must "
            "hand them out in the same order. Use in_order=True, or num_workers=1."
        )
    seed = agree(f"a stream of {length_of(dataset)} samples, {_batches_of(rows, source)}")
    if size > 1 and ctx.is_main_process:
        warnings.warn(
            f"each of {size} ranks reads the whole stream and keeps its part, so the data is read {size} "
            f"times. A dataset that offers num_shards, at least {size}, and shard(num_shards, index) is read "
            'once; one that gives each rank its own part goes with sharding="already_sharded".',
            stacklevel=4,
        )
    even = ctx.loading.even_batches and size > 1  # alone, there is nobody to keep in step with
    cut = StreamPlan(rows=rows, rank=rank, size=size, even=even, drop_last=drop_last)
    return StreamReader(ctx, source, dataset, cut, False, seed)


def _batches_of(rows: int, source: DataLoader[Any]) -> str:
    kind = "batches as they are" if source.batch_size is None else f"batches of {rows} a rank"
    last = ", the last one dropped" if source.drop_last else ""
    return f"{kind}{last}, by {source.num_workers} workers"


def pass_of(
    batches: Iterator[tuple[T, BatchInfo]],
    cut: StreamPlan,
    plan: EpochPlan | None,
    is_whole: bool,
    seen: Seen,
) -> EpochPass[T]:
    """Make a pass of the batches of a stream that all ranks read.

    Args:
        batches: Of the rank of ``cut``.
        cut: How the stream is cut.
        plan: Where the stream has a length.
        is_whole: Each sample is a batch, whose rows nobody has planned.
        seen: Kept up as the batches are read.
    """
    counts = None if plan is None else plan.counts
    evened_by = EVENED if is_whole else EVENED_OR_DROPPED
    share_at = seen.share_at
    if plan is not None:
        share_at = functools.partial(_planned_share, plan, cut.rank, is_whole, seen)
    return EpochPass(counts, batches, in_step=cut.in_step, share_at=share_at, evened_by=evened_by)


def _planned_share(plan: EpochPlan, rank: int, is_whole: bool, seen: Seen, step: int) -> BatchInfo:
    share = BatchInfo(consumed=plan.consumed(step)) if is_whole else share_of(plan, step, rank)
    return share._replace(stream=seen.share.stream)


def length_of(dataset: Any, num_workers: int = 0) -> int | None:
    """Count the samples of a stream; None where nobody can say: several workers may each cut theirs short."""
    if num_workers > 1:
        return None
    try:
        return len(cast("Sized", dataset))
    except (TypeError, NotImplementedError):
        return None
