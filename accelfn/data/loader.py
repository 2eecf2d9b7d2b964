"""A loader that gives this rank its share of the data, with the user's own DataLoader settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import Self

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context, check_context
from accelfn.data.dispatch import SliceFunction, check_slicing
from accelfn.data.own import OwnReader
from accelfn.data.passes import Passes
from accelfn.data.plan import EpochPlan
from accelfn.data.reader import Reader
from accelfn.data.rebuild import import_stateful, sampler_of, twin_of
from accelfn.data.resume import LoaderState, read_state
from accelfn.data.sampled import read_indexed
from accelfn.data.stream import read_stream
from accelfn.errors import ConfigurationError

__all__ = (
    "PreparedDataLoader",
    "Sharding",
    "Skipped",
    "Skipping",
    "loader_state",
    "next_plan",
    "passes_of",
    "prepare_data_loader",
    "restore_loader",
    "skip_first_batches",
)

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
Sharding = Literal["global", "already_sharded", "by_source"]


class PreparedDataLoader(Generic[T]):
    """This rank's share of a DataLoader. Made by :func:`prepare_data_loader`.

    Iterating it gives the batches of one epoch, on the rank's device. Each pass is the next epoch, whether
    the one before was complete or left by a ``break``; one that begins after a state was loaded goes on in
    the epoch of that state. As a pass begins, the random states that ``rng_types`` of the context names are
    brought to those of rank 0, so every rank has to begin it; ``"generator"`` is the loader's own, where it
    has one.

    ``len`` is this rank's number of batches in a whole epoch, also where a state was loaded. All attributes
    that are not listed here are those of the user's loader, and are set there.
    """

    _passes: Passes[T]
    _original: Any

    def __init__(self, passes: Passes[T], original: object) -> None:
        """Use :func:`prepare_data_loader` instead."""
        vars(self).update(_passes=passes, _original=original)  # the user's; no DataLoader perhaps

    @property
    def epoch(self) -> int:
        """Number of the epoch of the pass that is under way or was left, otherwise of the next one."""
        return self._passes.epoch

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in one step.

        Raises:
            AttributeError: The loader has no batch size.
        """
        size = self._passes.reader.batch_size
        if size is None:
            raise AttributeError  # goes on to __getattr__
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset.

        Raises:
            TypeError: It has no length.
        """
        return len(cast("Sized", getattr(self._original, "dataset", self._passes.source.dataset)))

    def set_epoch(self, epoch: int) -> None:
        """Let the next pass be ``epoch``, from its start: also where a state was loaded, or a pass was left.

        Raises:
            TypeError: ``epoch`` is no whole number.
            ValueError: It is negative.
        """
        self._passes.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return :func:`accelfn.loader_state` as a dict of plain values."""
        return asdict(self._passes.state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do as :func:`accelfn.restore_loader` with what ``state_dict`` has returned.

        Raises:
            TypeError, ValueError: It is something else.
            Exception: As ``restore_loader`` does.
        """
        self._passes.go_to(read_state(state_dict))

    def _twin(self, passes: Passes[Any]) -> Self:
        """Return a loader of this kind that makes other passes."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _passes=passes)
        return twin

    def __len__(self) -> int:
        count = self._passes.count()
        if count is None:
            raise TypeError("the loader's data has no length")
        return count

    def __iter__(self) -> Iterator[T]:
        return iter(self._passes)

    def __getattr__(self, name: str) -> Any:
        # Copy and pickle look before they are set.
        if name in ("_passes", "_original") or name.startswith("__"):
            raise AttributeError(name)
        if name == "total_batch_size":
            raise AttributeError("total_batch_size: the loader has no batch size of its own.")
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # What a class here names is refused by its property; all else is the user's.
        if name in vars(self) or hasattr(type(self), name) or name.startswith("__"):
            super().__setattr__(name, value)
        else:
            setattr(self._original, name, value)


def passes_of(loader: PreparedDataLoader[T]) -> Passes[T]:
    """Return what does the work of a prepared loader."""
    return loader._passes  # pyright: ignore[reportPrivateUsage] -- of this module


def next_plan(loader: PreparedDataLoader[Any] | DataLoader[Any]) -> EpochPlan | None:
    """Return how the next pass over a prepared loader is shared out.

    Ranks: any; doesn't communicate.

    Returns:
        None where only the pass itself can say.

    Raises:
        TypeError: ``loader`` isn't prepared.

    >>> loader = prepare_data_loader(Context(), DataLoader(list(range(5)), batch_size=2))
    >>> next_plan(loader).positions(step=2, rank=0)
    [4]
    """
    return _prepared_passes("next_plan", loader).plan()


# Apart: torch says of what a loader gives, iterated over, nothing.
@overload
def prepare_data_loader(
    ctx: Context,
    loader: DataLoader[T] | PreparedDataLoader[T],
    sharding: Sharding = "global",
    slice_fn: SliceFunction | None = None,
) -> PreparedDataLoader[T]: ...
@overload
def prepare_data_loader(
    ctx: Context,
    loader: Iterable[T],
    sharding: Sharding = "global",
    slice_fn: SliceFunction | None = None,
) -> PreparedDataLoader[T]: ...
def prepare_data_loader(
    ctx: Context,
    loader: DataLoader[T] | PreparedDataLoader[T] | Iterable[T],
    sharding: Sharding = "global",
    slice_fn: SliceFunction | None = None,
) -> PreparedDataLoader[T]:
    """Return this rank its share of ``loader``.

    The order of an epoch is a function of the seed and the epoch's number, the same for any number of ranks
    and workers: with ``shuffle=True`` each sample's place is computed by a keyed permutation, and no list is
    held. The seed is ``data_seed`` of the configuration, else that of the sampler's generator, else rank 0's
    ``torch.initial_seed()``, as the first pass begins. A sampler or batch sampler of your own draws on rank
    0, and the others follow.

    While a batch is made, in a worker or in this process, random numbers are seeded from the seed of the
    order and the batch's place in the epoch: no two batches or ranks share an augmentation, and neither the
    number of workers nor a resumption changes one. The program's own generators go on as if nothing had been
    drawn. Data that is sharded already is the exception: its loader draws as it would without this.

    A stream, that is an ``IterableDataset``, is read by its shards where it offers as many as there are ranks
    (ranks may then have different numbers of batches). Otherwise each rank reads all of it and keeps its
    piece of each group of batches, which a warning says. It must be the same stream on every rank: its
    random numbers are, and those of collation differ.

    On a mesh the shares are those along ``"dp"``: ranks that work on one batch together, such as those along
    ``"tp"``, get the same one. Rank 0 of the whole world draws for all.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and its ``DataLoaderConfiguration``.
        loader: A torch DataLoader, whose settings are kept, or any other iterable of batches, which are left
            as they are. It is read as a stream, in which each batch counts as one sample.
        sharding: ``"global"``: every rank was given the same loader, and reads its part.
            ``"already_sharded"``: every rank was given its own part already. ``"by_source"``: the dataset
            offers ``num_shards`` and ``shard(num_shards, index)``, and each rank gets some of them.
        slice_fn: With ``dispatch_batches=True``: called on rank 0 as ``slice_fn(batch, rows,
            process_index=rank, num_processes=size)``, it cuts out of the batch of a whole step the rows (a
            ``slice``) of one rank. A step is then read as one batch, also without ``split_batches``.

    Returns:
        The share; a loader that was prepared with this context already is returned as it is.

    Raises:
        ConfigurationError: The data is sharded already and would be sharded again, the loader was prepared
            with another context, the batch can't be split, each rank is to have shards of its own and there
            are too few, or a ``slice_fn`` has nothing to cut.
        MismatchError: The ranks have loaders of different length, batch size or options.
        TypeError: ``loader`` can't be iterated over, or only once, or its samples have no number.
        MissingExtraError: ``use_stateful_dataloader`` is asked for, and torchdata isn't installed.

    >>> import torch
    >>> loader = prepare_data_loader(Context(), DataLoader(torch.arange(5), batch_size=2))
    >>> list(loader)
    [tensor([0, 1]), tensor([2, 3]), tensor([4])]
    """
    check_context("prepare_data_loader", ctx)
    if isinstance(loader, PreparedDataLoader):
        if passes_of(loader).context != ctx:
            raise ConfigurationError(
                "the loader was prepared with another context, and would be sharded twice. Prepare the "
                "original loader."
            )
        return loader
    if sharding not in ("global", "already_sharded", "by_source"):
        raise ValueError(f'sharding must be "global", "already_sharded" or "by_source", got {sharding!r}.')
    is_loader = isinstance(loader, DataLoader)
    source = cast("DataLoader[T]", loader) if is_loader else _loader_over(ctx, loader)
    reader = _choose_reader(ctx, source, sharding, slice_fn)
    passes = Passes(ctx, source, reader, partial(_agree_on_seed, ctx, source))
    return PreparedDataLoader(passes, cast("object", loader))


def _choose_reader(
    ctx: Context, loader: DataLoader[T], sharding: Sharding, slice_fn: SliceFunction | None
) -> Reader[T]:
    """Choose the way of reading that a loader needs; arguments as ``prepare_data_loader``'s."""
    agree = partial(_agree_on_seed, ctx)
    if ctx.loading.use_stateful_dataloader:
        import_stateful()  # refused here where it is missing, whatever the data
    dispatches = ctx.loading.dispatch_batches
    if dispatches and sharding != "global":
        raise ConfigurationError(
            f'sharding="{sharding}" lets each rank read data of its own, and dispatch_batches=True lets rank '
            "0 read for all. Use one of the two."
        )
    if dispatches:
        _refuse_disorder(loader)
        check_slicing(loader, slice_fn)
    elif slice_fn is not None:
        raise ConfigurationError(
            "slice_fn cuts the batches that rank 0 reads for all ranks, and here each rank reads its own. "
            "Use DataLoaderConfiguration(dispatch_batches=True), or leave slice_fn out."
        )
    if sharding == "already_sharded":
        return OwnReader(ctx, loader, agree(loader, "already sharded"))
    if isinstance(loader.dataset, IterableDataset):
        return read_stream(ctx, loader, sharding == "by_source", slice_fn, partial(agree, loader))
    if sharding == "by_source":
        raise ConfigurationError(
            'sharding="by_source" is for streams. This dataset is read by its indices, of which each rank '
            'gets its own: use sharding="global".'
        )
    _refuse_disorder(loader)
    reader = read_indexed(ctx, loader, slice_fn)
    reader.seed = agree(loader, f"dispatched by rank 0: {reader.what}" if dispatches else reader.what)
    return reader


def _refuse_disorder(loader: DataLoader[Any]) -> None:
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            "in_order=False yields batches as workers come by them, so it would be unknown which rows are "
            "padding and where a pass goes on. Use in_order=True, one worker, or "
            'sharding="already_sharded", where each rank\'s batches are its own.'
        )


