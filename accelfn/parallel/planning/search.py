"""List the meshes of a number of ranks in which a model fits, those that send least first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import nn
from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions, MeshPlan, plan_context
from accelfn.context.config import GradientAccumulationPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.plan import WholePlan, plan_rank, plan_whole
from accelfn.parallel.planning.costs import StageCost, StepCost
from accelfn.parallel.planning.dry_run import dry_run
from accelfn.parallel.planning.memory import PARTS, Budget, activations_at, budget_at
from accelfn.parallel.planning.optimizer_states import OptimizerKind, OptimizerStates, states_of
from accelfn.parallel.planning.step import StepPlan
from accelfn.parallel.planning.traffic import Traffic, traffic_at
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
        layouts: Those in which the model fits, in the order of :func:`accelfn.search_meshes`.
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
    that of :func:`accelfn.plan_memory` and :func:`accelfn.plan_traffic` for each mesh; but the largest tensor
    of an operation is that of one row times the rows.

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
    search = _Search(model, memory, num_rows, make_batch, loss_fn, states, ranks_per_node, options)
    found = [search.lay_out(mesh) for mesh in _meshes(num_ranks, axes)]
    layouts = [one for one in found if isinstance(one, Layout)]
    refused = [one for one in found if isinstance(one, RefusedMesh)]
    layouts.sort(key=lambda one: (one.between_nodes, one.traffic.received, one.budget.total))
    return MeshSearch(num_ranks, memory, num_rows, tuple(layouts), tuple(refused))


def _meshes(num_ranks: int, axes: Sequence[str]) -> Iterator[MeshPlan]:
    """List the meshes of a number of ranks, with more than one rank along some of ``axes`` only."""

    def split(rest: int, left: Sequence[str]) -> Iterator[tuple[int, ...]]:
        if not left:
            if rest == 1:
                yield ()
            return
        sizes = [size for size in range(1, rest + 1) if rest % size == 0] if left[0] in axes else [1]
        for size in sizes:
            for others in split(rest // size, left[1:]):
                yield (size, *others)

    for sizes in split(num_ranks, AXES):
        yield MeshPlan(sizes)


class _TooLargeError(ConfigurationError):
    """A model doesn't fit."""

    def __init__(self, needed: int, batch: str) -> None:
        super().__init__(f"a rank needs {size_text(needed)}, with one row in a {batch}")
        self.needed: int = needed


