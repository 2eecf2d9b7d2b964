import threading
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import CollectiveTimeoutError, MismatchError, MissingRankError, RemoteRankError
from accelfn.testing.meeting import Meeting


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work`` on threads; what it raises is its result."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 -- it is the result
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@given(st.integers(1, 5), st.integers(1, 6))
def test_every_round_hands_over_what_each_brought(size: int, rounds: int) -> None:
    meeting = Meeting(size, 10)

    def work(rank: int) -> Any:
        return [meeting.meet(rank, ("round", number), (number, rank)) for number in range(rounds)]

    expected = [[(number, rank) for rank in range(size)] for number in range(rounds)]
    assert together(size, work) == [expected] * size


def test_other_calls_are_a_mismatch_for_all() -> None:
    meeting = Meeting(3, 10)
    errors = together(3, lambda rank: meeting.meet(rank, ("gather" if rank else "reduce", 7), None))
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert len({error.rows for error in errors}) == 1
    assert [(row.rank, row.found, row.expected) for row in errors[0].rows] == [(0, "reduce 7", "gather 7")]


def test_who_waits_hears_why_nobody_comes() -> None:
    for how, error, kind in (
        ("returned", None, MissingRankError),
        ("died", None, MissingRankError),
        ("raised", OSError("disk"), RemoteRankError),
    ):
        meeting = Meeting(2, 10)

        def work(rank: int, meeting: Meeting = meeting, how: str = how, error: Any = error) -> Any:
            return meeting.meet(0, ("gather",), 1) if rank == 0 else meeting.leave(1, how, error)

        here, _ = together(2, work)
        assert type(here) is kind
        assert (
            "disk" in str(here) if error else f"rank 1 {how} while rank 0 waits for it in gather" in str(here)
        )


def test_a_rank_may_leave_after_it_has_come() -> None:
    meeting = Meeting(2, 10)

    def work(rank: int) -> Any:
        result = meeting.meet(rank, ("last",), rank)
        meeting.leave(rank, "returned")
        return result

    assert together(2, work) == [[0, 1]] * 2


def test_who_waits_too_long_names_the_missing() -> None:
    meeting = Meeting(3, 0.05)
    error = together(1, lambda rank: meeting.meet(rank, ("gather",), None))[0]
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 0 waited 0.05 s in gather for rank(s) [1, 2]" in str(error)
