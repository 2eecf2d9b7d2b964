"""Where a loader is in its data, as a value; and going on from there, in any world."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast, overload

from torch.utils.data import DataLoader

from accelfn.data.loader import PreparedDataLoader
from accelfn.data.plan import EpochPlan
from accelfn.data.reading import Evening, Own, Pass, Reader, Remembering, Setting, Share, Stepping
from accelfn.data.skip import Skipped, check_num_batches, skip_of_iterable, skip_of_loader
from accelfn.data.states import State, check_plain
from accelfn.errors import ConfigurationError, NotAvailableError

__all__ = (
    "LoaderState",
    "SkippedReader",
    "Skipping",
    "Wrapping",
    "loader_state",
    "restore_loader",
    "skip_first_batches",
)

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)

_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """How far the ranks together have come in the data, as plain values that need no pickle.

    Attributes:
        version: Of this record.
        epoch: Number of the epoch, from 0.
        consumed: Samples of it that have been read, over all ranks. Where each rank has data of its own, what
            this one has read: samples of its shards of a source, or batches of what was sharded already.
        seed: Of the order.
        length: Samples in an epoch; None where nobody knows.
        num_workers: That read a stream; None of other data.
        group: Samples of a step, where several workers read a stream.
        num_processes: Ranks, where each has data of its own.
        rank: Whose data it is then.
        sampler: State of a sampler of your own, before it drew the epoch.
        stream: State of a stream of your own, in this place.

    Raises:
        TypeError: A number is no whole number, or a state holds what a checkpoint can't.
        ValueError: A number is negative, or more samples were read than there are.
    """

    version: int = _VERSION
    epoch: int
    consumed: int
    seed: int
    length: int | None = None
    num_workers: int | None = None
    group: int | None = None
    num_processes: int | None = None
    rank: int | None = None
    # A dict has no hash; equal states have equal numbers.
    sampler: State | None = field(default=None, hash=False)
    stream: State | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Refuse what can be no place in any data."""
        for one in fields(self):
            value: object = getattr(self, one.name)
            if value is None and one.default is None:
                continue
            if one.name in ("sampler", "stream"):
                check_plain(value, f"the state of the {one.name}")
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"LoaderState: {one.name} must be a whole number, got {value!r}.")
            if value < 0:
                raise ValueError(f"LoaderState: {one.name} must not be negative, got {value}.")
        _check_consumed(self.consumed, self.length)


class Wrapping(Protocol):
    """What has a prepared loader inside, such as the loaders of an ``Accelerator``."""

    @property
    def loader(self) -> PreparedDataLoader[Any]:
        """The loader that does the work."""
        ...


class Skipping(Protocol[R_co]):
    """What knows by itself how to leave out batches."""

    def skip_first_batches(self, num_batches: int = 0, /) -> R_co:
        """Give the same without the first batches."""
        ...


def loader_state(loader: PreparedDataLoader[Any] | Wrapping | DataLoader[Any]) -> LoaderState:
    """Say where a loader is in its data.

    Taken after a batch was handed out, it resumes at the next one: also amid an accumulation window, and with
    workers that have read ahead. After the last batch it resumes with what is left of the epoch, which is
    nothing, and then with the next epoch.

    Ranks: any; doesn't communicate. At the same batch all ranks get the same state, unless each reads data of
    its own. Of a stream that rank 0 alone reads, rank 0's state is the one to keep: the others know the
    place, and not the stream's own state.

    Args:
        loader: From :func:`accelfn.prepare_data_loader` (:func:`accelfn.prepare` gives the same, typed as the
            DataLoader that it was made of), or of an ``Accelerator``.

    Raises:
        TypeError: It is no such loader.

    >>> import torch
    >>> from accelfn import Context, prepare_data_loader
    >>> loader = prepare_data_loader(Context(), DataLoader(torch.arange(6), batch_size=2))
    >>> batches = iter(loader)
    >>> next(batches), loader_state(loader).consumed
    (tensor([0, 1]), 2)
    """
    prepared = _prepared("loader_state", loader)
    reader, setting, own = prepared.reader, prepared.setting, prepared.own
    return LoaderState(
        epoch=prepared.epoch,
        consumed=prepared.consumed,
        seed=reader.seed,
        length=reader.length,
        num_workers=setting.num_workers,
        group=setting.group,
        num_processes=setting.num_processes,
        rank=setting.rank,
        sampler=own.sampler,
        stream=own.stream,
    )


