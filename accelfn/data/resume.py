"""Where a loader is in its data, as a value; and going on from there, in any world."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar, cast, overload

from torch.utils.data import DataLoader

from accelfn.data.loader import PreparedDataLoader, passes_of, skipping
from accelfn.data.place import LoaderState
from accelfn.data.skip import Skipped, check_num_batches, skip_of_iterable, skip_of_loader

__all__ = ("Skipping", "loader_state", "restore_loader", "skip_first_batches")

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)


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
    check_num_batches(num_batches)
    if isinstance(loader, PreparedDataLoader):
        return skipping(cast("PreparedDataLoader[Any]", loader), num_batches)
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
