"""A loader that gives this rank its share of the data, with the user's own DataLoader settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import asdict
from functools import partial
from typing import Any, Generic, Literal, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import Self

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context, check_context
from accelfn.data.dispatch import DispatchedSteps, SliceFunction, check_slicing
from accelfn.data.own import OwnReader
from accelfn.data.passes import Passes
from accelfn.data.place import read_state
from accelfn.data.plan import EpochPlan
from accelfn.data.reading import Reader
from accelfn.data.rebuild import check_stateful, sampler_of
from accelfn.data.sampled import LocalSteps, read_indexed
from accelfn.data.stream import read_stream
from accelfn.errors import ConfigurationError

__all__ = ("PreparedDataLoader", "Sharding", "next_plan", "passes_of", "prepare_data_loader", "skipping")

T = TypeVar("T")
L = TypeVar("L", bound="PreparedDataLoader[Any]")
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
    if not isinstance(loader, PreparedDataLoader):
        raise TypeError(
            f"next_plan takes a loader that prepare_data_loader has returned, got {type(loader).__name__}."
        )
    return passes_of(loader).plan()


def skipping(loader: L, num_batches: int) -> L:
    """Return a prepared loader whose passes begin later; see :func:`accelfn.skip_first_batches`."""
    return loader._twin(passes_of(loader).skipping(num_batches))  # pyright: ignore[reportPrivateUsage]


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
        TypeError: ``loader`` can't be iterated over, or only once, its samples have no number, or
            ``slice_fn`` has another signature.
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
    check_stateful(ctx)
    if ctx.loading.dispatch_batches and sharding != "global":
        raise ConfigurationError(
            f'sharding="{sharding}" lets each rank read data of its own, and dispatch_batches=True lets rank '
            "0 read for all. Use one of the two."
        )
    dispatches = ctx.loading.dispatch_batches
    if dispatches:
        _refuse_disorder(loader)
        check_slicing(ctx, loader, slice_fn)
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
    rank, size = ctx.coordinate("dp"), ctx.axis_size("dp")
    steps = DispatchedSteps(ctx, loader, slice_fn) if dispatches else LocalSteps(ctx, loader, rank)
    reader = read_indexed(ctx, loader, rank, size, steps)
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
