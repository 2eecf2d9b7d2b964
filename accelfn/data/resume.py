"""Where a loader is in its data, as a value; going on from there, in any world; and leaving out batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Generic, Protocol, TypeVar, cast, overload

from torch.utils.data import DataLoader, IterableDataset

from accelfn.data.loader import PreparedDataLoader, passes_of, skipping
from accelfn.data.place import LoaderState
from accelfn.data.rebuild import twin_of

__all__ = ("Skipped", "Skipping", "loader_state", "restore_loader", "skip_first_batches")

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


class Skipped(Generic[T]):
    """An iterable without its first items, which each pass reads and throws away; or a sampler without them.

    Attributes that are not named here are passed through.
    """

    def __init__(self, source: Iterable[T], number: int) -> None:
        """Leave out ``number`` items of ``source``."""
        self._source = source
        self._number = number

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._source), self._number, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)


class _SizedSkipped(Skipped[T]):
    """The same of an iterable that has a length."""

    def __len__(self) -> int:
        return max(0, len(cast("Sized", self._source)) - self._number)


def _skip_items(source: Iterable[T], number: int) -> Skipped[T]:
    try:
        len(cast("Sized", source))
    except TypeError:
        return Skipped(source, number)
    return _SizedSkipped(source, number)


class Skipping(Protocol[R_co]):
    """What knows by itself how to leave out batches."""

    def skip_first_batches(self, num_batches: int = 0, /) -> R_co:
        """Return the same without the first batches."""
        ...


def loader_state(loader: PreparedDataLoader[Any] | DataLoader[Any]) -> LoaderState:
    """Return where a loader is in its data.

    Taken after a batch was yielded, it resumes at the next one: also in an accumulation window, and with
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
    return passes_of(_prepared("loader_state", loader)).state()


def restore_loader(loader: PreparedDataLoader[Any] | DataLoader[Any], state: LoaderState) -> None:
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
    passes_of(prepared).go_to(state)


def _prepared(operation: str, loader: object) -> PreparedDataLoader[Any]:
    if isinstance(loader, PreparedDataLoader):
        return cast("PreparedDataLoader[Any]", loader)
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
    """Return a loader whose passes begin behind the first ``num_batches`` batches. ``loader`` isn't changed.

    Of map-style data nothing that is skipped is loaded; what comes as a stream is read and thrown away, when
    the pass begins. All options of the loader are kept, and where it has a length, so has the result. More
    than there are: its passes are empty.

    A prepared loader and what is made from it share their epoch: when a pass over the one is complete, both
    are at the next epoch. Batches count from the start of the epoch, also where :func:`restore_loader` had
    moved the loader into it: ``num_batches`` says where to go on then, and not the state. A state from the
    end of an epoch is a place at the start of the next one. A state that is loaded into the result says by
    itself where to go on, and nothing is skipped in that pass.

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
    if not isinstance(cast("object", num_batches), int) or isinstance(num_batches, bool):
        raise TypeError(f"skip_first_batches: num_batches must be a whole number, got {num_batches!r}.")
    if num_batches < 0:
        raise ValueError(f"skip_first_batches: num_batches must not be negative, got {num_batches}.")
    kind: Any = type(cast("object", loader))
    if isinstance(loader, PreparedDataLoader):
        return skipping(cast("PreparedDataLoader[Any]", loader), num_batches)
    # Of the class: an instance may pass on what it doesn't have itself.
    own = getattr(kind, "skip_first_batches", None)
    if own is not None:
        return own(loader, num_batches)
    if not isinstance(loader, Iterable):
        raise TypeError(f"skip_first_batches takes a loader or another iterable, got {kind.__name__}.")
    # A loader that iterates in its own way may not ask its sampler.
    source, plain = cast("Any", loader), cast("Any", DataLoader)
    asks_sampler = issubclass(kind, plain) and kind.__iter__ is plain.__iter__
    if not asks_sampler or isinstance(source.dataset, IterableDataset):
        return _skip_items(source, num_batches)
    name = "sampler" if source.batch_sampler is None else "batch_sampler"
    return twin_of(source, **{name: _SizedSkipped(getattr(source, name), num_batches)})
