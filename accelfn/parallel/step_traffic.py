"""What ranks send each other in an optimizer step, and how long it keeps them from computing."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

from torch import nn

from accelfn.context import Context, MeshPlan, check_context
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, owner_of, table_text
from accelfn.parallel.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.shard import ShardPlan
from accelfn.parallel.step_cost import Collective, Exchange, Overlap, PassCost, StageCost, add_passes
from accelfn.parallel.step_plan import StepPlan, plan_step
from accelfn.parallel.zero import exchanges_of_zero
from accelfn.tree.structure import size_text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What connects ranks.

    Attributes:
        bandwidth: Bytes that a rank receives per second, while it sends as many.
        latency_s: Seconds until the first byte arrives.
    """

    bandwidth: float
    latency_s: float

    def __post_init__(self) -> None:
        """Check the fields."""
        if not (self.bandwidth > 0 and self.latency_s >= 0):
            raise ConfigurationError(
                f"Link: bandwidth must be positive and latency_s not negative, got {self.bandwidth} and "
                f"{self.latency_s}."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machines that a step is planned for; the defaults are those of nodes with eight H100.

    A group of ranks with ``k`` of its members in each node, of several nodes, receives at ``k`` times the
    rate of ``between``, at most at that of ``inside``: rings use the adapters of all members. A single rank
    that sends to another, and an all-to-all, have one adapter each.

    Attributes:
        ranks_per_node: Ranks that ``inside`` connects; consecutive ones.
        inside: The link within a node. Default 450 GB/s and 5 microseconds.
        between: The link between nodes, per rank. Default 50 GB/s and 15 microseconds.
        flops: Floating-point operations that a rank does per second in matrix products, as measured and not
            as on the data sheet. Default 400e12, of bf16.
    """

    ranks_per_node: int = 8
    inside: Link = Link(bandwidth=450e9, latency_s=5e-6)
    between: Link = Link(bandwidth=50e9, latency_s=15e-6)
    flops: float = 400e12

    def __post_init__(self) -> None:
        """Check the fields."""
        if not (self.ranks_per_node >= 1 and self.flops > 0):
            raise ConfigurationError(
                "Cluster: ranks_per_node must be at least 1 and flops positive, got "
                f"{self.ranks_per_node} and {self.flops}."
            )

    def link(self, mesh: MeshPlan, axes: Iterable[str], kind: Collective = "all_gather") -> Link:
        """Return the link along some axes of a mesh.

        >>> from accelfn.context import plan_mesh
        >>> from accelfn.context.config import ParallelismConfig
        >>> mesh = plan_mesh(ParallelismConfig(dp_shard_size=1024, tp_size=4), 4096)
        >>> Cluster().link(mesh, ["tp"]).bandwidth, Cluster().link(mesh, ["dp_shard"]).bandwidth
        (450000000000.0, 100000000000.0)
        """
        near, size = mesh.count_near(self.ranks_per_node, *axes), mesh.size(*axes)
        if near == size or (kind == "send" and near > 1):
            return self.inside
        adapters = 1 if kind in ("send", "all_to_all") else near
        rate = min(self.inside.bandwidth, adapters * self.between.bandwidth)
        return Link(bandwidth=rate, latency_s=self.between.latency_s)

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"{self.ranks_per_node} ranks a node, {_rate(self.inside)} inside and {_rate(self.between)} a "
            f"rank between; {self.flops / 1e12:g} TFLOP/s a rank"
        )


def check_cluster(function: str, cluster: object) -> None:
    """Check that an argument is a cluster.

    Raises:
        TypeError: It isn't a :class:`Cluster`.
    """
    if not isinstance(cluster, Cluster):
        raise TypeError(
            f"{function}: cluster must be an accelfn.Cluster, got {cluster!r}. Write "
            f"{function}(..., cluster=Cluster(ranks_per_node=4))."
        )


def _rate(link: Link) -> str:
    return f"{size_text(round(link.bandwidth))}/s"


class Traffic(NamedTuple):
    """What a rank sends and computes in an optimizer step, and how long that takes. Prints as a table.

    Assumed: gradients are averaged, and parameters gathered, beside the computation of the same pass. What of
    them can't be hidden is the first gather of a forward pass, the last reduction of a backward pass, and
    what takes longer than the computation. Ranks wait for activations: along ``tp``, ``cp`` and ``sp``
    and between stages. The stages of a pipeline are equally slow. The time of the optimizer, of the data and
    of operations other than matrix products isn't counted.

    Attributes:
        mesh: The mesh.
        cluster: The machines.
        exchanges: What is sent, by axis, kind and purpose.
        forward_flops: Floating-point operations of the forward passes of a step; 0 without a batch.
        backward_flops: The same of the backward passes.
        bubble: Share of a batch's time that a rank of the pipeline is idle; 0 without one.
    """

    mesh: MeshPlan
    cluster: Cluster
    exchanges: tuple[Exchange, ...]
    forward_flops: int
    backward_flops: int
    bubble: float

    @property
    def moved(self) -> dict[str, int]:
        """Bytes that the rank receives, by axis."""
        moved: Counter[str] = Counter()
        for exchange in self.exchanges:
            moved[exchange.axis] += exchange.received
        return dict(moved)

    def seconds(self, exchange: Exchange) -> float:
        """Return how long an exchange takes by itself."""
        return self._seconds(exchange, exchange.received, exchange.calls)

    def _seconds(self, exchange: Exchange, received: int, calls: int) -> float:
        axes = exchange.axis.split(" x ")
        link = self.cluster.link(self.mesh, axes, exchange.kind)
        is_tree = exchange.kind not in ("send", "all_to_all")
        hops = max(1, math.ceil(math.log2(self.mesh.size(*axes)))) if is_tree else 1
        return received / link.bandwidth + calls * hops * link.latency_s

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which the rank computes."""
        return (self.forward_flops + self.backward_flops) / self.cluster.flops

    def exposed(self, exchange: Exchange) -> float:
        """Return the seconds of an exchange that can't be hidden behind the computation."""
        if exchange.overlap == "none":
            return self.seconds(exchange)
        edge = self._seconds(exchange, exchange.edge, exchange.edge_calls)
        flops = self.forward_flops if exchange.overlap == "forward" else self.backward_flops
        rests = [
            self.seconds(one) - self._seconds(one, one.edge, one.edge_calls)
            for one in self.exchanges
            if one.overlap == exchange.overlap
        ]
        # They share the links: what is too long for the computation is everyone's in proportion.
        late = max(0.0, sum(rests) - flops / self.cluster.flops)
        return edge + (late * (self.seconds(exchange) - edge) / sum(rests) if late else 0.0)

    @property
    def exposed_s(self) -> float:
        """Seconds of a step in which the rank waits for what others send."""
        return sum(self.exposed(exchange) for exchange in self.exchanges)

    @property
    def idle_s(self) -> float:
        """Seconds of a step in which the rank has no microbatch to work on, in a pipeline."""
        return (self.compute_s + self.exposed_s) * self.bubble / (1 - self.bubble)

    @property
    def lost_s(self) -> float:
        """Seconds of a step in which the rank doesn't compute."""
        return self.exposed_s + self.idle_s

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.lost_s

    def rows(self) -> dict[str, str]:
        """Return the lines of the table: text by title."""
        cells: list[tuple[str, ...]] = [("along", "what", "received", "calls", "link", "time", "not hidden")]
        for one in self.exchanges:
            link = self.cluster.link(self.mesh, one.axis.split(" x "), one.kind)
            what = f"{one.kind} of {one.what}"
            times = time_text(self.seconds(one)), time_text(self.exposed(one))
            cells.append((one.axis, what, size_text(one.received), f"{one.calls:,}", _rate(link), *times))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line[1:], widths[1:], strict=True), start=1)
            ).rstrip()
            for line in cells
        ]
        # Titles are unique, and an axis may have several lines.
        table: dict[str, list[str]] = {}
        for (axis, *_), line in zip(cells, lines, strict=True):
            table.setdefault(axis, []).append(line)
        rows = {axis: "\n".join(found) for axis, found in table.items()} if self.exchanges else {}
        if self.compute_s:
            flops = (self.forward_flops + self.backward_flops) / 1e12
            rows["computing"] = f"{time_text(self.compute_s)}  {flops:,.1f} TFLOP on each rank"
            rows["waiting"] = f"{time_text(self.exposed_s)}  for what can't be hidden"
            if self.bubble:
                rows["idle"] = f"{time_text(self.idle_s)}  in the pipeline"
            rows["step"] = f"{time_text(self.step_s)}  of which {self.compute_s / self.step_s:.0%} computing"
            rows["step"] = rows["step"].replace("%", " %")
        rows["assumed"] = (
            f"{self.cluster}\nparameters and gradients travel beside the computation of their pass, except "
            "the first and last ones;\nranks wait for activations; matrix products alone take time"
        )
        return rows

    def __str__(self) -> str:
        """Return the traffic as a table."""
        return table_text(self.rows())


