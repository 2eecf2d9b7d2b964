import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import CollectiveTimeoutError, MismatchError, MissingRankError, RemoteRankError
from accelfn.testing.meeting import Meeting


def together(meeting: Meeting, size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work`` on threads, each from its first turn on; what it raises is its result."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        meeting.enter(rank)
        how = "returned"
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 -- it is the result
            how, results[rank] = "raised", error
        if results[rank] != "left":
            meeting.leave(rank, how, results[rank] if how == "raised" else None)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    meeting.open()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


@given(st.integers(1, 5), st.integers(1, 6))
def test_every_round_hands_over_what_each_brought(size: int, rounds: int) -> None:
    meeting = Meeting(size, 10)

    def work(rank: int) -> Any:
        return [meeting.meet(rank, ("round", number), (number, rank)) for number in range(rounds)]

    expected = [[(number, rank) for rank in range(size)] for number in range(rounds)]
    assert together(meeting, size, work) == [expected] * size


def test_other_calls_are_a_mismatch_for_all() -> None:
    meeting = Meeting(3, 10)
    errors = together(meeting, 3, lambda rank: meeting.meet(rank, ("gather" if rank else "reduce", 7), None))
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
            if rank == 0:
                return meeting.meet(0, ("gather",), 1)
            meeting.leave(1, how, error)
            return "left"

        here, _ = together(meeting, 2, work)
        assert type(here) is kind
        assert (
            "disk" in str(here) if error else f"rank 1 {how} while rank 0 waits for it in gather" in str(here)
        )


def test_a_rank_may_leave_after_it_has_come() -> None:
    meeting = Meeting(2, 10)

    def work(rank: int) -> Any:
        return meeting.meet(rank, ("last",), rank)

    assert together(meeting, 2, work) == [[0, 1]] * 2


def test_who_waits_too_long_names_the_missing() -> None:
    meeting = Meeting(3, 0.05)
    error = together(meeting, 1, lambda rank: meeting.meet(rank, ("gather",), None))[0]
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 0 waited 0.05 s in gather for rank(s) [1, 2]" in str(error)


@given(st.integers(1, 4), st.integers(0, 3))
def test_one_rank_runs_at_a_time_and_always_in_the_same_order(size: int, rounds: int) -> None:
    def run() -> list[tuple[int, int]]:
        meeting = Meeting(size, 10)
        log: list[tuple[int, int]] = []

        def work(rank: int) -> None:
            for number in range(rounds + 1):
                log.append((number, rank))
                time.sleep(0)  # gives way to any other thread that is free to run
                log.append((number, rank))
                if number < rounds:
                    meeting.meet(rank, ("round",), None)

        assert together(meeting, size, work) == [None] * size
        return log

    log = run()
    assert log[::2] == log[1::2], "a rank ran while another one had its turn"
    assert log == run()


def test_a_rank_that_was_told_of_another_may_go_on_alone() -> None:
    meeting = Meeting(3, 10)

    def work(rank: int) -> Any:
        if rank == 1:
            raise OSError("disk")
        for _ in range(2):
            with pytest.raises(RemoteRankError, match="rank 1 failed: OSError: disk"):
                meeting.meet(rank, ("gather",), None)
        return "went on"

    assert together(meeting, 3, work)[::2] == ["went on"] * 2