def _agree_on_seed(ctx: Context, loader: DataLoader[Any], what: str = "") -> int:
    """Return the seed of the order, the same on all ranks, after comparing what they will read.

    Ranks that sharded different data would skip samples, or wait for ever.
    """
    if ctx.loading.data_seed is not None:
        own = ctx.loading.data_seed
    else:
        # A sampler of the user's own may have one of Python's or numpy's there.
        generator = getattr(sampler_of(loader), "generator", None)
        own = generator.initial_seed() if isinstance(generator, torch.Generator) else torch.initial_seed()
    own %= 1 << 63
    if ctx.num_processes == 1:
        return own
    blobs = gather_bytes(
        ctx, Call("prepare_data_loader", what, lambda: {"loader": what}), own.to_bytes(8, "little")
    )
    return int.from_bytes(blobs[0], "little")


class _BatchStream(IterableDataset[Any]):
    """The batches of an iterable, as a stream. For everything else it is that iterable."""

    def __init__(self, source: Iterable[Any]) -> None:
        vars(self)["_source"] = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)  # a TypeError where it has none, as everywhere

    def __getattr__(self, name: str) -> Any:
        if name == "_source" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._source, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._source, name, value)


def _loader_over(ctx: Context, source: Iterable[T]) -> DataLoader[T]:
    """Make a loader whose batches are the items of ``source``, as they are."""
    kind = type(cast("object", source)).__name__
    if not isinstance(cast("object", source), Iterable) or isinstance(source, (str, bytes, Mapping)):
        raise TypeError(
            f"prepare_data_loader takes a torch DataLoader or another iterable of batches, got {kind}."
        )
    if isinstance(source, Iterator) and not isinstance(source, ctx.loading.custom_classes):
        raise TypeError(
            f"prepare_data_loader: {kind} is an iterator, which can be gone through only once, and a loader "
            "is gone through once an epoch. Pass what makes it, such as a list, or an object whose __iter__ "
            "gives a new one; if its own __iter__ begins anew each time, name its class in "
            "DataLoaderConfiguration(custom_classes=...)."
        )
    dataset = source if isinstance(source, IterableDataset) else _BatchStream(source)
    return DataLoader(cast("Any", dataset), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: T) -> T:
    return batch


