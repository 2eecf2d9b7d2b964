"""Before an operation is given up, the stacks of all ranks are printed."""

import threading
import time
from datetime import timedelta

import pytest

from accelfn.comm import wait_for_everyone
from accelfn.context import Context, MessageBoard, start_watchdog, watchdog
from accelfn.context.config import Guard
from accelfn.context.watchdog import print_all_stacks
from accelfn.errors import CollectiveTimeoutError
from accelfn.testing import Where, run_ranks
from accelfn.testing.rendezvous import Rendezvous

KINDS: tuple[Where, ...] = ("memory", "gloo", "processes")


def board_of() -> MessageBoard:
    return Rendezvous(1).board


def busy_elsewhere(started: threading.Event, done: threading.Event) -> None:
    """Stand on the stack of a rank that doesn't come."""
    started.set()
    done.wait(60)


@pytest.mark.parametrize("on", KINDS)
def test_a_timeout_prints_where_every_rank_is(on: Where, capfd: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()

    def work(ctx: Context) -> None:
        if ctx.rank == 1:
            busy_elsewhere(threading.Event(), done)
        else:
            waiting_for_the_others(ctx)

    def waiting_for_the_others(ctx: Context) -> None:
        try:
            wait_for_everyone(ctx)
        finally:
            done.set()

    guard = Guard(watchdog=True, timeout=timedelta(seconds=1), long_timeout=timedelta(seconds=1))
    with pytest.raises(CollectiveTimeoutError, match="rank 0 waited 1 s"):
        run_ranks(work, 2, on, guard=guard)
    printed = capfd.readouterr().err
    first, _, second = printed.partition("--- rank 1 ---")
    assert "Where each rank is:\n--- rank 0 ---" in first
    assert "in waiting_for_the_others" in first
    assert "in busy_elsewhere" not in first
    assert "in busy_elsewhere" in second
    assert "in waiting_for_the_others" not in second
    assert printed.count("Where each rank is:") == 1


def test_without_a_watchdog_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()

    def work(ctx: Context) -> None:
        if ctx.rank == 1:
            done.wait(60)
            return
        try:
            wait_for_everyone(ctx)
        finally:
            done.set()

    with pytest.raises(CollectiveTimeoutError):
        run_ranks(work, 2, guard=Guard(timeout=timedelta(seconds=0.3), long_timeout=timedelta(seconds=0.3)))
    assert capfd.readouterr().err == ""


def test_where_nobody_watches_nobody_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    board = board_of()
    print_all_stacks(board, 0, 3)
    assert capfd.readouterr().err == ""
    assert board.read("stacks") is None


def test_of_several_that_give_up_one_prints(capfd: pytest.CaptureFixture[str]) -> None:
    board = board_of()
    stop = start_watchdog(board, 0, whole_process=True)
    for rank in (0, 1):
        print_all_stacks(board, rank, 2)
    stop()
    assert capfd.readouterr().err.count("accelfn: ") == 1


def test_a_process_shows_all_its_threads_but_the_watchdogs(capfd: pytest.CaptureFixture[str]) -> None:
    board, started, done = board_of(), threading.Event(), threading.Event()
    other = threading.Thread(target=busy_elsewhere, args=(started, done), name="loader")
    other.start()
    assert started.wait(20)
    stop = start_watchdog(board, 0, whole_process=True)
    print_all_stacks(board, 0, 1)
    done.set()
    stop()
    other.join(20)
    printed = capfd.readouterr().err
    assert "thread loader:\n" in printed
    assert "in busy_elsewhere" in printed
    assert "in test_a_process_shows_all_its_threads_but_the_watchdogs" in printed
    assert "in _watch" not in printed


def test_who_does_not_answer_is_named(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "_ANSWERS_S", 0.2)
    board = board_of()
    board.post("watched/1", "yes")
    print_all_stacks(board, 0, 3)
    assert capfd.readouterr().err.splitlines()[1:] == [
        "--- rank 1 ---",
        "did not answer: it is stopped, or its process has ended",
    ]


def test_stopping_ends_the_thread() -> None:
    board = board_of()
    before = threading.active_count()
    stop = start_watchdog(board, 0, whole_process=False)
    assert threading.active_count() == before + 1
    assert board.read("watched/0") == "yes"
    stop()
    stop()
    end = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before
