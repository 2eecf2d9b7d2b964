"""What every way of reading data offers to the loader: passes, and what is known of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import NamedTuple  # of typing, one that is generic needs Python 3.11

from accelfn.context import Context
from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.rebuild import is_stateful, num_workers_of
from accelfn.data.states import State, StatefulIterator
from accelfn.tree import find_batch_size

__all__ = (
    "EVENED",
    "EVENED_OR_DROPPED",
    "EpochPass",
    "ReadSettings",
    "Reader",
    "StreamStates",
    "UserState",
    "length_of",
    "rows_of",
)

T = TypeVar("T")

# Of `EpochPass.evened_by`: where batches are left as they are, and where samples are put together to batches.
EVENED = ("even_batches=True",)
EVENED_OR_DROPPED = (*EVENED, "drop_last=True")


class UserState(NamedTuple):
    """State of what is the user's own.

    Attributes:
        sampler: Of the sampler, as it was before the epoch was drawn.
        stream: Of the stream.
    """

    sampler: State | None = None
    stream: State | None = None


class ReadSettings(NamedTuple):
    """What a place in the data holds for; None: any.

    Attributes:
        num_workers: Workers that read a stream.
        group: Samples of all that read it together, in a step.
        num_processes: Ranks, where each has data of its own.
        rank: Whose data it is then.
        order: How samples are ordered, as ``Order.kind``.
    """

    num_workers: int | None = None
    group: int | None = None
    num_processes: int | None = None
    rank: int | None = None
    order: str | None = None


class EpochPass(NamedTuple, Generic[T]):
    """One pass over the data.

    Attributes:
        counts: Batches of each rank, where that is known before.
        batches: This rank's, each with what is known of it.
        in_step: All ranks have equally many batches, even where it is unknown how many.
        info_at: What is known of this rank's batch in a step in which it may have none, where that is
            planned or shows at the end of its own.
        evened_by: Options of the user's, each of which would give all ranks equally many batches.
        sampler: State of a sampler of the user's own before it drew the epoch.
        is_own: Each rank has data of its own, and what it has consumed is of those.
    """

    counts: tuple[int, ...] | None
    batches: Iterator[tuple[T, BatchInfo]]
    in_step: bool = False
    info_at: Callable[[int], BatchInfo] | None = None
    evened_by: tuple[str, ...] = ()
    sampler: State | None = None
    is_own: bool = False

    def after(self, num_steps: int) -> EpochPass[T]:
        """Return the pass without its first steps, which are read and thrown away."""
        counts, info_at = self.counts, self.info_at
        return self._replace(
            counts=None if counts is None else tuple(max(0, one - num_steps) for one in counts),
            batches=islice(self.batches, num_steps, None),
            info_at=None if info_at is None else partial(_later, info_at, num_steps),
        )


def _later(info_at: Callable[[int], BatchInfo], num_steps: int, step: int) -> BatchInfo:
    return info_at(step + num_steps)


class Reader(Generic[T]):
    """One way of reading: by an order of samples, by batches, from a stream, through rank 0.

    Attributes:
        length: Samples in an epoch; None where it is unknown.
        batch_size: Samples of all ranks in a step; None where it isn't said.
        seed: Of the order, and of randomness in workers; a restored state brings its own.
        settings: What a place in the data holds for.
        even_batches: Whether all ranks have equally many full batches; None where nobody can choose.
        can_choose_even: Whether ``even_batches`` may be set, from the next pass on.
    """

    length: int | None = None
    batch_size: int | None = None
    seed: int = 0
    settings: ReadSettings = ReadSettings()
    even_batches: bool | None = None
    can_choose_even: bool = False
    _recalled: tuple[UserState, int] = (UserState(), 0)

    def plan(self, start: int) -> EpochPlan | None:
        """Return how the epoch is shared out from sample ``start`` on, where that is known before a pass."""
        del start
        return None

    def count(self) -> int | None:
        """Count this rank's batches in an epoch, where that is known before a pass."""
        return None

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass at sample ``start`` of ``epoch``; every rank of the world does."""
        raise NotImplementedError

    def begin_after(self, epoch: int, num_steps: int) -> EpochPass[T]:
        """Begin a pass behind the first steps of an epoch that has no plan."""
        return self.begin(epoch, 0).after(num_steps)

    def recall(self, own: UserState, start: int) -> None:
        """Let the next pass be of the epoch of ``own``, whose stream is at sample ``start``."""
        self._recalled = own, start

    def rest(self) -> UserState:
        """Return the states between passes, as far as this rank knows them."""
        return UserState()

    def finish(self) -> None:
        """Note that a pass is over."""

    def can_recall(self, stream: State) -> bool:
        """Return whether the state of a stream is of use here; otherwise a place is reached by reading."""
        del stream
        return False

    def _take_recalled(self) -> tuple[UserState, int]:
        recalled, self._recalled = self._recalled, (UserState(), 0)
        return recalled


class StreamStates:
    """Which states a stream has: those of its workers, which torchdata keeps, or that of the dataset here.

    Attributes:
        of_workers: Workers read it, and only torchdata knows which state belongs to a batch: they read ahead.
        follower: Goes through the dataset, in this process or with torchdata in each worker.
    """

    def __init__(self, ctx: Context, source: DataLoader[Any], dataset: IterableDataset[Any]) -> None:
        """Follow ``dataset``, as ``source`` reads it."""
        self._num_workers = source.num_workers
        self.of_workers: bool = source.num_workers > 0 and is_stateful(ctx, source)
        self.follower: StatefulIterator = StatefulIterator(
            dataset, follows=self.of_workers or source.num_workers == 0
        )

    def can_recall(self, stream: State) -> bool:
        """Return whether ``stream`` is a state of this kind of loader."""
        if self.of_workers:
            return num_workers_of(stream) == self._num_workers
        return self._num_workers == 0 and self.follower.can_take(stream)

    def rest(self) -> State | None:
        """Return the state between passes, where this process reads the stream."""
        return None if self._num_workers else self.follower.rest()


def length_of(thing: object) -> int | None:
    """Return the length of a dataset or loader; None where it has none."""
    try:
        return len(cast("Sized", thing))
    except (TypeError, NotImplementedError):
        return None


def rows_of(batch: Any) -> int | None:
    """Count the rows of a batch that nobody has planned."""
    try:
        return find_batch_size(batch)
    except ValueError:  # no tensor in it: the batch is the user's own kind
        return None
