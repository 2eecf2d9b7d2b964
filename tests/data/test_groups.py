import random
import weakref
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.data import EpochPlan, plan_epoch
from accelfn.data.groups import Piece, split_stream

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


def shared(rows: int, size: int = 1, *, even: bool = False, drop_last: bool = False) -> EpochPlan:
    """Plan a stream, whose length nobody knows."""
    return EpochPlan(num_samples=0, rank_batch=rows, size=size, even=even, drop_last=drop_last)


def contents(number: int, plan: EpochPlan, rank: int = 0, start: int = 0) -> Batches:
    return [piece.content for piece in split_stream(iter(range(number)), plan, rank, start) if piece.num_rows]


@pytest.mark.parametrize(("number", "drop_last", "first", "second"), TWO_RANKS)
def test_a_short_last_group_is_completed_from_the_start(
    number: int, drop_last: bool, first: Batches, second: Batches
) -> None:
    found = [contents(number, shared(2, 2, even=True, drop_last=drop_last), rank) for rank in (0, 1)]
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
        stream = shared(rows, size, even=plan.even, drop_last=drop_last)
        steps = range(plan.num_batches(rank))
        assert contents(number, stream, rank, start) == [plan.positions(step, rank) for step in steps]
        pieces = list(split_stream(iter(range(number)), stream, rank, start))
        assert [piece.num_valid for piece in pieces] == [plan.num_valid(step) for step in range(len(pieces))]
        assert all(piece.at_end == (piece.num_valid < plan.global_batch) for piece in pieces)
        assert [piece.key for piece in pieces if piece.num_rows] == [
            (rank, start + step * plan.global_batch) for step in steps
        ]


def test_a_piece_is_given_as_soon_as_its_group_is_complete() -> None:
    def ends_badly() -> Iterator[int]:
        yield from range(4)
        raise OSError("the line is dead")

    pieces = split_stream(ends_badly(), shared(1, 2, even=True), 1)
    assert [piece.content for piece in islice(pieces, 2)] == [[1], [3]]
    with pytest.raises(OSError, match="the line is dead"):
        next(pieces)


def test_no_more_is_read_than_the_group_at_hand() -> None:
    source = iter(range(100))
    pieces = split_stream(source, shared(2, 3), 0)
    next(pieces)
    assert next(source) == 6


def test_of_a_group_without_a_piece_for_this_rank_the_length_is_told() -> None:
    (piece,) = split_stream(iter([7]), shared(1, 2), 1)
    assert piece == Piece(None, 0, 1, True, (1, 0))


def test_what_a_collate_function_takes_out_of_a_sample_is_there_when_it_is_repeated() -> None:
    plan = shared(2, 2, even=True)
    pieces = split_stream(iter([{"label": number} for number in range(5)]), plan, 0)
    found = [[sample.pop("label") for sample in piece.content] for piece in pieces]
    assert found == [[0, 1], [4, 0]]
    (lone,) = split_stream(iter([[3]]), plan, 0)
    assert [sample.pop() for sample in lone.content] == [3, 3]


class Sample:
    pass


def remembered(number: int, samples: list[weakref.ref[Sample]]) -> Iterator[Sample]:
    """Yield so many samples, and note them without keeping them alive."""
    for _ in range(number):
        sample = Sample()
        samples.append(weakref.ref(sample))
        yield sample
        del sample


@given(st.integers(1, 5), st.integers(1, 4), st.booleans(), st.booleans())
def test_only_what_may_be_repeated_is_held(rows: int, size: int, even: bool, drop_last: bool) -> None:
    for rank in range(size):
        samples: list[weakref.ref[Sample]] = []
        stream = remembered(3 * rows * size, samples)
        held: list[int] = []
        for _ in split_stream(stream, shared(rows, size, even=even, drop_last=drop_last), rank):
            held = [number for number, one in enumerate(samples) if one() is not None]
        needed = (rank + 1) * rows - 1 if even and not drop_last else 0
        assert [number for number in held if number < rows * size] == list(range(needed))


@pytest.mark.parametrize("even", [True, False])
def test_a_start_behind_the_end_is_refused(even: bool) -> None:
    with pytest.raises(ValueError, match="can't resume at sample 9: the stream ended after 4"):
        next(split_stream(iter(range(4)), shared(2, 2, even=even), 1, start=9))
    assert contents(4, shared(2), start=4) == []


def test_a_start_reads_the_stream_from_its_start() -> None:
    """Whatever the stream draws while it is read, it draws again."""

    def shuffled() -> Iterator[int]:
        generator = random.Random(3)
        for _ in range(20):
            yield generator.randrange(1000)

    plan = shared(2, 2, even=True)
    whole = [piece.content for piece in split_stream(shuffled(), plan, 1)]
    assert [piece.content for piece in split_stream(shuffled(), plan, 1, start=8)] == whole[2:]


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

    assert [piece.content for piece in split_stream(Ends(), shared(2), 0)] == [[1, 2], [3]]