class Skipped(Generic[T]):
    """An iterable without its first items, which each pass reads and throws away; or a sampler without them.

    Attributes that are not named here are passed through.
    """

    def __init__(self, source: Iterable[T], number: int) -> None:
        """Leave out ``number`` items of ``source``."""
        self._source = source
        self._number = number

    def __len__(self) -> int:
        return max(0, len(cast("Sized", self._source)) - self._number)  # a TypeError where it has none

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._source), self._number, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)


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
    >>> loader = prepare_data_loader(Context(), DataLoader(torch.arange(6), batch_size=2))
    >>> batches = iter(loader)
    >>> next(batches), loader_state(loader).consumed
    (tensor([0, 1]), 2)
    """
    return _prepared_passes("loader_state", loader).state()


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
    passes = _prepared_passes("restore_loader", loader)
    if not isinstance(cast("object", state), LoaderState):
        raise TypeError(f"restore_loader: state must be a LoaderState, got {type(state).__name__}.")
    passes.go_to(state)


def _prepared_passes(operation: str, loader: object) -> Passes[Any]:
    if isinstance(loader, PreparedDataLoader):
        return passes_of(cast("PreparedDataLoader[Any]", loader))
    raise TypeError(
        f"{operation} takes a loader that prepare_data_loader has returned, got {type(loader).__name__}."
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
        prepared = cast("PreparedDataLoader[Any]", loader)
        return prepared._twin(passes_of(prepared).skipping(num_batches))  # pyright: ignore[reportPrivateUsage]
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
        return Skipped(source, num_batches)
    name = "sampler" if source.batch_sampler is None else "batch_sampler"
    return twin_of(source, **{name: Skipped(getattr(source, name), num_batches)})
