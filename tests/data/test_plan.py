# torch leaves tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.config import ParallelismConfig
from accelfn.data import EpochPlan, data_rank, plan_epoch
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


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("row", TWO_RANKS, ids=lambda row: f"{row[0]}{row[1]}")
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


def test_a_split_batch_leaves_ranks_without_a_piece_of_the_last_one() -> None:
    plan = plan_epoch(4, 6, 3, split_batches=True, even_batches=False)
    assert batches_of(plan) == [[[0, 1]], [[2, 3]], []]


@st.composite
def planned(draw: st.DrawFn) -> EpochPlan:
    size = draw(st.integers(1, 7))
    num_samples = draw(st.integers(0, 500))
    split = draw(st.booleans())
    return plan_epoch(
        num_samples,
        draw(st.integers(1, 9)) * (size if split else 1),
        size,
        split_batches=split,
        even_batches=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        start=draw(st.integers(0, num_samples)),
    )


@given(planned())
def test_every_sample_comes_exactly_once_among_the_valid_rows(plan: EpochPlan) -> None:
    seen: list[int] = []
    for step in range(plan.num_steps):
        rows = [position for rank in range(plan.size) for position in plan.positions(step, rank)]
        assert len(rows) >= plan.num_valid(step) > 0
        # What is padding is a repetition; with an uneven plan nothing is.
        assert all(position < plan.num_samples for position in rows)
        assert plan.even or len(rows) == plan.num_valid(step)
        seen += rows[: plan.num_valid(step)]
        assert plan.consumed(step) == plan.start + len(seen)
    left = plan.num_left // plan.global_batch * plan.global_batch if plan.drop_last else plan.num_left
    assert seen == list(range(plan.start, plan.start + left))


@given(planned())
def test_counts_agree_with_the_batches(plan: EpochPlan) -> None:
    counts = [plan.num_batches(rank) for rank in range(plan.size)]
    assert plan.num_steps == max(counts)
    assert counts == sorted(counts, reverse=True)
    assert max(counts) - min(counts) <= 1
    for rank, count in enumerate(counts):
        sizes = [len(plan.positions(step, rank)) for step in range(count)]
        assert sizes == [plan.num_rows(step, rank) for step in range(count)]
        assert all(0 < size <= plan.rank_batch for size in sizes)
        assert all(size == plan.rank_batch for size in sizes[:-1])
        for first in (0, count // 2):
            block = plan.block(first, count, range(rank, rank + 1))
            listed = [position for step in range(first, count) for position in plan.positions(step, rank)]
            assert (block.dtype, block.tolist()) == (torch.int64, listed)
        if plan.even:
            assert counts[0] == count
            assert set(sizes) <= {plan.rank_batch}
        elif count < plan.num_steps:
            assert plan.num_rows(count, rank) == 0


@given(planned())
def test_what_is_told_of_a_batch_is_what_the_plan_shares_out(plan: EpochPlan) -> None:
    by_rank = [list(plan.batch_infos(rank)) for rank in range(plan.size)]
    for step in range(plan.num_steps):
        rows = [len(plan.positions(step, rank)) for rank in range(plan.size)]
        infos = [plan.batch_info(step, rank) for rank in range(plan.size)]
        assert all(own[step : step + 1] in ([], [info]) for own, info in zip(by_rank, infos, strict=True))
        assert [info.num_rows for info in infos] == rows
        shared = {(info.max_rows, info.num_valid, info.consumed) for info in infos}
        assert shared == {(max(rows), plan.num_valid(step), plan.consumed(step))}
        # Valid rows stand in front, in rank order: padding follows them all.
        valid = [info.own_valid or 0 for info in infos]
        assert sum(valid) == plan.num_valid(step)
        marks = [
            mark for own, number in zip(valid, rows, strict=True) for mark in [1] * own + [0] * (number - own)
        ]
        assert marks == sorted(marks, reverse=True)
        for rank, info in enumerate(infos):
            assert info.is_last == (step + 1 == plan.num_batches(rank))


@given(planned(), st.integers(0, 500), st.integers(1, 9), st.integers(1, 7))
def test_what_is_left_of_an_epoch_is_planned_anew_for_any_world(
    plan: EpochPlan, step: int, batch_size: int, size: int
) -> None:
    if not plan.num_steps:
        return
    stop = plan.consumed(step % plan.num_steps)
    rest = plan_epoch(plan.num_samples, batch_size, size, start=stop)
    seen: list[int] = []
    for step in range(rest.num_steps):
        rows = [position for rank in range(size) for position in rest.positions(step, rank)]
        seen += rows[: rest.num_valid(step)]
    assert seen == list(range(stop, plan.num_samples))


def test_ten_thousand_ranks_and_ten_billion_samples_need_no_list() -> None:
    plan = plan_epoch(10**10, 32, 10_000)
    assert plan.num_steps == 31_250
    expected = list(range(10**10 - 32, 10**10))
    assert plan.positions(31_249, 9_999) == expected
    assert plan.block(31_249, 31_250, range(9_999, 10_000)).tolist() == expected


@pytest.mark.parametrize(("batch", "hint"), [(5, "Use 6 or 4."), (1, "Use 2.")])
def test_a_batch_that_cannot_be_split_is_refused_with_the_next_sizes(batch: int, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=f"got batch_size={batch} and 2 ranks. {hint}"):
        plan_epoch(10, batch, 2, split_batches=True)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((10, 0, 1, 0), "batch_size=0"),
        ((10, -2, 1, 0), "batch_size=-2"),
        ((10, 2, 0, 0), "0 ranks"),
        ((-1, 2, 1, 0), "num_samples=-1"),
        ((10, 2, 1, 11), "num_samples=10 and start=11"),
        ((10, 2, 1, -1), "start=-1"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, int, int], said: str) -> None:
    num_samples, batch_size, size, start = numbers
    with pytest.raises(ConfigurationError, match=said):
        plan_epoch(num_samples, batch_size, size, start=start)


@given(
    st.integers(1, 3), st.integers(2, 3), st.integers(1, 3), st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2)])
)
def test_ranks_of_one_tensor_or_context_group_read_the_same(
    replicas: int, shards: int, tensor: int, sequence: tuple[int, int]
) -> None:
    cp, sp = sequence
    mesh = ParallelismConfig(replicas, shards, tensor, cp, sp_size=sp)
    places = [data_rank(mesh, rank) for rank in range(mesh.total_size)]
    # Row by row, with the axes that share a batch innermost.
    size, together = replicas * shards, tensor * cp * sp
    assert {(place.size, place.sharing) for place in places} == {(size, together)}
    assert [place.rank for place in places] == [rank for rank in range(size) for _ in range(together)]
    # A stage of a pipeline is outermost: the same places come again in each.
    staged = ParallelismConfig(replicas, shards, tensor, cp, sp_size=sp, pp_size=2)
    assert [data_rank(staged, rank).rank for rank in range(staged.total_size)] == [
        place.rank for place in places
    ] * 2
    with pytest.raises(ValueError, match=f"ranks 0 to {len(places) - 1}, got rank {len(places)}"):
        data_rank(mesh, len(places))
