"""List the meshes of a number of ranks in which a model fits, those that send least first."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from torch import nn
from typing_extensions import Unpack

from accelfn.config import GradientAccumulationPlugin, ParallelismConfig
from accelfn.context import Context, ContextOptions, MeshPlan, plan_context
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.plan import WholePlan, plan_rank, plan_whole
from accelfn.parallel.planning.costs import Segment, StageCost, stages_of
from accelfn.parallel.planning.dry_run import dry_run
from accelfn.parallel.planning.memory import PARTS, Budget, budget_of
from accelfn.parallel.planning.optimizer_states import OptimizerKind, OptimizerStates, states_of
from accelfn.parallel.planning.step import StepPlan
from accelfn.parallel.planning.traffic import Traffic
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan, SchedulePlan
from accelfn.parallel.strategies.tensor import TensorPlan
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.structure import size_text

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
DEFAULT_AXES = ("pp", "dp_replicate", "dp_shard", "tp")
_SHOWN = 10
_NUMBERS = re.compile(r"\d[\d,.]*")


class Layout(NamedTuple):
    """A mesh in which a model fits, and a step in it.

    Attributes:
        mesh: The mesh.
        rows: Rows of a batch of each rank; in a pipeline of a microbatch.
        num_batches: Batches in an accumulation window, whose gradients are averaged in each batch if there
            are several; in a pipeline microbatches of a batch.
        budget: The memory of the rank that needs most.
        traffic: What the rank receives that receives most.
        between_nodes: Bytes of it along axes whose ranks are in several nodes.
    """

    mesh: MeshPlan
    rows: int
    num_batches: int
    budget: Budget
    traffic: Traffic
    between_nodes: int

    @property
    def name(self) -> str:
        """The mesh as ``accelfn plan-memory --mesh`` takes it."""
        return name_of(self.mesh)


class RefusedMesh(NamedTuple):
    """A mesh in which a model doesn't train.

    Attributes:
        name: The mesh as ``accelfn plan-memory --mesh`` takes it.
        reason: Why not.
        needed: Bytes that a rank would need; None if there is another reason.
    """

    name: str
    reason: str
    needed: int | None


class MeshSearch(NamedTuple):
    """The meshes of a number of ranks. Prints as a table of the first ones.

    Attributes:
        num_ranks: Number of ranks.
        memory: Bytes that each rank has.
        num_rows: Rows of a step on all ranks together.
        layouts: Those in which the model fits, in the order of :func:`accelfn.parallel.search_meshes`.
        refused: The others.
    """

    num_ranks: int
    memory: int
    num_rows: int
    layouts: tuple[Layout, ...]
    refused: tuple[RefusedMesh, ...]

    def __str__(self) -> str:
        """Return the first layouts as a table."""
        head = ("mesh", "batch", "memory", "received", "between nodes")
        rows = [
            (
                one.name,
                f"{one.num_batches} x {one.rows}",
                *map(size_text, (one.budget.total, one.traffic.received, one.between_nodes)),
            )
            for one in self.layouts[:_SHOWN]
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 1 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            for line in (head, *rows)
        ]
        more = len(self.layouts) - len(rows)
        lines.append(
            f"{self.num_rows:,} rows a step on {self.num_ranks:,} ranks of {size_text(self.memory)}: "
            f"{len(self.layouts)} meshes fit"
            f"{f' ({more} not shown)' if more else ''}, {len(self.refused)} don't"
        )
        if self.refused and not rows:
            # Those that are too large first, and of them the smallest.
            refused = sorted(self.refused, key=lambda one: (one.needed is None, one.needed or 0))
            kinds = [_NUMBERS.sub("*", one.reason) if one.needed is None else "" for one in refused]
            ((kind, count),) = Counter(kinds).most_common(1)
            closest = refused[kinds.index(kind)]
            what = f"{count:,} of {len(refused):,}, such as {closest.name}: {closest.reason}"
            if closest.needed is None and refused[0].needed is not None:
                what += f"; the smallest that is too large is {refused[0].name}: {refused[0].reason}"
            lines = [f"no mesh fits; {what}", lines[-1]]
        return "\n".join(lines)

    def why(self) -> str:
        """Return a line for each mesh that doesn't fit, with the reason."""
        width = max((len(one.name) for one in self.refused), default=0)
        return "\n".join(f"{one.name.ljust(width)}  {one.reason}" for one in self.refused)

    def svg(self) -> str:
        """Return a complete SVG document: the memory of a rank in the first layouts, as bars."""
        bars = [
            Bar(one.name, f"{one.num_batches} x {one.rows}", one.budget.parts)
            for one in self.layouts[:_SHOWN]
        ]
        about = f"A step of {self.num_rows:,} rows on {self.num_ranks:,} ranks: the memory of each"
        return draw_bars_svg([about], bars, PARTS[:-1])


