"""What becomes of a model on a mesh: planned first, as a value that prints, and then done."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeVar, cast

import torch
from torch import nn

from accelfn.comm import broadcast, verify_structure
from accelfn.context import Context, MeshPlan, check_context, plan_mesh
from accelfn.context.config import (
    DynamoBackend,
    FullyShardedDataParallelPlugin,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
)
from accelfn.errors import ConfigurationError
from accelfn.parallel.compile import compile_, plan_regions
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.handle import LocalHandle
from accelfn.parallel.pointers import leave_pointers, named, retie
from accelfn.parallel.replicate import check_each_forward, replicate
from accelfn.parallel.shard import ShardPlan, apply_shard, plan_shard
from accelfn.parallel.shard_handle import with_named_errors
from accelfn.parallel.tensor import apply_tensor
from accelfn.parallel.tensor_plans import TensorPlan, plan_tensor
from accelfn.parallel.thread_ddp import is_made_of_others
from accelfn.parallel.wrap import names_of_ignored, names_of_wrapped

__all__ = ("ModelPlan", "apply_model", "modules_to_compile", "plan_model")

Engine = Literal["none", "ddp", "shard"]

_MIB = 1 << 20
# Sent together, so that as much is there twice.
_BROADCAST_BYTES = 64 << 20


class ModelPlan(NamedTuple):
    """What is done with a model when it is prepared. A value; ``print(plan)`` shows it as a table.

    Attributes:
        model: Name of the model's class.
        num_parameters: Elements of its parameters, tied ones counted once.
        num_trainable: Of these, those that are trained.
        mesh: The ranks.
        tensor: How ranks share each layer; None where they don't.
        engine: What averages gradients: "ddp" (every rank has the whole model), "shard" (FSDP), or "none".
        shard: How the parameters are sharded; None where they are not.
        compiled: Names of the modules that are compiled, "" for the model itself; before it is sharded.
        precision: In what the model computes, in words.
    """

    model: str
    num_parameters: int
    num_trainable: int
    mesh: MeshPlan
    tensor: TensorPlan | None
    engine: Engine
    shard: ShardPlan | None
    compiled: tuple[str, ...]
    precision: str

    def rows(self) -> dict[str, str]:
        """Return the lines of the table: text by title."""
        rows = [
            ("model", f"{self.model}, {self.num_parameters:,} parameters, {self.num_trainable:,} trained")
        ]
        axes = [f"{axis} {self.mesh.size(axis)}" for axis in self.mesh.active()]
        rows.append(("mesh", " x ".join(axes) if axes else "one rank"))
        if self.tensor is not None:
            rows.extend(self.tensor.rows().items())
        averaged = " x ".join(self.mesh.active("loss"))
        if self.engine == "ddp":
            rows.append(("gradients", f"averaged over {averaged}; every rank has the whole model"))
        elif self.engine == "none":
            rows.append(("gradients", "whole on each rank as they are"))
        rows.extend(_rows_of_shard(self.shard, averaged))
        rows.append(("precision", self.precision))
        rows.append(("compiled", _listed(self.compiled) if self.compiled else "nothing"))
        return dict(rows)

    def __str__(self) -> str:
        """Return the plan as a table."""
        rows = self.rows()
        width = max(map(len, rows))
        indent = "\n" + " " * (width + 2)
        return "\n".join(
            f"{title.ljust(width)}  {text.replace(chr(10), indent)}" for title, text in rows.items()
        )


def _rows_of_shard(plan: ShardPlan | None, averaged: str) -> list[tuple[str, str]]:
    if plan is None:
        return []
    rest = "the rest of the model" if len(plan.units) > 1 else "the whole model"
    units = [*reversed(plan.units[:-1])]
    freed = "freed after its forward" if plan.reshard else "kept until its backward"
    kept = _mib(plan.shard_bytes) + (" in host memory" if plan.offload else "")
    largest = f"the largest unit is {_mib(plan.gathered_bytes)} while it computes"
    whole = f"until the last batch of a window each rank holds {_mib(plan.unreduced_bytes)}, whole gradients"
    rows = [
        ("gradients", f"averaged over {averaged} by FSDP, and sharded over {plan.num_shards}"),
        ("units", ", ".join([_listed(units), rest]) if units else rest),
        (
            "parameters",
            f"{kept} on each rank; {largest}, and {freed if units else 'kept until its backward'}",
        ),
        ("windows", f"{whole}; with sync_each_batch its shard of them"),
    ]
    if plan.prefetch:
        rows.append(("prefetch", "each unit asks for the next one in its forward"))
    if plan.ignored:
        rows.append(("ignored", f"whole on each rank: {_listed(plan.ignored)}"))
    return rows


def _listed(names: Iterable[str]) -> str:
    found = [name or "the model" for name in names]
    if len(found) <= 4:
        return ", ".join(found)
    return f"{found[0]}, {found[1]}, ..., {found[-1]} ({len(found)})"


def _mib(size: int) -> str:
    return f"{size / _MIB:,.1f} MiB" if size >= _MIB else f"{size / 1024:,.1f} KiB"


def plan_model(
    ctx: Context, model: nn.Module | ModelFacts, *, engine: Literal["ddp", "shard"] | None = None
) -> ModelPlan:
    """Return what :func:`accelfn.prepare_model` does with a model. Nothing is changed or sent.

    A model that is to have another plan than the context's is prepared with its own:
    ``prepare_model(ctx, teacher, plan=plan_model(ctx, teacher, engine="ddp"))``, or one of
    ``ctx.replace(fsdp_plugin=...)``.

    Ranks: local; the same on every rank.

    Args:
        ctx: The mesh, and what was asked for.
        model: Not prepared yet; its parameters may be on the meta device. Or its facts.
        engine: "ddp" keeps the whole model on every rank, "shard" shards it; None for what the context says:
            sharded with an ``fsdp_plugin``, ``dp_shard_size`` or ``tp_size``, else whole.

    Raises:
        ConfigurationError: What was asked for doesn't fit the model, or contradicts itself.

    >>> print(plan_model(Context(), nn.Linear(2, 2)))
    model      Linear, 6 parameters, 6 trained
    mesh       one rank
    gradients  whole on each rank as they are
    precision  that of the parameters
    compiled   nothing
    """
    check_context("plan_model", ctx)
    facts = model if isinstance(model, ModelFacts) else read_facts(model)
    real = None if isinstance(model, ModelFacts) else model
    mesh = plan_mesh(None, ctx.num_processes) if ctx.mesh is None else ctx.mesh.plan
    chosen = _choose_engine(ctx, mesh, engine)
    tensor = None
    if mesh.size("tp") > 1:
        parallelism = ctx.strategy.parallelism
        handler = None if parallelism is None else parallelism.tp_handler
        tensor = plan_tensor(handler or TorchTensorParallelConfig(), facts, mesh.size("tp"))
    shard = None
    if chosen == "shard":
        plugin = ctx.strategy.fsdp or FullyShardedDataParallelPlugin(fsdp_version=2)
        policy = plugin.auto_wrap_policy
        wrapped = None
        if policy is not None and not isinstance(policy, str):
            wrapped = names_of_wrapped(policy, _needed(real, "auto_wrap_policy"))
        ignored: tuple[str, ...] = ()
        if plugin.ignored_modules is not None:
            ignored = names_of_ignored(plugin.ignored_modules, _needed(real, "ignored_modules"), facts)
        shard = plan_shard(
            plugin,
            facts if tensor is None else tensor.local(facts),
            mesh,
            mixed_precision=ctx.mixed_precision,
            wrapped=wrapped,
            ignored=ignored,
        )
    own = facts.own_names
    return ModelPlan(
        model=facts.kinds[""],
        num_parameters=facts.numel(*own),
        num_trainable=facts.numel(*(name for name in own if name in facts.trainable)),
        mesh=mesh,
        tensor=tensor,
        engine=chosen,
        shard=shard,
        compiled=modules_to_compile(ctx.strategy.dynamo, facts, real, shard),
        precision=_precision(ctx.mixed_precision, shard),
    )


def _needed(model: nn.Module | None, field: str) -> nn.Module:
    if model is None:
        raise ConfigurationError(
            f"plan_model: {field} is asked of modules, and the facts of a model have none. Pass the model."
        )
    return model


def _choose_engine(ctx: Context, mesh: MeshPlan, engine: Literal["ddp", "shard"] | None) -> Engine:
    if ctx.num_processes == 1:
        _refuse_alone(ctx.strategy.fsdp)
        return "none"
    asked = ctx.strategy.fsdp is not None or mesh.size("dp_shard") > 1
    chosen = engine or ("shard" if asked or mesh.size("tp") > 1 else "ddp")
    if chosen == "ddp" and mesh.size("tp") > 1:
        raise ConfigurationError(
            'plan_model: engine="ddp" keeps the whole model on every rank, and ranks along tp read the same '
            "batch. Leave engine out, or prepare the model with evaluation_mode=True if it isn't trained."
        )
    if chosen == "shard" and ctx.reduction is not None:
        raise ConfigurationError(
            'reduction="canonical" needs the whole model on every rank, to take sums in one order: '
            "sums over shards change with their number. Leave fsdp_plugin, dp_shard_size and tp_size out, or "
            'use reduction="mean".'
        )
    return "none" if mesh.size("loss") == 1 else chosen


def _refuse_alone(plugin: FullyShardedDataParallelPlugin | None) -> None:
    """Refuse what only the sharding engine can do, where a single rank has nothing to shard."""
    if plugin is None:
        return
    for name, is_asked in (
        ("cpu_offload", plugin.offloads_params),
        ("mixed_precision_policy", plugin.mixed_precision_policy is not None),
    ):
        if is_asked:
            raise ConfigurationError(
                f"fsdp_plugin: {name} is what FSDP does with shards, and one rank has none. Start several "
                "ranks, or leave it out and use mixed_precision or accelfn.cpu_offload."
            )


def modules_to_compile(
    options: TorchDynamoPlugin,
    facts: ModelFacts,
    model: nn.Module | None = None,
    shard: ShardPlan | None = None,
) -> tuple[str, ...]:
    """Return the names of the modules that are compiled, "" for the model itself."""
    if options.backend == DynamoBackend.NO:
        return ()
    if shard is not None and len(shard.units) > 1:  # between units FSDP gathers, which no graph can hold
        return tuple(reversed(shard.units[:-1]))
    if not options.use_regional_compilation:
        return ("",)
    return (facts.blocks or ("",)) if model is None else plan_regions(model)


def _precision(mode: str, shard: ShardPlan | None) -> str:
    if shard is None:
        return "that of the parameters" if mode == "no" else f"{mode} by autocast, outputs in float32"
    if shard.param_dtype is None and shard.reduce_dtype is None and shard.output_dtype is None:
        return "that of the parameters"
    words = {
        "parameters gathered in": shard.param_dtype,
        "gradients averaged in": shard.reduce_dtype or shard.param_dtype,
        "outputs in": shard.output_dtype,
    }
    return ", ".join(f"{what} {str(one).removeprefix('torch.')}" for what, one in words.items() if one)


M = TypeVar("M", bound=nn.Module)


def apply_model(ctx: Context, model: M, plan: ModelPlan) -> M:
    """Do with a model what was planned for it: tensor parallelism, compilation, then shards or replicas.

    Parameters are as on rank 0 from now on. Those that are replaced point at their successors, so that an
    optimizer that holds them finds them.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world that was planned for.
        model: On this rank's device, or, where it is sharded, anywhere. Writes into it.
        plan: From :func:`plan_model`.

    Returns:
        The model to call: ``model`` itself, or a ``DistributedDataParallel`` around it.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
        Exception: As torch's engines.
    """
    before = named(model)
    result: nn.Module = model
    if plan.tensor is not None or plan.shard is not None:
        _take_from_rank_0(ctx, model)
    if plan.tensor is not None and ctx.mesh is not None:
        apply_tensor(model, plan.tensor, ctx.mesh.device_mesh("tp"))
        retie(before, model)
    compile_(model, ctx.strategy.dynamo, plan.compiled)
    if plan.shard is not None:
        apply_shard(ctx, model, plan.shard)
    elif plan.tensor is not None:
        LocalHandle(model)
    elif plan.engine == "ddp" or ctx.reduction is not None:
        result = replicate(ctx, model)
    if plan.tensor is not None or plan.shard is not None:
        with_named_errors(model, ctx.collectives.translate_error)
        check_each_forward(ctx, model)
    leave_pointers(before, model)
    return cast("M", result)


def _take_from_rank_0(ctx: Context, model: nn.Module) -> None:
    """Bring the parameters and buffers of a model to rank 0's values, some at a time."""
    tensors: dict[str, torch.Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    verify_structure(ctx, tensors)
    batch: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        with torch.no_grad():
            for name, value in broadcast(ctx, batch).items():
                tensors[name].copy_(value)
        batch.clear()

    for name, tensor in tensors.items():
        if tensor.is_meta or is_made_of_others(tensor):
            continue
        batch[name] = tensor.detach()
        size += tensor.nbytes
        if size >= _BROADCAST_BYTES:
            flush()
            size = 0
    if batch:
        flush()
