# torch leaves tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context.config import ParallelismConfig
from accelfn.data import EpochPlan, data_rank, plan_epoch
from accelfn.data.plan import BatchInfo
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


@pytest.mark.parametrize("even", [True, False])
def test_a_split_batch_leaves_ranks_without_a_piece_of_the_last_one(even: bool) -> None:
    plan = plan_epoch(4, 6, 3, split_batches=True, even_batches=even)
    assert batches_of(plan) == [[[0, 1]], [[2, 3]], [[0, 1]] if even else []]


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
        if plan.even:
            assert counts[0] == count
            assert set(sizes) <= {plan.rank_batch}
        elif count < plan.num_steps:
            assert plan.num_rows(count, rank) == 0


@given(planned(), st.data())
def test_a_block_is_the_positions_of_its_steps(plan: EpochPlan, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, plan.size - 1))
    last = data.draw(st.integers(0, plan.num_batches(rank)))
    first = data.draw(st.integers(0, last))
    for begin, end in ((first, last), (0, plan.num_batches(rank))):
        listed = [position for step in range(begin, end) for position in plan.positions(step, rank)]
        block = plan.block(begin, end, range(rank, rank + 1))
        assert block.dtype == torch.int64
        assert block.tolist() == listed


@given(planned())
def test_what_is_told_of_all_batches_is_what_is_told_of_each(plan: EpochPlan) -> None:
    for rank, count in enumerate(map(plan.num_batches, range(plan.size))):
        together = list(plan.batch_infos(rank))
        assert together == [plan.batch_info(step, rank) for step in range(count)]
        assert all(type(share) is BatchInfo for share in together)


def test_a_block_ends_where_the_order_does() -> None:
    plan = plan_epoch(11, 2, 2, even_batches=False)
    assert plan.block(0, 3, range(1, 2)).tolist() == [2, 3, 6, 7, 10]


@given(planned())
def test_what_is_told_of_a_batch_is_what_the_plan_shares_out(plan: EpochPlan) -> None:
    for step in range(plan.num_steps):
        rows = [len(plan.positions(step, rank)) for rank in range(plan.size)]
        shares = [plan.batch_info(step, rank) for rank in range(plan.size)]
        assert [share.num_rows for share in shares] == rows
        assert {share.max_rows for share in shares} == {max(rows)}
        assert {share.num_valid for share in shares} == {plan.num_valid(step)}
        assert {share.consumed for share in shares} == {plan.consumed(step)}
        # Valid rows stand in front, in rank order: padding follows them all.
        valid = [share.own_valid or 0 for share in shares]
        assert sum(valid) == plan.num_valid(step)
        padded = [
            row for rank in range(plan.size) for row in [1] * valid[rank] + [0] * (rows[rank] - valid[rank])
        ]
        assert padded == sorted(padded, reverse=True)
        for rank, share in enumerate(shares):
            assert share.is_last == (step + 1 == plan.num_batches(rank))


@given(planned(), st.data())
def test_what_is_left_of_an_epoch_is_planned_anew_for_any_world(plan: EpochPlan, data: st.DataObject) -> None:
    if not plan.num_steps:
        return
    stop = plan.consumed(data.draw(st.integers(0, plan.num_steps - 1)))
    rest = plan_epoch(
        plan.num_samples, data.draw(st.integers(1, 9)), data.draw(st.integers(1, 7)), start=stop
    )
    seen = [
        position
        for step in range(rest.num_steps)
        for position in [one for rank in range(rest.size) for one in rest.positions(step, rank)][
            : rest.num_valid(step)
        ]
    ]
    assert seen == list(range(stop, plan.num_samples))


def test_alone_the_last_batch_is_short_and_nothing_is_repeated() -> None:
    assert batches_of(plan_epoch(5, 2)) == [[[0, 1], [2, 3], [4]]]


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
    st.integers(1, 3),
    st.integers(2, 3),
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (3, 1), (1, 2)]),
    st.integers(0, 40),
)
def test_ranks_of_one_tensor_or_context_group_read_the_same_and_all_groups_read_everything(
    replicas: int, shards: int, tensor: int, sequence: tuple[int, int], num: int
) -> None:
    mesh = ParallelismConfig(
        dp_replicate_size=replicas,
        dp_shard_size=shards,
        tp_size=tensor,
        cp_size=sequence[0],
        sp_size=sequence[1],
    )
    places = [data_rank(mesh, rank) for rank in range(mesh.total_size)]
    size = replicas * shards
    assert {place.size for place in places} == {size}
    # Row by row, with the axes that share a batch innermost.
    together = tensor * sequence[0] * sequence[1]
    assert [place.rank for place in places] == [one for one in range(size) for _ in range(together)]
    assert {place.sharing for place in places} == {together}
    plan = plan_epoch(num, 2, size, even_batches=False)
    read = [
        position
        for place in places[::together]
        for step in range(plan.num_batches(place.rank))
        for position in plan.positions(step, place.rank)
    ]
    assert sorted(read) == list(range(num))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_of_the_mesh_reads_nothing(rank: int) -> None:
    with pytest.raises(ValueError, match=f"ranks 0 to 3, got rank {rank}"):
        data_rank(ParallelismConfig(dp_shard_size=2, tp_size=2), rank)
