from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.data import EpochPlan, plan_epoch
from accelfn.errors import ConfigurationError

Batches = list[list[int]]


def batches_of(plan: EpochPlan) -> list[Batches]:
    return [
        [plan.positions(step, rank) for step in range(plan.num_batches(rank))] for rank in range(plan.size)
    ]


# As Accelerate 1.15 deals out the same samples; each row was observed there.
TWO_RANKS: tuple[tuple[int, str, Batches, Batches], ...] = (
    (8, "", [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (11, "", [[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]),
    (9, "", [[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]),
    (3, "", [[0, 1]], [[2, 0]]),
    (1, "", [[0, 0]], [[0, 0]]),
    (0, "", [], []),
    (11, "uneven", [[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10]]),
    (9, "uneven", [[0, 1], [4, 5], [8]], [[2, 3], [6, 7]]),
    (3, "uneven", [[0, 1]], [[2]]),
    (1, "uneven", [[0]], []),
    (11, "drop_last", [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (9, "drop_last", [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (3, "drop_last", [], []),
    (1, "drop_last", [], []),
)
THREE_RANKS: tuple[tuple[int, str, Batches, Batches, Batches], ...] = (
    (13, "", [[0, 1], [6, 7], [12, 0]], [[2, 3], [8, 9], [1, 2]], [[4, 5], [10, 11], [3, 4]]),
    (13, "uneven", [[0, 1], [6, 7], [12]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]),
    (10, "", [[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [0, 1]]),
    (10, "uneven", [[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5]]),
    (4, "", [[0, 1]], [[2, 3]], [[0, 1]]),
    (4, "uneven", [[0, 1]], [[2, 3]], []),
    (13, "drop_last", [[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]),
)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "row", [*TWO_RANKS, *THREE_RANKS], ids=lambda row: f"{len(row) - 2}x{row[0]}{row[1]}"
)
def test_batches_are_those_of_accelerate(row: tuple[Any, ...], split: bool) -> None:
    num_samples, flag, *expected = row
    size = len(expected)
    plan = plan_epoch(
        num_samples,
        2 * size if split else 2,
        size,
        split_batches=split,
        even_batches=flag != "uneven",
        drop_last=flag == "drop_last",
    )
    assert batches_of(plan) == expected


plans = st.builds(
    plan_epoch,
    st.integers(0, 70),
    st.integers(1, 9),
    st.integers(1, 6),
    even_batches=st.booleans(),
    drop_last=st.booleans(),
)


@given(plans)
def test_every_sample_comes_exactly_once_among_the_valid_rows(plan: EpochPlan) -> None:
    seen: list[int] = []
    for step in range(plan.num_steps):
        rows = [position for rank in range(plan.size) for position in plan.positions(step, rank)]
        assert len(rows) >= plan.num_valid(step) > 0
        seen += rows[: plan.num_valid(step)]
    kept = plan.num_samples // plan.global_batch * plan.global_batch if plan.drop_last else plan.num_samples
    assert seen == list(range(kept))


@given(plans)
def test_counts_agree_with_the_batches(plan: EpochPlan) -> None:
    counts = [plan.num_batches(rank) for rank in range(plan.size)]
    assert plan.num_steps == max(counts)
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    for rank, count in enumerate(counts):
        sizes = [len(plan.positions(step, rank)) for step in range(count)]
        assert all(0 < size <= plan.rank_batch for size in sizes)
        assert all(size == plan.rank_batch for size in sizes[:-1])
        if plan.even:
            assert counts[0] == count
            assert set(sizes) <= {plan.rank_batch}


def test_alone_the_last_batch_is_short_and_nothing_is_repeated() -> None:
    assert batches_of(plan_epoch(5, 2)) == [[[0, 1], [2, 3], [4]]]


def test_ten_thousand_ranks_and_ten_billion_samples_need_no_list() -> None:
    plan = plan_epoch(10**10, 32, 10_000)
    assert plan.num_steps == 31_250
    assert plan.positions(31_249, 9_999) == list(range(10**10 - 32, 10**10))


@pytest.mark.parametrize(("batch", "hint"), [(5, "Use 6 or 4."), (1, "Use 2.")])
def test_a_batch_that_cannot_be_split_is_refused_with_the_next_sizes(batch: int, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"got batch_size={batch} and 2 ranks. {hint}"):
        plan_epoch(10, batch, 2, split_batches=True)
