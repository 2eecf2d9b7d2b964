"""Plan how a model is prepared on a mesh, and apply the plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accelfn.context import Context, MeshPlan, check_context, plan_mesh
from accelfn.context.config import FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.agreement import check_each_forward
from accelfn.parallel.buffers import sync_buffers
from accelfn.parallel.engines import xla
from accelfn.parallel.engines.xla import XlaShardPlan
from accelfn.parallel.facts import ModelFacts, list_text, read_facts, table_text
from accelfn.parallel.handle import Handle, LocalHandle
from accelfn.parallel.parameters import fill, leave_pointers, materialize, named, release
from accelfn.parallel.strategies import (
    attention,
    compilation,
    experts,
    fp8,
    pipeline_plan,
    recompute,
    shard,
    shard_plan,
    stages,
    tensor,
)
from accelfn.parallel.strategies.attention import AttentionPlan
from accelfn.parallel.strategies.experts import ExpertPlan
from accelfn.parallel.strategies.fp8 import Fp8Plan
from accelfn.parallel.strategies.pipeline import PipelineHandle
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.parallel.strategies.replicate import replicate
from accelfn.parallel.strategies.shard import ShardHandle, with_named_errors
from accelfn.parallel.strategies.shard_plan import ShardPlan
from accelfn.parallel.strategies.strategy import Application, Engine, Planning, Strategy
from accelfn.parallel.strategies.tensor import TensorPlan


class ModelPlan(NamedTuple):
    """How a model is prepared. A value; ``print(plan)`` shows it as a table.

    Attributes:
        model: Name of the model's class.
        num_parameters: Elements of its parameters, tied ones counted once.
        num_trainable: Elements of those that are trained.
        mesh: The mesh of ranks.
        pipeline: How the model is split into stages; None without a pipeline. The fields below are those of
            this rank's stages.
        schedule: The order in which stages compute; None without a pipeline.
        tensor: How ranks share each layer; None where they don't.
        attention: How ranks that share sequences compute attention; None where they don't.
        experts: How experts are spread over ranks; None where each rank has all of them.
        fp8: Which layers compute in 8 bits, and by which engine; None without mixed_precision="fp8".
        engine: The engine that averages gradients: "ddp" (every rank has the full model), "shard" (FSDP), or
            "none".
        shard: How the parameters are sharded; None where they aren't.
        recomputed: Names of the modules whose activations are recomputed in the backward pass.
        compiled: Names of the modules that are compiled before sharding, "" for the model itself.
        precision: Description of the dtypes.
        xla: How XLA's compiler shards the model over the devices of this host; None elsewhere.
    """

    model: str
    num_parameters: int
    num_trainable: int
    mesh: MeshPlan
    pipeline: PipelinePlan | None
    schedule: SchedulePlan | None
    tensor: TensorPlan | None
    attention: AttentionPlan | None
    experts: ExpertPlan | None
    fp8: Fp8Plan | None
    engine: Engine
    shard: ShardPlan | None
    recomputed: tuple[str, ...]
    compiled: tuple[str, ...]
    precision: str
    xla: XlaShardPlan | None = None

    @property
    def is_spread(self) -> bool:
        """Whether ranks hold different parts of the model."""
        return self.pipeline is not None or self.tensor is not None or self.shard is not None

    def rows(self) -> dict[str, str]:
        """Return the lines of the table: text by title."""
        rows = [
            ("model", f"{self.model}, {self.num_parameters:,} parameters, {self.num_trainable:,} trained")
        ]
        axes = [f"{axis} {self.mesh.size(axis)}" for axis in self.mesh.active()]
        rows.append(("mesh", " x ".join(axes) if axes else "one rank"))
        if self.pipeline is not None:
            rows.append(("pipeline", str(self.pipeline)))
            rows.append(("schedule", str(self.schedule)))
        if self.tensor is not None:
            rows.extend(self.tensor.rows().items())
        if self.attention is not None:
            rows.append(("attention", str(self.attention)))
        if self.experts is not None:
            num_shards = 1 if self.shard is None else self.shard.num_expert_shards
            rows.append(("experts", self.experts.row(num_shards)))
        averaged = " x ".join(self.mesh.active("loss"))
        if self.engine == "ddp":
            rows.append(("gradients", f"averaged over {averaged}; every rank has the full model"))
        elif self.xla is not None:
            rows.append(("sharding", str(self.xla)))
        elif self.engine == "none":
            rows.append(("gradients", "complete on each rank without averaging"))
        if self.shard is not None:
            rows.extend(self.shard.rows(averaged))
        rows.append(("precision", self.precision))
        if self.fp8 is not None:
            rows.append(("fp8", str(self.fp8)))
        if self.recomputed:
            rows.append(("recomputed", f"in the backward: {list_text(self.recomputed)}"))
        rows.append(("compiled", list_text(self.compiled) if self.compiled else "nothing"))
        return dict(rows)

    def __str__(self) -> str:
        """Return the plan as a table."""
        return table_text(self.rows())


def plan_model(
    ctx: Context, model: nn.Module | ModelFacts, *, engine: Literal["ddp", "shard"] | None = None
) -> ModelPlan:
    """Return the plan of :func:`accelfn.prepare_model` for a model. Pure.

    To prepare a model with another plan than the context's, pass its own:
    ``prepare_model(ctx, teacher, plan=plan_model(ctx, teacher, engine="ddp"))``, or one of
    ``ctx.replace(fsdp_plugin=...)``.

    Ranks: local; the same on every rank, or on those that have the same stages.

    Args:
        ctx: The mesh and the options.
        model: Not prepared yet; its parameters may be on the meta device. Or its facts.
        engine: "ddp" keeps the full model on every rank, such as a small one beside one that ranks along "tp"
            share; "shard" shards it; None for the context's choice:
            sharded with an ``fsdp_plugin``, ``dp_shard_size``, ``tp_size`` or ``pp_size``, else replicated.

    Raises:
        ConfigurationError: The options don't fit the model, or contradict each other.

    >>> print(plan_model(Context(), nn.Linear(2, 2)))
    model      Linear, 6 parameters, 6 trained
    mesh       one rank
    gradients  complete on each rank without averaging
    precision  that of the parameters
    compiled   nothing
    """
    check_context("plan_model", ctx)
    if ctx.strategy.engine is not None and engine is None:
        raise ConfigurationError(
            f"plan_model plans torch's own strategies, and here {ctx.strategy.engine} trains. Print "
            "that engine's plan: plan_deepspeed(plugin, deepspeed_facts(ctx, model, optimizer)), or "
            "plan_megatron(plugin, ctx.num_processes)."
        )
    return plan_at(ctx, model, ctx.coordinate("pp"), engine=engine)


def _only(plan: Any, at: Planning) -> Any:
    return None if plan is None else plan.only(at.facts)


def _local(plan: Any, at: Planning) -> ModelFacts:
    return plan.local(at.facts)


# In the order in which strategies are planned and applied; nothing else knows it.
STRATEGIES: tuple[Strategy, ...] = (
    Strategy("schedule", plan=pipeline_plan.plan_schedule_at),
    Strategy("pipeline", plan=pipeline_plan.plan, narrow=pipeline_plan.narrow, apply=stages.apply),
    Strategy("tensor", plan=tensor.plan, of_rank=_only, narrow=_local, apply=tensor.apply),
    Strategy("experts", plan=experts.plan, of_rank=_only, narrow=_local, apply=experts.apply),
    Strategy("attention", of_rank=attention.of_rank, apply=attention.apply),
    Strategy("fp8", plan=fp8.plan, of_rank=_only, apply=fp8.apply),
    Strategy("recomputed", plan=recompute.plan, of_rank=recompute.of_rank, apply=recompute.apply),
    Strategy("compiled", of_rank=compilation.of_rank, apply=compilation.apply),
    Strategy("xla", of_rank=xla.of_rank, apply=xla.apply),
    Strategy("", apply=fp8.apply_around),
    Strategy("shard", of_rank=shard_plan.of_rank, apply=shard.apply),
)


class WholePlan(NamedTuple):
    """What the plans of all ranks share: the complete model, and how it is spread.

    Attributes:
        ctx: The mesh and the options.
        facts: Of the complete model.
        model: The model; None where there are facts alone.
        mesh: The mesh.
        engine: What averages gradients.
        plans: By strategy.
    """

    ctx: Context
    facts: ModelFacts
    model: nn.Module | None
    mesh: MeshPlan
    engine: Engine
    plans: Mapping[str, Any]

    def but(self, **plans: Any) -> WholePlan:
        """Return this with other plans of some strategies."""
        return self._replace(plans={**self.plans, **plans})


def plan_at(
    ctx: Context,
    model: nn.Module | ModelFacts,
    pp_rank: int,
    *,
    engine: Literal["ddp", "shard"] | None = None,
) -> ModelPlan:
    """Return the plan for the ranks at a coordinate along "pp"; see :func:`plan_model`."""
    return plan_rank(plan_whole(ctx, model, engine), pp_rank)


def plan_each(
    ctx: Context, model: nn.Module | ModelFacts, facts: ModelFacts | None = None
) -> tuple[ModelPlan, ...]:
    """Return the plan for each coordinate along "pp"; see :func:`plan_model`. Pure.

    Args:
        ctx: The mesh and the options.
        model: The model, or its facts.
        facts: Those of the model, if they have been read.
    """
    whole = plan_whole(ctx, model, facts=facts)
    return tuple(plan_rank(whole, pp_rank) for pp_rank in range(ctx.axis_size("pp")))


def plan_whole(
    ctx: Context,
    model: nn.Module | ModelFacts,
    engine: Literal["ddp", "shard"] | None = None,
    facts: ModelFacts | None = None,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> WholePlan:
    """Return what the plans of all ranks share; see :func:`plan_each`. ``known`` has plans by strategy."""
    real = None if isinstance(model, ModelFacts) else model
    whole = facts or (model if isinstance(model, ModelFacts) else read_facts(model))
    mesh = plan_mesh(None, ctx.num_processes) if ctx.mesh is None else ctx.mesh.plan
    chosen = _choose_engine(ctx, mesh, engine)
    plans: dict[str, Any] = {}
    for name, plan, *_ in STRATEGIES:
        at = Planning(ctx, mesh, chosen, real, whole, whole, 0, plans)
        plans[name] = known[name] if known.get(name) is not None else plan(at)
    return WholePlan(ctx, whole, real, mesh, chosen, plans)


def plan_rank(whole: WholePlan, pp_rank: int) -> ModelPlan:
    """Return the plan for the ranks at a coordinate along "pp"."""
    ctx, facts, mesh, names = whole.ctx, whole.facts, whole.mesh, whole.facts.own_names
    plans: dict[str, Any] = {}
    for name, _, of_rank, narrow, _ in STRATEGIES:
        at = Planning(ctx, mesh, whole.engine, whole.model, whole.facts, facts, pp_rank, plans)
        plans[name] = plan = of_rank(whole.plans[name], at)
        if plan is not None:
            facts = narrow(plan, at)
    del plans[""]
    return ModelPlan(
        model=facts.kinds[""],
        num_parameters=whole.facts.numel(*names),
        num_trainable=whole.facts.numel(*(name for name in names if name in whole.facts.trainable)),
        mesh=mesh,
        engine=whole.engine,
        precision=_precision(ctx.mixed_precision, plans["shard"]),
        **plans,
    )


def _choose_engine(ctx: Context, mesh: MeshPlan, engine: Literal["ddp", "shard"] | None) -> Engine:
    if ctx.num_processes == 1:
        _refuse_alone(ctx.strategy.fsdp)
        return "none"
    is_sharded = ctx.strategy.fsdp is not None or mesh.size("dp_shard") > 1
    is_apart = mesh.size("tp", "pp") > 1
    chosen = engine or ("shard" if is_sharded or is_apart else "ddp")
    if chosen == "ddp" and mesh.size("pp") > 1:
        raise ConfigurationError(
            'plan_model: engine="ddp" keeps the full model on every rank, but ranks along pp have parts of '
            "it. Leave engine out, or prepare a model that isn't trained with evaluation_mode=True."
        )
    if chosen == "shard" and ctx.reduction is not None:
        raise ConfigurationError(
            'reduction="canonical" needs the full model on every rank: sums over shards depend on their '
            "number. Leave fsdp_plugin, dp_shard_size and tp_size out, or "
            'use reduction="mean".'
        )
    # Ranks along "tp" have the same gradients of a full model: their mean is these, and keeps them equal.
    return "none" if mesh.size("loss") == 1 and chosen == "shard" else chosen


def _refuse_alone(plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Refuse options of FSDP that have no effect on a single rank, which has nothing to shard."""
    if plugin is None:
        return
    for name, is_set in (
        ("cpu_offload", plugin.offloads_params),
        ("mixed_precision_policy", plugin.mixed_precision_policy is not None),
    ):
        if is_set:
            raise ConfigurationError(
                f"fsdp_plugin: {name} only applies to shards, and a single rank has none. Start several "
                "ranks, or leave it out and use mixed_precision or accelfn.cpu_offload."
            )


def _precision(mode: str, shard: ShardPlan | None) -> str:
    if shard is None:
        name = "bf16" if mode == "fp8" else mode
        return "that of the parameters" if mode == "no" else f"{name} by autocast, outputs in float32"
    if shard.param_dtype is None and shard.reduce_dtype is None and shard.output_dtype is None:
        return "that of the parameters"
    gathered = "autocast, parameters gathered in" if shard.autocasts else "parameters gathered in"
    words = {
        gathered: shard.param_dtype,
        "gradients averaged in": shard.reduce_dtype or shard.param_dtype,
        "outputs in": shard.output_dtype,
    }
    return ", ".join(f"{what} {str(dtype).removeprefix('torch.')}" for what, dtype in words.items() if dtype)


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
    before = named(model)
    values = _release(ctx, model, plan) if plan.is_spread else None
    at = Application(ctx, model, plan._asdict(), before)
    for strategy in STRATEGIES:
        strategy.apply(at)
    result: nn.Module = model
    if values is not None:
        _fill(ctx, model, plan, values)
    elif plan.engine == "ddp" or ctx.reduction is not None:
        result = replicate(ctx, model)
    leave_pointers(before, model)
    return cast("M", result)


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
