"""Plan the stages of a pipeline, and the order in which they process microbatches. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from accelfn.config import PipelineParallelConfig
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, list_text, owner_of
from accelfn.parallel.strategies.strategy import Planning
from accelfn.tree.structure import size_text


class SchedulePlan(NamedTuple):
    """One of torch's schedules, and its sizes. A value; ``str`` returns one line.

    Attributes:
        name: Torch's name, in lower case.
        num_ranks: Ranks along "pp".
        stages_per_rank: Stages on each rank.
        num_microbatches: Microbatches of a batch with enough rows.

    >>> print(plan_schedule(PipelineParallelConfig(num_microbatches=6), 2))
    1f1b with 6 microbatches: 2 ranks idle for 14 % of a batch's time
    """

    name: str
    num_ranks: int
    stages_per_rank: int
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        """Total number of stages."""
        return self.num_ranks * self.stages_per_rank

    @property
    def bubble(self) -> float:
        """Share of a batch's time that a rank is idle, with equal stages."""
        waits = self.num_ranks - 1
        return waits / (self.num_microbatches * self.stages_per_rank + waits)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank along "pp".

        >>> SchedulePlan("loopedbfs", 2, 2, 4).stages_of(1)
        (1, 3)
        """
        return tuple(range(rank, self.num_stages, self.num_ranks))

    def rank_of(self, stage: int) -> int:
        """Return the rank along "pp" that has a stage."""
        return stage % self.num_ranks

    def most_kept(self, rank: int, sizes: Mapping[int, int]) -> int:
        """Return the peak of a rank's saved activations of microbatches before their backward pass.

        Args:
            rank: Along "pp".
            sizes: Bytes that each of its stages saves of a microbatch.

        >>> plan = SchedulePlan("1f1b", 2, 1, 8)
        >>> plan.most_kept(0, {0: 10}), plan.most_kept(1, {1: 10})
        (20, 10)
        >>> plan._replace(name="gpipe").most_kept(1, {1: 10})
        80
        """
        stages, count = self.stages_of(rank), self.num_microbatches
        if self.name == "1f1b":
            return sizes[stages[0]] * min(count, self.num_ranks - rank)
        if self.name != "interleaved1f1b":  # all of them
            return count * sum(sizes[stage] for stage in stages)
        per_round = count // max(1, count // self.num_ranks)
        passes = [stages[index // per_round % len(stages)] for index in range(count * len(stages))]
        first = min(len(passes), (len(stages) - 1) * per_round + 2 * (self.num_ranks - 1 - rank))
        kept = most = sum(sizes[stage] for stage in passes[:first])
        for index, stage in enumerate(passes[first:]):
            most = max(most, kept + sizes[stage])
            kept += sizes[stage] - sizes[stages[-1 - index // per_round % len(stages)]]
        return most

    def fit(self, rows: int) -> SchedulePlan:
        """Return the schedule of a batch of ``rows`` rows.

        It is split into the most microbatches that divide it, up to ``num_microbatches``. If the schedule
        needs more of them, it is replaced by one with the same stages that doesn't.

        >>> plan = SchedulePlan("1f1b", 2, 1, 4)
        >>> [(fitted.name, fitted.num_microbatches) for fitted in map(plan.fit, (8, 6, 1))]
        [('1f1b', 4), ('1f1b', 3), ('gpipe', 1)]
        """
        count = next(n for n in range(min(rows, self.num_microbatches), 0, -1) if rows % n == 0)
        fitted = self._replace(num_microbatches=count)
        if self.name == "1f1b" and count < self.num_stages:
            return fitted._replace(name="gpipe")
        if self.name == "interleaved1f1b" and (count < self.num_ranks or count % (count // self.num_ranks)):
            return fitted._replace(name="loopedbfs")
        return fitted

    def __str__(self) -> str:
        """Return the schedule on one line."""
        idle = f"{self.bubble:.0%}".replace("%", " %")
        return (
            f"{self.name} with {self.num_microbatches} microbatches: {self.num_ranks} ranks idle for {idle} "
            "of a batch's time"
        )


def plan_schedule(config: PipelineParallelConfig, num_ranks: int) -> SchedulePlan:
    """Return the configured schedule. Pure.

    Args:
        config: Names the schedule and its sizes.
        num_ranks: Ranks along "pp".

    Raises:
        ConfigurationError: The schedule needs more microbatches.
    """
    per_rank = config.stages_per_rank or 1
    count = config.num_microbatches or num_ranks * per_rank
    plan = SchedulePlan(config.schedule, num_ranks, per_rank, count)
    if plan.fit(count) != plan:
        least = num_ranks if plan.name == "interleaved1f1b" else plan.num_stages
        raise ConfigurationError(
            f"PipelineParallelConfig.num_microbatches must be at least {least} with schedule={plan.name!r}, "
            f"and a multiple of {num_ranks} above {2 * num_ranks} where stages are interleaved, got {count}. "
            'Use more, or schedule="gpipe".'
        )
    return plan


class StagePlan(NamedTuple):
    """The modules and parameters of one stage.

    Attributes:
        blocks: Names of its blocks, in the order in which they run.
        modules: Names of its other modules with parameters, each with all submodules.
        parameters: Names of its parameters, in the model's order, including those that other stages hold
            too; of a tied one only the names of its modules.
        num_parameters: Elements of its parameters.
        size_bytes: Bytes of its parameters.
    """

    blocks: tuple[str, ...]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    num_parameters: int
    size_bytes: int


class PipelinePlan(NamedTuple):
    """How a model is split into stages. A value; ``print(plan)`` shows it as a table.

    Attributes:
        stages: In the order in which a batch goes through them.
        shared: The stages of each parameter on several: tied over stages, or held by the model itself or
            another container of blocks. A tied one has its first name.
        ties: Names of each tied parameter, the first one first.
        held_by: Stages that hold a parameter, by each of its names.
    """

    stages: tuple[StagePlan, ...]
    shared: Mapping[str, tuple[int, ...]]
    ties: tuple[tuple[str, ...], ...]
    held_by: Mapping[str, tuple[int, ...]]

    @property
    def split(self) -> tuple[str, ...]:
        """First block of each stage except the first."""
        return tuple(stage.blocks[0] for stage in self.stages[1:])

    def of(self, name: str) -> tuple[int, ...]:
        """Return the stages that hold a parameter, by any of its names.

        Raises:
            KeyError: The model has none of that name.
        """
        return self.held_by[name]

    def elsewhere(self, own: Sequence[int]) -> set[str]:
        """Return the names of the blocks and other modules that are only on other stages than ``own``."""
        by_stage = [{*stage.blocks, *stage.modules} for stage in self.stages]
        return {name for names in by_stage for name in names}.difference(*(by_stage[index] for index in own))

    def local(self, facts: ModelFacts, own: Sequence[int]) -> ModelFacts:
        """Return the facts of a rank's model, with the stages ``own``."""
        held = {name for index in own for name in self.stages[index].parameters}
        others = self.elsewhere(own)
        modules = {name for name in facts.kinds if owner_of(name, others) is None}
        return facts.only(modules, held)

    def __str__(self) -> str:
        """Return the plan as a table."""
        rows = [("stage", "blocks", "other modules", "parameters", "size")]
        for index, stage in enumerate(self.stages):
            blocks = ", ".join(stage.blocks) or "-"
            if len(stage.blocks) > 1:
                blocks = f"{stage.blocks[0]} ... {stage.blocks[-1]} ({len(stage.blocks)})"
            size = size_text(stage.size_bytes)
            modules = ", ".join(stage.modules) or "-"
            rows.append((str(index), blocks, modules, f"{stage.num_parameters:,}", size))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lines += [f"{name} is held by stages {_and(stages)}" for name, stages in self.shared.items()]
        return "\n".join(lines)


