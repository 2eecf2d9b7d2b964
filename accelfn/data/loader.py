"""Carry out the plan of an epoch with the user's own DataLoader settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelfn.comm import Call, agree, failing_together, gather_object, synchronize_rng_states
from accelfn.context import Context
from accelfn.data.order import Order, order_of
from accelfn.data.plan import EpochPlan, plan_epoch
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.tree import send_to_device

__all__ = ("PreparedDataLoader", "RankBatches", "prepare_data_loader")

T = TypeVar("T")
Sharding = Literal["global", "already_sharded", "by_source"]


class RankBatches:
    """The batches of one rank, as lists of indices: torch's DataLoader takes it for a batch sampler."""

    def __init__(self, ctx: Context, plan: EpochPlan, order: Order) -> None:
        """Start at epoch 0."""
        self.epoch = 0
        self._ctx = ctx
        self._plan = plan
        self._order = order

    def __len__(self) -> int:
        return self._plan.num_batches(self._ctx.rank)

    def __iter__(self) -> Iterator[list[Any]]:
        indices = self._order.indices(self._ctx, self.epoch)
        for step in range(len(self)):
            yield [indices[position] for position in self._plan.positions(step, self._ctx.rank)]


class PreparedDataLoader(Generic[T]):
    """This rank's share of a DataLoader. Made by :func:`prepare_data_loader`.

    Iterating it gives the batches of one epoch, on the rank's device; a complete pass moves on to the next
    epoch. As a pass begins, the random states that ``rng_types`` of the context names are brought to those
    of rank 0, so every rank has to begin it; ``"generator"`` is the loader's own, where it has one. All
    attributes of the user's loader that are not named here are passed through.

    Attributes:
        plan: How an epoch is shared out; None for data that was sharded already.
        num_batches_by_rank: Batches of each rank in an epoch.
    """

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        num_batches_by_rank: tuple[int, ...],
        plan: EpochPlan | None = None,
        batches: RankBatches | None = None,
    ) -> None:
        """Use :func:`prepare_data_loader` instead."""
        self.plan = plan
        self.num_batches_by_rank = num_batches_by_rank
        self._ctx = ctx
        self._source = source
        self._batches = batches
        self._epoch = 0
        self._loader = source if batches is None else _rebuilt(source, batches)

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next pass is."""
        return self._epoch

    @property
    def context(self) -> Context:
        """The context that the loader was prepared with."""
        return self._ctx

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in one step."""
        if self.plan is not None:
            return self.plan.global_batch
        return (self._source.batch_size or 1) * self._ctx.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the dataset."""
        return len(cast("Any", self._source.dataset))

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, and with it the order."""
        self._epoch = epoch
        if self._batches is None:
            set_epoch = getattr(cast("Any", self._source).sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[T]:
        self._synchronize()
        if self._batches is not None:
            self._batches.epoch = self._epoch
        batches: Iterator[T] | None = None
        while True:
            with failing_together(self._ctx, "a data loader"):
                batches = iter(self._loader) if batches is None else batches
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                if self._ctx.device_placement:
                    batch = send_to_device(
                        batch, self._ctx.device, non_blocking=self._ctx.loading.non_blocking
                    )
            yield batch
        self.set_epoch(self._epoch + 1)

    def _synchronize(self) -> None:
        """Bring the random states that the context names to rank 0's, as a pass begins."""
        generator: torch.Generator | None = cast("Any", self._source).generator
        types = [name for name in self._ctx.rng_types if name != "generator" or generator is not None]
        if types:
            synchronize_rng_states(self._ctx, types, generator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet (copy and pickle look before __init__ has run)
            raise AttributeError(name)
        return getattr(self._source, name)


def prepare_data_loader(
    ctx: Context, loader: DataLoader[T] | PreparedDataLoader[T], sharding: Sharding = "global"
) -> PreparedDataLoader[T]:
    """Give this rank its share of ``loader``.

    The order of an epoch is a function of the seed and the epoch's number, the same for any number of ranks:
    with ``shuffle=True`` the seed is ``data_seed`` of the configuration, else that of the sampler's
    generator, else rank 0's ``torch.initial_seed()``. A sampler of your own runs on rank 0, and the others
    follow its order.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and its ``DataLoaderConfiguration``.
        loader: A torch DataLoader over a map-style dataset. Its settings are kept.
        sharding: ``"global"``: every rank was given the same loader, and reads its part.
            ``"already_sharded"``: every rank was given its own part already.

    Returns:
        The share; a loader that was prepared with this context already is given back as it is.

    Raises:
        ConfigurationError: The data is sharded already and would be sharded again, the loader was prepared
            with another context, or the batch can't be split.
        MismatchError: The ranks have loaders of different length, batch size or options.
        TypeError: ``loader`` is no DataLoader, or has no length.
        NotAvailableError: A kind of loader or an option that this version has no machinery for.

    >>> import torch
    >>> loader = prepare_data_loader(Context(), DataLoader(torch.arange(5), batch_size=2))
    >>> list(loader)
    [tensor([0, 1]), tensor([2, 3]), tensor([4])]
    """
    if isinstance(loader, PreparedDataLoader):
        if loader.context != ctx:
            raise ConfigurationError(
                "the loader was prepared with another context, and would be sharded twice. Prepare the "
                "original loader."
            )
        return loader
    if not isinstance(cast("object", loader), DataLoader):
        raise TypeError(f"prepare_data_loader takes a torch DataLoader, got {type(loader).__name__}.")
    if sharding not in ("global", "already_sharded", "by_source"):
        raise ValueError(f'sharding must be "global", "already_sharded" or "by_source", got {sharding!r}.')
    _refuse_unavailable(ctx, loader, sharding)
    if sharding == "already_sharded":
        return PreparedDataLoader(
            ctx, loader, tuple(gather_object(ctx.tagged("prepare_data_loader"), [len(loader)]))
        )
    order = order_of(ctx, loader)
    plan = plan_epoch(
        order.num_samples,
        cast("int", loader.batch_size),
        ctx.num_processes,
        split_batches=ctx.loading.split_batches,
        even_batches=ctx.loading.even_batches,
        drop_last=loader.drop_last,
    )
    if ctx.num_processes > 1:  # ranks that share out different data would skip samples, or wait for ever
        agree(ctx, Call("prepare_data_loader", repr(plan), lambda: {"loader": repr(plan)}))
    counts = tuple(plan.num_batches(rank) for rank in range(plan.size))
    return PreparedDataLoader(ctx, loader, counts, plan, RankBatches(ctx, plan, order))


def _refuse_unavailable(ctx: Context, loader: DataLoader[Any], sharding: Sharding) -> None:
    asked = (
        (isinstance(loader.dataset, IterableDataset), "a loader over an IterableDataset"),
        (
            loader.batch_size is None,
            "a loader without batch_size (a batch sampler of one's own, or batch_size=None)",
        ),
        (
            type(cast("Any", loader).batch_sampler) not in (BatchSampler, type(None)),
            "a batch sampler of one's own",
        ),
        (bool(ctx.loading.dispatch_batches), "DataLoaderConfiguration(dispatch_batches=True)"),
        (ctx.loading.use_stateful_dataloader, "DataLoaderConfiguration(use_stateful_dataloader=True)"),
        (ctx.loading.custom_classes is not None, "DataLoaderConfiguration(custom_classes=...)"),
        (sharding == "by_source", 'sharding="by_source"'),
    )
    if sharding == "already_sharded":
        asked = asked[3:6]
    for is_asked, what in asked:
        if is_asked:
            raise NotAvailableError(
                f"prepare_data_loader: {what} has no machinery in this version of accelfn yet."
            )


def _rebuilt(source: DataLoader[T], batches: RankBatches) -> DataLoader[T]:
    """Make a loader like ``source`` that reads ``batches``: torch lets nobody exchange a batch sampler."""
    names = (
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "persistent_workers", "in_order"),
    )
    options: dict[str, Any] = {name: getattr(source, name) for name in names}
    if source.num_workers > 0:
        options["prefetch_factor"] = source.prefetch_factor
    return DataLoader(source.dataset, batch_sampler=cast("Any", batches), **options)
