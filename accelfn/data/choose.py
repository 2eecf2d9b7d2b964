"""Choose the way of reading that a loader needs."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context
from accelfn.data.asked import BatchSamplerSpec, read_asked, sampler_of
from accelfn.data.dispatch import SliceFunction, dispatch
from accelfn.data.own import OwnReader
from accelfn.data.reading import Reader
from accelfn.data.sampled import BatchedReader, SampledReader
from accelfn.data.stateful import check_stateful
from accelfn.data.stream import read_stream
from accelfn.errors import ConfigurationError

__all__ = ("Sharding", "agree_on_seed", "choose_reader")

T = TypeVar("T")
Sharding = Literal["global", "already_sharded", "by_source"]


def choose_reader(
    ctx: Context, loader: DataLoader[T], sharding: Sharding, slice_fn: SliceFunction | None
) -> Reader[T]:
    """Choose the way of reading that a loader needs; arguments as ``prepare_data_loader``'s.

    Ranks: every rank of ``ctx``.
    """
    agree = partial(agree_on_seed, ctx)
    check_stateful(ctx)
    if ctx.loading.dispatch_batches and sharding != "global":
        raise ConfigurationError(
            f'sharding="{sharding}" lets each rank read data of its own, and dispatch_batches=True lets rank '
            "0 read for all. Use one of the two."
        )
    if ctx.loading.dispatch_batches:
        _refuse_disorder(loader)
        return dispatch(ctx, loader, partial(agree, loader), slice_fn)
    if slice_fn is not None:
        raise ConfigurationError(
            "slice_fn cuts the batches that rank 0 reads for all ranks, and here each rank reads its own. "
            "Use DataLoaderConfiguration(dispatch_batches=True), or leave slice_fn out."
        )
    if sharding == "already_sharded":
        return OwnReader(ctx, loader, agree(loader, "already sharded"))
    if isinstance(loader.dataset, IterableDataset):
        return read_stream(ctx, loader, sharding == "by_source", partial(agree, loader))
    if sharding == "by_source":
        raise ConfigurationError(
            'sharding="by_source" is for streams. This dataset is read by its indices, of which each rank '
            'gets its own: use sharding="global".'
        )
    _refuse_disorder(loader)
    asked = read_asked(ctx.loading, ctx.axis_size("dp"), loader)
    seed = agree(loader, asked.what)
    if isinstance(asked, BatchSamplerSpec):
        return BatchedReader(ctx, loader, asked, seed)
    return SampledReader(ctx, loader, asked, seed, ctx.coordinate("dp"))


def _refuse_disorder(loader: DataLoader[Any]) -> None:
    if loader.num_workers > 1 and not getattr(loader, "in_order", True):
        raise ConfigurationError(
            "in_order=False yields batches as workers come by them, so it would be unknown which rows are "
            "padding and where a pass goes on. Use in_order=True, one worker, or "
            'sharding="already_sharded", where each rank\'s batches are its own.'
        )


def agree_on_seed(ctx: Context, loader: DataLoader[Any], what: str = "") -> int:
    """Return the seed of the order, the same on all ranks, after comparing what they will read.

    Ranks that share out different data would skip samples, or wait for ever.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        loader: The user's loader.
        what: Is read, as text: the same on every rank.
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