def name_of(mesh: MeshPlan) -> str:
    """Return a mesh as ``accelfn plan-memory --mesh`` takes it.

    >>> name_of(MeshPlan((1, 1, 8, 1, 1, 2)))
    'dp_shard=8,tp=2'
    """
    return ",".join(f"{axis}={mesh.size(axis)}" for axis in mesh.active()) or "dp_replicate=1"


def search_meshes(
    num_ranks: int,
    model: nn.Module,
    *,
    memory: int,
    num_rows: int,
    make_batch: Callable[[Context, int], Any],
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
    optimizer: OptimizerKind = "adamw",
    axes: Sequence[str] = DEFAULT_AXES,
    ranks_per_node: int = 8,
    **options: Unpack[ContextOptions],
) -> MeshSearch:
    """List the meshes of a number of ranks in which a model fits, those that send least first. Pure.

    First come those whose ranks receive the fewest bytes in a step along axes whose ranks are in several
    nodes; of equal ones those that receive the fewest along all axes, then those that need the least memory.
    Seconds aren't predicted: neither the computation counts nor the time in which ranks of a pipeline wait,
    though pipelines send least.

    A step has the same rows in each mesh. A rank's share of them is one batch if that fits, else the fewest
    batches of an accumulation window that do, whose gradients are averaged in each batch
    (``sync_each_batch``). In a pipeline microbatches have one row each, and the schedule is 1F1B. Tensor
    parallelism is kept within a node. Only meshes for which :func:`accelfn.plan_model` has a plan are found.

    The passes of one row and of two are simulated for each size of ``tp``, ``cp`` and ``sp``. The result is
    that of :func:`accelfn.plan_memory` and :func:`accelfn.parallel.plan_traffic` for each mesh; but the
    largest tensor of an operation is that of one row times the rows.

    Ranks: local.

    Args:
        num_ranks: Number of ranks.
        model: Not prepared yet; its parameters may be on the meta device.
        memory: Bytes that each rank has.
        num_rows: Rows of a step on all ranks together.
        make_batch: Called with the context of a mesh and a number of rows, returns a batch of a rank that has
            them, as :func:`accelfn.plan_memory` takes it. A ``ValueError`` refuses the mesh.
        loss_fn: As in :func:`accelfn.plan_memory`.
        optimizer: As in :func:`accelfn.plan_memory`.
        axes: The axes of more than one rank in the meshes: some of "pp", "dp_replicate", "dp_shard", "cp",
            "sp" and "tp".
        ranks_per_node: Consecutive ranks that are in one node.
        **options: Keyword arguments of :func:`accelfn.plan_context`, other than those of the mesh and of
            accumulation windows.

    Raises:
        ConfigurationError: An axis is unknown, an argument isn't positive, or options contradict each other.
        TypeError: The model isn't one.
        Exception: Raised by the model or the loss function.
    """
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ConfigurationError(f"search_meshes: no axis {unknown[0]!r}. Axes are {', '.join(AXES)}.")
    numbers = {"num_ranks": num_ranks, "memory": memory, "num_rows": num_rows}
    for name, number in {**numbers, "ranks_per_node": ranks_per_node}.items():
        if number < 1:
            raise ConfigurationError(f"search_meshes: {name} must be at least 1, got {number}.")
    states = states_of(optimizer, "search_meshes")
    search = _Search(
        model=model,
        memory=memory,
        num_rows=num_rows,
        make_batch=make_batch,
        loss_fn=loss_fn,
        states=states,
        ranks_per_node=ranks_per_node,
        options=options,
        facts=read_facts(model),
    )
    found = [search.lay_out(mesh) for mesh in _meshes(num_ranks, axes)]
    layouts = [one for one in found if isinstance(one, Layout)]
    refused = [one for one in found if isinstance(one, RefusedMesh)]
    layouts.sort(key=lambda one: (one.between_nodes, one.traffic.received, one.budget.total))
    return MeshSearch(num_ranks, memory, num_rows, tuple(layouts), tuple(refused))


