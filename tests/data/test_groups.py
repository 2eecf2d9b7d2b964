"""What of a stream is read and held while ranks share it out."""

import weakref
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from accelfn.data import EpochPlan
from accelfn.data.groups import Piece, split_stream


def shared(rows: int, size: int = 1, *, even: bool = False, drop_last: bool = False) -> EpochPlan:
    """Plan a stream, whose length nobody knows."""
    return EpochPlan(num_samples=0, rank_batch=rows, size=size, even=even, drop_last=drop_last)


def test_no_more_is_read_than_the_group_at_hand_and_nothing_after_the_end() -> None:
    source = iter(range(100))
    next(split_stream(source, shared(2, 3), 0))
    assert next(source) == 6
    (piece,) = split_stream(iter([7]), shared(1, 2), 1)
    assert piece == Piece(None, 0, 1, True, (1, 0))

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
            held = [number for number, sample in enumerate(samples) if sample() is not None]
        needed = (rank + 1) * rows - 1 if even and not drop_last else 0
        assert [number for number in held if number < rows * size] == list(range(needed))