class _Search:
    """The parts of a search that meshes share, each made for the first one that needs it."""

    def __init__(
        self,
        model: nn.Module,
        memory: int,
        num_rows: int,
        make_batch: Callable[[Context, int], Any],
        loss_fn: Callable[[nn.Module, Any], Any] | None,
        states: OptimizerStates,
        ranks_per_node: int,
        options: ContextOptions,
    ) -> None:
        self._model, self._memory, self._num_rows = model, memory, num_rows
        self._make_batch, self._loss_fn = make_batch, loss_fn
        self._states, self._ranks_per_node, self._options = states, ranks_per_node, options
        self._facts: ModelFacts = read_facts(model)
        self._tensors: dict[int, TensorPlan] = {}
        self._costs: dict[tuple[object, ...], StepCost | ConfigurationError] = {}

    def lay_out(self, mesh: MeshPlan) -> Layout | RefusedMesh:
        """Return the step in a mesh, or why the model doesn't train in it."""
        try:
            return self._lay_out(mesh)
        except ConfigurationError as error:
            needed = error.needed if isinstance(error, _TooLargeError) else None
            reason, *more = str(error).splitlines()
            if reason.endswith(":"):  # a list follows
                reason += " " + more[0].lstrip(" -")
            return RefusedMesh(name_of(mesh), reason, needed)

    def _lay_out(self, mesh: MeshPlan) -> Layout:
        rows = self._rows_of_rank(mesh)
        ctx = self._context(mesh)
        known = {"tensor": self._tensors.get(mesh.size("tp"))}
        shared = plan_whole(ctx, self._model, facts=self._facts, known=known)
        if shared.plans["tensor"] is not None:
            self._tensors[mesh.size("tp")] = shared.plans["tensor"]
        schedule: SchedulePlan | None = shared.plans["schedule"]
        if schedule is None:
            bare, budgets = self._plan(shared, [0])
            num_batches = batches = self._fewest_batches(shared, budgets[0], rows)
            rows //= batches
            stages = self._stages(shared, rows)
        else:
            num_batches, batches, rows = 1, rows, 1
            shared = shared.but(schedule=schedule._replace(num_microbatches=batches))
            stages = self._stages(shared, rows)
            bare, budgets = self._plan(shared, _places(shared, stages))
        step = bare._replace(stages=stages, num_batches=num_batches)
        traffics = {place: traffic_at(ctx, step, place) for place in budgets}
        whole = [
            budget._replace(
                moved=traffics[place].moved,
                accumulates=step.accumulates,
                **activations_at(step, place)._asdict(),
            )
            for place, budget in budgets.items()
        ]
        most = max(whole, key=lambda budget: budget.total)
        if most.total > self._memory:
            raise _TooLargeError(most.total, "microbatch")
        traffic = max(traffics.values(), key=lambda one: one.received)
        return Layout(mesh, rows, batches, most, traffic, self._between_nodes(traffic))

    def _plan(self, shared: WholePlan, places: Iterable[int]) -> tuple[StepPlan, dict[int, Budget]]:
        """Plan places along "pp" without a batch: the step, and the budget of each."""
        plans = {place: plan_rank(shared, place) for place in places}
        step = StepPlan(self._facts, plans, shared.plans["schedule"], None, 1)
        return step, {place: budget_at(shared.ctx, step, place, self._states, {}) for place in plans}

    def _rows_of_rank(self, mesh: MeshPlan) -> int:
        tp, pp, dp = mesh.size("tp"), mesh.size("pp"), mesh.size("dp")
        each = self._ranks_per_node
        if mesh.num_ranks > each and each % tp:
            raise ConfigurationError(
                f"ranks of one layer would be in several nodes of {each} ranks"
                + (f", which {tp} doesn't divide" if tp < each else "")
            )
        if self._num_rows % dp:
            raise ConfigurationError(
                f"{self._num_rows:,} rows can't be split over {dp:,} ranks that read different ones"
            )
        rows = self._num_rows // dp
        if rows < pp:
            raise ConfigurationError(f"{rows} rows make fewer microbatches than {pp} stages need")
        return rows

    def _context(self, mesh: MeshPlan) -> Context:
        config = ParallelismConfig(**cast("Any", {f"{axis}_size": mesh.size(axis) for axis in AXES}))
        # So that the gradients of a window take no memory.
        window = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        mine: ContextOptions = {"parallelism_config": config, "gradient_accumulation_plugin": window}
        return plan_context(mesh.num_ranks, **cast("ContextOptions", {**self._options, **mine}))

    def _fewest_batches(self, shared: WholePlan, budget: Budget, rows: int) -> int:
        """Return the fewest batches of an accumulation window that fit."""

        def needed(count: int) -> int:
            (stage,) = self._stages(shared, rows // count)
            return budget.total + stage.kept + stage.recomputed + stage.largest

        if needed(rows) > self._memory:
            raise _TooLargeError(needed(rows), "batch")
        return next(n for n in range(1, rows + 1) if rows % n == 0 and needed(n) <= self._memory)

    def _stages(self, shared: WholePlan, rows: int) -> tuple[StageCost, ...]:
        """Return the cost of each stage for a number of rows, each of which adds as much as the second."""
        pipeline: PipelinePlan | None = shared.plans["pipeline"]
        starts = () if pipeline is None else pipeline.split
        one = self._cost(shared, 1).stages(starts)
        if rows == 1:
            return one
        two = self._cost(shared, 2).stages(starts)
        return tuple(_of_rows(rows, first, both) for first, both in zip(one, two, strict=True))

    def _cost(self, shared: WholePlan, rows: int) -> StepCost:
        """Return the cost of some rows on ranks that have all blocks."""
        ctx, key = shared.ctx, (*shared.mesh.sizes[3:], shared.engine == "shard", rows)
        if key not in self._costs:
            try:
                plan = plan_rank(shared.but(pipeline=None, schedule=None), 0)
                batch = self._batch(ctx, rows)
                self._costs[key] = dry_run(ctx, self._model, self._facts, [plan], batch, self._loss_fn)
            except ConfigurationError as error:
                self._costs[key] = error
        found = self._costs[key]
        if isinstance(found, ConfigurationError):
            raise found
        return found

    def _batch(self, ctx: Context, rows: int) -> Any:
        try:
            return self._make_batch(ctx, rows)
        except ValueError as error:  # such as of sequences that ranks can't share
            raise ConfigurationError(str(error)) from error

    def _between_nodes(self, traffic: Traffic) -> int:
        """Return the bytes that a rank receives along axes whose ranks are in several nodes."""
        mesh, between = traffic.mesh, 0
        for axis, size in traffic.moved.items():
            axes = axis.split(" x ")
            if mesh.count_near(self._ranks_per_node, *axes) < mesh.size(*axes):
                between += size
        return between


def _places(shared: WholePlan, stages: Sequence[StageCost]) -> Iterable[int]:
    """List the places along "pp" that differ: of those between the first and the last most are alike."""
    pipeline: PipelinePlan = shared.plans["pipeline"]
    schedule: SchedulePlan = shared.plans["schedule"]
    places: dict[tuple[object, ...], int] = {}
    for place in range(schedule.num_ranks):
        key: list[object] = [place == 0, place == schedule.num_ranks - 1]
        for stage in schedule.stages_of(place):
            own = pipeline.stages[stage]
            key += (*(shared.facts.kinds[name] for name in own.blocks), own.modules, own.size_bytes)
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