def restore_loader(loader: PreparedDataLoader[Any] | Wrapping | DataLoader[Any], state: LoaderState) -> None:
    """Let the next pass over ``loader`` begin where ``state`` was taken.

    The number of ranks, the batch size and the number of workers may be others than they were: the order
    goes on, and each sample that is left comes once. A sampler of your own draws the same order again: it is
    brought to the state that it had before. Where each rank has data of its own (shards of a source, or what
    was sharded already) it goes on in a world of the same size, each rank with its own state; a stream that
    several workers read goes on with as many workers, and the same batch size times ranks.

    Ranks: every rank of the loader's context, with one state; doesn't communicate. Between passes: one
    that is under way isn't moved.

    Args:
        loader: Over the same dataset, from :func:`accelfn.prepare_data_loader`, or of an ``Accelerator``.
        state: From :func:`loader_state`.

    Raises:
        TypeError: ``loader`` or ``state`` is something else.
        NotAvailableError: A newer version of accelfn has written the state.
        ValueError: It is of a dataset of another length.
        ConfigurationError: The order of a stream depends on workers or ranks, and theirs is another number
            now. Whatever is raised, nothing was changed.
    """
    prepared = _prepared("restore_loader", loader)
    if not isinstance(cast("object", state), LoaderState):
        raise TypeError(f"restore_loader: state must be a LoaderState, got {type(state).__name__}.")
    if state.version > _VERSION:
        raise NotAvailableError(
            f"restore_loader: the state has version {state.version}, and this accelfn knows versions up to "
            f"{_VERSION}. Use the accelfn that wrote it, or a newer one."
        )
    length = prepared.reader.length
    if length is not None and state.length is not None and length != state.length:
        raise ValueError(
            f"restore_loader: the state is of {state.length} samples in an epoch, and the loader has "
            f"{length}. Restore it with the data that it was taken with, or begin anew."
        )
    _check_consumed(state.consumed, length)
    stream = state.stream
    if stream is not None and not prepared.can_recall(stream):
        stream = None  # a place is reached by reading too
    if not _check_setting(state, prepared.setting, stream is not None):
        stream = None
    prepared.move_to(state.epoch, state.consumed, state.seed, Own(state.sampler, stream))


def _check_setting(state: LoaderState, now: Setting, by_state: bool) -> bool:
    """Refuse a place in what is read in another way now; say whether the state of its stream holds.

    Args:
        state: Taken before.
        now: How the data is read now.
        by_state: The stream has a state that can be restored.
    """
    if (state.num_processes, state.rank) != (now.num_processes, now.rank) and state.version > 1:
        if not state.consumed:
            return False  # all begin an epoch from its start
        raise ConfigurationError(
            f"restore_loader: the state is of {_whose(state.num_processes, state.rank)}, and the loader of "
            f"{_whose(now.num_processes, now.rank)}. Where each rank reads data of its own, go on with as "
            "many ranks, each with the state that it has saved, or restore a state from the end of an epoch."
        )
    several = [max(1, number or 0) for number in (state.num_workers, now.num_workers)]
    if by_state or state.num_workers is None or now.num_workers is None or not state.consumed:
        return by_state
    if several[0] != several[1] or (state.group is not None and state.group != now.group):
        raise ConfigurationError(
            f"restore_loader: the state is of a stream that {_readers(state.num_workers, state.group)} had "
            f"read, and the loader's is read by {_readers(now.num_workers, now.group)}, in another order. Go "
            "on with as many workers, and the same batch size times ranks, or restore a state from the end "
            "of an epoch. With num_workers=0 or 1, any world goes on."
        )
    return False


def _whose(num_processes: int | None, rank: int | None) -> str:
    return "data that all ranks share" if rank is None else f"rank {rank} of {num_processes}"


def _readers(num_workers: int, group: int | None) -> str:
    number = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
    return number if group is None else f"{number} in steps of {group} samples"


def _check_consumed(consumed: int, length: int | None) -> None:
    if length is not None and consumed > length:
        raise ValueError(
            f"a loader's state can't have read {consumed} samples of an epoch that has {length}. "
            "Take it by loader_state, and change nothing in it."
        )


def _prepared(operation: str, loader: object) -> PreparedDataLoader[Any]:
    if isinstance(loader, PreparedDataLoader):
        return cast("PreparedDataLoader[Any]", loader)
    inner: object = getattr(loader, "loader", None)
    if isinstance(inner, PreparedDataLoader):
        return cast("PreparedDataLoader[Any]", inner)
    raise TypeError(
        f"{operation} takes a loader that prepare_data_loader has given, got {type(loader).__name__}."
    )


