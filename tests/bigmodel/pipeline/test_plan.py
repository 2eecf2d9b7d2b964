import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel.pipeline.plan import PipelinePlan, StagePlan, Unit, choose_cuts

NAMES = "abcdef"
SLACK = 1.05


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Unit], dict[str, int], int]:
    """Units that may share tensors, sizes, and a number of stages that fits them."""
    sizes = {name: draw(st.integers(0, 100)) for name in NAMES}
    units = draw(
        st.lists(
            st.builds(
                Unit,
                st.sampled_from(["x", "x.y", "x.y.z"]),
                st.frozensets(st.sampled_from(NAMES), max_size=3),
                st.integers(0, 50),
            ),
            min_size=1,
            max_size=7,
        )
    )
    return units, sizes, draw(st.integers(1, len(units)))


@given(problem=problems())
def test_the_cuts_are_the_cheapest_of_those_that_are_even(
    problem: tuple[list[Unit], dict[str, int], int],
) -> None:
    units, sizes, num_stages = problem

    def largest(starts: tuple[int, ...]) -> int:
        ends = (*starts[1:], len(units))
        parts = [units[start:end] for start, end in zip(starts, ends, strict=True)]
        used = [frozenset[str]().union(*(unit.tensors for unit in part)) for part in parts]
        return max(sum(sizes[name] for name in names) for names in used)

    def cost(starts: tuple[int, ...]) -> tuple[int, int]:
        cut = [units[start] for start in starts[1:]]
        return sum(unit.traffic for unit in cut), sum(unit.name.count(".") for unit in cut)

    every = [(0, *rest) for rest in itertools.combinations(range(1, len(units)), num_stages - 1)]
    limit = int(min(map(largest, every)) * SLACK)
    chosen = choose_cuts(units, sizes, num_stages)
    assert chosen in every
    assert largest(chosen) <= limit
    assert cost(chosen) == min(cost(starts) for starts in every if largest(starts) <= limit)


def test_more_stages_than_places_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has 1 places .* and 2 ranks need a stage each"):
        choose_cuts([Unit("", frozenset("a"), 0)], {"a": 1}, 2)


def test_a_model_of_thousands_of_modules_is_cut_evenly() -> None:
    units = [Unit(f"layers.{number}", frozenset({str(number)}), 8) for number in range(4000)]
    starts = choose_cuts(units, {str(number): 7 for number in range(4000)}, 8)
    lengths = [end - start for start, end in zip(starts, (*starts[1:], 4000), strict=True)]
    assert max(lengths) <= 500 * SLACK


def test_a_plan_prints_as_a_table() -> None:
    stages = (StagePlan("", ("a",), 2_000_000, 512), StagePlan("layers.7", ("b", "a"), 1_500_000, 0))
    plan = PipelinePlan(stages=stages, rows=2, num_chunks=4)
    assert plan.split_points == ("layers.7",)
    assert str(plan).splitlines() == [
        "rank  begins at      holds   passes on",
        "0     the beginning  2.0 MB  512 B",
        "1     layers.7       1.5 MB",
        "micro-batches of 2 rows, 4 of the example",
    ]