def _meshes(num_ranks: int, axes: Sequence[str]) -> list[MeshPlan]:
    """List the meshes of a number of ranks, with more than one rank along some of ``axes`` only."""
    found: list[tuple[tuple[int, ...], int]] = [((), num_ranks)]
    for axis in AXES:
        found = [
            ((*sizes, size), rest // size)
            for sizes, rest in found
            for size in (range(1, rest + 1) if axis in axes else [1])
            if rest % size == 0
        ]
    return [MeshPlan(sizes) for sizes, rest in found if rest == 1]


@dataclass(frozen=True, kw_only=True)
class _Search:
    """The parts of a search that meshes share, some of them made for the first one that needs it."""

    model: nn.Module
    memory: int
    num_rows: int
    make_batch: Callable[[Context, int], Any]
    loss_fn: Callable[[nn.Module, Any], Any] | None
    states: OptimizerStates
    ranks_per_node: int
    options: ContextOptions
    facts: ModelFacts
    tensors: dict[int, TensorPlan] = field(default_factory=dict[int, TensorPlan])
    costs: dict[tuple[object, ...], Sequence[Segment] | ConfigurationError] = field(
        default_factory=dict[tuple[object, ...], "Sequence[Segment] | ConfigurationError"]
    )

    def lay_out(self, mesh: MeshPlan) -> Layout | RefusedMesh:
        """Return the step in a mesh, or why the model doesn't train in it."""
        try:
            return self._lay_out(mesh)
        except ConfigurationError as error:
            reason, *more = str(error).splitlines()
            if reason.endswith(":"):  # a list follows
                reason += " " + more[0].lstrip(" -")
            return RefusedMesh(name_of(mesh), reason, None)

    def _lay_out(self, mesh: MeshPlan) -> Layout | RefusedMesh:
        """Return the step with the fewest batches that fit; in a pipeline microbatches have one row."""
        rows = self._rows_of_rank(mesh)
        known = {"tensor": self.tensors.get(mesh.size("tp"))}
        whole = plan_whole(self._context(mesh), self.model, facts=self.facts, known=known)
        if whole.plans["tensor"] is not None:
            self.tensors[mesh.size("tp")] = whole.plans["tensor"]
        schedule: SchedulePlan | None = whole.plans["schedule"]
        if schedule is not None:
            whole = whole.but(schedule=schedule._replace(num_microbatches=rows))
        counts = [count for count in range(1, rows + 1) if rows % count == 0] if schedule is None else [rows]

        def layout(count: int) -> Layout:
            return self._layout(whole, rows, count)

        def fits(count: int) -> bool:
            return layout(count).budget.total <= self.memory

        found = layout(counts[bisect_left(counts[:-1], True, key=fits)])
        if found.budget.total > self.memory:
            needed, batch = found.budget.total, "batch" if schedule is None else "microbatch"
            reason = f"a rank needs {size_text(needed)}, with one row in a {batch}"
            return RefusedMesh(name_of(mesh), reason, needed)
        return found

    def _layout(self, whole: WholePlan, rows: int, num_batches: int) -> Layout:
        """Return the step of a rank's rows in some batches, or microbatches."""
        schedule: SchedulePlan | None = whole.plans["schedule"]
        stages = self._stages(whole, rows // num_batches)
        plans = {place: plan_rank(whole, place) for place in _places(whole, stages)}
        step = StepPlan(self.facts, plans, schedule, stages, num_batches if schedule is None else 1)
        budget, traffic = budget_of(whole.ctx, step, self.states)
        between = self._between_nodes(traffic)
        return Layout(whole.mesh, rows // num_batches, num_batches, budget, traffic, between)

    def _rows_of_rank(self, mesh: MeshPlan) -> int:
        tp, pp, dp = mesh.size("tp"), mesh.size("pp"), mesh.size("dp")
        each = self.ranks_per_node
        if mesh.num_ranks > each and each % tp:
            raise ConfigurationError(
                f"ranks of one layer would be in several nodes of {each} ranks"
                + (f", which {tp} doesn't divide" if tp < each else "")
            )
        if self.num_rows % dp:
            raise ConfigurationError(
                f"{self.num_rows:,} rows can't be split over {dp:,} ranks that read different ones"
            )
        rows = self.num_rows // dp
        if rows < pp:
            raise ConfigurationError(f"{rows} rows make fewer microbatches than {pp} stages need")
        return rows

    def _context(self, mesh: MeshPlan) -> Context:
        config = ParallelismConfig(**cast("Any", {f"{axis}_size": mesh.size(axis) for axis in AXES}))
        # So that the gradients of a window take no memory.
        window = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        mine: ContextOptions = {"parallelism_config": config, "gradient_accumulation_plugin": window}
        return plan_context(mesh.num_ranks, **cast("ContextOptions", {**self.options, **mine}))

    def _stages(self, whole: WholePlan, rows: int) -> tuple[StageCost, ...]:
        """Return the cost of each stage for a number of rows, each of which adds as much as the second."""
        pipeline: PipelinePlan | None = whole.plans["pipeline"]
        starts = () if pipeline is None else pipeline.split
        one = stages_of(self._cost(whole, 1), starts)
        if rows == 1:
            return one
        two = stages_of(self._cost(whole, 2), starts)
        return tuple(_of_rows(rows, first, both) for first, both in zip(one, two, strict=True))

    def _cost(self, whole: WholePlan, rows: int) -> Sequence[Segment]:
        """Return the cost of some rows on ranks that have all blocks."""
        ctx, key = whole.ctx, (*whole.mesh.sizes[3:], whole.engine == "shard", rows)
        if key not in self.costs:
            try:
                plan = plan_rank(whole.but(pipeline=None, schedule=None), 0)
                batch = self._batch(ctx, rows)
                self.costs[key] = dry_run(ctx, self.model, self.facts, plan, batch, self.loss_fn)
            except ConfigurationError as error:
                self.costs[key] = error
        found = self.costs[key]
        if isinstance(found, ConfigurationError):
            raise found
        return found

    def _batch(self, ctx: Context, rows: int) -> Any:
        try:
            return self.make_batch(ctx, rows)
        except ValueError as error:  # such as of sequences that ranks can't share
            raise ConfigurationError(str(error)) from error

    def _between_nodes(self, traffic: Traffic) -> int:
        """Return the bytes that a rank receives along axes whose ranks are in several nodes."""
        mesh, between = traffic.mesh, 0
        for axis, size in traffic.moved.items():
            axes = axis.split(" x ")
            if mesh.count_near(self.ranks_per_node, *axes) < mesh.size(*axes):
                between += size
        return between


def _places(whole: WholePlan, stages: Sequence[StageCost]) -> Iterable[int]:
    """List the places along "pp" that differ: of those between the first and the last most are alike."""
    pipeline: PipelinePlan | None = whole.plans["pipeline"]
    schedule: SchedulePlan | None = whole.plans["schedule"]
    if pipeline is None or schedule is None:
        return [0]
    places: dict[tuple[object, ...], int] = {}
    for place in range(schedule.num_ranks):
        key: list[object] = []
        for stage in schedule.stages_of(place):
            own = pipeline.stages[stage]
            key += (*(whole.facts.kinds[name] for name in own.blocks), own.modules, own.size_bytes)
            key.append(stages[stage])
        places.setdefault(tuple(key), place)
    return places.values()


def _of_rows(rows: int, one: StageCost, two: StageCost) -> StageCost:
    """Return the cost of several rows from those of one and of two."""

    def more(first: int, both: int) -> int:
        return first + (rows - 1) * (both - first)

    received = {each.key: each.received for each in one.exchanges}
    return StageCost(
        kept=more(one.kept, two.kept),
        recomputed=more(one.recomputed, two.recomputed),
        received=more(one.received, two.received),
        exchanges=tuple(
            each._replace(received=more(received.get(each.key, 0), each.received)) for each in two.exchanges
        ),
        largest=rows * one.largest,
    )
