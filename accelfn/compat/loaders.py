"""Loaders as programs written for Accelerate know them: in torch's order, with flags at their end."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence, Sized
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import accelfn.comm as comm
import accelfn.data as data
from accelfn.accelerator import AcceleratedDataLoader, Accelerator
from accelfn.compat.current import current
from accelfn.compat.shards import BatchSamplerShard, SeedableRandomSampler
from accelfn.config import DataLoaderConfiguration
from accelfn.context import Context
from accelfn.data.loader import passes_of
from accelfn.data.passes import Passes
from accelfn.data.rebuild import batch_sampler_of, remake, sampler_of, twin_of
from accelfn.errors import ConfigurationError

T = TypeVar("T")


class DataLoaderShard(AcceleratedDataLoader[T]):
    """A prepared loader, under Accelerate's name; of map-style data and of data that one rank reads alone.

    It reads one batch ahead, so that the last batch is known to be the last one.

    Attributes:
        end_of_dataloader: Whether the latest batch is the last one of its pass.
        remainder: Rows of all ranks in an incomplete last step; 0 if it is complete, -1 if that is unknown.
    """

    end_of_dataloader: bool
    remainder: int

    def __init__(self, accelerator: Accelerator | None, loader: data.PreparedDataLoader[T]) -> None:
        """Use ``Accelerator.prepare`` or :func:`prepare_data_loader` instead."""
        vars(self).update(vars(loader), end_of_dataloader=False, remainder=-1, _accelerator=None)
        if accelerator is not None:
            self.adopt(accelerator)

    def adopt(self, accelerator: Accelerator) -> None:
        """Make it a loader of an accelerator, which saves it."""
        vars(self).update(_accelerator=accelerator)
        accelerator.loaders.add(self)

    @property
    def __class__(self) -> type[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """DataLoader, since programs ask ``isinstance(loader, DataLoader)``."""
        return DataLoader

    @property
    def device(self) -> torch.device | None:
        """Device of the batches; None if they aren't moved."""
        ctx = passes_of(self).context
        return ctx.device if ctx.device_placement else None

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in one step."""
        ctx, rows = passes_of(self).context, _batch_size_of(self._target)
        if rows is None:
            raise AttributeError
        return rows if ctx.loading.split_batches else rows * ctx.axis_size("dp")

    def _twin(self, passes: Passes[Any]) -> Any:
        twin = object.__new__(cast("type[DataLoaderShard[Any]]", type(self)))
        vars(twin).update(vars(self), _passes=passes, end_of_dataloader=False)
        accelerator: Accelerator | None = vars(self)["_accelerator"]
        if accelerator is not None:
            accelerator.loaders.add(twin, accelerator.loaders.name_of(self))
        return twin

    def __iter__(self) -> Iterator[T]:
        accelerator: Accelerator | None = vars(self)["_accelerator"]
        passes = passes_of(self)
        _synchronize_order(passes.context, passes.source)
        vars(self).update(end_of_dataloader=False, remainder=_remainder(passes))
        loops = current().loops
        loops.append(self)
        try:
            uneven = "error" if accelerator is None else accelerator.uneven
            shard = batch_sampler_of(passes.source)
            if isinstance(shard, BatchSamplerShard) and (shard.counts_by_rank or not shard.even_batches):
                # Nothing is compared: a rank may loop alone over a fixed order, and a program that asks for
                # uneven batches counts on each rank reading its own.
                uneven = "join"
            batches = data.microbatches(passes.context, cast("data.PreparedDataLoader[T]", self), uneven)
            has_state = passes.context.loading.use_stateful_dataloader
            latest = next(batches, None)
            while latest is not None:
                if has_state:
                    passes.hold()
                following = next(batches, None)
                if following is None:
                    vars(self).update(end_of_dataloader=True, remainder=self._last_remainder(latest[1]))
                yield latest[0]
                latest = following
            passes.position.held = None
        finally:  # also after a break
            loops[:] = [loop for loop in loops if loop is not self]

    def _last_remainder(self, micro: data.MicroBatch) -> int:
        del micro
        return self.remainder


class DataLoaderDispatcher(DataLoaderShard[T]):
    """A prepared loader whose batches rank 0 reads for all ranks."""

    def __iter__(self) -> Iterator[T]:
        torch.empty((), dtype=torch.int64).random_()  # as a DataLoader on every rank
        yield from super().__iter__()

    def _last_remainder(self, micro: data.MicroBatch) -> int:
        return -1 if micro.num_valid is None else micro.num_valid


def prepare_loader(
    accelerator: Accelerator | None, ctx: Context, loader: Any, slice_fn: Any = None
) -> DataLoaderShard[Any]:
    """Return a loader of this rank's share, in torch's order of a shuffle.

    Map-style data is read by torch's own loader, whose batch sampler is sharded, so that the program's random
    numbers are what they would be without accelfn. Of a stream that several ranks share, rank 0 reads for
    all, unless ``dispatch_batches=False``.

    Ranks: every rank of ``ctx``.
    """
    if isinstance(loader, DataLoaderShard) and loader._accelerator is None and accelerator is not None:  # pyright: ignore[reportPrivateUsage, reportUnnecessaryComparison]
        loader.adopt(accelerator)
        return cast("DataLoaderShard[Any]", loader)
    # Windows count the calls of `accumulate`, and loaders read one batch ahead, not one window.
    ctx = ctx.replace(gradient_accumulation_steps=1)
    loading, size = ctx.loading, ctx.axis_size("dp")
    if isinstance(loader, data.PreparedDataLoader) or not isinstance(loader, DataLoader):
        return DataLoaderShard(accelerator, data.prepare_data_loader(ctx, cast("Any", loader)))
    source = cast("DataLoader[Any]", loader)
    is_stream = isinstance(source.dataset, IterableDataset)
    dispatches = loading.dispatch_batches
    if dispatches is None:
        dispatches = is_stream and ctx.device_placement
    if size > 1 and dispatches:
        ctx = ctx.replace(dataloader_config=dataclasses.replace(loading, dispatch_batches=True))
        return DataLoaderDispatcher(accelerator, data.prepare_data_loader(ctx, source, slice_fn=slice_fn))
    ctx = ctx.replace(dataloader_config=dataclasses.replace(loading, dispatch_batches=False))
    if size > 1 and (is_stream or batch_sampler_of(source) is None):
        return DataLoaderShard(accelerator, data.prepare_data_loader(ctx, source))
    return DataLoaderShard(
        accelerator, data.prepare_data_loader(ctx, _sharded(ctx, source), "already_sharded")
    )


def prepare_data_loader(
    dataloader: Any,
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: Any = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard[Any]:
    """Shard a loader over the ranks of the current context; see :func:`accelfn.prepare_data_loader`.

    Ranks: every rank.

    Raises:
        ConfigurationError: A device, a mesh, or another number of ranks than the current context's.
    """
    ctx = current().start()
    given = {"num_processes": num_processes, "process_index": process_index}
    own = {"num_processes": ctx.num_processes, "process_index": ctx.rank}
    wrong = [name for name, value in given.items() if value not in (None, own[name])]
    if torch_device_mesh is not None:
        wrong.append("torch_device_mesh")
    if device is not None and put_on_device and torch.device(device).type != ctx.device.type:
        wrong.append("device")
    if wrong:
        raise ConfigurationError(
            f"prepare_data_loader: {', '.join(wrong)} isn't the current context's: {ctx.num_processes} "
            f"ranks, of which this is {ctx.rank}, on {ctx.device}. Leave it out; to read as another rank, "
            "use a BatchSamplerShard."
        )
    loading = DataLoaderConfiguration(
        split_batches,
        dispatch_batches,
        even_batches,
        use_seedable_sampler,
        data_seed,
        non_blocking,
        use_stateful_dataloader,
    )
    ctx = ctx.replace(
        device_placement=put_on_device,
        dataloader_config=loading,
        rng_types=None if rng_types is None else [str(kind) for kind in rng_types],
    )
    return prepare_loader(None, ctx, dataloader, slice_fn_for_dispatch)


def _sharded(ctx: Context, loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of this rank's batches; with one rank the loader itself, unless it is seedable."""
    size, loading = ctx.axis_size("dp"), ctx.loading
    batching = batch_sampler_of(loader)
    if isinstance(loader.dataset, IterableDataset) or batching is None:
        return loader
    sampler = sampler_of(loader)
    if loading.use_seedable_sampler and type(sampler) is RandomSampler:
        seed = torch.random.initial_seed() if loading.data_seed is None else loading.data_seed
        replaced: Any = SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,  # pyright: ignore[reportPrivateUsage]
            data_seed=int(comm.broadcast_object_list(ctx, [seed])[0]),
        )
    elif size > 1 and type(sampler) is RandomSampler and cast("Any", sampler).generator is None:
        # Ranks agree on the order by rank 0's state of this generator.
        replaced = cast("Any", copy.copy(sampler))
        replaced.generator = torch.Generator()
        replaced.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    else:
        replaced = sampler
    if replaced is not sampler:
        batching = copy.copy(batching)
        batching.sampler = replaced
    elif size == 1 and getattr(sampler, "generator", None) is None:
        return loader
    # With one rank too: it passes the epoch on to the sampler, and runs it to its end, where a shuffle draws
    # from its generator once more.
    batching = BatchSamplerShard(
        batching, size, ctx.coordinate("dp"), loading.split_batches, loading.even_batches
    )
    if cast("Any", loader).batch_sampler is None:  # the batch sampler was passed as the sampler
        return remake(loader, loader.dataset, sampler=batching)
    if type(loader) is DataLoader:
        return remake(loader, loader.dataset, batch_sampler=batching)
    return twin_of(loader, batch_sampler=batching)


