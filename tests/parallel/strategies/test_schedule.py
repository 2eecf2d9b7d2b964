"""Tests of the schedules of accelfn.parallel.strategies.pipeline_plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.config import PipelineParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel import SchedulePlan, plan_schedule

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": 2, "loopedbfs": 3}


@given(
    name=st.sampled_from(list(SCHEDULES)),
    ranks=st.integers(2, 4),
    asked=st.integers(1, 12),
    rows=st.integers(1, 40),
)
def test_any_batch_is_cut_into_equal_microbatches_on_the_same_stages(
    name: str, ranks: int, asked: int, rows: int
) -> None:
    plan = SchedulePlan(name, ranks, SCHEDULES[name], asked)
    fitted = plan.fit(rows)
    assert rows % fitted.num_microbatches == 0
    assert fitted.num_microbatches <= asked
    assert all(rows % more for more in range(fitted.num_microbatches + 1, min(asked, rows) + 1))
    assert [fitted.stages_of(rank) for rank in range(ranks)] == [
        plan.stages_of(rank) for rank in range(ranks)
    ]
    assert fitted.fit(rows) == fitted


@pytest.mark.parametrize(
    ("schedule", "count", "least"),
    [
        ("1f1b", 3, "at least 4"),
        ("interleaved1f1b", 2, "at least 4"),
        ("interleaved1f1b", 9, "a multiple of 4"),
    ],
)
def test_too_few_microbatches_are_refused_by_name(schedule: str, count: int, least: str) -> None:
    with pytest.raises(ConfigurationError, match=least):
        plan_schedule(PipelineParallelConfig(num_microbatches=count, schedule=schedule), 4)


def test_the_bubble_is_that_of_the_formula() -> None:
    assert plan_schedule(PipelineParallelConfig(num_microbatches=8), 4).bubble == 3 / 11
    plan = plan_schedule(PipelineParallelConfig(num_microbatches=8, schedule="interleaved1f1b"), 4)
    assert plan.bubble == 3 / 19
