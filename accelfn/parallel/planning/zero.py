"""What DeepSpeed's ZeRO holds on each rank, and sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch

from accelfn.context import Context
from accelfn.errors import NotAvailableError
from accelfn.parallel.engines.deepspeed_plan import DeepSpeedFacts, plan_deepspeed
from accelfn.parallel.facts import ModelFacts
from accelfn.parallel.planning.costs import Exchange, Weights, received_in_ring
from accelfn.parallel.planning.optimizer_states import OptimizerStates


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

    def size_bytes(self, facts: ModelFacts, names: Iterable[str]) -> int:
        """Return the bytes of some parameters, or of their gradients."""
        return sum(facts.numel(name) * self.width(facts, name) for name in names)

    def width(self, facts: ModelFacts, name: str) -> int:
        """Return the bytes of an element."""
        return (self.dtype or facts.dtypes[name]).itemsize


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
    return ZeroPlan(
        stage=plan.stage,
        num_ranks=ctx.num_processes,
        dtype=None if plan.dtype is None else cast("torch.dtype", getattr(torch, plan.dtype)),
        # These are DeepSpeed's own defaults.
        bucket=int(zero.get("reduce_bucket_size", 500_000_000)),
        live=int(zero.get("stage3_max_live_parameters", 1_000_000_000)),
        persistent=int(zero.get("stage3_param_persistence_threshold", 100_000)),
    )


def weights_of_zero(plan: ZeroPlan, facts: ModelFacts, states: OptimizerStates) -> Weights:
    """Return what a rank holds. Pure.

    At stages 1 to 3 the optimizer steps a float32 copy of this rank's share of all parameters, flattened,
    which counts among its states.
    """
    names = facts.own_names
    trained = [name for name in names if name in facts.trainable]
    whole, gradients = plan.size_bytes(facts, names), plan.size_bytes(facts, trained)
    if plan.stage == 0:
        optimizer = sum(states.bytes_of(facts.shapes[name], facts.dtypes[name]) for name in trained)
        return Weights(whole, 0, gradients, optimizer, states.name)
    share = -(-facts.numel(*trained) // plan.num_ranks)
    optimizer = 4 * share + states.bytes_of((share,), torch.float32)
    title = f"{states.name}, with float32 copies of the parameters"
    if plan.stage < 3:
        kept = gradients if plan.stage == 1 else -(-gradients // plan.num_ranks)
        return Weights(whole, 0, kept, optimizer, title)
    shards = sum(-(-facts.numel(name) // plan.num_ranks) * plan.width(facts, name) for name in names)
    persistent = plan.size_bytes(facts, (name for name in names if facts.numel(name) <= plan.persistent))
    widest = max(plan.width(facts, name) for name in names)
    return Weights(
        parameters=shards + persistent,
        padding=shards - whole // plan.num_ranks,
        gradients=share * widest,
        optimizer=optimizer,
        optimizer_name=title,
        gathered=min(whole - persistent, plan.live * widest),
    )


def exchanges_of_zero(plan: ZeroPlan, facts: ModelFacts, axis: str, num_batches: int) -> Iterable[Exchange]:
    """List what ranks exchange in an optimizer step. Pure.

    At stages 1 and 2 gradients are all-reduced, each rank keeps its share, and updated parameters are
    gathered after the step. Stage 3 gathers parameters in each pass, once for both if all may live at once.
    """
    trained = [name for name in facts.own_names if name in facts.trainable]
    gradients = plan.size_bytes(facts, trained)
    buckets = -(-facts.numel(*trained) // plan.bucket)

    def received(size: int) -> int:
        return received_in_ring(size, plan.num_ranks)

    if plan.stage < 3:
        yield Exchange(axis, "all_reduce", "gradients", buckets, received(2 * gradients), "backward")
        if plan.stage:
            yield Exchange(axis, "all_gather", "parameters", 1, received(gradients), "step")
        return
    sharded = [name for name in facts.own_names if facts.numel(name) > plan.persistent]
    gathered = received(plan.size_bytes(facts, sharded))
    forward = Exchange(axis, "all_gather", "parameters", len(sharded), gathered, "forward").times(num_batches)
    yield forward
    if facts.numel(*sharded) > plan.live:
        yield forward._replace(during="backward")
    size = received(num_batches * gradients)
    yield Exchange(axis, "reduce_scatter", "gradients", num_batches * buckets, size, "backward")
