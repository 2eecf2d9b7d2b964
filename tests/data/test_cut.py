import random
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.data import plan_epoch
from accelfn.data.groups import Piece, StreamPlan, cut_stream

Batches = list[list[int]]

# Two ranks with two rows each, as Accelerate 1.15 deals out the same streams.
TWO_RANKS: tuple[tuple[int, bool, Batches, Batches], ...] = (
    (11, False, [[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]),
    (9, False, [[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]),
    (3, False, [[0, 1]], [[2, 0]]),
    (1, False, [[0, 0]], [[0, 0]]),
    (0, False, [], []),
    (11, True, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (9, True, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (3, True, [], []),
)


def contents(number: int, cut: StreamPlan, start: int = 0) -> Batches:
    return [piece.content for piece in cut_stream(iter(range(number)), cut, start) if piece.num_rows]


@pytest.mark.parametrize(("number", "drop_last", "first", "second"), TWO_RANKS)
def test_a_short_last_group_is_completed_from_the_start(
    number: int, drop_last: bool, first: Batches, second: Batches
) -> None:
    found = [
        contents(number, StreamPlan(rows=2, rank=rank, size=2, even=True, drop_last=drop_last))
        for rank in (0, 1)
    ]
    assert found == [first, second]


@given(
    st.integers(0, 200),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(0, 200),
)
def test_a_stream_is_dealt_out_as_a_dataset_of_its_length(
    number: int, rows: int, size: int, even: bool, drop_last: bool, start: int
) -> None:
    start = min(start, number)
    plan = plan_epoch(number, rows, size, even_batches=even, drop_last=drop_last, start=start)
    for rank in range(size):
        cut = StreamPlan(rows=rows, rank=rank, size=size, even=plan.even, drop_last=drop_last)
        steps = range(plan.num_batches(rank))
        assert contents(number, cut, start) == [plan.positions(step, rank) for step in steps]
        pieces = list(cut_stream(iter(range(number)), cut, start))
        assert [piece.num_valid for piece in pieces] == [plan.num_valid(step) for step in range(len(pieces))]
        assert all(piece.at_end == (piece.num_valid < cut.group) for piece in pieces)
        assert [piece.key for piece in pieces if piece.num_rows] == [
            (rank, start + step * cut.group) for step in steps
        ]


def test_a_piece_is_given_as_soon_as_its_group_is_complete() -> None:
    def ends_badly() -> Iterator[int]:
        yield from range(4)
        raise OSError("the line is dead")

    pieces = cut_stream(ends_badly(), StreamPlan(rows=1, rank=1, size=2, even=True))
    assert [piece.content for piece in islice(pieces, 2)] == [[1], [3]]
    with pytest.raises(OSError, match="the line is dead"):
        next(pieces)


def test_no_more_is_read_than_the_group_at_hand() -> None:
    source = iter(range(100))
    pieces = cut_stream(source, StreamPlan(rows=2, size=3))
    next(pieces)
    assert next(source) == 6


def test_of_a_group_without_a_piece_for_this_rank_the_length_is_told() -> None:
    (piece,) = cut_stream(iter([7]), StreamPlan(rows=1, rank=1, size=2))
    assert piece == Piece(None, 0, 1, True, (1, 0))


def test_what_a_collate_function_takes_out_of_a_sample_is_there_when_it_is_repeated() -> None:
    cut = StreamPlan(rows=2, rank=0, size=2, even=True)
    pieces = cut_stream(iter([{"label": number} for number in range(5)]), cut)
    found = [[sample.pop("label") for sample in piece.content] for piece in pieces]
    assert found == [[0, 1], [4, 0]]
    (lone,) = cut_stream(iter([[3]]), StreamPlan(rows=2, rank=0, size=2, even=True))
    assert [sample.pop() for sample in lone.content] == [3, 3]


def test_only_what_may_be_repeated_is_held() -> None:
    assert [StreamPlan(rows=3, rank=rank, size=3, even=True).num_kept for rank in range(3)] == [2, 5, 8]
    assert StreamPlan(rows=3, rank=2, size=3, even=True, drop_last=True).num_kept == 0
    assert StreamPlan(rows=3, rank=2, size=3).num_kept == 0


@pytest.mark.parametrize("even", [True, False])
def test_a_start_behind_the_end_is_refused(even: bool) -> None:
    with pytest.raises(ValueError, match="go on at sample 9, and the stream ended after 4"):
        next(cut_stream(iter(range(4)), StreamPlan(rows=2, rank=1, size=2, even=even), start=9))
    assert contents(4, StreamPlan(rows=2), start=4) == []


def test_a_start_reads_the_stream_from_its_start() -> None:
    """Whatever the stream draws while it is read, it draws again."""

    def shuffled() -> Iterator[int]:
        generator = random.Random(3)
        for _ in range(20):
            yield generator.randrange(1000)

    cut = StreamPlan(rows=2, rank=1, size=2, even=True)
    whole = [piece.content for piece in cut_stream(shuffled(), cut)]
    assert [piece.content for piece in cut_stream(shuffled(), cut, start=8)] == whole[2:]


def test_a_source_that_has_ended_is_not_asked_again() -> None:
    class Ends:
        asked = 0

        def __iter__(self) -> Iterator[int]:
            return self

        def __next__(self) -> int:
            self.asked += 1
            if self.asked > 3:
                assert self.asked == 4
                raise StopIteration
            return self.asked

    assert [piece.content for piece in cut_stream(Ends(), StreamPlan(rows=2))] == [[1, 2], [3]]
