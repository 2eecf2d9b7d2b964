"""Apply the plan of a model: its strategies in their order, and the values of rank 0."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.context import Context
from accelfn.errors import NotAvailableError
from accelfn.parallel.buffers import sync_buffers
from accelfn.parallel.facts import read_facts
from accelfn.parallel.forward import WrappedForward, plain_forward
from accelfn.parallel.forward_agreement import check_each_forward
from accelfn.parallel.handle import Handle, LocalHandle
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.pointers import leave_pointers, named
from accelfn.parallel.strategies.fsdp import ShardHandle, with_named_errors
from accelfn.parallel.strategies.pipeline import PipelineHandle
from accelfn.parallel.strategies.precision import with_precision
from accelfn.parallel.strategies.replicate import replicate
from accelfn.parallel.strategies.strategy import Application, Planning, Strategy
from accelfn.parallel.strategies.table import STRATEGIES
from accelfn.parallel.values import fill, materialize, release, send_values

M = TypeVar("M", bound=nn.Module)


def apply_model(ctx: Context, model: M, plan: ModelPlan) -> M:
    """Prepare a model as planned: stages, shared layers, recomputation, compilation, shards, replicas.

    Its parameters get the values of rank 0. Replaced parameters point at their successors, so that optimizers
    that hold them find these.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world of the plan.
        model: On this rank's device; if it is spread over ranks, on any device, also meta. Written into.
        plan: From :func:`plan_model`.

    Returns:
        The model to call: ``model`` itself, or a ``DistributedDataParallel`` around it.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
        ConfigurationError: Rank 0 lacks values that another rank has.
        Exception: Raised by torch's engines.
    """
    _reset_forward(model)
    before = named(model)
    values = _release(ctx, model, plan) if plan.is_spread else None
    _apply_each(STRATEGIES, Application(ctx, model, plan._asdict(), before))
    result: nn.Module = model
    if values is not None:
        _fill(ctx, model, plan, values)
    elif plan.engine == "ddp" or ctx.reduction is not None:
        result = replicate(ctx, model)
    if plan.shard is None or plan.shard.autocasts:
        with_precision(ctx, model)
    leave_pointers(before, model)
    return cast("M", result)


def adopt_layers(ctx: Context, model: nn.Module) -> None:
    """Take over a model whose layers are split over the ranks along tp already, as transformers loads it.

    Ranks: every rank of ``ctx``, which has tp alone.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
        ConfigurationError: The options don't fit the model.
    """
    apply_compute(ctx, model)
    send_values(ctx, model)
    LocalHandle(model)
    with_named_errors(model, ctx.collectives.translate_error)
    check_each_forward(ctx, model)


def apply_compute(ctx: Context, model: nn.Module) -> None:
    """Make a model compute as the context says, where each rank has all of it and averages no gradients.

    Ranks: every rank of ``ctx``; nothing is communicated.

    Args:
        ctx: The world.
        model: On this rank's device. Written into.

    Raises:
        ConfigurationError: The options don't fit the model.
    """
    _reset_forward(model)
    facts = read_facts(model)
    mesh = ctx.mesh_plan.restrict("seq")  # along other axes the model is whole
    plans: dict[str, Any] = dict.fromkeys(strategy.name for strategy in STRATEGIES)
    at = Planning(ctx, mesh, "none", model, facts, facts, 0, plans)
    computing = [strategy for strategy in STRATEGIES if strategy.is_compute]
    for strategy in computing:
        if strategy.is_for(mesh):
            plans[strategy.name] = strategy.of_rank(strategy.plan(at), at)
    _apply_each(computing, Application(ctx, model, plans, named(model)))
    with_precision(ctx, model)


def _apply_each(strategies: Iterable[Strategy], at: Application) -> None:
    for strategy in strategies:
        plan = at.plans[strategy.name]
        if plan:
            strategy.apply(plan, at)


def _reset_forward(model: nn.Module) -> None:
    """Remove wrappers around the forward of an unpickled model that was prepared elsewhere."""
    if isinstance(vars(model).get("forward"), WrappedForward):
        model.forward = plain_forward(model)


def _placed(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to(device)


def _release(ctx: Context, model: nn.Module, plan: ModelPlan) -> Any:
    """Return the values of a model that ranks share, whose tensors have no memory from then on."""
    if ctx.mesh is None:
        raise NotAvailableError(
            "a model that is spread over ranks needs a mesh. Pass fsdp_plugin or parallelism_config to "
            "init_context."
        )
    if plan.tensor is not None or plan.shard is not None:  # before anything is changed: threads have none
        ctx.mesh.device_mesh(*(("tp",) if plan.shard is None else plan.shard.dims))
    return release(ctx, model)


def _fill(ctx: Context, model: nn.Module, plan: ModelPlan, values: Any) -> None:
    """Allocate a rank's parts of a model on its device, and set their values; then watch the model."""
    own = plan.shard
    if own is None:  # FSDP places what isn't on "meta" itself
        cast("Any", model)._apply(partial(_placed, ctx.device))
    materialize(model, torch.device("cpu") if own is not None and own.offload else ctx.device)
    fill(ctx, model, values)
    handle: Handle
    if own is None:
        handle = LocalHandle(model)
    else:
        handle = ShardHandle(model, [model.get_submodule(name) for name in own.units], ctx, own)
        if plan.fp8 is not None and plan.fp8.gathers:
            handle.gather_in_fp8()
    if plan.pipeline is not None and plan.schedule is not None:
        PipelineHandle(ctx, model, plan.pipeline, plan.schedule, handle)  # which agrees once for each batch
        return
    with_named_errors(model, ctx.collectives.translate_error)
    check_each_forward(ctx, model)
    sync_buffers(ctx, model, handle)
