"""The passes over one loader: how far they have come, and where the next one begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import DataLoader

from accelfn.comm import failing_together, synchronize_rng_states
from accelfn.context import Context
from accelfn.data.order import tell
from accelfn.data.placement import placer
from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.reader import EpochPass, Reader, UserState
from accelfn.data.resume import LoaderState, check_state
from accelfn.data.sequence import sequence_sharder
from accelfn.data.states import rewound
from accelfn.data.workers import naming_dead_workers

__all__ = ("Passes",)

T = TypeVar("T")


class _Place:
    """How far loaders over the same passes have come."""

    def __init__(self) -> None:
        self.epoch = 0  # of the next pass, or of the one that is under way or was left
        self.start = 0  # sample at which the next pass begins
        self.latest = BatchInfo()  # of the batch yielded last: how far all ranks have read
        self.is_amid = False  # whether a pass is under way, or was left
        self.own = UserState()  # states of the user's own: as the pass began, or of the one that is to begin
        self.is_recalled = False  # whether they were restored, and no pass has started since
        self.num_moves = 0  # how often a place was chosen
        self.has_seed = False  # whether the order's seed is settled


class Passes(Generic[T]):
    """The passes that a prepared loader makes over its data.

    Attributes:
        context: The context that the loader was prepared with.
        source: The user's DataLoader, or one that was made over the user's iterable.
        reader: What reads the data.
    """

    def __init__(
        self, ctx: Context, source: DataLoader[T], reader: Reader[T], agree_on_seed: Callable[[], int]
    ) -> None:
        """Read ``source`` with ``reader``.

        Args:
            ctx: The world.
            source: The user's loader.
            reader: What reads it.
            agree_on_seed: Gives all ranks the seed of the order, when the first pass begins.
        """
        self.context = ctx
        self.source = source
        self.reader = reader
        self._agree_on_seed = agree_on_seed
        self._place = _Place()
        self._place.has_seed = ctx.loading.data_seed is not None
        self._num_skipped = 0  # batches that each pass leaves out
        self._skips_since: int | None = None  # the number of moves when that was asked for

    def skipping(self, num_batches: int) -> Passes[T]:
        """Make the same passes without their first batches; the two share their epoch and place."""
        twin = Passes(self.context, self.source, self.reader, self._agree_on_seed)
        twin._place = self._place
        twin._num_skipped = self._num_skipped + num_batches
        twin._skips_since = self._place.num_moves
        return twin

    def is_shared_with(self, other: Passes[Any]) -> bool:
        """Return whether both go through the same passes, as what skips batches of a loader does."""
        return self._place is other._place

    # --- where the passes are --------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Number of the epoch of the pass that is under way or was left, otherwise of the next one."""
        return self._place.epoch

    @property
    def consumed(self) -> int:
        """Samples of the epoch that all ranks have read, the batch yielded last included."""
        return self._place.latest.consumed

    def state(self) -> LoaderState:
        """Describe the place; see :func:`accelfn.loader_state`."""
        place, reader = self._place, self.reader
        own = place.own if place.is_amid or place.is_recalled else reader.rest()
        return LoaderState(
            epoch=place.epoch,
            consumed=place.latest.consumed,
            seed=reader.seed,
            length=reader.length,
            sampler=own.sampler,
            stream=place.latest.stream or own.stream,
            **reader.settings._asdict(),
        )

    def go_to(self, state: LoaderState) -> None:
        """Let the next pass begin where ``state`` was taken; see :func:`accelfn.restore_loader`."""
        reader, stream = self.reader, state.stream
        by_state = stream is not None and reader.can_recall(stream)
        if not check_state(state, reader.length, reader.settings, by_state):
            stream = None  # the place is reached by reading
        self.move_to(state.epoch, state.consumed, state.seed, UserState(state.sampler, stream))

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be ``epoch``, from its start.

        Raises:
            TypeError: ``epoch`` is no whole number.
            ValueError: It is negative.
        """
        if not isinstance(cast("object", epoch), int) or isinstance(epoch, bool):
            raise TypeError(f"set_epoch: epochs are whole numbers, got {epoch!r}.")
        if epoch < 0:
            raise ValueError(f"set_epoch: epochs count from 0, got {epoch}.")
        place = self._place
        place.epoch = epoch
        place.start, place.latest = 0, BatchInfo()
        place.is_amid = False
        if place.is_recalled:
            place.own = UserState(place.own.sampler, rewound(place.own.stream))
        loader = cast("Any", self.source)
        for thing in (loader.batch_sampler, loader.sampler, loader.dataset):
            tell(thing, epoch)

    def move_to(self, epoch: int, start: int, seed: int | None = None, own: UserState | None = None) -> None:
        """Let the next pass begin at sample ``start`` of ``epoch``.

        Args:
            epoch: From 0.
            start: Samples of it that have been read.
            seed: Of the order from now on; None keeps it.
            own: States of what is the user's own, to which it is brought then; None leaves it as it is.
        """
        self.set_epoch(epoch)
        place = self._place
        place.start, place.latest = start, BatchInfo(consumed=start)
        place.own, place.is_recalled = own or UserState(), own is not None
        place.num_moves += 1
        if seed is not None:
            self.reader.seed, place.has_seed = seed, True

    @property
    def even_batches(self) -> bool | None:
        """Whether the ranks have equally many full batches; None where that isn't the loader's to choose."""
        return self.reader.even_batches

    @property
    def can_choose_even(self) -> bool:
        """Whether :meth:`choose_even` can be called."""
        # What rank 0 sends to all in step isn't left uneven by the ranks that read it.
        return self.reader.can_choose_even and not self.context.loading.dispatch_batches

    def choose_even(self, even: bool) -> None:
        """Choose ``even_batches`` from the next pass on; every rank has to choose the same."""
        self.reader.even_batches = even

    # --- what a pass gives -----------------------------------------------------------------------

    def count(self) -> int | None:
        """Count this rank's batches in an epoch; None where only reading could say."""
        count = self.reader.count()
        return None if count is None else max(0, count - self._num_skipped)

    def plan(self) -> EpochPlan | None:
        """Plan the next pass; None where only the pass itself can say."""
        first = 0 if self._place.is_amid else self._place.start
        if not self._skips(first):
            return self.reader.plan(first)
        plan = self.reader.plan(0)
        return None if plan is None else plan.after(self._num_skipped)

    def begin(self) -> EpochPass[T]:
        """Begin a pass. Whoever takes a batch from it calls :meth:`note`, and :meth:`finish` at its end.

        Ranks: every rank of the context.
        """
        begun = self._begin()
        return begun._replace(batches=self._placed(begun.batches))

    def note(self, info: BatchInfo) -> None:
        """Take down how far the pass has come."""
        self._place.latest = info

    def finish(self) -> None:
        """End a pass: the next one is the next epoch."""
        with failing_together(self.context, "a data loader"):
            self.reader.finish()
        self.set_epoch(self._place.epoch + 1)

    def __iter__(self) -> Iterator[T]:
        place = self._place
        for batch, place.latest in self.begin().batches:
            yield batch
        self.finish()

    def _begin(self) -> EpochPass[T]:
        place = self._place
        self._synchronize()
        if not place.has_seed:
            self.reader.seed, place.has_seed = self._agree_on_seed(), True
        if place.is_amid:  # the pass before was left: that epoch is over
            self.set_epoch(place.epoch + 1)
        skips = self._skips(place.start)
        if skips and self._is_over():
            # The batches that were skipped by hand are of the next epoch: it begins as after any pass.
            for _ in self._begin_at(place.start, skips=False).batches:
                pass
            self.finish()
        return self._begin_at(place.start, skips)

    def _begin_at(self, start: int, skips: bool) -> EpochPass[T]:
        place, plan = self._place, self.reader.plan(0) if skips else None
        recalled, place.is_recalled = place.own if place.is_recalled else UserState(), False
        if skips:  # batches count from the start of the epoch
            recalled = UserState(recalled.sampler, rewound(recalled.stream))
            at, start = 0, 0 if plan is None else plan.after(self._num_skipped).start
        else:
            at = start
        place.start, place.latest = 0, BatchInfo(consumed=start)
        self.reader.recall(recalled, at)
        with failing_together(self.context, "a data loader"), naming_dead_workers(self.context.rank):
            if skips and plan is None:
                begun = self.reader.begin_after(place.epoch, self._num_skipped)
            else:
                begun = self.reader.begin(place.epoch, start)
        place.own, place.is_amid = UserState(begun.sampler, recalled.stream), True
        return begun

    def _skips(self, start: int) -> bool:
        """Return whether a pass that would begin at sample ``start`` leaves out batches instead.

        They are counted from the start of the epoch, also of one that a state had moved the loader into. A
        state that was loaded later says by itself where to go on.
        """
        if self._skips_since is None:
            return False
        return start == 0 or self._skips_since == self._place.num_moves

    def _is_over(self) -> bool:
        """Return whether batches are wanted of an epoch of which a loaded state leaves nothing."""
        start = self._place.start
        whole, rest = self.reader.plan(0), self.reader.plan(start)
        if not start or whole is None or rest is None:
            return False
        return rest.num_steps == 0 and whole.num_steps > self._num_skipped

    def _placed(self, batches: Iterator[tuple[T, BatchInfo]]) -> Iterator[tuple[T, BatchInfo]]:
        """Bring batches to the rank's device and shard their sequences; a source's error is every rank's."""
        ctx = self.context
        place = placer(ctx.device, ctx.loading.non_blocking) if ctx.device_placement else None
        shard = sequence_sharder(ctx)
        # Once around all: what the loop over the batches raises doesn't come in here, where they are made.
        with failing_together(ctx, "a data loader"), naming_dead_workers(ctx.rank):
            for batch, info in batches:
                batch = batch if place is None else place(batch)
                yield batch if shard is None else shard(batch), info

    def _synchronize(self) -> None:
        """Bring the random states that the context names to rank 0's, as a pass begins."""
        generator: torch.Generator | None = cast("Any", self.source).generator
        types = [name for name in self.context.rng_types if name != "generator" or generator is not None]
        if types:
            synchronize_rng_states(self.context, types, generator)
