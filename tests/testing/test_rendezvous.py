import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import CallLog, MessageBoard, announce_end, publish
from accelfn.errors import CollectiveTimeoutError, MismatchError, MissingRankError, RemoteRankError
from accelfn.testing.threads import Rendezvous


def together(rendezvous: Rendezvous, size: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work`` on threads, each from its first turn on; what it raises is its result."""
    results: list[Any] = [None] * size

    def one(rank: int) -> None:
        rendezvous.enter(rank)
        how = "returned"
        try:
            results[rank] = work(rank)
        except Exception as error:  # noqa: BLE001 -- it is the result
            how, results[rank] = "failed", error
        if results[rank] != "left":
            rendezvous.leave(rank, how)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    rendezvous.open()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


def in_operation(operation: str = "gather", patience_s: float = 10.0) -> CallLog:
    """Make the call log of a rank in its second operation."""
    call_log = CallLog()
    call_log.begin("scatter", "train.py:6 in main", "", patience_s)
    call_log.begin(operation, "train.py:7 in main", "", patience_s)
    return call_log


@given(st.integers(1, 5), st.integers(1, 6))
def test_every_round_hands_over_what_each_brought(size: int, rounds: int) -> None:
    rendezvous = Rendezvous(size)

    def work(rank: int) -> Any:
        call_log = in_operation()
        return [
            rendezvous.meet(rank, f"round {number}", (number, rank), call_log) for number in range(rounds)
        ]

    expected = [[(number, rank) for rank in range(size)] for number in range(rounds)]
    assert together(rendezvous, size, work) == [expected] * size


def test_other_calls_are_a_mismatch_for_all() -> None:
    rendezvous = Rendezvous(3)
    errors = together(
        rendezvous,
        3,
        lambda rank: rendezvous.meet(rank, "gather" if rank else "reduce", None, in_operation()),
    )
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert len({error.rows for error in errors}) == 1
    assert [(row.rank, row.found, row.expected) for row in errors[0].rows] == [(0, "reduce", "gather")]


def end(board: MessageBoard, call_log: CallLog, rank: int) -> None:
    announce_end(board, call_log, rank)


def fail(board: MessageBoard, call_log: CallLog, rank: int) -> None:
    publish(board, call_log, rank, OSError("disk"))


def say_nothing(board: MessageBoard, call_log: CallLog, rank: int) -> None:
    del board, call_log, rank


@pytest.mark.parametrize(
    ("how", "last_words", "kind", "said"),
    [
        ("returned", end, MissingRankError, "rank {} has ended after scatter at train.py:6 in main"),
        (
            "died",
            say_nothing,
            MissingRankError,
            "gather: rank {} died while rank {} waits for it in call 2 at",
        ),
        ("failed", fail, RemoteRankError, "rank {} failed: OSError: disk"),
    ],
)
@pytest.mark.parametrize("leaver", [0, 1])
def test_who_waits_hears_why_nobody_comes(
    how: str, last_words: Any, kind: type[Exception], said: str, leaver: int
) -> None:
    rendezvous = Rendezvous(2)

    def work(rank: int) -> Any:
        # In rank order: so the other one sees rank 1 go, and finds rank 0 gone.
        if rank != leaver:
            return rendezvous.meet(rank, "gather", 1, in_operation())
        before = CallLog()
        before.begin("scatter", "train.py:6 in main", "", 1)
        last_words(rendezvous.board, before, rank)
        rendezvous.leave(rank, how)
        return "left"

    error = together(rendezvous, 2, work)[1 - leaver]
    assert type(error) is kind
    assert said.format(leaver, 1 - leaver) in str(error)


def test_a_rank_that_has_failed_frees_those_that_wait_before_it_ends() -> None:
    rendezvous = Rendezvous(2)
    told = threading.Event()

    def work(rank: int) -> Any:
        if rank == 0:
            try:
                return rendezvous.meet(0, "gather", None, in_operation())
            finally:
                told.set()
        publish(rendezvous.board, in_operation(), 1, OSError("disk"))
        return told.wait(10)  # still at work, and the other one has heard

    here, there = together(rendezvous, 2, work)
    assert there is True
    assert isinstance(here, RemoteRankError)


def test_a_rank_may_leave_after_it_has_come() -> None:
    rendezvous = Rendezvous(2)

    def work(rank: int) -> Any:
        return rendezvous.meet(rank, "last", rank, in_operation())

    assert together(rendezvous, 2, work) == [[0, 1]] * 2


def test_who_waits_too_long_names_the_missing() -> None:
    rendezvous = Rendezvous(3)
    error = together(
        rendezvous, 1, lambda rank: rendezvous.meet(rank, "gather", None, in_operation(patience_s=0.05))
    )[0]
    assert isinstance(error, CollectiveTimeoutError)
    # Rank 1 has the turn; rank 2 only waits for it.
    assert "rank 0 waited 0.05 s in call 2 at train.py:7 in main for rank 1," in str(error)


def test_the_board_is_one_for_all_ranks() -> None:
    board = Rendezvous(2).board
    assert board.read("a") is None
    board.post("a", "1")
    board.post("a", "2")
    assert (board.read("a"), board.post_once("a", "3"), board.post_once("b", "4")) == ("2", "2", "4")
    assert (board.post_once("b", "5"), board.read("b")) == ("4", "4")


@given(st.integers(1, 4), st.integers(0, 3))
def test_one_rank_runs_at_a_time_and_always_in_the_same_order(size: int, rounds: int) -> None:
    def run() -> list[tuple[int, int]]:
        rendezvous = Rendezvous(size)
        call_log = in_operation()
        log: list[tuple[int, int]] = []

        def work(rank: int) -> None:
            for number in range(rounds + 1):
                log.append((number, rank))
                time.sleep(0)  # gives way to any other thread that is free to run
                log.append((number, rank))
                if number < rounds:
                    rendezvous.meet(rank, "round", None, call_log)

        assert together(rendezvous, size, work) == [None] * size
        return log

    log = run()
    assert log[::2] == log[1::2], "a rank ran while another one had its turn"
    assert log == run()


def test_a_rank_that_was_told_of_another_may_go_on_alone() -> None:
    rendezvous = Rendezvous(3)

    def work(rank: int) -> Any:
        if rank == 1:
            error = OSError("disk")
            publish(rendezvous.board, in_operation(), 1, error)
            raise error
        for _ in range(2):
            with pytest.raises(RemoteRankError, match="rank 1 failed: OSError: disk"):
                rendezvous.meet(rank, "gather", None, in_operation())
        return "went on"

    assert together(rendezvous, 3, work)[::2] == ["went on"] * 2
