"""Choose the way of reading that a loader needs."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context
from accelfn.data.dispatch import SliceFunction, dispatch
from accelfn.data.items import ItemReader
from accelfn.data.order import read_order, refuse_sharded
from accelfn.data.own import OwnReader
from accelfn.data.plan import planner
from accelfn.data.reading import Reader
from accelfn.data.sampled import BatchedReader, SampledReader, batch_sampler_of, sampler_of
from accelfn.data.stateful import check_stateful
from accelfn.data.stream import read_stream, rows_in
from accelfn.errors import ConfigurationError

__all__ = ("Sharding", "choose_reader")

T = TypeVar("T")
Sharding = Literal["global", "already_sharded", "by_source"]


def choose_reader(
    ctx: Context, loader: DataLoader[T], sharding: Sharding, slice_fn: SliceFunction | None
) -> Reader[T]:
    """Choose the way of reading that a loader needs; arguments as ``prepare_data_loader``'s.

    Ranks: every rank of ``ctx``.
    """
    check_stateful(ctx)
    if ctx.loading.dispatch_batches and sharding != "global":
        raise ConfigurationError(
            f'sharding="{sharding}" lets each rank read data of its own, and dispatch_batches=True lets rank '
            "0 read for all. Use one of the two."
        )
    if ctx.loading.dispatch_batches:
        return dispatch(ctx, loader, partial(_agreed_seed, ctx, loader), slice_fn)
    if slice_fn is not None:
        raise ConfigurationError(
            "slice_fn cuts the batches that rank 0 reads for all ranks, and here each rank reads its own. "
            "Use DataLoaderConfiguration(dispatch_batches=True), or leave slice_fn out."
        )
    rank, size = ctx.rank, ctx.num_processes
    if sharding == "already_sharded":
        return OwnReader(ctx, loader, _agreed_seed(ctx, loader, "already sharded"))
    if isinstance(loader.dataset, IterableDataset):
        return read_stream(ctx, loader, sharding == "by_source", partial(_agreed_seed, ctx, loader))
    if sharding == "by_source":
        raise ConfigurationError(
            'sharding="by_source" is for streams. This dataset is read by its indices, of which each rank '
            'gets its own: use sharding="global".'
        )
    batch_sampler = batch_sampler_of(loader)
    if batch_sampler is None:
        rows_in(ctx, None)  # refuses what makes batches only
        order = read_order(sampler_of(loader), loader.dataset, 0)
        order = replace(order, seed=_agreed_seed(ctx, loader, f"{order}, each a batch"))
        return ItemReader(ctx, loader, order)
    make_plan = planner(ctx.loading, size, bool(getattr(batch_sampler, "drop_last", False)))
    if type(batch_sampler) is BatchSampler:
        batch_size = int(batch_sampler.batch_size)
        order = read_order(cast("Any", batch_sampler).sampler, loader.dataset, 0)
        plan = make_plan(order.num_samples, 0, batch_size)
        seed = _agreed_seed(ctx, loader, repr(plan))
        order = read_order(cast("Any", batch_sampler).sampler, loader.dataset, seed)
        return SampledReader(ctx, loader, order, rank, partial(make_plan, batch_size=batch_size))
    refuse_sharded(getattr(batch_sampler, "sampler", None))
    batch_size = getattr(batch_sampler, "batch_size", None)
    if batch_size is not None:
        make_plan(0, 0, batch_size)  # refuses a batch that can't be split
    seed = _agreed_seed(ctx, loader, f"batches of {batch_size}")
    by_sample = partial(make_plan, batch_size=int(batch_size or 1))
    return BatchedReader(ctx, loader, seed, rank, size, by_sample)


def _agreed_seed(ctx: Context, loader: DataLoader[Any], what: str) -> int:
    """Compare on all ranks what is to be shared out, and give them one seed.

    Ranks that share out different data would skip samples, or wait for ever.
    """
    if ctx.loading.data_seed is not None:
        own = ctx.loading.data_seed
    else:
        generator = cast("torch.Generator | None", getattr(sampler_of(loader), "generator", None))
        own = torch.initial_seed() if generator is None else generator.initial_seed()
    own %= 1 << 63
    if ctx.num_processes == 1:
        return own
    blobs = gather_bytes(
        ctx, Call("prepare_data_loader", what, lambda: {"loader": what}), own.to_bytes(8, "little")
    )
    return int.from_bytes(blobs[0], "little")
