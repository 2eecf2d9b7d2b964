"""Plan how a model is prepared on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from torch import nn

from accelfn.config import FullyShardedDataParallelPlugin
from accelfn.context import Context, MeshPlan, takes_context
from accelfn.errors import ConfigurationError
from accelfn.parallel.engines.xla import XlaShardPlan
from accelfn.parallel.facts import ModelFacts, list_text, read_facts, table_text
from accelfn.parallel.strategies.attention import AttentionPlan
from accelfn.parallel.strategies.experts import ExpertPlan
from accelfn.parallel.strategies.fp8 import Fp8Plan
from accelfn.parallel.strategies.fsdp_plan import ShardPlan
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.parallel.strategies.strategy import Engine, Planning
from accelfn.parallel.strategies.table import STRATEGIES
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


@takes_context
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
    if ctx.strategy.engine is not None and engine is None:
        raise ConfigurationError(
            f"plan_model plans torch's own strategies, and here {ctx.strategy.engine} trains. Print "
            "that engine's plan: plan_deepspeed(plugin, deepspeed_facts(ctx, model, optimizer)), or "
            "plan_megatron(plugin, ctx.num_processes)."
        )
    return plan_at(ctx, model, ctx.coordinate("pp"), engine=engine)


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


def plan_whole(
    ctx: Context,
    model: nn.Module | ModelFacts,
    engine: Literal["ddp", "shard"] | None = None,
    facts: ModelFacts | None = None,
    known: Mapping[str, Any] = MappingProxyType({}),
) -> WholePlan:
    """Return what the plans of all ranks share; see :func:`plan_model`. Pure.

    Args:
        ctx: The mesh and the options.
        model: The model, or its facts.
        engine: As in :func:`plan_model`.
        facts: Those of the model, if they have been read.
        known: Plans by strategy, if they have been made.
    """
    real = None if isinstance(model, ModelFacts) else model
    whole = facts or (model if isinstance(model, ModelFacts) else read_facts(model))
    mesh = ctx.mesh_plan
    chosen = _choose_engine(ctx, mesh, engine)
    plans: dict[str, Any] = dict.fromkeys(strategy.name for strategy in STRATEGIES)
    for strategy in STRATEGIES:
        if strategy.is_for(mesh):
            at = Planning(ctx, mesh, chosen, real, whole, whole, 0, plans)
            known_one = known.get(strategy.name)
            plans[strategy.name] = strategy.plan(at) if known_one is None else known_one
    return WholePlan(ctx, whole, real, mesh, chosen, plans)


def plan_rank(whole: WholePlan, pp_rank: int) -> ModelPlan:
    """Return the plan for the ranks at a coordinate along "pp"."""
    ctx, facts, mesh, names = whole.ctx, whole.facts, whole.mesh, whole.facts.own_names
    plans: dict[str, Any] = dict.fromkeys(whole.plans)
    for strategy in STRATEGIES:
        if not strategy.is_for(mesh):
            continue
        at = Planning(ctx, mesh, whole.engine, whole.model, whole.facts, facts, pp_rank, plans)
        plans[strategy.name] = plan = strategy.of_rank(whole.plans[strategy.name], at)
        if plan is not None:
            facts = strategy.narrow(plan, at)
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
