"""The interface of readers: passes over the data, with the facts of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import NamedTuple  # typing's can be generic only from Python 3.11

from accelfn.context import Context
from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.rebuild import is_stateful, num_workers_of
from accelfn.data.states import State, TrackedStream, rewind_state
from accelfn.tree import find_batch_size

__all__ = (
    "EVEN_BATCHES",
    "EVEN_OR_DROP_LAST",
    "EpochPass",
    "ReadSettings",
    "Reader",
    "StreamStates",
    "UserState",
    "length_of",
    "rows_of",
)

T = TypeVar("T")

# For EpochPass.remedies: of readers that don't split the user's batches, and of those that form batches.
EVEN_BATCHES = ("even_batches=True",)
EVEN_OR_DROP_LAST = (*EVEN_BATCHES, "drop_last=True")


class UserState(NamedTuple):
    """States of the user's objects.

    Attributes:
        sampler: Of the sampler, before it drew the epoch.
        stream: Of the stream.
    """

    sampler: State | None = None
    stream: State | None = None

    def at_start(self) -> UserState:
        """Return the state with its stream at the start of the epoch."""
        return UserState(self.sampler, rewind_state(self.stream))


class ReadSettings(NamedTuple):
    """The settings under which a position in the data is valid; None for any.

    Attributes:
        num_workers: Number of workers that read a stream.
        group: Samples per step of all ranks that read the stream together.
        num_processes: Number of ranks, if each rank reads its own data.
        rank: The rank whose data it is then.
        order: ``Order.kind``.
    """

    num_workers: int | None = None
    group: int | None = None
    num_processes: int | None = None
    rank: int | None = None
    order: str | None = None


class EpochPass(NamedTuple, Generic[T]):
    """One pass over the data.

    Attributes:
        counts: Number of batches of each rank, if it is known in advance.
        batches: This rank's batches, each with its BatchInfo.
        in_step: All ranks have equally many batches, even if their number is unknown.
        info_at: Returns the BatchInfo of a step in which this rank may have no batch; None if unknown.
        remedies: Options of the user's, each of which would make the ranks' numbers of batches equal.
        sampler: State of a custom sampler before it drew the epoch.
        is_rank_local: Each rank reads its own data, and counts what it has consumed of it.
    """

    counts: tuple[int, ...] | None
    batches: Iterator[tuple[T, BatchInfo]]
    in_step: bool = False
    info_at: Callable[[int], BatchInfo] | None = None
    remedies: tuple[str, ...] = ()
    sampler: State | None = None
    is_rank_local: bool = False

    def after(self, num_steps: int) -> EpochPass[T]:
        """Return the pass without its first steps, which are read and dropped."""
        counts, info_at = self.counts, self.info_at
        return self._replace(
            counts=None if counts is None else tuple(max(0, count - num_steps) for count in counts),
            batches=islice(self.batches, num_steps, None),
            info_at=None if info_at is None else partial(_info_after, info_at, num_steps),
        )


def _info_after(info_at: Callable[[int], BatchInfo], num_steps: int, step: int) -> BatchInfo:
    return info_at(step + num_steps)


class Reader(Generic[T]):
    """Base of the readers: by an order of samples, by user batches, from a stream, or through rank 0.

    Attributes:
        length: Samples in an epoch; None if unknown.
        batch_size: Samples of all ranks in a step; None if unknown.
        seed: Of the order, and of random numbers in workers; restoring a state replaces it.
        settings: The settings under which a position in the data is valid.
        even_batches: Whether all ranks have equally many full batches; None if that can't be chosen.
        can_choose_even: Whether ``even_batches`` may be set, from the next pass on.
    """

    length: int | None = None
    batch_size: int | None = None
    seed: int = 0
    settings: ReadSettings = ReadSettings()
    even_batches: bool | None = None
    can_choose_even: bool = False
    _restored: tuple[UserState, int] = (UserState(), 0)

    def plan(self, start: int) -> EpochPlan | None:
        """Return the plan of the epoch from sample ``start`` on, if it is known before a pass."""
        del start
        return None

    def count(self) -> int | None:
        """Return this rank's number of batches in an epoch, if it is known before a pass."""
        return None

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass at sample ``start`` of ``epoch``, on every rank of the world."""
        raise NotImplementedError

    def begin_after(self, epoch: int, num_steps: int) -> EpochPass[T]:
        """Begin a pass after the first steps of an epoch that has no plan."""
        return self.begin(epoch, 0).after(num_steps)

    def restore(self, state: UserState, start: int) -> None:
        """Begin the next pass from ``state``, whose stream is at sample ``start``."""
        self._restored = state, start

    def idle_state(self) -> UserState:
        """Return the states between passes, as far as this rank knows them."""
        return UserState()

    def finish(self) -> None:
        """End a pass."""

    def can_restore(self, stream: State) -> bool:
        """Return whether a stream's state can be restored; if not, a position is reached by reading."""
        del stream
        return False

    def _pop_restored(self) -> tuple[UserState, int]:
        """Return what :meth:`restore` was called with, without a stream's state of another kind."""
        (state, start), self._restored = self._restored, (UserState(), 0)
        if state.stream is not None and not self.can_restore(state.stream):
            state = state._replace(stream=None)
        return state, start


class StreamStates:
    """The states of a stream: torchdata's, of the workers that read it, or the dataset's in this process.

    Attributes:
        of_workers: Workers read the stream, and torchdata keeps the state after each batch, since they
            prefetch.
        tracked: The dataset, in this process or, with torchdata, in each worker.
    """

    def __init__(self, ctx: Context, source: DataLoader[Any], dataset: IterableDataset[Any]) -> None:
        """Track ``dataset``, as ``source`` reads it."""
        self._num_workers = source.num_workers
        self.of_workers: bool = source.num_workers > 0 and is_stateful(ctx, source)
        self.tracked: TrackedStream = TrackedStream(
            dataset, tracks=self.of_workers or source.num_workers == 0
        )

    def can_restore(self, stream: State) -> bool:
        """Return whether ``stream`` is a state of this kind of loader."""
        if self.of_workers:
            return num_workers_of(stream) == self._num_workers
        return self._num_workers == 0 and self.tracked.accepts(stream)

    def idle_state(self) -> State | None:
        """Return the state between passes, if this process reads the stream."""
        return None if self._num_workers else self.tracked.idle_state()


def length_of(thing: object) -> int | None:
    """Return the length of a dataset or loader; None if it has none."""
    try:
        return len(cast("Sized", thing))
    except (TypeError, NotImplementedError):
        return None


def rows_of(batch: Any) -> int | None:
    """Return the number of rows of a batch; None if it contains no tensor."""
    try:
        return find_batch_size(batch)
    except ValueError:
        return None
