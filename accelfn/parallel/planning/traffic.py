"""What ranks send each other in an optimizer step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast

from torch import nn

from accelfn.context import Context, MeshPlan, takes_context
from accelfn.parallel.facts import ModelFacts, owner_of, table_text
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.planning.costs import Exchange, merge, received_in_ring
from accelfn.parallel.planning.step import StepPlan, plan_step
from accelfn.parallel.planning.zero import exchanges_of_zero
from accelfn.parallel.strategies.fsdp_plan import ShardPlan
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.tree.structure import size_text


class Traffic(NamedTuple):
    """What a rank sends and receives in an optimizer step. Prints as a table.

    Attributes:
        mesh: The mesh.
        exchanges: What is sent, by axis, kind, purpose and pass.
    """

    mesh: MeshPlan
    exchanges: tuple[Exchange, ...]

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that the rank receives, by axis."""
        moved: Counter[str] = Counter()
        for exchange in self.exchanges:
            moved[exchange.axis] += exchange.received
        return dict(moved)

    @property
    def received(self) -> int:
        """Bytes that the rank receives along all axes."""
        return sum(exchange.received for exchange in self.exchanges)

    def rows(self) -> dict[str, str]:
        """Return the lines of the table: text by title."""
        cells = [("along", "what", "pass", "received", "calls")]
        for one in self.exchanges:
            what = f"{one.kind} of {one.what}"
            cells.append((one.axis, what, one.during, size_text(one.received), f"{one.calls:,}"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        # Titles are unique, and an axis may have several lines.
        table: dict[str, list[str]] = {}
        for axis, what, during, received, calls in cells:
            line = f"{what.ljust(widths[1])}  {during.ljust(widths[2])}"
            line += f"  {received.rjust(widths[3])}  {calls.rjust(widths[4])}"
            table.setdefault(axis, []).append(line)
        return {axis: "\n".join(lines) for axis, lines in table.items()}

    def __str__(self) -> str:
        """Return the traffic as a table."""
        return table_text(self.rows()) if self.exchanges else "nothing is sent between ranks"


@takes_context
def plan_traffic(
    ctx: Context,
    model: nn.Module | ModelFacts,
    *,
    plan: ModelPlan | None = None,
    batch: Any = None,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
) -> Traffic:
    """Return what a rank sends and receives in an optimizer step: bytes and numbers of collectives. Pure.

    In a pipeline it is that of the rank that receives most.

    Ranks: local; the same on every rank.

    Args:
        ctx: The mesh, the options, and the length of accumulation windows; also of
            :func:`accelfn.plan_context`, for ranks that don't exist yet.
        model: Not prepared yet; its parameters may be on the meta device. Or its facts.
        plan: As in :func:`accelfn.plan_memory`.
        batch: As in :func:`accelfn.plan_memory`. Without one, activations don't count.
        loss_fn: As in :func:`accelfn.plan_memory`.

    Raises:
        ConfigurationError: As in :func:`accelfn.plan_memory`.
        TypeError: The model isn't one.
        ValueError: In a pipeline, the batch can't be split along its rows.
        Exception: Raised by the model or the loss function.

    >>> from accelfn.context import plan_context
    >>> traffic = plan_traffic(plan_context(16), nn.Linear(1000, 250))
    >>> [(one.axis, one.kind, one.what, one.received) for one in traffic.exchanges]
    [('dp_replicate', 'all_reduce', 'gradients', 1876875)]
    """
    step = plan_step(ctx, model, plan=plan, batch=batch, loss_fn=loss_fn)
    return max((traffic_at(ctx, step, place) for place in step.plans), key=lambda one: one.received)


def traffic_at(ctx: Context, step: StepPlan, place: int) -> Traffic:
    """Return the traffic of the ranks at a place along "pp"."""
    plan = step.plans[place]
    if step.zero is None:
        exchanges = [*_of_weights(ctx, step, plan, step.local(place))]
    else:
        axis = " x ".join(plan.mesh.active("loss"))
        exchanges = [*exchanges_of_zero(step.zero, step.local(place), axis, step.num_batches)]
    return Traffic(plan.mesh, merge([*exchanges, *_of_activations(step, place)]))


def _of_activations(step: StepPlan, place: int) -> Iterable[Exchange]:
    """List the activations that ranks at a place exchange, and in a pipeline those of their neighbors."""
    schedule = step.schedule
    times = step.num_batches * (1 if schedule is None else schedule.num_microbatches)
    for stage, cost in step.own_stages(place).items():
        yield from (one.times(times) for one in cost.exchanges)
        if schedule is None or step.stages is None:
            continue
        if stage > 0 and schedule.rank_of(stage - 1) != place:
            yield Exchange("pp", "send", "activations", 1, cost.received, "forward").times(times)
        if stage + 1 < len(step.stages) and schedule.rank_of(stage + 1) != place:
            size = step.stages[stage + 1].received  # a gradient for each activation
            yield Exchange("pp", "send", "activations", 1, size, "backward").times(times)


def _of_weights(ctx: Context, step: StepPlan, plan: ModelPlan, facts: ModelFacts) -> Iterable[Exchange]:
    """List what ranks exchange of parameters and gradients in an optimizer step.

    Args:
        ctx: Whether gradients are averaged in each batch of a window.
        step: Batches in a window; and the schedule, whose stages gather parameters for each microbatch.
        plan: Of the ranks.
        facts: Of their model, before it is sharded.
    """
    reductions = step.num_batches if ctx.accumulation.sync_each_batch else 1
    if plan.shard is None:
        yield from _of_copies(ctx, plan, facts, reductions)
    else:
        microbatches = 1 if step.schedule is None else step.schedule.num_microbatches
        yield from _of_shards(plan, plan.shard, facts, step.num_batches * microbatches, reductions)
    if plan.pipeline is not None and plan.schedule is not None:
        yield from _of_stages(plan.pipeline, plan.schedule, plan.shard, facts, reductions)


def _of_copies(ctx: Context, plan: ModelPlan, facts: ModelFacts, reductions: int) -> Iterable[Exchange]:
    copies = plan.mesh.size("loss") if plan.engine == "ddp" else 1
    if copies == 1:
        return
    size = facts.size_bytes(*(name for name in facts.own_names if name in facts.trainable))
    buckets = max(1, math.ceil(size / (ctx.strategy.ddp.bucket_cap_mb * 2**20)))
    axis, received = " x ".join(plan.mesh.active("loss")), received_in_ring(2 * size, copies)
    yield Exchange(axis, "all_reduce", "gradients", buckets, received, "backward").times(reductions)


def sizes_of_units(shard: ShardPlan, facts: ModelFacts, width: Callable[[str], int]) -> dict[str, int]:
    """Return the bytes of each unit's parameters, unsharded and with padding; the last is the rest.

    Args:
        shard: Has the units.
        facts: Of the model, before it is sharded.
        width: Returns the bytes of an element of a parameter.
    """
    units, left_out = frozenset(shard.units), frozenset(shard.left_out)
    sizes = dict.fromkeys(shard.units, 0)
    for name in facts.own_names:
        if name not in left_out:
            numel = shard.shards_of(name) * shard.shard_numel(facts, name)
            sizes[cast("str", owner_of(name, units))] += numel * width(name)
    return sizes


def gathered_units(plan: ModelPlan, shard: ShardPlan, facts: ModelFacts) -> dict[str, int]:
    """Return the gathered bytes of each unit of a sharded model; the last is the rest of the model."""
    in_bytes: set[str] = set()
    if plan.fp8 is not None and plan.fp8.gathers:
        in_bytes = {f"{name}.weight" for name in plan.fp8.converted}

    def width(name: str) -> int:
        return 1 if name in in_bytes else (shard.param_dtype or facts.dtypes[name]).itemsize

    return sizes_of_units(shard, facts, width)


def _of_shards(
    plan: ModelPlan, shard: ShardPlan, facts: ModelFacts, gathers: int, reductions: int
) -> Iterable[Exchange]:
    dtype = shard.reduce_dtype or shard.param_dtype

    def width(name: str) -> int:
        return (dtype or facts.dtypes[name]).itemsize if name in facts.trainable else 0

    gathered, reduced = gathered_units(plan, shard, facts), sizes_of_units(shard, facts, width)
    if plan.fp8 is not None and plan.fp8.gathers:  # one scale of each layer, before each forward pass
        size = received_in_ring(2 * 4 * len(plan.fp8.converted), shard.num_shards)
        axis = " x ".join(plan.mesh.active("shard"))
        yield Exchange(axis, "all_reduce", "parameters", 1, size, "forward").times(gathers)
    experts = shard.expert_units
    for are_experts in (False, True):
        own = [name for name in shard.units if (name in experts) == are_experts]
        shards = shard.num_expert_shards if are_experts else shard.num_shards
        axis = " x ".join(plan.mesh.parts("eshard") if are_experts else plan.mesh.active("shard"))
        gather = [gathered[name] for name in own if gathered[name]]
        size = received_in_ring(sum(gather), shards)
        yield Exchange(axis, "all_gather", "parameters", len(gather), size, "forward").times(gathers)
        if shard.reshard:
            # The rest of the model stays gathered until its backward pass.
            again = [gathered[name] for name in own if gathered[name] and name]
            size = received_in_ring(sum(again), shards)
            yield Exchange(axis, "all_gather", "parameters", len(again), size, "backward").times(gathers)
        whole = [reduced[name] for name in own if reduced[name]]
        size, calls = sum(whole), len(whole)
        received = received_in_ring(size, shards)
        yield Exchange(axis, "reduce_scatter", "gradients", calls, received, "backward").times(reductions)
        if shard.num_replicas > 1 and own:
            received = received_in_ring(2 * size // shards, shard.num_replicas)
            average = Exchange("dp_replicate", "all_reduce", "gradients", calls, received, "backward")
            yield average.times(reductions)


def _of_stages(
    pipeline: PipelinePlan,
    schedule: SchedulePlan,
    shard: ShardPlan | None,
    facts: ModelFacts,
    reductions: int,
) -> Iterable[Exchange]:
    """List the gradients of parameters that other pipeline ranks hold too."""
    for name in facts.own_names:
        if name in facts.trainable:
            others = len({schedule.rank_of(stage) for stage in pipeline.of(name)}) - 1
            numel = facts.numel(name) if shard is None else shard.shard_numel(facts, name)
            size = numel * facts.dtypes[name].itemsize
            yield Exchange("pp", "send", "gradients", 1, size, "backward").times(reductions * others)
