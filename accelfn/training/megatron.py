"""Prepare loaders for Megatron-LM, also over its own datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch.utils.data import BatchSampler, DataLoader

from accelfn.config import MegatronLMPlugin
from accelfn.context import Context
from accelfn.data import PreparedDataLoader, prepare_data_loader
from accelfn.data.rebuild import batch_sampler_of, remake
from accelfn.errors import ConfigurationError, NotAvailableError


class MegatronLMDummyDataLoader:
    """Asks ``prepare`` for a loader over one of Megatron's own datasets.

    The datasets come from the plugin's ``custom_megatron_datasets_provider_function``. Pass the same object
    three times: for training, evaluation and test.

    Attributes:
        dataset_args: What was passed: ``micro_batch_size``, and whatever the provider reads.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        """Keep the options.

        Args:
            **dataset_kwargs: ``micro_batch_size``, the samples of one microbatch, 1 by default; and others.
        """
        self.dataset_args: dict[str, Any] = dict(dataset_kwargs)
        self.micro_batch_size: int = self.dataset_args.get("micro_batch_size", 1)


def prepare_megatron_loaders(ctx: Context, objects: Mapping[int, object]) -> dict[int, Any]:
    """Prepare loaders so that a batch has all microbatches of a replica's step.

    Ranks: local.

    Raises:
        ConfigurationError: A loader for Megatron's own datasets needs another option of the plugin.
        NotAvailableError: A loader's batches can't be made larger.
    """
    plugin = cast("MegatronLMPlugin", ctx.strategy.megatron)
    dummies = {i: item for i, item in objects.items() if isinstance(item, MegatronLMDummyDataLoader)}
    loaders: dict[int, Any] = {
        i: item
        for i, item in objects.items()
        if isinstance(item, DataLoader) and not isinstance(item, PreparedDataLoader)
    }
    if dummies:
        loaders |= _megatron_loaders(ctx, plugin, dummies)
    return {
        index: prepare_data_loader(ctx, _with_microbatches(loader, plugin.num_micro_batches))
        for index, loader in loaders.items()
    }


def _with_microbatches(loader: DataLoader[Any], number: int) -> DataLoader[Any]:
    """Return a loader whose batches have ``number`` of the loader's."""
    if number == 1:
        return loader
    sampler = batch_sampler_of(loader)
    if type(sampler) is not BatchSampler:
        raise NotAvailableError(
            f"Megatron-LM: num_micro_batches={number} joins batches of a loader, and this one makes them by "
            f"{type(sampler).__name__}. Use batch_size and sampler instead, or make batches of {number} "
            "microbatches and split them into one (num_micro_batches=1)."
        )
    size = sampler.batch_size * number
    joined = BatchSampler(cast("Any", sampler).sampler, size, sampler.drop_last)
    return remake(loader, loader.dataset, batch_sampler=joined)


def _megatron_loaders(
    ctx: Context, plugin: MegatronLMPlugin, dummies: Mapping[int, MegatronLMDummyDataLoader]
) -> dict[int, DataLoader[Any]]:
    provider = plugin.custom_megatron_datasets_provider_function
    if not plugin.megatron_dataset_flag or provider is None:
        raise ConfigurationError(
            "MegatronLMDummyDataLoader stands for a loader over Megatron's own datasets: set the "
            "MegatronLMPlugin's megatron_dataset_flag=True and custom_megatron_datasets_provider_function."
        )
    if len(dummies) != 3:
        raise ConfigurationError(
            f"MegatronLMDummyDataLoader: pass it three times, for training, evaluation and test: got "
            f"{len(dummies)}."
        )
    micro = next(iter(dummies.values())).micro_batch_size
    batch = micro * plugin.num_micro_batches * ctx.num_processes // (plugin.tp_degree * plugin.pp_degree)
    steps = plugin.train_iters or (plugin.train_samples or 0) // batch
    if not steps:
        raise ConfigurationError(
            "MegatronLMDummyDataLoader: how many samples does the training need? Set train_iters or "
            "train_samples of the MegatronLMPlugin."
        )
    evaluated = (steps // plugin.eval_interval + 1) * plugin.eval_iters
    datasets: Sequence[Any] = provider([steps * batch, evaluated * batch, plugin.eval_iters * batch])
    consumed = plugin.consumed_samples or (0, 0, 0)
    loaders: dict[int, DataLoader[Any]] = {}
    for index, dataset, used in zip(dummies, datasets, consumed, strict=True):
        # Megatron's datasets are shuffled already.
        loaders[index] = DataLoader(
            dataset, batch_size=micro, sampler=range(used, len(dataset)), drop_last=True
        )
    return loaders
