"""Search the meshes of a number of ranks for those in which a model fits, and rank them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from torch import nn
from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions, MeshPlan, plan_context
from accelfn.context.config import GradientAccumulationPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.budget import Budget, activations_at, budget_at
from accelfn.parallel.dry_run import dry_run
from accelfn.parallel.facts import ModelFacts, owner_of, read_facts
from accelfn.parallel.optimizer_states import OptimizerKind, OptimizerStates, states_of
from accelfn.parallel.pipeline_plan import outer_blocks
from accelfn.parallel.plan import Outline, plan_outline, plan_place
from accelfn.parallel.repeats import Repeats, find_repeats
from accelfn.parallel.step_cost import PassCost, StageCost, StepCost
from accelfn.parallel.step_plan import StepPlan
from accelfn.parallel.step_traffic import Cluster, Exchange, Traffic, check_cluster, time_text, traffic_at
from accelfn.parallel.tensor import TensorPlan
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.structure import size_text

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
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
        traffic: The time of the rank whose step is the longest.
    """

    mesh: MeshPlan
    rows: int
    num_batches: int
    budget: Budget
    traffic: Traffic

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
    """The meshes of a number of ranks. Prints as a table of the best ones.

    Attributes:
        num_ranks: Number of ranks.
        memory: Bytes that each rank has.
        num_rows: Rows of a step on all ranks together.
        layouts: Those in which the model fits, the shortest step first, then the least memory.
        refused: The others.
        cluster: The machines.
    """

    num_ranks: int
    memory: int
    num_rows: int
    layouts: tuple[Layout, ...]
    refused: tuple[RefusedMesh, ...]
    cluster: Cluster

    def __str__(self) -> str:
        """Return the best layouts as a table."""
        head = ("mesh", "batch", "memory", "computing", "waiting", "idle", "step")
        rows = [
            (
                one.name,
                f"{one.num_batches} x {one.rows}",
                size_text(one.budget.total),
                *map(time_text, (*_times(one.traffic), one.traffic.step_s)),
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
        return "\n".join([*lines, f"assumed: {self.cluster}"])

    def why(self) -> str:
        """Return a line for each mesh that doesn't fit, with the reason."""
        width = max((len(one.name) for one in self.refused), default=0)
        return "\n".join(f"{one.name.ljust(width)}  {one.reason}" for one in self.refused)

    def svg(self) -> str:
        """Return a complete SVG document: the time of a step in the best layouts, as bars."""
        parts = (("computing", "#14407a"), ("waiting", "#e0945a"), ("idle", "#b9b9b9"))
        bars = [
            Bar(one.name, size_text(one.budget.total), [round(1e6 * time) for time in _times(one.traffic)])
            for one in self.layouts[:_SHOWN]
        ]
        about = f"A step of {self.num_rows:,} rows on {self.num_ranks:,} ranks, and the memory of each"
        return draw_bars_svg([about], bars, parts, text=lambda size: time_text(size / 1e6))


def _times(traffic: Traffic) -> tuple[float, float, float]:
    return traffic.compute_s, traffic.exposed_s, traffic.idle_s


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
    cluster: Cluster = Cluster(),  # noqa: B008 -- frozen
    **options: Unpack[ContextOptions],
) -> MeshSearch:
    """Search the meshes of a number of ranks for those in which a model fits, and rank them. Pure.

    A step has the same rows in each mesh. A rank's share of them is one batch if that fits, else the fewest
    batches of an accumulation window that do, whose gradients are averaged in each batch
    (``sync_each_batch``). In a pipeline microbatches have one row each, and the schedule is 1F1B. Tensor
    parallelism is kept within a node. Only meshes for which :func:`accelfn.plan_model` has a plan are found.

    The passes of one row and of two are simulated for each size of ``tp``, ``cp`` and ``sp``, and equal
    blocks are planned once, so that a thousand meshes take seconds. The result is that of
    :func:`accelfn.plan_memory` and :func:`accelfn.plan_traffic` for each mesh; but the largest tensor of an
    operation is that of one row times the rows.

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
        cluster: Bandwidths, latencies and the rate of the computation.
        **options: Keyword arguments of :func:`accelfn.plan_context`, other than those of the mesh and of
            accumulation windows.

    Raises:
        ConfigurationError: An axis is unknown, an argument isn't positive, or options contradict each other.
        TypeError: The cluster isn't a :class:`Cluster`, or the model isn't one.
        Exception: Raised by the model or the loss function.
    """
    check_cluster("search_meshes", cluster)
    unknown = [axis for axis in axes if axis not in AXES]
    if unknown:
        raise ConfigurationError(f"search_meshes: no axis {unknown[0]!r}. Axes are {', '.join(AXES)}.")
    for name, number in (("num_ranks", num_ranks), ("memory", memory), ("num_rows", num_rows)):
        if number < 1:
            raise ConfigurationError(f"search_meshes: {name} must be at least 1, got {number}.")
    search = _Search(
        model, memory, num_rows, make_batch, loss_fn, states_of(optimizer, "search_meshes"), cluster, options
    )
    layouts: list[Layout] = []
    refused: list[RefusedMesh] = []
    for mesh in _meshes(num_ranks, axes):
        found = search.lay_out(mesh)
        if isinstance(found, Layout):
            layouts.append(found)
        else:
            refused.append(found)
    layouts.sort(key=lambda one: (one.traffic.step_s, one.budget.total))
    return MeshSearch(num_ranks, memory, num_rows, tuple(layouts), tuple(refused), cluster)


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


class _Place(NamedTuple):
    """Ranks along "pp", with the first ones of their equal blocks: enough to know what more of them add.

    Attributes:
        number: The place.
        facts: Of the model of these ranks, with at most three equal blocks in a row.
        more: For each row of equal blocks with more of them: how many, and the facts with one less.
    """

    number: int
    facts: ModelFacts
    more: tuple[tuple[int, ModelFacts], ...]


class _Split(NamedTuple):
    """A model that is split along "pp" and "tp", and whose sequences are along "cp" and "sp".

    Attributes:
        ctx: Of a mesh with these sizes.
        outline: Of the model.
        places: Those that differ.
    """

    ctx: Context
    outline: Outline
    places: tuple[_Place, ...]


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
        cluster: Cluster,
        options: ContextOptions,
    ) -> None:
        self._model, self._memory, self._num_rows = model, memory, num_rows
        self._make_batch, self._loss_fn = make_batch, loss_fn
        self._states, self._cluster, self._options = states, cluster, options
        self._facts: ModelFacts = read_facts(model)
        self._whole: int = self._facts.size_bytes(*self._facts.own_names)
        self._repeats: tuple[Repeats, ...] = find_repeats(model, outer_blocks(self._facts))
        self._tensors: dict[int, TensorPlan] = {}
        self._costs: dict[tuple[object, ...], StepCost | ConfigurationError] = {}
        self._splits: dict[tuple[object, ...], _Split | ConfigurationError] = {}

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
        split = self._split(mesh)
        outline = split.outline._replace(mesh=mesh)
        bare = [self._budget(split.ctx, outline, place) for place in split.places]
        if outline.schedule is None:
            num_batches = microbatches = self._fewest_batches(split, bare[0], rows)
            rows //= num_batches
        else:
            num_batches, microbatches = 1, rows
            outline = outline._replace(schedule=outline.schedule._replace(num_microbatches=rows))
            rows = 1
        stages = self._stages(split, rows)
        budgets: list[Budget] = []
        traffics: list[Traffic] = []
        for place, budget in zip(split.places, bare, strict=True):

            def step_of(
                facts: ModelFacts, number: int = place.number, outline: Outline = outline
            ) -> StepPlan:
                plan = plan_place(split.ctx, outline._replace(facts=facts), number)
                return StepPlan(facts, {number: plan}, outline.schedule, stages, num_batches)

            def traffic_of(facts: ModelFacts, number: int = place.number) -> Traffic:
                return traffic_at(split.ctx, step_of(facts), number, self._cluster)

            traffics.append(_prolonged_traffic(place, traffic_of))
            step = step_of(place.facts)
            budget = budget._replace(**activations_at(step, place.number)._asdict())
            budgets.append(budget._replace(moved=traffics[-1].moved, accumulates=step.accumulates))
        most = max(budgets, key=lambda budget: budget.total)
        if most.total > self._memory:
            raise _TooLargeError(most.total, "microbatch")
        return Layout(mesh, rows, microbatches, most, max(traffics, key=lambda traffic: traffic.step_s))

    def _rows_of_rank(self, mesh: MeshPlan) -> int:
        tp, pp, dp = mesh.size("tp"), mesh.size("pp"), mesh.size("dp")
        each = self._cluster.ranks_per_node
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

    def _fewest_batches(self, split: _Split, budget: Budget, rows: int) -> int:
        """Return the fewest batches of an accumulation window that fit."""

        def needed(count: int) -> int:
            (stage,) = self._stages(split, rows // count)
            return budget.total + stage.kept + stage.recomputed + stage.largest

        if needed(rows) > self._memory:
            raise _TooLargeError(needed(rows), "batch")
        return next(n for n in range(1, rows + 1) if rows % n == 0 and needed(n) <= self._memory)

    def _budget(self, ctx: Context, outline: Outline, place: _Place) -> Budget:
        """Return the budget of the ranks at a place, without a batch."""

        def of(facts: ModelFacts) -> Budget:
            plan = plan_place(ctx, outline._replace(facts=facts), place.number)
            step = StepPlan(facts, {place.number: plan}, plan.schedule, None, 1)
            return budget_at(ctx, step, place.number, self._states, {})

        return _prolonged_budget(place, of)._replace(whole=self._whole)

    def _split(self, mesh: MeshPlan) -> _Split:
        small = {axis: min(2, mesh.size(axis)) for axis in ("dp_replicate", "dp_shard")}
        small |= {axis: mesh.size(axis) for axis in ("pp", "cp", "sp", "tp")}
        key = tuple(small.values())
        if key not in self._splits:
            try:
                self._splits[key] = self._make_split(small)
            except ConfigurationError as error:
                self._splits[key] = error
        return _or_raise(self._splits[key])

    def _make_split(self, sizes: Mapping[str, int]) -> _Split:
        config = ParallelismConfig(**cast("Any", {f"{axis}_size": size for axis, size in sizes.items()}))
        # So that the gradients of a window take no memory.
        window = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        mine: ContextOptions = {"parallelism_config": config, "gradient_accumulation_plugin": window}
        ctx = plan_context(config.total_size, **cast("ContextOptions", {**self._options, **mine}))
        tensor = self._tensors.get(sizes["tp"])
        outline = plan_outline(ctx, self._model, facts=self._facts, tensor=tensor)
        if outline.tensor is not None:
            self._tensors[sizes["tp"]] = outline.tensor
        return _Split(ctx, outline, tuple(self._places(outline)))

    def _stages(self, split: _Split, rows: int) -> tuple[StageCost, ...]:
        """Return the cost of each stage for a number of rows, each of which adds as much as the second."""
        pipeline = split.outline.pipeline
        starts = () if pipeline is None else pipeline.split
        one = self._cost(split.ctx, split.outline, 1).stages(starts)
        if rows == 1:
            return one
        two = self._cost(split.ctx, split.outline, 2).stages(starts)
        return tuple(_of_rows(rows, first, both) for first, both in zip(one, two, strict=True))

    def _cost(self, ctx: Context, outline: Outline, rows: int) -> StepCost:
        """Return the cost of some rows on ranks that have all blocks."""
        key = (*outline.mesh.sizes[3:], outline.engine == "shard", rows)
        if key not in self._costs:
            try:
                plan = plan_place(ctx, outline._replace(pipeline=None, schedule=None), 0)
                batch = self._batch(ctx, rows)
                self._costs[key] = dry_run(ctx, self._model, self._facts, [plan], batch, self._loss_fn)
            except ConfigurationError as error:
                self._costs[key] = error
        return _or_raise(self._costs[key])

    def _batch(self, ctx: Context, rows: int) -> Any:
        try:
            return self._make_batch(ctx, rows)
        except ValueError as error:  # such as of sequences that ranks can't share
            raise ConfigurationError(str(error)) from error

    def _places(self, outline: Outline) -> Iterator[_Place]:
        """List the places whose ranks have different modules, or other numbers of equal blocks."""
        seen: set[tuple[object, ...]] = set()
        schedule, pipeline = outline.schedule, outline.pipeline
        # The buckets of DistributedDataParallel don't grow evenly.
        repeats = () if outline.engine == "ddp" else self._repeats
        for number in range(1 if schedule is None else schedule.num_ranks):
            facts = self._facts
            if pipeline is not None and schedule is not None:
                facts = pipeline.local(facts, schedule.stages_of(number))
            runs = [[name for name in run.names if name in facts.kinds] for run in repeats]
            equal = {name for run in runs for name in run}
            others = (name for name in facts.shapes if owner_of(name, equal) is None)
            key = (*map(len, runs), *others)
            if key in seen:
                continue
            seen.add(key)
            short = facts.without([name for run in runs for name in run[_ENOUGH:]])
            long = [run for run in runs if len(run) > _ENOUGH]
            more = tuple((len(run) - _ENOUGH, short.without([run[_ENOUGH - 1]])) for run in long)
            yield _Place(number, short, more)


# Equal blocks in a row, after which each adds the same: FSDP gathers two at once.
_ENOUGH = 3


def _or_raise(found: T | ConfigurationError) -> T:
    if isinstance(found, ConfigurationError):
        raise found
    return found


_GROWING = ("parameters", "padding", "gradients", "optimizer", "buckets", "gathered")


def _prolonged_budget(place: _Place, of: Callable[[ModelFacts], Budget]) -> Budget:
    """Return the budget with all blocks: each adds as many bytes as the last one of the short model."""

    def sizes_of(facts: ModelFacts) -> tuple[Budget, dict[str, int]]:
        budget = of(facts)
        return budget, {name: getattr(budget, name) for name in _GROWING}

    budget, sizes = sizes_of(place.facts)
    fewer = [(count, sizes_of(facts)[1]) for count, facts in place.more]
    return budget._replace(**_prolonged(sizes, fewer))


def _prolonged_traffic(place: _Place, of: Callable[[ModelFacts], Traffic]) -> Traffic:
    """Return the traffic with all blocks."""

    def sizes_of(facts: ModelFacts) -> tuple[Traffic, dict[tuple[str, ...], int]]:
        traffic = of(facts)
        sizes = {(*_key(one), "calls"): one.calls for one in traffic.exchanges}
        sizes |= {(*_key(one), "received"): one.received for one in traffic.exchanges}
        return traffic, sizes

    traffic, sizes = sizes_of(place.facts)
    found = _prolonged(sizes, [(count, sizes_of(facts)[1]) for count, facts in place.more])
    return traffic._replace(
        exchanges=tuple(
            one._replace(calls=found[(*_key(one), "calls")], received=found[(*_key(one), "received")])
            for one in traffic.exchanges
        )
    )


def _key(exchange: Exchange) -> tuple[str, ...]:
    return exchange.axis, exchange.kind, exchange.what, exchange.overlap


def _prolonged(base: Mapping[K, int], fewer: Iterable[tuple[int, Mapping[K, int]]]) -> dict[K, int]:
    """Add to some sizes those of more equal blocks.

    Args:
        base: With the first equal blocks.
        fewer: How many more there are in each row, and the sizes with one less.

    >>> _prolonged({"parameters": 50, "gathered": 20}, [(10, {"parameters": 40, "gathered": 20})])
    {'parameters': 150, 'gathered': 20}
    """
    return {
        key: size + sum(count * (size - sizes.get(key, 0)) for count, sizes in fewer)
        for key, size in base.items()
    }


def _of_rows(rows: int, one: StageCost, two: StageCost) -> StageCost:
    """Return the cost of several rows from those of one and of two."""

    def more(first: int, both: int) -> int:
        return first + (rows - 1) * (both - first)

    def passes(first: PassCost, both: PassCost) -> PassCost:
        received = {route: more(size, both.received[route]) for route, size in first.received.items()}
        return PassCost(more(first.flops, both.flops), first.calls, received)

    return StageCost(
        kept=more(one.kept, two.kept),
        recomputed=more(one.recomputed, two.recomputed),
        received=more(one.received, two.received),
        forward=passes(one.forward, two.forward),
        backward=passes(one.backward, two.backward),
        largest=rows * one.largest,
    )