def time_text(seconds: float) -> str:
    """Format a time, with three digits or more.

    >>> time_text(2.5), time_text(0.0123), time_text(0)
    ('2.50 s', '12.3 ms', '-')
    """
    if not seconds:
        return "-"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale or unit == "us":
            return f"{seconds / scale:,.{2 if seconds / scale < 10 else 1}f} {unit}"
    raise AssertionError


def plan_traffic(
    ctx: Context,
    model: nn.Module | ModelFacts,
    *,
    cluster: Cluster = Cluster(),
    plan: ModelPlan | None = None,
    batch: Any = None,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
) -> Traffic:
    """Return what a rank sends and receives in an optimizer step, and how long it waits for that. Pure.

    The assumptions about what runs at the same time are those of :class:`Traffic`. In a pipeline it is that
    of the rank whose step is the longest.

    Ranks: local; the same on every rank.

    Args:
        ctx: The mesh, the options, and the length of accumulation windows; also of
            :func:`accelfn.plan_context`, for ranks that don't exist yet.
        model: Not prepared yet; its parameters may be on the meta device. Or its facts.
        cluster: Bandwidths, latencies and the rate of the computation.
        plan: As in :func:`accelfn.plan_memory`.
        batch: As in :func:`accelfn.plan_memory`. Without one, neither activations nor the computation count.
        loss_fn: As in :func:`accelfn.plan_memory`.

    Raises:
        ConfigurationError: As in :func:`accelfn.plan_memory`.
        TypeError: The cluster isn't a :class:`Cluster`, or the model isn't one.
        ValueError: In a pipeline, the batch can't be split along its rows.
        Exception: Raised by the model or the loss function.

    >>> from accelfn.context import plan_context
    >>> traffic = plan_traffic(plan_context(16), nn.Linear(1000, 250))
    >>> [(one.axis, one.kind, one.what, one.received) for one in traffic.exchanges]
    [('dp_replicate', 'all_reduce', 'gradients', 1876875)]
    >>> f"{traffic.exposed_s * 1e6:.0f} us"
    '65 us'
    """
    check_context("plan_traffic", ctx)
    check_cluster("plan_traffic", cluster)
    step = plan_step(ctx, model, plan=plan, batch=batch, loss_fn=loss_fn)
    found = [traffic_at(ctx, step, place, cluster) for place in step.plans]
    return max(found, key=lambda traffic: (traffic.step_s, sum(traffic.moved.values())))


