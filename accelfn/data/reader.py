"""The interface of readers: passes over the data, with the facts of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from typing_extensions import NamedTuple  # typing's can be generic only from Python 3.11

from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.states import State, rewind_state
from accelfn.tree import find_batch_size

__all__ = (
    "EVEN_BATCHES",
    "EVEN_OR_DROP_LAST",
    "EpochPass",
    "PassStart",
    "ReadSettings",
    "Reader",
    "UserState",
    "length_of",
    "rows_of",
    "with_actual_rows",
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


class PassStart(NamedTuple):
    """Where a pass begins.

    Attributes:
        epoch: From 0.
        sample: Number of its samples that have been read.
        num_skipped: Number of its first steps that are skipped instead, if the epoch has no plan.
        states: What the user's objects are set to before.
        states_at: Sample at which the stream has its state.
    """

    epoch: int
    sample: int = 0
    num_skipped: int = 0
    states: UserState = UserState()
    states_at: int = 0


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
        if not num_steps:
            return self
        counts, info_at = self.counts, self.info_at
        later: Callable[[int], BatchInfo] | None = (
            None if info_at is None else lambda step: info_at(step + num_steps)
        )
        return self._replace(
            counts=None if counts is None else tuple(max(0, count - num_steps) for count in counts),
            batches=islice(self.batches, num_steps, None),
            info_at=later,
        )


class Reader(Generic[T]):
    """Base of the readers: by an order of samples, by user batches, from a stream, or through rank 0.

    Attributes:
        length: Samples in an epoch; None if unknown.
        batch_size: Samples of all ranks in a step; None if unknown.
        seed: Of the order, and of random numbers in workers; restoring a state replaces it.
        what: Describes the data, the same text on all ranks.
        settings: The settings under which a position in the data is valid.
        even_batches: Whether all ranks have equally many full batches; None if that can't be chosen.
        can_choose_even: Whether ``even_batches`` may be set, from the next pass on.
    """

    length: int | None = None
    batch_size: int | None = None
    seed: int = 0
    what: str = ""
    settings: ReadSettings = ReadSettings()
    even_batches: bool | None = None
    can_choose_even: bool = False
    _rank: int = 0  # among those that read different data

    def plan(self, start: int) -> EpochPlan | None:
        """Return the plan of the epoch from sample ``start`` on, if it is known before a pass."""
        del start
        return None

    def count(self) -> int | None:
        """Return this rank's number of batches in an epoch, if it is known before a pass."""
        plan = self.plan(0)
        return None if plan is None else plan.num_batches(self._rank)

    def begin(self, at: PassStart) -> EpochPass[T]:
        """Begin a pass, on every rank of the world."""
        raise NotImplementedError

    def idle_state(self) -> UserState:
        """Return the states between passes, as far as this rank knows them."""
        return UserState()

    def finish(self) -> None:
        """End a pass."""

    def can_restore(self, stream: State) -> bool:
        """Return whether a stream's state can be restored; if not, a position is reached by reading."""
        del stream
        return False


def length_of(thing: object) -> int | None:
    """Return the length of a dataset or loader; None if it has none."""
    try:
        return len(cast("Sized", thing))
    except (TypeError, NotImplementedError):
        return None


def with_actual_rows(batch: Any, info: BatchInfo) -> BatchInfo:
    """Return the BatchInfo of a planned item that is a batch itself, so that only it tells its rows."""
    own_valid = None if info.own_valid else 0
    return BatchInfo(rows_of(batch), own_valid=own_valid, is_last=info.is_last, consumed=info.consumed)


def rows_of(batch: Any) -> int | None:
    """Return the number of rows of a batch; None if it contains no tensor."""
    try:
        return find_batch_size(batch)
    except ValueError:
        return None
