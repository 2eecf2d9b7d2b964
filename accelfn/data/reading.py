"""What every way of reading data offers to the loader: passes, and what is known of each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from typing_extensions import NamedTuple  # of typing, one that is generic needs Python 3.11

from accelfn.data.plan import EpochPlan
from accelfn.data.states import State
from accelfn.tree import find_batch_size

__all__ = (
    "EVENED",
    "EVENED_OR_DROPPED",
    "BatchInfo",
    "EpochPass",
    "ReadSettings",
    "Reader",
    "UserState",
    "rows_of",
    "share_of",
    "shares_of",
    "start_behind",
    "with_rows",
)

T = TypeVar("T")

# Of `EpochPass.evened_by`: where batches are left as they are, and where samples are put together to batches.
EVENED = ("even_batches=True",)
EVENED_OR_DROPPED = (*EVENED, "drop_last=True")


class BatchInfo(NamedTuple):
    """What is known of one batch of one rank. The first five are those of a MicroBatch, in its order.

    Attributes:
        num_rows: Samples in it, padding included; None where nobody says.
        max_rows: Samples in the batch of the rank that has most.
        num_valid: Samples of all ranks that are no padding; the first ones, in rank order, unless
            ``valid_by_rank`` says otherwise.
        valid_by_rank: The same by rank, where batches have different lengths; each rank's first ones.
        own_valid: Of this rank alone, its first ones; None for all its rows.
        is_last: Whether no batch follows; None where that shows only when the next one is asked for.
        consumed: Samples of the epoch that have been read, on all ranks, when this batch is done.
        stream: State of a stream of the user's own then, where it has one.
    """

    num_rows: int | None = None
    max_rows: int | None = None
    num_valid: int | None = None
    valid_by_rank: tuple[int, ...] | None = None
    own_valid: int | None = None
    is_last: bool | None = None
    consumed: int = 0
    stream: State | None = None


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
        share_at: What is known of this rank's batch in a step in which it may have none, where that is
            planned or shows at the end of its own.
        evened_by: Options of the user's, each of which would give all ranks equally many batches.
        sampler: State of a sampler of the user's own before it drew the epoch.
        is_own: Each rank has data of its own, and what it has consumed is of those.
    """

    counts: tuple[int, ...] | None
    batches: Iterator[tuple[T, BatchInfo]]
    in_step: bool = False
    share_at: Callable[[int], BatchInfo] | None = None
    evened_by: tuple[str, ...] = ()
    sampler: State | None = None
    is_own: bool = False


class Reader(Generic[T]):
    """One way of reading: by an order of samples, by batches, from a stream, through rank 0.

    Attributes:
        length: Samples in an epoch; None where it is unknown.
        batch_size: Samples of all ranks in a step; None where it isn't said.
        seed: Of the order, and of randomness in workers; a restored state brings its own.
        setting: What a place in the data holds for.
        even_batches: Whether all ranks have equally many full batches; None where nobody can choose.
        can_choose_even: Whether ``even_batches`` may be set, from the next pass on.
    """

    length: int | None = None
    batch_size: int | None = None
    seed: int = 0
    setting: ReadSettings = ReadSettings()
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
        begun = self.begin(epoch, 0)
        share_at = begun.share_at
        return begun._replace(
            counts=None if begun.counts is None else tuple(max(0, one - num_steps) for one in begun.counts),
            batches=islice(begun.batches, num_steps, None),
            share_at=None if share_at is None else partial(_later, share_at, num_steps),
        )

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


def _later(share_at: Callable[[int], BatchInfo], num_steps: int, step: int) -> BatchInfo:
    return share_at(step + num_steps)


def start_behind(plan: EpochPlan, num_steps: int) -> int:
    """Return the sample at which a pass begins that leaves out the first steps of a plan. Pure.

    >>> from accelfn.data.plan import plan_epoch
    >>> [start_behind(plan_epoch(9, 2, 2), num_steps) for num_steps in range(5)]
    [0, 4, 8, 9, 9]
    """
    if num_steps == 0:
        return plan.start
    return plan.consumed(num_steps - 1) if num_steps < plan.num_steps else plan.num_samples


def share_of(plan: EpochPlan, step: int, rank: int) -> BatchInfo:
    """Describe the batch that ``rank`` reads in ``step`` of a plan. Pure.

    >>> from accelfn.data.plan import plan_epoch
    >>> share = share_of(plan_epoch(5, 2, 2), 1, 1)
    >>> share.num_rows, share.own_valid, share.is_last, share.consumed
    (2, 0, True, 5)
    """
    return BatchInfo(
        num_rows=plan.num_rows(step, rank),
        max_rows=plan.num_rows(step, 0),
        num_valid=plan.num_valid(step),
        own_valid=max(0, min(plan.rank_batch, plan.num_valid(step) - rank * plan.rank_batch)),
        is_last=step == plan.num_batches(rank) - 1,
        consumed=plan.consumed(step),
    )


def shares_of(plan: EpochPlan, rank: int) -> Iterator[BatchInfo]:
    """Describe the batches that ``rank`` reads, one after the other, as :func:`share_of` does. Pure.

    >>> from accelfn.data.plan import plan_epoch
    >>> plan = plan_epoch(9, 2, 2)
    >>> list(shares_of(plan, 1)) == [share_of(plan, step, 1) for step in range(3)]
    True
    """
    num_batches = plan.num_batches(rank)
    rows, group, consumed = plan.rank_batch, plan.global_batch, plan.start
    # Full steps but for a last one differ in their places only.
    full = max(0, min(num_batches - 1, plan.num_left // group))
    # What BatchInfo(...) calls, at half of its cost, which each batch pays.
    make = cast("Callable[..., BatchInfo]", cast("Any", tuple).__new__)
    for _ in range(full):
        consumed += group
        yield make(BatchInfo, (rows, rows, group, None, rows, False, consumed, None))
    for step in range(full, num_batches):
        yield share_of(plan, step, rank)


def rows_of(batch: Any) -> int | None:
    """Count the rows of a batch that nobody has planned."""
    try:
        return find_batch_size(batch)
    except ValueError:  # no tensor in it: the batch is the user's own kind
        return None


def with_rows(begun: EpochPass[T]) -> EpochPass[T]:
    """Return a pass over batches of the user's own, whose rows only the batches themselves tell."""
    share_at = begun.share_at
    return begun._replace(
        batches=map(_counted, begun.batches),
        share_at=None if share_at is None else partial(_place_at, share_at),
        evened_by=EVENED,
    )


def _place_at(share_at: Callable[[int], BatchInfo], step: int) -> BatchInfo:
    return BatchInfo(consumed=share_at(step).consumed)


def _counted(one: tuple[T, BatchInfo]) -> tuple[T, BatchInfo]:
    batch, share = one
    own_valid = None if share.own_valid else 0
    return batch, BatchInfo(
        num_rows=rows_of(batch), own_valid=own_valid, is_last=share.is_last, consumed=share.consumed
    )
