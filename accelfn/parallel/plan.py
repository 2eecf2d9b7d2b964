"""Plan how a model is prepared on a mesh, and apply the plan."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accelfn.context import Context, MeshPlan, check_context, plan_mesh
from accelfn.context.config import (
    DynamoBackend,
    ExpertParallelConfig,
    FullyShardedDataParallelPlugin,
    PipelineParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
)
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.agreement import check_each_forward
from accelfn.parallel.buffers import sync_buffers
from accelfn.parallel.engines import XlaShardPlan, apply_xla, plan_xla
from accelfn.parallel.facts import ModelFacts, list_text, read_facts, table_text
from accelfn.parallel.handle import LocalHandle
from accelfn.parallel.parameters import fill, leave_pointers, materialize, named, release, retie
from accelfn.parallel.strategies.attention import AttentionPlan, apply_attention, plan_attention
from accelfn.parallel.strategies.compile import compile_, plan_regions
from accelfn.parallel.strategies.experts import ExpertPlan, apply_experts, plan_experts
from accelfn.parallel.strategies.fp8 import Fp8Plan, apply_fp8, plan_fp8_of, run_in_fp8
from accelfn.parallel.strategies.pipeline import PipelineHandle
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan, SchedulePlan, plan_schedule, plan_stages
from accelfn.parallel.strategies.position_check import find_mixing_module
from accelfn.parallel.strategies.recompute import plan_recompute, recompute, refuse_own_recomputation
from accelfn.parallel.strategies.replicate import replicate
from accelfn.parallel.strategies.shard import ShardHandle, apply_shard, with_named_errors
from accelfn.parallel.strategies.shard_plan import (
    ShardPlan,
    choose_units,
    names_of_ignored,
    names_of_wrapped,
    plan_shard,
)
from accelfn.parallel.strategies.stages import apply_stages
from accelfn.parallel.strategies.tensor import TensorPlan, apply_tensor, plan_tensor
from accelfn.tree.structure import size_text

Engine = Literal["none", "ddp", "shard"]


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
            rows.append(("attention", _row_of_attention(self.attention)))
        if self.experts is not None:
            rows.append(("experts", _row_of_experts(self.experts, self.shard)))
        averaged = " x ".join(self.mesh.active("loss"))
        if self.engine == "ddp":
            rows.append(("gradients", f"averaged over {averaged}; every rank has the full model"))
        elif self.xla is not None:
            rows.append(("sharding", str(self.xla)))
        elif self.engine == "none":
            rows.append(("gradients", "complete on each rank without averaging"))
        rows.extend(_rows_of_shard(self.shard, averaged))
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


def _row_of_attention(plan: AttentionPlan) -> str:
    how = f"passed around by {plan.rotation}" if plan.axis == "cp" else "heads exchanged"
    what = f"a ring of {plan.size}, keys and values {how}" if plan.axis == "cp" else f"{how} over {plan.size}"
    where = list_text(plan.modules) or "no module of this stage"
    return f"each sequence shared along {plan.axis}: {what}; in {where}"


def _rows_of_shard(plan: ShardPlan | None, averaged: str) -> list[tuple[str, str]]:
    if plan is None:
        return []
    rest = "the rest of the model" if len(plan.units) > 1 else "the complete model"
    units = [*reversed(plan.units[:-1])]
    freed = "freed after its forward" if plan.reshard else "kept until its backward"
    kept = size_text(plan.shard_bytes) + (" in host memory" if plan.offload else "")
    largest = f"the largest unit is {size_text(plan.gathered_bytes)} while it computes"
    whole = f"until the last batch of a window each rank holds {size_text(plan.unreduced_bytes)}, unsharded"
    rows = [
        ("gradients", f"averaged over {averaged} by FSDP, and sharded over {plan.num_shards}"),
        ("units", ", ".join([list_text(units), rest]) if units else rest),
        (
            "parameters",
            f"{kept} on each rank; {largest}, and {freed if units else 'kept until its backward'}",
        ),
        ("windows", f"{whole}; with sync_each_batch its shard of them"),
    ]
    if plan.prefetch:
        rows.append(("prefetch", "each unit's forward starts to gather the next one"))
    if plan.ignored:
        rows.append(("ignored", f"unsharded on each rank: {list_text(plan.ignored)}"))
    return rows


def _row_of_experts(plan: ExpertPlan, shard: ShardPlan | None) -> str:
    counts = sorted({held.num_experts for held in plan.modules.values()})
    each = " or ".join(str(count) for count in counts)
    local = " or ".join(str(count // plan.size) for count in counts)
    text = f"{each} of {list_text(plan.modules)}, spread over {plan.size} ranks: {local} on each"
    if shard is None or shard.num_expert_shards == 1:
        return text
    return f"{text}, sharded over {shard.num_expert_shards}"


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


class Outline(NamedTuple):
    """What all places along "pp" share: the complete model, and how it is spread."""

    facts: ModelFacts
    model: nn.Module | None
    mesh: MeshPlan
    engine: Engine
    pipeline: PipelinePlan | None
    schedule: SchedulePlan | None
    experts: ExpertPlan | None
    tensor: TensorPlan | None
    ignored: tuple[str, ...]
    fp8: Fp8Plan | None


def plan_at(
    ctx: Context,
    model: nn.Module | ModelFacts,
    place: int,
    *,
    engine: Literal["ddp", "shard"] | None = None,
) -> ModelPlan:
    """Return the plan for the ranks at a place along "pp"; see :func:`plan_model`."""
    return plan_place(ctx, plan_outline(ctx, model, engine), place)


def plan_places(
    ctx: Context, model: nn.Module | ModelFacts, facts: ModelFacts | None = None
) -> tuple[ModelPlan, ...]:
    """Return the plan for each place along "pp"; see :func:`plan_model`. Pure.

    Args:
        ctx: The mesh and the options.
        model: The model, or its facts.
        facts: Those of the model, if they have been read.
    """
    outline = plan_outline(ctx, model, facts=facts)
    return tuple(plan_place(ctx, outline, place) for place in range(ctx.axis_size("pp")))


def plan_outline(
    ctx: Context,
    model: nn.Module | ModelFacts,
    engine: Literal["ddp", "shard"] | None = None,
    facts: ModelFacts | None = None,
    tensor: TensorPlan | None = None,
) -> Outline:
    """Return what the plans of all places share; see :func:`plan_places`. ``tensor`` may be planned."""
    real = None if isinstance(model, ModelFacts) else model
    outline = facts or (model if isinstance(model, ModelFacts) else read_facts(model))
    mesh = plan_mesh(None, ctx.num_processes) if ctx.mesh is None else ctx.mesh.plan
    chosen = _choose_engine(ctx, mesh, engine)
    parallelism = ctx.strategy.parallelism
    pipeline, schedule = None, None
    if mesh.size("pp") > 1:
        config = (None if parallelism is None else parallelism.pp_handler) or PipelineParallelConfig()
        schedule = plan_schedule(config, mesh.size("pp"))
        pipeline = plan_stages(outline, schedule.num_stages, split=config.split, last=config.last)
    experts = None
    if chosen == "shard" and mesh.size("ep") > 1:
        experts = _plan_experts(ctx, outline, mesh)
    if mesh.size("tp") > 1 and tensor is None and chosen != "ddp":
        handler = None if parallelism is None else parallelism.tp_handler
        tensor = plan_tensor(handler or TorchTensorParallelConfig(), outline, mesh.size("tp"))
    plugin = ctx.strategy.fsdp
    if plugin is not None and plugin.activation_checkpointing and real is not None:
        refuse_own_recomputation(real)
        if plugin.activation_checkpointing_offload and ctx.strategy.dynamo.backend != DynamoBackend.NO:
            raise ConfigurationError(
                "fsdp_plugin: activation_checkpointing_offload moves tensors between operations that "
                f"dynamo_backend={str(ctx.strategy.dynamo.backend)!r} compiles into one. Leave one out."
            )
    ignored: tuple[str, ...] = ()
    if chosen == "shard" and plugin is not None and plugin.ignored_modules is not None:
        ignored = names_of_ignored(plugin.ignored_modules, _needed(real, "ignored_modules"), outline)
    fp8 = plan_fp8_of(ctx, outline, real, engine=chosen, axes=mesh.active(), ignored=ignored)
    return Outline(outline, real, mesh, chosen, pipeline, schedule, experts, tensor, ignored, fp8)


def plan_place(ctx: Context, outline: Outline, place: int) -> ModelPlan:
    """Return the plan for the ranks at a place along "pp"."""
    facts, real, mesh, chosen, pipeline, schedule, experts, tensor, ignored, fp8 = outline
    own_names = facts.own_names
    if pipeline is not None and schedule is not None:
        facts = pipeline.local(facts, schedule.stages_of(place))
        experts = None if experts is None else experts.only(facts)
        tensor = None if tensor is None else tensor.only(facts)
        fp8 = None if fp8 is None else fp8.only(facts)
        ignored = tuple(name for name in ignored if name in facts.shapes)
    plugin = ctx.strategy.fsdp or FullyShardedDataParallelPlugin(fsdp_version=2)
    local = facts if tensor is None else tensor.local(facts)
    if experts is not None:
        local = experts.local(local)
    shard, recomputed = None, ()
    if chosen == "shard" or plugin.activation_checkpointing:
        units = choose_units(plugin, local, _wrapped(plugin, real))
        if plugin.activation_checkpointing:
            recomputed = plan_recompute(facts, units)
        if chosen == "shard":
            shard = plan_shard(
                plugin,
                local,
                mesh,
                units,
                mixed_precision=ctx.mixed_precision,
                ignored=ignored,
                experts=experts,
                in_fp8=fp8.converted if fp8 is not None and fp8.gathers else (),
            )
    return ModelPlan(
        model=facts.kinds[""],
        num_parameters=outline.facts.numel(*own_names),
        num_trainable=outline.facts.numel(*(name for name in own_names if name in outline.facts.trainable)),
        mesh=mesh,
        pipeline=pipeline,
        schedule=schedule,
        tensor=tensor,
        attention=_plan_attention(ctx, local, mesh, real, outline.facts),
        experts=experts,
        fp8=fp8,
        engine=chosen,
        shard=shard,
        recomputed=recomputed,
        compiled=modules_to_compile(ctx.strategy.dynamo, facts, None if pipeline else real, shard, pipeline),
        precision=_precision(ctx.mixed_precision, shard),
        xla=plan_xla(ctx, local, None if ctx.device.type != "xla" else _wrapped(plugin, real)),
    )


def _plan_attention(
    ctx: Context,
    facts: ModelFacts,
    mesh: MeshPlan,
    model: nn.Module | None,
    whole: ModelFacts | None = None,
) -> AttentionPlan | None:
    if mesh.size("seq") == 1:
        return None
    parallelism = ctx.strategy.parallelism
    handler = None if parallelism is None else parallelism.cp_handler
    axis = "cp" if mesh.size("cp") > 1 else "sp"
    return plan_attention(handler, facts, axis, mesh.size("seq"), model, whole)


def share_attention(ctx: Context, model: nn.Module, plan: AttentionPlan | None = None) -> None:
    """Make ranks along "cp" or "sp" compute attention together, if there are any. Writes into ``model``.

    Ranks: every rank of ``ctx``; nothing is communicated.

    Args:
        ctx: The world.
        model: Without shared attention yet.
        plan: From :func:`plan_model`; None to make one.

    Raises:
        NotAvailableError: The ranks are threads.
        ConfigurationError: As :func:`accelfn.parallel.strategies.attention.plan_attention`.
    """
    if ctx.mesh is None or ctx.mesh.plan.size("seq") == 1:
        return
    plan = plan or _plan_attention(ctx, read_facts(model), ctx.mesh.plan, model)
    group = ctx.along("seq").world.group
    if plan is None or group is None:
        raise NotAvailableError(
            "ranks that share sequences must be processes with an initialised torch.distributed; these are "
            'threads. In a test, use run_ranks(..., on="processes").'
        )
    if not plan.modules:  # a stage without attention
        return
    # A stage of a pipeline ends the model's forward early; scales of 8 bits are those of all positions.
    is_tried = ctx.axis_size("pp") == 1 and ctx.precision.mode != "fp8"
    find_mixing = partial(find_mixing_module, ctx) if is_tried else None
    apply_attention(model, plan, group, find_mixing=find_mixing)


def _plan_experts(ctx: Context, facts: ModelFacts, mesh: MeshPlan) -> ExpertPlan:
    if mesh.size("tp") > 1:
        raise ConfigurationError(
            f"ep_size={mesh.ep_size} and tp_size={mesh.size('tp')}: expert and tensor parallelism can't be "
            "combined yet. Set one of them to 1."
        )
    if ctx.strategy.dynamo.backend != DynamoBackend.NO:
        raise ConfigurationError(
            f"ep_size={mesh.ep_size} and dynamo_backend={str(ctx.strategy.dynamo.backend)!r}: the number of "
            "rows that experts get differs between steps, which no compiled block supports. Leave one of the "
            "two out."
        )
    parallelism = ctx.strategy.parallelism
    handler = None if parallelism is None else parallelism.ep_handler
    return plan_experts(handler or ExpertParallelConfig(), facts, mesh.ep_size)


def _wrapped(plugin: FullyShardedDataParallelPlugin, model: nn.Module | None) -> tuple[str, ...] | None:
    policy = plugin.auto_wrap_policy
    if policy is None or isinstance(policy, str):
        return None
    return names_of_wrapped(policy, _needed(model, "auto_wrap_policy"))


def _needed(model: nn.Module | None, field: str) -> nn.Module:
    if model is None:
        raise ConfigurationError(
            f"plan_model: {field} needs the model's modules, which its facts don't have. Pass the model."
        )
    return model


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


def modules_to_compile(
    options: TorchDynamoPlugin,
    facts: ModelFacts,
    model: nn.Module | None = None,
    shard: ShardPlan | None = None,
    pipeline: PipelinePlan | None = None,
) -> tuple[str, ...]:
    """Return the names of the modules that are compiled, "" for the model itself."""
    if options.backend == DynamoBackend.NO:
        return ()
    if shard is not None and len(shard.units) > 1:  # FSDP gathers between units, which no graph can contain
        return tuple(reversed(shard.units[:-1]))
    if pipeline is not None:  # the model's forward ends early on most stages
        return tuple(name for stage in pipeline.stages for name in stage.blocks if name in facts.kinds)
    if not options.use_regional_compilation:
        return ("",)
    return (facts.blocks or ("",)) if model is None else plan_regions(model)


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
    result: nn.Module = model
    if not plan.is_spread:
        share_attention(ctx, model, plan.attention)
        apply_fp8(model, plan.fp8)
        recompute(ctx, model, plan.recomputed)
        compile_(model, ctx.strategy.dynamo, plan.compiled)
        if plan.xla is not None:
            apply_xla(ctx, model, plan.xla)
        run_in_fp8(model, plan.fp8)
        if plan.engine == "ddp" or ctx.reduction is not None:
            result = replicate(ctx, model)
    else:
        _spread(ctx, model, plan, before)
    leave_pointers(before, model)
    return cast("M", result)


def _placed(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.to(device)


def _spread(ctx: Context, model: nn.Module, plan: ModelPlan, before: Mapping[str, torch.Tensor]) -> None:
    """Spread a model over ranks on the meta device; then allocate each rank's parts and set their values."""
    if ctx.mesh is None:
        raise NotAvailableError(
            "a model that is spread over ranks needs a mesh. Pass fsdp_plugin or parallelism_config to "
            "init_context."
        )
    tp = None if plan.tensor is None else ctx.mesh.device_mesh("tp")
    shards = None if plan.shard is None else ctx.mesh.device_mesh(*plan.shard.dims)
    ep = of_experts = None
    if plan.experts is not None and plan.shard is not None:
        ep = ctx.mesh.device_mesh("ep")
        of_experts = ctx.mesh.device_mesh(*plan.shard.expert_dims_of_mesh)
    values = release(ctx, model)
    if plan.pipeline is not None and plan.schedule is not None:
        own = plan.schedule.stages_of(ctx.coordinate("pp"))
        apply_stages(model, plan.pipeline, own, ctx.device)
    if plan.shard is None:  # FSDP places what isn't on "meta" itself
        cast("Any", model)._apply(partial(_placed, ctx.device))
    if plan.tensor is not None and tp is not None:
        apply_tensor(model, plan.tensor, tp)
        retie(before, model)
    if plan.experts is not None and ep is not None:
        apply_experts(model, plan.experts, ep)
        retie(before, model)
    share_attention(ctx, model, plan.attention)
    apply_fp8(model, plan.fp8)
    recompute(ctx, model, plan.recomputed)
    compile_(model, ctx.strategy.dynamo, plan.compiled)
    run_in_fp8(model, plan.fp8)
    units: list[nn.Module] = []
    if plan.shard is not None and shards is not None:
        units = apply_shard(model, plan.shard, shards, ctx.device, of_experts)
    in_host = plan.shard is not None and plan.shard.offload
    materialize(model, torch.device("cpu") if in_host else ctx.device)
    fill(ctx, model, values)
    shard = plan.shard
    handle = LocalHandle(model) if shard is None else ShardHandle(model, units, ctx, shard)
    if isinstance(handle, ShardHandle) and plan.fp8 is not None and plan.fp8.gathers:
        handle.gather_in_fp8()
    if plan.pipeline is not None and plan.schedule is not None:
        PipelineHandle(ctx, model, plan.pipeline, plan.schedule, handle)  # which agrees once for each batch
        return
    with_named_errors(model, ctx.collectives.translate_error)
    check_each_forward(ctx, model)
    sync_buffers(ctx, model, handle)