def plan_stages(
    facts: ModelFacts,
    num_stages: int,
    *,
    split: Sequence[str] = (),
    costs: Mapping[str, float] | None = None,
    last: Sequence[str] = (),
) -> PipelinePlan:
    """Choose the stage of each block and each other module with parameters. Pure.

    The blocks are those of ``facts`` whose class repeats, else the items of ``nn.Sequential``; they must be
    called one after another. A module that is called before the blocks belongs to the first stage, a module
    after a block to that block's stage, and a module with several names to each stage that calls it. The
    order is that of the calls in ``forward``, as far as the source of the model and of other containers of
    blocks shows it, and else that of registration. Parameters of these containers themselves are on every
    stage.

    Args:
        facts: Of the model.
        num_stages: At least 1.
        split: First block of each stage except the first, or another module that is called there with the
            output of the block before; empty to choose.
        costs: Of blocks and other modules, by name, in any unit; 0 without an entry. Minimises the largest
            cost of a stage. None: equally many blocks per stage, the first stages one more.
        last: Modules that are called after the blocks, if the order above is wrong.

    Raises:
        ConfigurationError: There are fewer blocks than stages; or ``split``, ``costs`` or ``last`` name
            unknown modules.

    >>> from torch import nn
    >>> from accelfn.parallel.facts import read_facts
    >>> print(plan_stages(read_facts(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))), 2))
    stage  blocks       other modules  parameters  size
    0      0 ... 1 (2)  -              6           24 B
    1      2            -              6           24 B
    """
    blocks = _with_named(facts, outer_blocks(facts), split)
    if num_stages < 1:
        raise ConfigurationError(f"plan_stages: num_stages must be at least 1, got {num_stages}.")
    if len(blocks) < num_stages and num_stages > 1:
        raise ConfigurationError(
            f"{facts.kinds['']} has {len(blocks)} block{'s' * (len(blocks) != 1)}, but {num_stages} stages "
            "need at least one each"
            + (f": {list_text(blocks)}" if blocks else "")
            + ". Use fewer stages. Blocks are the modules in the model's _no_split_modules, or the items of "
            "an nn.ModuleList that are of one class, or those of an nn.Sequential."
        )
    containers = {""}
    for name in blocks:
        while name := name.rpartition(".")[0]:
            containers.add(name)
    unit_of = {name: _unit_of(name, containers) for name in facts.shapes}
    units = {*blocks, *(unit for unit in unit_of.values() if unit is not None)}
    ordered = [name for name in facts.order if name in units]
    _check_names("last", last, [name for name in ordered if name not in blocks])
    _check_names("split", split, blocks[1:])
    _check_names("costs", costs or (), [*facts.kinds])
    behind = _blocks_before(ordered, blocks)
    starts = _starts(blocks, behind, num_stages, split, costs)
    stage_of = {
        name: num_stages - 1 if name in last else bisect.bisect_right(starts, max(block, 0)) - 1
        for name, block in behind.items()
    }
    return _describe(facts, blocks, unit_of, stage_of, num_stages)