def traffic_at(ctx: Context, step: StepPlan, place: int, cluster: Cluster) -> Traffic:
    """Return the traffic of the ranks at a place along "pp"."""
    plan = step.plans[place]
    local = step.local(place)
    if step.zero is None:
        exchanges = [*exchanges_of_weights(ctx, plan, local, step.num_batches, step.schedule)]
    else:
        axis = " x ".join(plan.mesh.active("loss"))
        exchanges = [*exchanges_of_zero(step.zero, local, axis, step.num_batches)]
    forward = backward = PassCost(0, {}, {})
    bubble = 0.0
    if step.stages is not None:
        forward, backward = _passes(step, place, step.stages)
        for cost in (forward, backward):
            exchanges += [
                Exchange(axis, kind, "activations", cost.calls[axis, kind], received)
                for (axis, kind), received in cost.received.items()
            ]
        if step.schedule is not None:
            exchanges += _between_stages(step, place, step.schedule, step.stages)
            bubble = step.schedule.bubble
    return Traffic(plan.mesh, cluster, _merged(exchanges), forward.flops, backward.flops, bubble)


def _merged(exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """Join exchanges that differ in their sizes only; leave empty ones out."""
    found: dict[tuple[object, ...], Exchange] = {}
    for one in exchanges:
        key = one.axis, one.kind, one.what, one.overlap
        if key in found:
            other = found[key]
            one = one._replace(
                calls=one.calls + other.calls,
                received=one.received + other.received,
                edge=one.edge + other.edge,
                edge_calls=one.edge_calls + other.edge_calls,
            )
        if one.received:
            found[key] = one
    return tuple(found.values())


def _passes(step: StepPlan, place: int, stages: tuple[StageCost, ...]) -> tuple[PassCost, PassCost]:
    """Return the cost of all passes of a step on the ranks at a place."""
    own, times = range(len(stages)), step.num_batches
    if step.schedule is not None:
        own, times = step.schedule.stages_of(place), times * step.schedule.num_microbatches
    return (
        add_passes((times, stages[stage].forward) for stage in own),
        add_passes((times, stages[stage].backward) for stage in own),
    )


def _between_stages(
    step: StepPlan, place: int, schedule: SchedulePlan, stages: tuple[StageCost, ...]
) -> Iterable[Exchange]:
    """List the activations of the stages before, and the gradients of the stages after."""
    times = step.num_batches * schedule.num_microbatches
    for stage in schedule.stages_of(place):
        of_others = {
            stage - 1: stages[stage].received,
            stage + 1: stages[stage + 1].received if stage + 1 < len(stages) else 0,
        }
        for other, size in of_others.items():
            if size and schedule.rank_of(other) != place:
                yield Exchange("pp", "send", "activations", times, times * size)


def exchanges_of_weights(
    ctx: Context,
    plan: ModelPlan,
    facts: ModelFacts,
    num_batches: int,
    schedule: SchedulePlan | None = None,
) -> Iterable[Exchange]:
    """List what ranks exchange of parameters and gradients in an optimizer step.

    Args:
        ctx: Whether gradients are averaged in each batch of a window.
        plan: Of the model.
        facts: Of one rank's model, before it is sharded.
        num_batches: Batches in a window.
        schedule: Of each batch, if there is a pipeline: its stages gather parameters for each microbatch.
    """
    reductions = num_batches if ctx.accumulation.sync_each_batch else 1
    if plan.shard is None:
        yield from _of_copies(ctx, plan, facts, reductions)
    else:
        gathers = num_batches * (1 if schedule is None else schedule.num_microbatches)
        yield from _of_shards(plan, plan.shard, facts, gathers, reductions)
    if plan.pipeline is not None and plan.schedule is not None:
        yield from _of_stages(plan.pipeline, plan.schedule, plan.shard, facts, reductions)


def _of_copies(ctx: Context, plan: ModelPlan, facts: ModelFacts, reductions: int) -> Iterable[Exchange]:
    copies = plan.mesh.size("loss") if plan.engine == "ddp" else 1
    if copies == 1:
        return
    size = facts.size_bytes(*(name for name in facts.own_names if name in facts.trainable))
    buckets = max(1, math.ceil(size / (ctx.strategy.ddp.bucket_cap_mb << 20)))
    yield Exchange(
        axis=" x ".join(plan.mesh.active("loss")),
        kind="all_reduce",
        what="gradients",
        calls=reductions * buckets,
        received=reductions * _received(2 * size, copies),
        overlap="backward",
        edge=reductions * _received(2 * size // buckets, copies),
        edge_calls=reductions,
    )


def whole_units(plan: ModelPlan, facts: ModelFacts) -> dict[str, int]:
    """Return the gathered bytes of each unit of a sharded model; the last is the rest of the model."""
    shard = cast("ShardPlan", plan.shard)
    units, left_out = frozenset(shard.units), frozenset(shard.left_out)
    in_bytes: set[str] = set()
    if plan.fp8 is not None and plan.fp8.gathers:
        in_bytes = {f"{name}.weight" for name in plan.fp8.converted}
    sizes = dict.fromkeys(shard.units, 0)
    for name in facts.own_names:
        if name not in left_out:
            width = 1 if name in in_bytes else (shard.param_dtype or facts.dtypes[name]).itemsize
            owner = cast("str", owner_of(name, units))
            sizes[owner] += shard.shards_of(name) * shard.shard_numel(facts, name) * width
    return sizes


def _of_shards(
    plan: ModelPlan, shard: ShardPlan, facts: ModelFacts, gathers: int, reductions: int
) -> Iterable[Exchange]:
    gathered = whole_units(plan, facts)
    units, left_out = frozenset(shard.units), frozenset(shard.left_out)
    dtype = shard.reduce_dtype or shard.param_dtype
    reduced = dict.fromkeys(shard.units, 0)
    for name in facts.own_names:
        if name in facts.trainable and name not in left_out:
            size = shard.shards_of(name) * shard.shard_numel(facts, name)
            owner = cast("str", owner_of(name, units))
            reduced[owner] += size * (dtype or facts.dtypes[name]).itemsize
    if plan.fp8 is not None and plan.fp8.gathers:  # one scale of each layer, before each forward pass
        size = _received(2 * 4 * len(plan.fp8.converted), shard.num_shards)
        axis = " x ".join(plan.mesh.active("shard"))
        yield Exchange(axis, "all_reduce", "parameters", gathers, gathers * size)
    experts = shard.expert_units
    for are_experts in (False, True):
        own = [name for name in shard.units if (name in experts) == are_experts]
        shards = shard.num_expert_shards if are_experts else shard.num_shards
        axis = " x ".join(plan.mesh.parts("eshard") if are_experts else plan.mesh.active("shard"))
        # The first unit to compute and the rest of the model, which comes first and last.
        edges = [] if are_experts else [*own[-2:]]

        def total(sizes: Mapping[str, int], names: Iterable[str]) -> int:
            return sum(sizes[name] for name in names)

        for overlap, names in (
            ("forward", own),
            # The rest of the model stays gathered until its backward pass.
            ("backward", [name for name in own if name and shard.reshard]),
        ):
            first = edges if overlap == "forward" else []
            yield Exchange(
                axis=axis,
                kind="all_gather",
                what="parameters",
                calls=gathers * sum(gathered[name] > 0 for name in names),
                received=gathers * _received(total(gathered, names), shards),
                overlap=cast("Overlap", overlap),
                edge=gathers * _received(total(gathered, first), shards),
                edge_calls=gathers * len(first),
            )
        yield Exchange(
            axis=axis,
            kind="reduce_scatter",
            what="gradients",
            calls=reductions * sum(reduced[name] > 0 for name in own),
            received=reductions * _received(total(reduced, own), shards),
            overlap="backward",
            edge=reductions * _received(total(reduced, edges), shards),
            edge_calls=reductions * len(edges),
        )
        if shard.num_replicas > 1 and own:
            yield Exchange(
                axis="dp_replicate",
                kind="all_reduce",
                what="gradients",
                calls=reductions * sum(reduced[name] > 0 for name in own),
                received=reductions * _received(2 * total(reduced, own) // shards, shard.num_replicas),
                overlap="backward",
                edge=reductions * _received(2 * total(reduced, edges) // shards, shard.num_replicas),
                edge_calls=reductions * len(edges),
            )


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
            if others:
                calls = reductions * others
                yield Exchange("pp", "send", "gradients", calls, calls * numel * facts.dtypes[name].itemsize)


def _received(size: int, num_ranks: int) -> int:
    return size * (num_ranks - 1) // num_ranks