@overload
def skip_first_batches(loader: PreparedDataLoader[T], num_batches: int = 0) -> PreparedDataLoader[T]: ...
@overload
def skip_first_batches(loader: DataLoader[T], num_batches: int = 0) -> DataLoader[T] | Skipped[Any]: ...
@overload
def skip_first_batches(loader: Skipping[T], num_batches: int = 0) -> T: ...
@overload
def skip_first_batches(loader: Iterable[T], num_batches: int = 0) -> Iterable[T]: ...
def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Give a loader whose passes begin behind the first ``num_batches`` batches. ``loader`` isn't changed.

    Of map-style data nothing that is skipped is loaded; what comes as a stream is read and thrown away, when
    the pass begins. All options of the loader are kept, and where it has a length, so has the result. More
    than there are: its passes are empty.

    A prepared loader and what is made from it share their epoch: when a pass over the one is complete, both
    are at the next epoch. Of one that :func:`restore_loader` has moved into an epoch, batches are counted
    from there on in the pass that begins there.

    Prepare first and skip then: what is left of a plain loader is shared out as data of its own.

    Ranks: any; doesn't communicate. Every rank of a prepared loader's context skips alike.

    Args:
        loader: From :func:`accelfn.prepare_data_loader`, of an ``Accelerator``, a torch DataLoader, or any
            other iterable. One that has a method ``skip_first_batches`` is asked itself.
        num_batches: Batches of each rank, that is steps of the world.

    Returns:
        A loader of the same kind; of a stream or another iterable, an iterable.

    Raises:
        TypeError: ``num_batches`` is no whole number, or ``loader`` can't be iterated over.
        ValueError: ``num_batches`` is negative.

    >>> list(skip_first_batches(["a", "b", "c"], 2))
    ['c']
    """
    check_num_batches(num_batches)
    if isinstance(loader, PreparedDataLoader):
        prepared = cast("PreparedDataLoader[Any]", loader)
        reader = SkippedReader(prepared.reader, num_batches, prepared.start)
        return prepared.read_by(cast("Reader[Any]", reader))  # a checker takes no property for an attribute
    # Of the class: an instance may pass on what it doesn't have itself.
    own = getattr(type(cast("object", loader)), "skip_first_batches", None)
    if own is not None:
        return own(loader, num_batches)
    if isinstance(loader, DataLoader):
        return skip_of_loader(cast("DataLoader[Any]", loader), num_batches)
    if not isinstance(loader, Iterable):
        raise TypeError(
            f"skip_first_batches takes a loader or another iterable, got {type(loader).__name__}."
        )
    return skip_of_iterable(cast("Iterable[Any]", loader), num_batches)


class SkippedReader(Generic[T]):
    """Reads as another reader does, without the first steps of a pass."""

    def __init__(self, reader: Reader[T], num_steps: int, start: int = 0) -> None:
        """Leave out ``num_steps`` steps of passes that begin with an epoch, or at sample ``start`` of it."""
        self._reader = reader
        self._num_steps = {0: num_steps, start: num_steps}
        # One in the other would take the place that it is sent to for one at which it has to skip.
        if isinstance(reader, SkippedReader):
            inner = cast("SkippedReader[T]", reader)
            own = {begin: number + inner._number(begin) for begin, number in self._num_steps.items()}
            self._num_steps = {**inner._num_steps, **own}
            self._reader = inner._reader

    @property
    def length(self) -> int | None:
        """Samples in an epoch, those that are left out included."""
        return self._reader.length

    @property
    def batch_size(self) -> int | None:
        """Samples of all ranks in a step."""
        return self._reader.batch_size

    @property
    def seed(self) -> int:
        """Of the order."""
        return self._reader.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._reader.seed = seed

    @property
    def even_batches(self) -> bool:
        """Whether the ranks have equally many full batches."""
        return cast("Evening", self._reader).even_batches  # where it has none: an AttributeError, as wanted

    @property
    def choose_even(self) -> Callable[[bool], None]:
        """Choose it from the next pass on."""
        return cast("Evening", self._reader).choose_even

    @property
    def setting(self) -> Setting:
        """What a place in the data holds for."""
        return self._remembering.setting

    @property
    def recall(self) -> Callable[[Own, int], None]:
        """Let the next pass begin with states that were restored."""
        return self._remembering.recall

    @property
    def rest(self) -> Callable[[], Own]:
        """Say the states between passes."""
        return self._remembering.rest

    @property
    def can_recall(self) -> Callable[[State], bool]:
        """Whether the state of a stream is of use here."""
        return self._remembering.can_recall

    @property
    def finish(self) -> Callable[[], None]:
        """Note that a pass is over."""
        return self._remembering.finish

    @property
    def _remembering(self) -> Remembering:
        return cast("Remembering", self._reader)

    def _number(self, start: int) -> int:
        """Say how many steps a pass leaves out: none where a state was restored that knows where it is."""
        return self._num_steps.get(start, 0)

    def plan(self, start: int) -> EpochPlan | None:
        """Plan what is left."""
        plan = self._reader.plan(start)
        return None if plan is None else plan.continued(_start_after(plan, self._number(start)))

    def count(self, start: int) -> int | None:
        """Count what is left."""
        count = self._reader.count(start)
        return None if count is None else max(0, count - self._number(start))

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Begin a pass behind the steps that are left out."""
        number = self._number(start)
        plan = self._reader.plan(start)
        if plan is not None:
            return self._reader.begin(epoch, _start_after(plan, number))
        if isinstance(self._reader, Stepping):
            return cast("Stepping[T]", self._reader).begin_after(epoch, start, number)
        begun = self._reader.begin(epoch, start)
        share_at = None if begun.share_at is None else _shifted(begun.share_at, number)
        return begun._replace(
            counts=None if begun.counts is None else tuple(max(0, count - number) for count in begun.counts),
            batches=islice(begun.batches, number, None),
            share_at=share_at,
        )


def _shifted(share_at: Callable[[int], Share], number: int) -> Callable[[int], Share]:
    return lambda step: share_at(step + number)


def _start_after(plan: EpochPlan, num_steps: int) -> int:
    if num_steps == 0:
        return plan.start
    return plan.consumed(num_steps - 1) if num_steps < plan.num_steps else plan.num_samples
