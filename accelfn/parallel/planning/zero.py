"""What DeepSpeed's ZeRO holds on each rank, and sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from accelfn.context import Context
from accelfn.errors import NotAvailableError
from accelfn.parallel.engines.deepspeed_plan import DeepSpeedFacts, plan_deepspeed
from accelfn.parallel.facts import ModelFacts
from accelfn.parallel.planning.costs import Exchange
from accelfn.parallel.planning.optimizer_states import OptimizerStates

# DeepSpeed's own defaults.
_DEFAULTS: Mapping[str, int] = MappingProxyType(
    {
        "reduce_bucket_size": 500_000_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_param_persistence_threshold": 100_000,
    }
)


class ZeroPlan(NamedTuple):
    """A stage of ZeRO on a number of ranks. Sizes are in elements.

    Attributes:
        stage: 0 shards nothing, 1 optimizer states, 2 and gradients, 3 and parameters.
        num_ranks: Ranks that share them.
        dtype: Of parameters and gradients; None for that of the model's.
        bucket: Gradients that are averaged together.
        live: Parameters that stage 3 holds unsharded at once, before it frees some.
        persistent: Parameters of at most this size are unsharded at stage 3.
    """

    stage: int
    num_ranks: int
    dtype: torch.dtype | None
    bucket: int
    live: int
    persistent: int


class ZeroMemory(NamedTuple):
    """What a rank holds, in bytes; the names are those of :class:`accelfn.Budget`."""

    parameters: int
    padding: int
    gradients: int
    optimizer: int
    gathered: int


def plan_zero(ctx: Context, facts: ModelFacts, hidden_size: int | None) -> ZeroPlan | None:
    """Return how DeepSpeed shards a model, None if it doesn't train. Pure.

    Args:
        ctx: Has DeepSpeed's options.
        facts: Of the model.
        hidden_size: Of the model's ``config``; None without one.

    Raises:
        NotAvailableError: Megatron-LM trains, or DeepSpeed offloads.
        ConfigurationError: As :func:`accelfn.parallel.engines.plan_deepspeed`.
    """
    plugin = ctx.strategy.deepspeed
    if plugin is None:
        if ctx.strategy.engine is not None:
            raise NotAvailableError(
                f"memory and traffic are planned for torch's own strategies and for DeepSpeed, and here "
                f"{ctx.strategy.engine} trains. Its layout is printed by plan_megatron."
            )
        return None
    plan = plan_deepspeed(
        plugin,
        DeepSpeedFacts(
            world_size=ctx.num_processes,
            mixed_precision=ctx.mixed_precision,
            num_steps=ctx.gradient_accumulation_steps,
            hidden_size=hidden_size,
            classes=frozenset(facts.kinds.values()),
        ),
    )
    zero = cast("Mapping[str, Any]", plan.config["zero_optimization"])
    for what in ("optimizer", "param"):
        if cast("Mapping[str, Any]", zero.get(f"offload_{what}") or {}).get("device", "none") != "none":
            raise NotAvailableError(
                f"memory isn't planned for DeepSpeed with offload_{what}: it keeps as much in the host's "
                "memory as it finds. Leave it out of the plan, or plan an fsdp_plugin with cpu_offload."
            )
    sizes = {name: int(zero.get(name, default)) for name, default in _DEFAULTS.items()}
    return ZeroPlan(
        stage=plan.stage,
        num_ranks=ctx.num_processes,
        dtype=None if plan.dtype is None else cast("torch.dtype", getattr(torch, plan.dtype)),
        bucket=sizes["reduce_bucket_size"],
        live=sizes["stage3_max_live_parameters"],
        persistent=sizes["stage3_param_persistence_threshold"],
    )


def memory_of_zero(plan: ZeroPlan, facts: ModelFacts, states: OptimizerStates) -> ZeroMemory:
    """Return what a rank holds. Pure.

    At stages 1 to 3 the optimizer steps a float32 copy of this rank's share of all parameters, flattened,
    which counts among its states.
    """
    names = facts.own_names
    widths = {name: (plan.dtype or facts.dtypes[name]).itemsize for name in names}
    trained = [name for name in names if name in facts.trainable]
    whole = sum(facts.numel(name) * widths[name] for name in names)
    gradients = sum(facts.numel(name) * widths[name] for name in trained)
    if plan.stage == 0:
        optimizer = sum(states.bytes_of(facts.shapes[name], facts.dtypes[name]) for name in trained)
        return ZeroMemory(whole, 0, gradients, optimizer, 0)
    share = -(-facts.numel(*trained) // plan.num_ranks)
    optimizer = 4 * share + states.bytes_of((share,), torch.float32)
    if plan.stage < 3:
        kept = gradients if plan.stage == 1 else -(-gradients // plan.num_ranks)
        return ZeroMemory(whole, 0, kept, optimizer, 0)
    shards = sum(-(-facts.numel(name) // plan.num_ranks) * widths[name] for name in names)
    persistent = sum(
        facts.numel(name) * widths[name] for name in names if facts.numel(name) <= plan.persistent
    )
    return ZeroMemory(
        parameters=shards + persistent,
        padding=shards - whole // plan.num_ranks,
        gradients=share * max(widths.values()),
        optimizer=optimizer,
        gathered=min(whole - persistent, plan.live * max(widths.values())),
    )


def exchanges_of_zero(plan: ZeroPlan, facts: ModelFacts, axis: str, num_batches: int) -> Iterable[Exchange]:
    """List what ranks exchange in an optimizer step. Pure.

    At stages 1 and 2 gradients are all-reduced, each rank keeps its share, and updated parameters are
    gathered after the step. Stage 3 gathers parameters in each pass, once for both if all may live at once.
    """
    names, num_ranks = facts.own_names, plan.num_ranks
    widths = {name: (plan.dtype or facts.dtypes[name]).itemsize for name in names}
    gradients = sum(facts.numel(name) * widths[name] for name in names if name in facts.trainable)
    others = num_ranks - 1
    size = sum(facts.numel(name) for name in names if name in facts.trainable)
    buckets = -(-size // plan.bucket)
    if plan.stage < 3:
        received = 2 * gradients * others // num_ranks
        yield Exchange(axis, "all_reduce", "gradients", buckets, received, "backward")
        if plan.stage:
            yield Exchange(axis, "all_gather", "parameters", 1, gradients * others // num_ranks, "step")
        return
    sharded = [name for name in names if facts.numel(name) > plan.persistent]
    gathered = sum(facts.numel(name) * widths[name] for name in sharded) * others // num_ranks
    forward = Exchange(axis, "all_gather", "parameters", len(sharded), gathered, "forward").times(num_batches)
    yield forward
    if facts.numel(*sharded) > plan.live:
        yield forward._replace(during="backward")
    reduced = num_batches * gradients * others // num_ranks
    yield Exchange(axis, "reduce_scatter", "gradients", num_batches * buckets, reduced, "backward")
