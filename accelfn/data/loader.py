"""Carry out the plan of an epoch with the user's own DataLoader settings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import asdict
from typing import Any, Generic, TypeVar, cast, overload

import torch
from torch.utils.data import DataLoader

from accelfn.comm import failing_together, synchronize_rng_states
from accelfn.context import Context, check_context
from accelfn.data.choose import Sharding, choose_reader
from accelfn.data.deal import SliceFunction
from accelfn.data.iterables import loader_over
from accelfn.data.place import LoaderState, check_state, read_state
from accelfn.data.placement import placer
from accelfn.data.plan import EpochPlan
from accelfn.data.reading import Evening, Own, Pass, Reader, Remembering, Share
from accelfn.data.states import rewound
from accelfn.data.workers import naming_dead_workers
from accelfn.errors import ConfigurationError

__all__ = ("PreparedDataLoader", "prepare_data_loader", "tell_epoch")

T = TypeVar("T")


class _Place:
    """How far loaders over the same passes have come."""

    def __init__(self) -> None:
        self.epoch = 0  # of the next pass, or the one under way
        self.start = 0  # sample at which the next pass begins
        self.latest = Share()  # of the batch handed out last: how far all ranks have read
        self.is_amid = False  # whether a pass is under way, or was left
        self.own = Own()  # states of the user's own: as the pass began, or of the one that is to begin
        self.is_recalled = False  # whether they were restored, and no pass has begun since


class PreparedDataLoader(Generic[T]):
    """This rank's share of a DataLoader. Made by :func:`prepare_data_loader`.

    Iterating it gives the batches of one epoch, on the rank's device; a complete pass moves on to the next
    epoch. As a pass begins, the random states that ``rng_types`` of the context names are brought to those
    of rank 0, so every rank has to begin it; ``"generator"`` is the loader's own, where it has one. All
    attributes of the user's loader that are not named here are passed through.
    """

    def __init__(
        self, ctx: Context, source: DataLoader[T], reader: Reader[T], original: object = None
    ) -> None:
        """Use :func:`prepare_data_loader` instead."""
        self._original = source if original is None else original  # the user's; no DataLoader perhaps
        self._ctx = ctx
        self._source = source
        self._reader = reader
        self._place = _Place()

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next pass is, or the pass under way."""
        return self._place.epoch

    @property
    def consumed(self) -> int:
        """Samples of the epoch that all ranks have read, the batch handed out last included."""
        return self._place.latest.consumed

    @property
    def start(self) -> int:
        """Sample of the epoch at which the next pass begins: 0 but where a state was restored."""
        return self._place.start

    @property
    def context(self) -> Context:
        """The context that the loader was prepared with."""
        return self._ctx

    @property
    def plan(self) -> EpochPlan | None:
        """How the next pass is shared out; None where only the pass itself will tell."""
        return self._reader.plan(self._place.start)

    @property
    def reader(self) -> Reader[T]:
        """What reads the data."""
        return self._reader

    @property
    def even_batches(self) -> bool | None:
        """Whether the ranks have equally many full batches; None where that isn't the loader's to choose.

        Setting it holds from the next pass on, and every rank has to set the same.

        Raises:
            AttributeError: Its data can't be shared out in the other way.
        """
        return getattr(self._reader, "even_batches", None)

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        if not self.can_choose_even:
            raise AttributeError(
                "even_batches: how its batches are shared out isn't this loader's to choose."
            )
        cast("Evening", self._reader).choose_even(even)

    @property
    def can_choose_even(self) -> bool:
        """Whether ``even_batches`` can be set."""
        return hasattr(self._reader, "choose_even")

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in one step.

        Raises:
            AttributeError: The loader has no batch size.
        """
        if self._reader.batch_size is None:
            raise AttributeError  # goes on to __getattr__
        return self._reader.batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset.

        Raises:
            TypeError: It has no length.
        """
        return len(cast("Sized", getattr(self._original, "dataset", self._source.dataset)))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and with it the order.

        Raises:
            TypeError: ``epoch`` is no whole number.
            ValueError: It is negative.
        """
        if not isinstance(cast("object", epoch), int) or isinstance(epoch, bool):
            raise TypeError(f"set_epoch: epochs are whole numbers, got {epoch!r}.")
        if epoch < 0:
            raise ValueError(f"set_epoch: epochs count from 0, got {epoch}.")
        place = self._place
        place.epoch = epoch
        place.start, place.latest = 0, Share()
        place.is_amid = False
        if place.is_recalled:
            place.own = Own(place.own.sampler, rewound(place.own.stream))
        tell_epoch(self._source, epoch)

    def move_to(self, epoch: int, start: int, seed: int | None = None, own: Own | None = None) -> None:
        """Let the next pass begin at sample ``start`` of ``epoch``.

        Args:
            epoch: From 0.
            start: Samples of it that have been read.
            seed: Of the order from now on; None keeps it.
            own: States of what is the user's own, to which it is brought then; None leaves it as it is.
        """
        self.set_epoch(epoch)
        place = self._place
        place.start, place.latest = start, Share(consumed=start)
        place.own, place.is_recalled = own or Own(), own is not None
        if seed is not None:
            self._reader.seed = seed

    def place(self) -> LoaderState:
        """Say where the loader is; see :func:`accelfn.loader_state`."""
        place, reader, setting = self._place, self._reader, self._remembering().setting
        own = place.own if place.is_amid or place.is_recalled else self._remembering().rest()
        return LoaderState(
            epoch=place.epoch,
            consumed=place.latest.consumed,
            seed=reader.seed,
            length=reader.length,
            num_workers=setting.num_workers,
            group=setting.group,
            num_processes=setting.num_processes,
            rank=setting.rank,
            order=setting.order,
            sampler=own.sampler,
            stream=place.latest.stream or own.stream,
        )

    def shares_place(self, other: PreparedDataLoader[Any]) -> bool:
        """Whether both go through the same passes, as what skips batches of a loader does."""
        return self._place is other._place

    def go_to(self, state: LoaderState) -> None:
        """Let the next pass begin where ``state`` was taken; see :func:`accelfn.restore_loader`."""
        remembering, stream = self._remembering(), state.stream
        by_state = stream is not None and remembering.can_recall(stream)
        if not check_state(state, self._reader.length, remembering.setting, by_state):
            stream = None  # the place is reached by reading
        self.move_to(state.epoch, state.consumed, state.seed, Own(state.sampler, stream))

    def state_dict(self) -> dict[str, Any]:
        """Give :func:`accelfn.loader_state` as a dict of plain values."""
        return asdict(self.place())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do as :func:`accelfn.restore_loader` with what ``state_dict`` has given.

        Raises:
            TypeError, ValueError: It is something else.
            Exception: As ``restore_loader`` does.
        """
        self.go_to(read_state(state_dict))

    def read_by(self, reader: Reader[T]) -> PreparedDataLoader[T]:
        """Give a loader that reads the same passes in another way: the two share their epoch and place."""
        twin = copy.copy(self)
        twin._reader = reader
        return twin

    def begin(self) -> Pass[T]:
        """Begin a pass. Whoever takes a batch from it tells :meth:`note`, and :meth:`finish` at its end.

        Ranks: every rank of the context.
        """
        begun = self._begin()
        return begun._replace(batches=self._placed(begun.batches))

    def _begin(self) -> Pass[T]:
        self._synchronize()
        place = self._place
        start, place.start = place.start, 0
        place.latest = Share(consumed=start)
        recalled, place.is_recalled = place.own if place.is_recalled else Own(), False
        self._remembering().recall(recalled, start)
        with failing_together(self._ctx, "a data loader"), naming_dead_workers(self._ctx.rank):
            begun = self._reader.begin(place.epoch, start)
        place.own, place.is_amid = Own(begun.sampler, recalled.stream), True
        return begun

    def note(self, share: Share) -> None:
        """Take down how far the pass has come."""
        self._place.latest = share

    def finish(self) -> None:
        """End a pass: the next one is the next epoch."""
        with failing_together(self._ctx, "a data loader"):
            self._remembering().finish()
        self.set_epoch(self._place.epoch + 1)

    def __len__(self) -> int:
        count = self._reader.count(self._place.start)
        if count is None:
            raise TypeError("the loader's data has no length")
        return count

    def __iter__(self) -> Iterator[T]:
        # As a loop over what begin gives does, in one generator less, which each batch pays for.
        place, put = self._place, self._put()
        begun = self._begin()
        with failing_together(self._ctx, "a data loader"), naming_dead_workers(self._ctx.rank):
            for batch, place.latest in begun.batches:
                yield batch if put is None else put(batch)
        self.finish()

    def _placed(self, batches: Iterator[tuple[T, Share]]) -> Iterator[tuple[T, Share]]:
        """Bring batches to the rank's device; what a source raises is every rank's."""
        put = self._put()
        # Once around all: what the loop over the batches raises doesn't come in here, where they are made.
        with failing_together(self._ctx, "a data loader"), naming_dead_workers(self._ctx.rank):
            for batch, share in batches:
                yield batch if put is None else put(batch), share

    def _put(self) -> Callable[[T], T] | None:
        """Give what brings a batch to the rank's device; None where batches stay where they are."""
        ctx = self._ctx
        return placer(ctx.device, ctx.loading.non_blocking) if ctx.device_placement else None

    def _remembering(self) -> Remembering:
        return cast("Remembering", self._reader)

    def _synchronize(self) -> None:
        """Bring the random states that the context names to rank 0's, as a pass begins."""
        generator: torch.Generator | None = cast("Any", self._source).generator
        types = [name for name in self._ctx.rng_types if name != "generator" or generator is not None]
        if types:
            synchronize_rng_states(self._ctx, types, generator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet (copy and pickle look before __init__ has run)
            raise AttributeError(name)
        if name == "total_batch_size":
            raise AttributeError("total_batch_size: the loader has no batch size of its own.")
        return getattr(self._original, name)


def tell_epoch(source: DataLoader[Any], epoch: int) -> None:
    """Tell the epoch to whatever of a loader asks for it."""
    loader = cast("Any", source)
    for thing in (loader.batch_sampler, loader.sampler, loader.dataset):
        set_epoch = getattr(thing, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


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
    """Give this rank its share of ``loader``.

    The order of an epoch is a function of the seed and the epoch's number, the same for any number of ranks
    and workers: with ``shuffle=True`` each sample's place is computed by a keyed permutation, and no list is
    held. The seed is ``data_seed`` of the configuration, else that of the sampler's generator, else rank 0's
    ``torch.initial_seed()``. A sampler or batch sampler of your own draws on rank 0, and the others follow.

    In worker processes, random numbers are seeded anew for each batch, from the seed and the batch's place in
    the epoch: no two batches share an augmentation, and neither the number of workers nor a resumption
    changes one.

    A stream, that is an ``IterableDataset``, is read by its shards where it offers as many as there are ranks
    (ranks may then have different numbers of batches). Otherwise each rank reads all of it and keeps its
    piece of each group of batches, which a warning says once. It must be the same stream on every rank: in
    workers its random numbers are, and those of collation differ; without workers they are the program's
    own, so a stream that is shuffled needs a seed.

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
        The share; a loader that was prepared with this context already is given back as it is.

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
    # Also one inside of another, as the loaders of an Accelerator have: it would be sharded twice too.
    prepared = loader if isinstance(loader, PreparedDataLoader) else getattr(loader, "loader", None)
    if isinstance(prepared, PreparedDataLoader):
        prepared = cast("PreparedDataLoader[T]", prepared)
        if prepared.context != ctx:
            raise ConfigurationError(
                "the loader was prepared with another context, and would be sharded twice. Prepare the "
                "original loader."
            )
        return prepared
    if sharding not in ("global", "already_sharded", "by_source"):
        raise ValueError(f'sharding must be "global", "already_sharded" or "by_source", got {sharding!r}.')
    if isinstance(loader, DataLoader):
        source = cast("DataLoader[T]", loader)
    else:
        source = loader_over(loader, ctx.loading.custom_classes)
    reader = choose_reader(ctx, source, sharding, slice_fn)
    return PreparedDataLoader(ctx, source, reader, cast("object", loader))
