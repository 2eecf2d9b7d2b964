"""Where a model is cut into stages: as evenly as it goes, and then where little has to be passed on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from accelfn.tree.sizes import size_text

__all__ = ("PipelinePlan", "StagePlan", "Unit", "choose_cuts")

# How much larger than it has to be the largest stage may be, if less is passed on then.
_SLACK = 0.05
_DEPTH_BITS = 16


class Unit(NamedTuple):
    """A part of a model that isn't cut.

    Attributes:
        name: Of the module that it begins with.
        tensors: Names of the parameters and buffers that are used in it.
        traffic: Bytes of the values that are needed in it or later and were computed before.
    """

    name: str
    tensors: frozenset[str]
    traffic: int


class StagePlan(NamedTuple):
    """What one rank runs.

    Attributes:
        begins_at: Name of the first module; ``""`` of the first stage.
        tensors: Names of the parameters and buffers that it holds, in the order of their first use. What is
            used by several stages stands in each of them.
        num_bytes: Of them.
        passed_on: Bytes of a micro-batch's values that go to the next stage.
    """

    begins_at: str
    tensors: tuple[str, ...]
    num_bytes: int
    passed_on: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePlan:
    """How a model is run on several ranks, stage after stage.

    Attributes:
        stages: By rank.
        rows: Of a micro-batch: a batch is cut into as many as are needed.
        num_chunks: Micro-batches of a batch that is as large as the example.
    """

    stages: tuple[StagePlan, ...]
    rows: int
    num_chunks: int

    @property
    def split_points(self) -> tuple[str, ...]:
        """Names of the modules that begin a stage, but for the first."""
        return tuple(stage.begins_at for stage in self.stages[1:])

    def __str__(self) -> str:
        """Draw the stages as a table."""
        head = ("rank", "begins at", "holds", "passes on")
        rows = [
            (
                str(rank),
                stage.begins_at or "the beginning",
                size_text(stage.num_bytes),
                size_text(stage.passed_on) if rank + 1 < len(self.stages) else "",
            )
            for rank, stage in enumerate(self.stages)
        ]
        widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in (head, *rows)
        ]
        return "\n".join([*lines, f"micro-batches of {self.rows} rows, {self.num_chunks} of the example"])


def choose_cuts(units: Sequence[Unit], sizes: Mapping[str, int], num_stages: int) -> tuple[int, ...]:
    """Choose with which units the stages begin. Pure.

    The largest stage is at most a twentieth larger than it has to be; among all such cuts those are taken
    with which the fewest bytes are passed on, and then those between outer modules.

    Args:
        units: In the order in which they run.
        sizes: Bytes of each tensor, by name. One that several stages use counts in each.
        num_stages: How many there are to be.

    Returns:
        Their first units, ascending; the first is 0.

    Raises:
        ValueError: There are fewer units than stages.

    >>> units = [Unit(name, frozenset({name}), 8) for name in "abcd"]
    >>> choose_cuts(units, {"a": 3, "b": 1, "c": 1, "d": 1}, 2)
    (0, 1)
    """
    if len(units) < num_stages:
        raise ValueError(
            f"the model has {len(units)} places where a stage can begin, and {num_stages} ranks need a stage "
            "each. Run fewer processes, or leave out classes in no_split_module_classes."
        )
    low, high = max(_size(unit.tensors, sizes) for unit in units), sum(sizes.values())
    while low < high:
        middle = (low + high) // 2
        if _stages_needed(units, sizes, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    ends = _farthest_ends(units, sizes, int(low * (1 + _SLACK)))
    # Of cuts that pass on as much, those between outer modules.
    costs = [(unit.traffic << _DEPTH_BITS) + unit.name.count(".") for unit in units]
    return _cheapest(costs, ends, num_stages)


def _size(names: Iterable[str], sizes: Mapping[str, int]) -> int:
    return sum(sizes[name] for name in names)


def _stages_needed(units: Sequence[Unit], sizes: Mapping[str, int], limit: int) -> int:
    """Count the stages when each takes as much as it can. All units fit by themselves."""
    count, held, size = 1, set[str](), 0
    for unit in units:
        new = unit.tensors - held
        more = _size(new, sizes)
        if size + more > limit and held:
            count, held, size = count + 1, set(unit.tensors), _size(unit.tensors, sizes)
        else:
            held |= new
            size += more
    return count


def _farthest_ends(units: Sequence[Unit], sizes: Mapping[str, int], limit: int) -> list[int]:
    """Say for each unit how far a stage may go that begins with it: the number after the last unit."""
    ends: list[int] = []
    uses: Counter[str] = Counter()
    size = end = 0
    for start, unit in enumerate(units):
        while end < len(units):
            more = _size((name for name in units[end].tensors if not uses[name]), sizes)
            if size + more > limit and end > start:
                break
            uses.update(units[end].tensors)
            size, end = size + more, end + 1
        ends.append(end)
        uses.subtract(unit.tensors)
        size -= _size((name for name in unit.tensors if not uses[name]), sizes)
    return ends


def _cheapest(costs: Sequence[int], ends: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Choose the cuts that cost the least, where a stage from ``i`` may end at ``i + 1 .. ends[i]``."""
    count = len(costs)
    # cost[i]: least cost of the cuts up to i, where a stage ends.
    cost: list[float] = [0.0] + [float("inf")] * count
    before: list[list[int]] = []
    for _ in range(num_stages):
        next_cost, came_from = [float("inf")] * (count + 1), [-1] * (count + 1)
        window: deque[int] = deque()  # of beginnings, their costs ascending
        for end in range(1, count + 1):
            start = end - 1
            while window and cost[window[-1]] > cost[start]:
                window.pop()
            window.append(start)
            while ends[window[0]] < end:
                window.popleft()
            if cost[window[0]] < float("inf"):
                next_cost[end] = cost[window[0]] + (costs[end] if end < count else 0)
                came_from[end] = window[0]
        before.append(came_from)
        cost = next_cost
    starts: list[int] = []
    end = count
    for came_from in reversed(before):
        end = came_from[end]
        starts.append(end)
    return tuple(reversed(starts))
