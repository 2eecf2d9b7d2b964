"""The passes over a prepared loader: their position, and where the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from accelfn.comm import failing_together, synchronize_rng_states
from accelfn.context import Context
from accelfn.context.call_log import OpenRead
from accelfn.data.order import set_epoch_of
from accelfn.data.placement import placer
from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.reader import EpochPass, PassStart, Reader, UserState
from accelfn.data.resume import LoaderState, check_state
from accelfn.data.sequence import sequence_sharder
from accelfn.data.workers import explain_dead_workers

__all__ = ("Passes", "Position")

T = TypeVar("T")


class Position:
    """The position in the data that loaders over the same passes share."""

    def __init__(self) -> None:
        """Start at the first epoch."""
        self.epoch = 0  # of the pass that is in progress or was left early, otherwise of the next pass
        self.start = 0  # sample at which the next pass begins
        self.latest: BatchInfo = BatchInfo()  # of the batch yielded last: how far all ranks have read
        self.in_progress = False  # whether a pass is in progress, or was left early
        self.user_state: UserState = UserState()  # when the current pass began, or to restore
        self.is_restored = False  # whether user_state was restored, and no pass has started since
        self.num_moves = 0  # number of calls of move_to
        self.num_begun = 0  # number of passes that have begun
        self.has_seed = False  # whether the seed of the order is fixed
        self.held: LoaderState | None = None  # the position of a loop that reads ahead of what it yields


class Passes(Generic[T]):
    """The passes that a prepared loader makes over its data.

    Attributes:
        context: The context that the loader was prepared with.
        source: The user's DataLoader, or one over the user's iterable.
        reader: Reads the data.
        position: How far the ranks have read.
    """

    def __init__(
        self, ctx: Context, source: DataLoader[T], reader: Reader[T], agree_on_seed: Callable[[], int]
    ) -> None:
        """Read ``source`` with ``reader``.

        Args:
            ctx: The world.
            source: The user's loader.
            reader: Reads its data.
            agree_on_seed: Returns the seed of the order on all ranks, when the first pass begins.
        """
        self.context = ctx
        self.source = source
        self.reader = reader
        self._agree_on_seed = agree_on_seed
        self.position: Position = Position()
        self.position.has_seed = ctx.loading.data_seed is not None
        self._num_skipped = 0  # batches that each pass skips
        self._skips_since: int | None = None  # num_moves when skipping was requested

    def skipping(self, num_batches: int) -> Passes[T]:
        """Return the same passes without their first batches; both share their epoch and position."""
        twin = Passes(self.context, self.source, self.reader, self._agree_on_seed)
        twin.position = self.position
        twin._num_skipped = self._num_skipped + num_batches
        twin._skips_since = self.position.num_moves
        return twin

    @property
    def epoch(self) -> int:
        """Epoch of the pass that is in progress or was left early, otherwise of the next pass."""
        return self.position.epoch

    @property
    def next_epoch(self) -> int:
        """Epoch of the next pass: that of the position, unless a pass over it was left early."""
        return self.position.epoch + self.position.in_progress

    def state(self) -> LoaderState:
        """Return the position; see :func:`accelfn.loader_state`."""
        return self.position.held or self._read_position()

    def hold(self) -> None:
        """Keep the position of the batch read last as the state, while a loop reads ahead of it.

        Until another call, a pass that begins, a position that is set, or ``position.held`` is None again.
        """
        self.position.held = self._read_position()

    def _read_position(self) -> LoaderState:
        position, reader = self.position, self.reader
        uses_stored = position.in_progress or position.is_restored
        user_state = position.user_state if uses_stored else reader.idle_state()
        return LoaderState(
            epoch=position.epoch,
            consumed=position.latest.consumed,
            seed=reader.seed,
            length=reader.length,
            sampler=user_state.sampler,
            stream=position.latest.stream or user_state.stream,
            **reader.settings._asdict(),
        )

    def go_to(self, state: LoaderState) -> None:
        """Begin the next pass where ``state`` was taken; see :func:`accelfn.restore_loader`."""
        reader, stream = self.reader, state.stream
        can_restore = stream is not None and reader.can_restore(stream)
        if not check_state(state, reader.length, reader.settings, can_restore):
            stream = None  # the position is reached by reading up to it
        self.move_to(state.epoch, state.consumed, state.seed, UserState(state.sampler, stream))
        self.context.collectives.call_log.resumed[self] = None

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next pass, from its start.

        Raises:
            TypeError: ``epoch`` isn't an int.
            ValueError: It is negative.
        """
        if not isinstance(cast("object", epoch), int) or isinstance(epoch, bool):
            raise TypeError(f"set_epoch: epoch must be an int, got {epoch!r}.")
        if epoch < 0:
            raise ValueError(f"set_epoch: epoch must not be negative, got {epoch}.")
        position = self.position
        position.epoch, position.held = epoch, None
        position.start, position.latest = 0, BatchInfo()
        position.in_progress = False
        if position.is_restored:
            position.user_state = position.user_state.at_start()
        loader = cast("Any", self.source)
        for thing in (loader.batch_sampler, loader.sampler, loader.dataset):
            set_epoch_of(thing, epoch)

    def move_to(
        self, epoch: int, start: int, seed: int | None = None, user_state: UserState | None = None
    ) -> None:
        """Begin the next pass at sample ``start`` of ``epoch``.

        Args:
            epoch: From 0.
            start: Number of its samples that have been read.
            seed: Of the order from now on; None keeps it.
            user_state: The states that the user's sampler and stream are set to then; None keeps theirs.
        """
        self.set_epoch(epoch)
        position = self.position
        position.start, position.latest = start, BatchInfo(consumed=start)
        position.user_state, position.is_restored = user_state or UserState(), user_state is not None
        position.num_moves += 1
        if seed is not None:
            self.reader.seed, position.has_seed = seed, True

    def count(self) -> int | None:
        """Return this rank's number of batches in an epoch; None if it is unknown before reading."""
        count = self.reader.count()
        return None if count is None else max(0, count - self._num_skipped)

    def plan(self) -> EpochPlan | None:
        """Return the plan of the next pass; None if it is known only during the pass."""
        first = 0 if self.position.in_progress else self.position.start
        if not self._skips(first):
            return self.reader.plan(first)
        plan = self.reader.plan(0)
        return None if plan is None else plan.after(self._num_skipped)

    def begin(self) -> EpochPass[T]:
        """Begin a pass. The caller sets ``position.latest`` after each batch, and then calls :meth:`finish`.

        Ranks: every rank of the context.
        """
        begun = self._begin()
        return begun._replace(batches=self._placed(begun.batches))

    def finish(self) -> None:
        """End a pass: the next one is the next epoch."""
        with failing_together(self.context, "a data loader"):
            self.reader.finish()
        held = self.position.held
        self.set_epoch(self.position.epoch + 1)
        self.position.held = held

    def __iter__(self) -> Iterator[T]:
        position, batches, place = self.position, self._begin().batches, self._placer()
        # Around the loop rather than in it: exceptions of the user's loop aren't raised in this generator.
        with self.reading(), self._told_to_others():
            for batch, position.latest in batches:  # not in _placed: a call for each batch
                yield batch if place is None else place(batch)

    @contextmanager
    def reading(self) -> Generator[None, None, None]:
        """Enclose the loop of a pass. At its end, end the pass, and those of loops that have begun within it.

        ``zip`` notices the end of the first loader, and leaves the second after its last batch.
        """
        position, reads = self.position, self.context.collectives.call_log.open_reads
        num_begun = position.num_begun

        def is_current() -> bool:
            return position.in_progress and position.num_begun == num_begun

        def end() -> None:
            if is_current() and position.latest.is_last:
                self.finish()

        own = OpenRead(end)
        reads.append(own)
        try:
            yield
            if is_current():
                self.finish()
            for inner in reads[reads.index(own) + 1 :]:
                inner.end()
        finally:
            reads.remove(own)

    def end_rest(self) -> None:
        """Go to the next epoch, if a state was loaded that leaves no batch of its epoch on any rank.

        Ranks: every rank of the context.
        """
        position = self.position
        if not position.start:
            return
        before = dict(vars(position))
        begun = self._begin_at(position.start, skips=False)
        if _is_empty(begun):
            # Read rather than skipped: samplers and streams with a state go on from the end of their epoch.
            for _ in begun.batches:
                pass
            self.finish()
        else:
            vars(position).update(before)

    def _placed(self, batches: Iterator[tuple[T, BatchInfo]]) -> Iterator[tuple[T, BatchInfo]]:
        place = self._placer()
        with self._told_to_others():
            for batch, info in batches:
                yield batch if place is None else place(batch), info

    def _placer(self) -> Callable[[T], T] | None:
        """Return what moves a batch to the rank's device and shards its sequences; None for neither."""
        ctx = self.context
        place = placer(ctx.device, ctx.loading.non_blocking) if ctx.device_placement else None
        shard = sequence_sharder(ctx)
        if shard is None or place is None:
            return place or shard
        return lambda batch: shard(place(batch))

    @contextmanager
    def _told_to_others(self) -> Generator[None, None, None]:
        """Raise an error inside on every rank; name this one where a worker has died."""
        with failing_together(self.context, "a data loader"), explain_dead_workers(self.context.rank):
            yield

    def _begin(self) -> EpochPass[T]:
        position = self.position
        position.held = None
        generator: torch.Generator | None = cast("Any", self.source).generator
        types = [name for name in self.context.rng_types if name != "generator" or generator is not None]
        if types:
            synchronize_rng_states(self.context, types, generator)
        if not position.has_seed:
            self.reader.seed, position.has_seed = self._agree_on_seed(), True
        if position.in_progress:  # the previous pass was left early, which ends its epoch
            self.set_epoch(position.epoch + 1)
        start, skips = position.start, self._skips(position.start)
        if skips and self._epoch_is_over():
            self.end_rest()  # the skipped batches are those of the next epoch
        begun = self._begin_at(position.start, skips)
        if start and _is_empty(begun):
            # Of loaders that are read side by side, zip asks only the first one for the rest of an epoch.
            for other in list(self.context.collectives.call_log.resumed):
                other.end_rest()
        return begun

    def _begin_at(self, start: int, skips: bool) -> EpochPass[T]:
        position, plan = self.position, self.reader.plan(0) if skips else None
        restored, position.is_restored = position.user_state if position.is_restored else UserState(), False
        if skips:  # batches count from the start of the epoch
            restored = restored.at_start()
            at, start = 0, 0 if plan is None else plan.after(self._num_skipped).start
        else:
            at = start
        position.start, position.latest = 0, BatchInfo(consumed=start)
        states = restored
        if states.stream is not None and not self.reader.can_restore(states.stream):
            states = states._replace(stream=None)
        num_skipped = self._num_skipped if skips and plan is None else 0
        with self._told_to_others():
            begun = self.reader.begin(PassStart(position.epoch, start, num_skipped, states, at))
        position.user_state, position.in_progress = UserState(begun.sampler, restored.stream), True
        position.num_begun += 1
        return begun

    def _skips(self, start: int) -> bool:
        """Return whether a pass that would begin at sample ``start`` skips batches.

        They count from the start of the epoch, even if a state had moved the loader into it. A state that was
        loaded after skipping was requested takes precedence.
        """
        if self._skips_since is None:
            return False
        return start == 0 or self._skips_since == self.position.num_moves

    def _epoch_is_over(self) -> bool:
        """Return whether a loaded state leaves no steps of an epoch that has more than are skipped."""
        start = self.position.start
        full, remaining = self.reader.plan(0), self.reader.plan(start)
        if not start or full is None or remaining is None:
            return False
        return remaining.num_steps == 0 and full.num_steps > self._num_skipped


def _is_empty(begun: EpochPass[Any]) -> bool:
    """Return whether a pass is known to have no batch on any rank."""
    return begun.counts is not None and not any(begun.counts)
