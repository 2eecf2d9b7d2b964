"""Where a loader is in its data, as a value; and going on from there, in any world."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast, overload

from torch.utils.data import DataLoader

from accelfn.data.loader import PreparedDataLoader
from accelfn.data.place import LoaderState
from accelfn.data.plan import EpochPlan
from accelfn.data.reading import Evening, Own, Pass, Reader, Remembering, Setting, Share, Stepping
from accelfn.data.skip import Skipped, check_num_batches, skip_of_iterable, skip_of_loader
from accelfn.data.states import State

__all__ = (
    "SkippedReader",
    "Skipping",
    "Wrapping",
    "loader_state",
    "restore_loader",
    "skip_first_batches",
)

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


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
    return _prepared("loader_state", loader).place()


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
    prepared.go_to(state)


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