def _describe(
    facts: ModelFacts,
    blocks: Sequence[str],
    unit_of: Mapping[str, str | None],
    stage_of: Mapping[str, int],
    num_stages: int,
) -> PipelinePlan:
    ties = {name: group for group in facts.ties for name in group}
    everywhere = tuple(range(num_stages))
    all_names: dict[str, list[str]] = {}  # of each module that has several, by the first one
    for name, first in facts.aliases.items():
        all_names.setdefault(first, [first]).append(name)
    units = set(stage_of)
    homes: dict[str, set[int]] = {}
    for name in stage_of:
        first = facts.aliases.get(name, name)
        # A module may be called under each of its names; a block is called once.
        group = [first] if first in blocks else all_names.get(first, [first])
        owners = {owner_of(alias, units) for alias in group}
        homes[first] = {stage_of[owner] for owner in owners if owner is not None}
    of_slots: dict[str, set[int]] = {}
    for name, unit in unit_of.items():
        of_slots.setdefault(_slot(facts, name), set()).update(
            everywhere if unit is None else [stage_of[unit]]
        )
    where = {name: of_slots[_slot(facts, name)] for name in facts.shapes}
    held_by = {
        name: tuple(sorted({stage for other in ties.get(name, (name,)) for stage in where[other]}))
        for name in facts.shapes
    }
    shared = {name: held_by[name] for name in facts.own_names if len(held_by[name]) > 1}
    stages: list[StagePlan] = []
    for index in everywhere:
        names = tuple(name for name in facts.shapes if index in where[name])
        # Each parameter once, by the first of its names on the stage.
        once = tuple({ties.get(name, (name,)): name for name in reversed(names)}.values())
        own = [name for name, found in homes.items() if index in found]
        stages.append(
            StagePlan(
                blocks=tuple(name for name in own if name in blocks),
                modules=tuple(name for name in own if name not in blocks),
                parameters=names,
                num_parameters=facts.numel(*once),
                size_bytes=facts.size_bytes(*once),
            )
        )
    return PipelinePlan(tuple(stages), shared, facts.ties, held_by)


def _slot(facts: ModelFacts, parameter: str) -> str:
    """Return a parameter's name by the first name of its module."""
    module, _, leaf = parameter.rpartition(".")
    return f"{facts.aliases.get(module, module)}.{leaf}"


def outer_blocks(facts: ModelFacts) -> tuple[str, ...]:
    """Return the modules that run one after another, in the order of registration."""
    if facts.kinds[""] == "Sequential":
        return _items(facts, "")
    count = Counter(facts.kinds[name] for name in facts.blocks)
    repeated = [name for name in facts.blocks if count[facts.kinds[name]] > 1] or [*facts.blocks]
    known = set(repeated)
    outer = tuple(name for name in repeated if owner_of(name.rpartition(".")[0], known) is None)
    if outer:
        return outer
    sequences = {name for name, kind in facts.kinds.items() if kind == "Sequential"}
    return tuple(
        item
        for name in facts.kinds
        if name in sequences and owner_of(name.rpartition(".")[0], sequences) is None
        for item in _items(facts, name)
    )