def _synchronize_order(ctx: Context, loader: Any) -> None:
    """Set the generator of a shuffle to rank 0's state."""
    if ctx.axis_size("dp") == 1 or "generator" not in ctx.rng_types:
        return
    generator = getattr(sampler_of(loader), "generator", None)
    if isinstance(generator, torch.Generator):
        comm.synchronize_rng_states(ctx, ["generator"], generator)


def _batch_size_of(loader: Any) -> int | None:
    is_loader = isinstance(loader, cast("Any", DataLoader))
    batching: Any = batch_sampler_of(loader) if is_loader else None
    size = getattr(batching, "batch_size", getattr(loader, "batch_size", None))
    return None if size is None else int(size)


def _remainder(passes: Passes[Any]) -> int:
    """Return the rows of all ranks in an incomplete last step, as far as the loader's lengths tell."""
    source: Any = passes.source
    rows, ctx = _batch_size_of(source), passes.context
    batching = batch_sampler_of(source)
    if rows is None or batching is None or getattr(batching, "drop_last", False):
        return -1
    if isinstance(source.dataset, IterableDataset) or ctx.loading.dispatch_batches:
        return -1
    number = len(cast("Sized", source.dataset))
    return number % (rows if ctx.loading.split_batches else rows * ctx.axis_size("dp"))
