"""Prepare a loader: it yields this rank's share of the data, with the settings of the user's DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any, Generic, Literal, Protocol, TypeVar, cast, overload

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from typing_extensions import Self

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context, takes_context
from accelfn.context.call_log import LoaderPlace
from accelfn.data.dispatch import SliceFunction
from accelfn.data.passes import Passes
from accelfn.data.plan import EpochPlan
from accelfn.data.presharded import PreshardedReader
from accelfn.data.reader import Reader
from accelfn.data.rebuild import Proxy, batch_sampler_of, import_stateful, sampler_of, twin_of
from accelfn.data.resume import LoaderState, read_state
from accelfn.data.sampled import BatchedReader, SampledReader
from accelfn.data.stream import read_stream
from accelfn.errors import ConfigurationError
from accelfn.keys import seed_of

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


class PreparedDataLoader(Proxy, Generic[T]):
    """This rank's share of a DataLoader. Made by :func:`prepare_data_loader`.

    Iterating it yields the batches of one epoch, on the rank's device. Each pass is the next epoch, whether
    the previous pass was complete or ended with a ``break``; the first pass after a state was loaded resumes
    the epoch of that state. Every rank must begin each pass: it sets the random states that ``rng_types`` of
    the context names to those of rank 0. ``"generator"`` is the loader's generator, if it has one.

    ``len`` is this rank's number of batches in a full epoch, even after a state was loaded. All attributes
    that aren't listed here are read from the user's loader and set on it.
    """

    _passes: Passes[T]

    def __init__(self, passes: Passes[T], original: object) -> None:
        """Use :func:`prepare_data_loader` instead."""
        super().__init__(original, _passes=passes)  # the user's loader may be any iterable

    @property
    def epoch(self) -> int:
        """Epoch of the pass that is in progress or was left early, otherwise of the next pass."""
        return self._passes.epoch

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in one step.

        Raises:
            AttributeError: The loader has no batch size.
        """
        size = self._passes.reader.batch_size
        if size is None:
            raise AttributeError  # Python then calls __getattr__
        return size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset.

        Raises:
            TypeError: It has no length.
        """
        return len(cast("Sized", getattr(self._target, "dataset", self._passes.source.dataset)))

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next pass, from its start, even after a state was loaded or a pass left early.

        Raises:
            TypeError: ``epoch`` isn't an int.
            ValueError: It is negative.
        """
        self._passes.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return :func:`accelfn.loader_state` as a dict of plain values."""
        return asdict(self._passes.state())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` has returned, as :func:`accelfn.restore_loader` does.

        Raises:
            TypeError, ValueError: ``state_dict`` isn't the state of a loader.
            Exception: As for ``restore_loader``.
        """
        self._passes.go_to(read_state(state_dict))

    def _twin(self, passes: Passes[Any]) -> Self:
        """Return a loader of this kind over other passes."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), _passes=passes)
        return twin

    def __len__(self) -> int:
        count = self._passes.count()
        if count is None:
            raise TypeError("the loader's data has no length: its number of batches is unknown.")
        return count

    def __iter__(self) -> Iterator[T]:
        return iter(self._passes)

    def __getattr__(self, name: str) -> Any:
        if name == "total_batch_size":
            raise AttributeError("total_batch_size: the loader has no batch size.")
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(type(self), name):  # a property, which refuses to be set
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)


def passes_of(loader: PreparedDataLoader[T]) -> Passes[T]:
    """Return the passes of a prepared loader, which do its work."""
    return loader._passes  # pyright: ignore[reportPrivateUsage] -- defined in this module


def next_plan(loader: PreparedDataLoader[Any] | DataLoader[Any]) -> EpochPlan | None:
    """Return the plan of the next pass over a prepared loader.

    Ranks: any; doesn't communicate.

    Returns:
        The plan; None if it is known only during the pass.

    Raises:
        TypeError: ``loader`` isn't prepared.

    >>> loader = prepare_data_loader(Context(), DataLoader(list(range(5)), batch_size=2))
    >>> next_plan(loader).positions(step=2, rank=0)
    [4]
    """
    return _prepared_passes("next_plan", loader).plan()


# Two overloads, since iterating over a DataLoader has no element type in torch.
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
@takes_context
def prepare_data_loader(
    ctx: Context,
    loader: DataLoader[T] | PreparedDataLoader[T] | Iterable[T],
    sharding: Sharding = "global",
    slice_fn: SliceFunction | None = None,
) -> PreparedDataLoader[T]:
    """Return a loader of this rank's share of ``loader``.

    The order of an epoch is a function of the seed and the epoch number, the same for any number of ranks
    and workers: with ``shuffle=True`` each sample's position is computed by a keyed permutation, without a
    list of indices. The seed is ``data_seed`` of the configuration, else that of the sampler's generator,
    else rank 0's ``torch.initial_seed()`` when the first pass begins. Loaders that exist at the same time and
    get the same seed in this way each derive their own from it, in the order of preparation, so that loaders
    which are read side by side are independent. To read pairs, prepare one loader over a dataset of pairs. A
    custom sampler or batch sampler draws on rank 0, which sends its indices to the other ranks.

    While a batch is made, in a worker or in this process, random numbers are seeded from the seed of the
    order and the batch's position in the epoch: no two batches or ranks share an augmentation, and neither
    the number of workers nor a resumption changes one. The program's own generators don't advance. Data that
    is already sharded is the exception: its loader draws as it would without accelfn.

    A stream (an ``IterableDataset``) is sharded by source if it has at least as many shards as there are
    ranks; ranks may then have different numbers of batches. Otherwise each rank reads the full stream and
    keeps its piece of each group of batches, with a warning. The stream must be the same on every rank: its
    random numbers are the same there, and those of collation differ.

    On a mesh the data is sharded along ``"dp"``: ranks that compute on one batch together, such as those
    along ``"tp"``, get the same batch. Rank 0 of the world draws for all.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and its ``DataLoaderConfiguration``.
        loader: A torch DataLoader, whose settings are kept, or any other iterable of batches, which is read
            as a stream of batches that aren't split.
        sharding: ``"global"``: every rank passes the same loader, and reads its part of it.
            ``"already_sharded"``: every rank passes a loader of its own part. ``"by_source"``: the dataset
            has ``num_shards`` and ``shard(num_shards, index)``, and each rank reads some of its shards.
        slice_fn: With ``dispatch_batches=True``: called on rank 0 as ``slice_fn(batch, rows,
            process_index=rank, num_processes=size)``, it returns the rows (a ``slice``) of one rank from the
            batch of a whole step. Each step is then read as one batch, even without ``split_batches``.

    Returns:
        The prepared loader; a loader that was prepared with this context is returned unchanged.

    Raises:
        ConfigurationError: The data is already sharded and would be sharded again, the loader was prepared
            with another context, the batch can't be split, the dataset has too few shards for
            ``"by_source"``, or there is no batch for ``slice_fn``.
        MismatchError: The ranks have loaders of different length, batch size or options.
        TypeError: ``loader`` isn't iterable, or only once, or its dataset or sampler has no length.
        MissingExtraError: ``use_stateful_dataloader`` needs torchdata, which isn't installed.

    >>> import torch
    >>> loader = prepare_data_loader(Context(), DataLoader(torch.arange(5), batch_size=2))
    >>> list(loader)
    [tensor([0, 1]), tensor([2, 3]), tensor([4])]
    """
    if isinstance(loader, PreparedDataLoader):
        if passes_of(loader).context != ctx:
            raise ConfigurationError(
                "the loader was prepared with another context and would be sharded twice. Prepare the "
                "original loader."
            )
        return loader
    if sharding not in ("global", "already_sharded", "by_source"):
        raise ValueError(f'sharding must be "global", "already_sharded" or "by_source", got {sharding!r}.')
    is_loader = isinstance(loader, DataLoader)
    source = cast("DataLoader[T]", loader) if is_loader else _loader_over(ctx, loader)
    seeded_alike = None if ctx.loading.data_seed is not None else _generator_of(source)
    place = ctx.collectives.call_log.place_loader(seeded_alike)
    agree = partial(_agree_on_seed, ctx, source, place)
    reader = _choose_reader(ctx, source, sharding, slice_fn)
    reader.seed = agree(reader.what)
    passes = Passes(ctx, source, reader, agree)
    passes.position.has_seed |= sharding == "already_sharded"  # which draws as the loader does
    return PreparedDataLoader(passes, cast("object", loader))


def _choose_reader(
    ctx: Context, loader: DataLoader[T], sharding: Sharding, slice_fn: SliceFunction | None
) -> Reader[T]:
    """Return the reader for a loader; arguments as for ``prepare_data_loader``."""
    if ctx.loading.use_stateful_dataloader:
        import_stateful()  # raises if it is missing, even if this data doesn't need it
    dispatches = ctx.loading.dispatch_batches
    if dispatches and sharding != "global":
        raise ConfigurationError(
            f'sharding="{sharding}" makes each rank read its own data, and dispatch_batches=True makes rank '
            "0 read for all. Use one of the two."
        )
    if dispatches:
        _refuse_disorder(loader)
        if slice_fn is not None and batch_sampler_of(loader) is None:
            raise ConfigurationError(
                "slice_fn slices the batch of a whole step, but a loader with batch_size=None makes no "
                "batches. Leave slice_fn out, or give the loader a batch size."
            )
    elif slice_fn is not None:
        raise ConfigurationError(
            "slice_fn slices the batches that rank 0 reads for all ranks, but here each rank reads its own. "
            "Use DataLoaderConfiguration(dispatch_batches=True), or leave slice_fn out."
        )
    if sharding == "already_sharded":
        return PreshardedReader(ctx, loader)
    if ctx.loading.split_batches and batch_sampler_of(loader) is None:
        raise ConfigurationError(
            "split_batches divides the loader's batches, but a loader with batch_size=None makes none. Use "
            "split_batches=False, or give the loader a batch size."
        )
    if isinstance(loader.dataset, IterableDataset):
        return read_stream(ctx, loader, sharding == "by_source", slice_fn)
    if sharding == "by_source":
        raise ConfigurationError(
            'sharding="by_source" is for streams, and this dataset is map-style. Use sharding="global", with '
            "which each rank reads its own indices."
        )
    _refuse_disorder(loader)
    is_custom = type(batch_sampler_of(loader)) not in (BatchSampler, type(None))
    return (BatchedReader if is_custom else SampledReader)(ctx, loader, slice_fn)


def _refuse_disorder(loader: DataLoader[Any]) -> None:
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            "in_order=False yields batches in the order in which workers finish them, so padding and the "
            "position to resume at would be unknown. Use in_order=True, one worker, or "
            'sharding="already_sharded".'
        )


def _generator_of(loader: DataLoader[Any]) -> torch.Generator | None:
    # A custom sampler's may be one of Python's or numpy's.
    generator = getattr(sampler_of(loader), "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _agree_on_seed(ctx: Context, loader: DataLoader[Any], place: LoaderPlace, what: str = "") -> int:
    """Return the seed of a loader, the same on all ranks, after comparing what they will read.

    Ranks that sharded different data would skip samples, or deadlock.

    Args:
        ctx: The world.
        loader: The user's loader.
        place: Of the loader among those that are seeded alike: each has its own seed, so that two loaders
            which are read side by side are independent.
        what: Describes what this rank will read.
    """
    generator = _generator_of(loader)
    if ctx.loading.data_seed is not None:
        seed = ctx.loading.data_seed
    else:
        seed = torch.initial_seed() if generator is None else generator.initial_seed()
    seed %= 1 << 63
    if place.number:
        seed = seed_of("loader", seed, place.number) >> 1
    if ctx.num_processes == 1:
        return seed
    messages = gather_bytes(
        ctx, Call("prepare_data_loader", what, lambda: {"loader": what}), seed.to_bytes(8, "little")
    )
    return int.from_bytes(messages[0], "little")


class _BatchStream(Proxy, IterableDataset[Any]):
    """Presents an iterable of batches as a stream."""

    def __iter__(self) -> Iterator[Any]:
        return iter(self._target)


def _loader_over(ctx: Context, source: Iterable[T]) -> DataLoader[T]:
    """Return a loader whose batches are the items of ``source``."""
    kind = type(cast("object", source)).__name__
    if not isinstance(cast("object", source), Iterable) or isinstance(source, (str, bytes, Mapping)):
        raise TypeError(
            f"prepare_data_loader takes a torch DataLoader or another iterable of batches, got {kind}."
        )
    if isinstance(source, Iterator) and not isinstance(source, ctx.loading.custom_classes):
        raise TypeError(
            f"prepare_data_loader: {kind} is an iterator, which can be iterated over only once, and a loader "
            "is iterated over once per epoch. Pass a list, or an object whose __iter__ returns a new "
            "iterator; if this class's __iter__ restarts it, name the class in "
            "DataLoaderConfiguration(custom_classes=...)."
        )
    dataset = source if isinstance(source, IterableDataset) else _BatchStream(source)
    return DataLoader(cast("Any", dataset), batch_size=None, collate_fn=_identity)


def _identity(batch: T) -> T:
    return batch


class Skipped(Proxy, Generic[T]):
    """An iterable or a sampler without its first items, which each pass reads and drops.

    All other attributes are those of the iterable.
    """

    _number: int

    def __init__(self, source: Iterable[T], number: int) -> None:
        """Skip ``number`` items of ``source``."""
        super().__init__(source, _number=number)

    def __len__(self) -> int:
        return max(0, super().__len__() - self._number)

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._target), self._number, None)


class Skipping(Protocol[R_co]):
    """A loader that can skip batches itself."""

    def skip_first_batches(self, num_batches: int = 0, /) -> R_co:
        """Return the same loader without its first batches."""
        ...


def loader_state(loader: PreparedDataLoader[Any] | DataLoader[Any]) -> LoaderState:
    """Return a loader's position in its data.

    A state that is taken after a batch was yielded resumes at the next batch, even within an accumulation
    window and with workers that have read ahead. A state that is taken after the last batch, before the loop
    has ended, resumes with an empty pass, then with the next epoch. Loaders of one ``zip`` end together.

    Ranks: any; doesn't communicate. After the same batch all ranks get the same state, unless each rank reads
    its own data. If rank 0 reads a stream for all, keep rank 0's state: only it includes the state of the
    stream.

    Args:
        loader: From :func:`accelfn.prepare_data_loader`, :func:`accelfn.prepare` or an ``Accelerator``.

    Raises:
        TypeError: ``loader`` isn't prepared.

    >>> import torch
    >>> loader = prepare_data_loader(Context(), DataLoader(torch.arange(6), batch_size=2))
    >>> batches = iter(loader)
    >>> next(batches), loader_state(loader).consumed
    (tensor([0, 1]), 2)
    """
    return _prepared_passes("loader_state", loader).state()


def restore_loader(loader: PreparedDataLoader[Any] | DataLoader[Any], state: LoaderState) -> None:
    """Begin the next pass over ``loader`` where ``state`` was taken.

    The number of ranks, the batch size and the number of workers may have changed: the order continues, and
    each remaining sample is read once. A custom sampler draws the same order again, from its restored state.
    Data that each rank reads alone (shards of a source, or data that is already sharded) resumes in a world
    of the same size, each rank from its own state; a stream that several workers read resumes with the same
    number of workers, and the same batch size times ranks.

    If nothing is left of the epoch, the next pass is empty. If that is so for several loaders, as for those
    of one ``zip``, only the first pass over any of them is empty, and all are then at their next epoch.

    Ranks: every rank of the loader's context, with the same state; doesn't communicate. Call it between
    passes: a pass in progress isn't changed.

    Args:
        loader: Over the same dataset, from :func:`accelfn.prepare_data_loader` or an ``Accelerator``.
        state: From :func:`loader_state`.

    Raises:
        TypeError: ``loader`` isn't prepared, or ``state`` isn't a LoaderState.
        NotAvailableError: A newer version of accelfn wrote the state.
        ValueError: The state is of a dataset of another length.
        ConfigurationError: The order of a stream depends on the number of workers or ranks, which has
            changed. If an error is raised, the loader is unchanged.
    """
    passes = _prepared_passes("restore_loader", loader)
    if not isinstance(cast("object", state), LoaderState):
        raise TypeError(f"restore_loader: state must be a LoaderState, got {type(state).__name__}.")
    passes.go_to(state)


def _prepared_passes(operation: str, loader: object) -> Passes[Any]:
    if isinstance(loader, PreparedDataLoader):
        return passes_of(cast("PreparedDataLoader[Any]", loader))
    raise TypeError(f"{operation} takes a loader from prepare_data_loader, got {type(loader).__name__}.")


@overload
def skip_first_batches(loader: PreparedDataLoader[T], num_batches: int = 0) -> PreparedDataLoader[T]: ...
@overload
def skip_first_batches(loader: DataLoader[T], num_batches: int = 0) -> DataLoader[T] | Skipped[Any]: ...
@overload
def skip_first_batches(loader: Skipping[T], num_batches: int = 0) -> T: ...
@overload
def skip_first_batches(loader: Iterable[T], num_batches: int = 0) -> Iterable[T]: ...
def skip_first_batches(loader: Any, num_batches: int = 0) -> Any:
    """Return a loader whose passes begin after the first ``num_batches`` batches. ``loader`` isn't changed.

    Skipped samples of map-style data aren't loaded; those of a stream are read and dropped when the pass
    begins. The result keeps the loader's options, and has a length if the loader has one. If there are fewer
    batches, its passes are empty.

    A prepared loader and the result share their epoch: when a pass over either is complete, both are at the
    next epoch. ``num_batches`` counts from the start of the epoch, even if :func:`restore_loader` moved the
    loader into it: it replaces the position of that state. (A state from the end of an epoch is at the start
    of the next.) A state that is loaded into the result itself determines where the pass begins, and nothing
    is skipped in that pass.

    Prepare first, then skip: the remainder of a plain loader is sharded like any other data.

    Ranks: any; doesn't communicate. Every rank of a prepared loader's context must skip the same number.

    Args:
        loader: From :func:`accelfn.prepare_data_loader` or an ``Accelerator``, a torch DataLoader, or any
            other iterable. If its class has a method ``skip_first_batches``, that is called.
        num_batches: Batches of each rank, which are steps of the world.

    Returns:
        A loader of the same kind; for a stream or another iterable, an iterable.

    Raises:
        TypeError: ``num_batches`` isn't an int, or ``loader`` isn't iterable.
        ValueError: ``num_batches`` is negative.

    >>> list(skip_first_batches(["a", "b", "c"], 2))
    ['c']
    """
    if not isinstance(cast("object", num_batches), int) or isinstance(num_batches, bool):
        raise TypeError(f"skip_first_batches: num_batches must be an int, got {num_batches!r}.")
    if num_batches < 0:
        raise ValueError(f"skip_first_batches: num_batches must not be negative, got {num_batches}.")
    kind: Any = type(cast("object", loader))
    if isinstance(loader, PreparedDataLoader):
        prepared = cast("PreparedDataLoader[Any]", loader)
        return prepared._twin(passes_of(prepared).skipping(num_batches))  # pyright: ignore[reportPrivateUsage]
    # Looked up on the class: an instance may forward the attributes of another object.
    method = getattr(kind, "skip_first_batches", None)
    if method is not None:
        return method(loader, num_batches)
    if not isinstance(loader, Iterable):
        raise TypeError(f"skip_first_batches takes a loader or another iterable, got {kind.__name__}.")
    # A loader with its own __iter__ may not use its sampler.
    source, plain = cast("Any", loader), cast("Any", DataLoader)
    uses_sampler = issubclass(kind, plain) and kind.__iter__ is plain.__iter__
    if not uses_sampler or isinstance(source.dataset, IterableDataset):
        return Skipped(source, num_batches)
    name = "sampler" if source.batch_sampler is None else "batch_sampler"
    return twin_of(source, **{name: Skipped(getattr(source, name), num_batches)})