def _with_named(facts: ModelFacts, blocks: tuple[str, ...], split: Sequence[str]) -> tuple[str, ...]:
    """Add the other modules in ``split`` to the blocks, in the order of calls."""
    known = set(blocks)
    around = {""}
    for block in blocks:
        while block := block.rpartition(".")[0]:
            around.add(block)
    for name in split:
        if name and name in facts.kinds and name not in around and owner_of(name, known) is None:
            known.add(name)
    return tuple(name for name in facts.order if name in known)


def _items(facts: ModelFacts, name: str) -> tuple[str, ...]:
    return tuple(child for child in facts.kinds if child and child.rpartition(".")[0] == name)


def _unit_of(parameter: str, containers: set[str]) -> str | None:
    """Return the outermost module around a parameter that holds no block; None where a container holds it."""
    parts = parameter.split(".")[:-1]
    names = itertools.accumulate(parts, "{}.{}".format)
    return next((name for name in names if name not in containers), None)


def _blocks_before(ordered: Sequence[str], blocks: Sequence[str]) -> dict[str, int]:
    """Return the index of each block, and for other modules that of the block before them; -1 for none."""
    numbers = {name: number for number, name in enumerate(blocks)}
    found: dict[str, int] = {}
    latest = -1
    for name in ordered:
        latest = max(latest, numbers.get(name, -1))
        found[name] = numbers.get(name, latest)
    return found


def _starts(
    blocks: Sequence[str],
    behind: Mapping[str, int],
    num_stages: int,
    split: Sequence[str],
    costs: Mapping[str, float] | None,
) -> list[int]:
    """Return the index of the first block of each stage."""
    if split:
        starts = [0, *(blocks.index(name) for name in split)]
        if len(starts) != num_stages or starts != sorted(set(starts)):
            raise ConfigurationError(
                f"split must name the first block of each stage except the first, in the model's order: "
                f"{num_stages} stages need {num_stages - 1} different ones, got {', '.join(split)}. The "
                f"blocks are {', '.join(blocks)}."
            )
        return starts
    if costs is None or num_stages == 1:
        size, more = divmod(len(blocks), num_stages)
        return [index * size + min(index, more) for index in range(num_stages)]
    of_blocks = [0.0] * len(blocks)
    for name, block in behind.items():
        of_blocks[max(block, 0)] += costs.get(name, 0.0)
    return _cheapest(of_blocks, num_stages)


def _cheapest(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return the starts of stages that minimise the largest cost."""
    sums = [0.0, *itertools.accumulate(costs)]

    def fill(limit: float) -> list[int] | None:
        starts = [0]
        for later in range(num_stages - 1, 0, -1):  # each of these needs at least one block
            end = bisect.bisect_right(sums, limit + sums[starts[-1]]) - 1
            if end <= starts[-1]:
                return None
            starts.append(min(end, len(costs) - later))
        return starts if sums[-1] - sums[starts[-1]] <= limit else None

    limits = sorted({end - start for start, end in itertools.combinations(sums, 2)})
    best = bisect.bisect_left(limits, True, key=lambda limit: fill(limit) is not None)
    return cast("list[int]", fill(limits[best]))


def _check_names(field: str, names: Mapping[str, float] | Sequence[str], known: Sequence[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigurationError(
            f"{field} names {', '.join(unknown)}, but it can name {', '.join(known) or 'nothing'}."
        )


def _and(stages: Sequence[int]) -> str:
    return f"{', '.join(map(str, stages[:-1]))} and {stages[-1]}"


def plan_order(at: Planning) -> SchedulePlan:
    """Return the order in which the stages of a pipeline compute."""
    return plan_schedule(_options(at.ctx), at.mesh.size("pp"))


def plan(at: Planning) -> PipelinePlan:
    """Return how a model is split into stages."""
    options, num_stages = _options(at.ctx), at.plans["schedule"].num_stages
    return plan_stages(at.facts, num_stages, split=options.split, last=options.last)


def narrow(plan: PipelinePlan, at: Planning) -> ModelFacts:
    """Return the facts of a rank's stages."""
    return plan.local(at.facts, at.plans["schedule"].stages_of(at.pp_rank))


def _options(ctx: Context) -> PipelineParallelConfig:
    parallelism = ctx.strategy.parallelism
    return (None if parallelism is None else parallelism.pp_handler) or PipelineParallelConfig()
