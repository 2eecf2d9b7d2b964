"""Prepare a model together with its optimizer and schedulers, for engines that own the training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelfn.config import DeepSpeedPlugin
from accelfn.context import Context
from accelfn.data import PreparedDataLoader
from accelfn.errors import ConfigurationError
from accelfn.parallel.engines import (
    REPLACED,
    DummyScheduler,
    EngineOptimizer,
    apply_deepspeed,
    deepspeed_facts,
    plan_deepspeed,
)
from accelfn.parallel.engines.megatron import MegatronLMDummyScheduler, prepare_megatron
from accelfn.parallel.optimizers import steps_in_backward
from accelfn.training.megatron import prepare_megatron_loaders
from accelfn.training.prepared import MARK, is_prepared, mark_of


def prepare_with_engine(ctx: Context, objects: Sequence[object]) -> dict[int, Any]:
    """Prepare a model, its optimizer and its schedulers together, with the engine of the context.

    Ranks: every rank of ``ctx``.

    Returns:
        What replaces each of them, by index. Objects that are prepared already aren't in it.
    """
    known = {
        index
        for index, item in enumerate(objects)
        for kind, name in ((nn.Module, "model"), (Optimizer, "optimizer"))
        if isinstance(item, kind) and is_prepared(ctx, item, name)
    }
    trained = _prepare_trained(ctx, {i: item for i, item in enumerate(objects) if i not in known})
    mark = mark_of(ctx)
    for index, item in trained.items():
        before = objects[index]
        if isinstance(item, nn.Module):
            setattr(item, MARK, mark)
            setattr(before, MARK, mark._replace(is_wrapped=True))
        elif isinstance(item, Optimizer):
            inner = item.optimizer if isinstance(item, EngineOptimizer) else item
            for one in (item, inner, before):  # a scheduler may be over the last one
                setattr(one, MARK, mark)
            setattr(before, REPLACED, item is not before)
    return trained


def _prepare_trained(ctx: Context, objects: Mapping[int, object]) -> dict[int, Any]:
    """Prepare the model, the optimizer and the schedulers among objects with the engine of the context.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: Its strategy names an engine.
        objects: By index. Loaders among them tell the size of batches; other objects are ignored.

    Returns:
        What replaces the model, the optimizer and the schedulers, by index; with Megatron-LM the loaders too.
        Without an optimizer nothing else.

    Raises:
        ConfigurationError: There are several models or optimizers, or an optimizer without its model; or as
            :func:`accelfn.parallel.engines.plan_deepspeed`.
        NotAvailableError: The engine doesn't run here.
    """
    models = {index: item for index, item in objects.items() if isinstance(item, nn.Module)}
    optimizers = {index: item for index, item in objects.items() if isinstance(item, Optimizer)}
    name, is_megatron = ctx.strategy.engine, ctx.strategy.megatron is not None
    dummies = (DummyScheduler, MegatronLMDummyScheduler)
    schedulers = {index: item for index, item in objects.items() if isinstance(item, (LRScheduler, *dummies))}
    for item in schedulers.values():
        if isinstance(item, dummies[not is_megatron]):
            raise ConfigurationError(
                f"prepare: {type(item).__name__} is of another engine than {name}. Use a "
                f"{dummies[is_megatron].__name__}, or a scheduler of torch."
            )
    loaders = prepare_megatron_loaders(ctx, objects) if is_megatron else {}
    if not optimizers:
        if any(isinstance(item, dummies) for item in schedulers.values()):
            raise ConfigurationError(
                "prepare: got a DummyScheduler without its optimizer. Prepare both with the model."
            )
        return loaders
    if len(models) != 1 or len(optimizers) != 1 or len(schedulers) > 1:
        raise ConfigurationError(
            f"prepare: {name} trains one model with one optimizer, and at most one scheduler, in one call: "
            f"got {len(models)} models, {len(optimizers)} optimizers and {len(schedulers)} schedulers. "
            "Prepare the model and its optimizer in one call; other models in calls of their own."
        )
    ((at_model, model),) = models.items()
    ((at_optimizer, optimizer),) = optimizers.items()
    at_scheduler, scheduler = cast("tuple[Any, Any]", next(iter(schedulers.items()), (None, None)))
    if is_megatron:
        sizes = [getattr(loader, "total_batch_size", None) for loader in loaders.values()]
        model, optimizer, scheduler = prepare_megatron(ctx, model, optimizer, scheduler, sizes)
    elif steps_in_backward(optimizer):
        model = _shard_for_backward(ctx, model, optimizer)
    else:
        plugin = cast("DeepSpeedPlugin", ctx.strategy.deepspeed)
        sizes = [_batch_size(ctx, item) for item in objects.values()]
        plan = plan_deepspeed(plugin, deepspeed_facts(ctx, model, optimizer, scheduler, sizes))
        model, optimizer, scheduler = apply_deepspeed(ctx, model, plan, optimizer, scheduler)
    found = {**loaders, at_model: model, at_optimizer: optimizer}
    return found if at_scheduler is None else {**found, at_scheduler: scheduler}


def _shard_for_backward(ctx: Context, model: nn.Module, optimizer: Optimizer) -> nn.Module:
    """Return DeepSpeed's engine around a model whose shards LOMO steps in backward: it reduces by itself."""
    plugin = cast("DeepSpeedPlugin", ctx.strategy.deepspeed)
    if plugin.stage != 3 or any(not hasattr(one, "ds_tensor") for one in model.parameters()):
        raise ConfigurationError(
            f"prepare: a {type(optimizer).__name__} steps in backward, so DeepSpeed can only shard "
            "parameters for it: use zero_stage=3, and make the model and the optimizer in zero3_init(ctx)."
        )
    plan = plan_deepspeed(plugin, deepspeed_facts(ctx, model, None))
    # It steps the shards alone, so no parameter may stay gathered between the passes.
    zero = {**plan.config["zero_optimization"], "stage3_param_persistence_threshold": 0}
    plan = plan._replace(config={**plan.config, "zero_optimization": zero})
    return apply_deepspeed(ctx, model, plan)[0]


def prepare_untrained(ctx: Context, model: nn.Module, evaluation_mode: bool) -> nn.Module | None:
    """Prepare a model without an optimizer with the engine of the context.

    Ranks: every rank of ``ctx``.

    Returns:
        The engine's model, which shards parameters; None if each rank computes with the complete model.

    Raises:
        ConfigurationError: The model isn't for evaluation: to train it, the engine needs its optimizer.
    """
    if not evaluation_mode:
        raise ConfigurationError(
            f"prepare_model: {ctx.strategy.engine} needs the model and its optimizer together. Write "
            "prepare(ctx, model, optimizer, ...); or pass evaluation_mode=True for one that isn't trained."
        )
    plugin = ctx.strategy.deepspeed
    if plugin is None or plugin.stage != 3:
        return None
    return apply_deepspeed(ctx, model, plan_deepspeed(plugin, deepspeed_facts(ctx, model, None)))[0]


def _batch_size(ctx: Context, item: object) -> int | None:
    """Return the rows of a loader's batches on each rank; None for another object, or if it is unknown."""
    if isinstance(item, PreparedDataLoader):
        total: int | None = getattr(cast("object", item), "total_batch_size", None)
        return None if total is None else total // ctx.num_processes
    if not isinstance(item, DataLoader) or item.batch_size is None:
        return None
    return item.batch_size // (ctx.num_processes if ctx.loading.split_batches else 1)
