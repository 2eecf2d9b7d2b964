"""Waiting with open eyes: for the others, for news of them, and no longer than agreed."""

import dataclasses
import json
import threading
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import pytest

from accelfn.comm import wait_for_everyone
from accelfn.context import (
    CallLog,
    Context,
    MessageBoard,
    PeerMonitor,
    announce_end,
    late_error,
    peer_monitor,
    publish,
    start_watchdog,
)
from accelfn.context.config import Guard
from accelfn.context.peer_monitor import print_all_stacks
from accelfn.errors import (
    Caller,
    CollectiveTimeoutError,
    MismatchError,
    MissingRankError,
    RemoteRankError,
)
from accelfn.testing import Where, run_ranks
from accelfn.testing.threads import Rendezvous


class Notes:
    """A board in a dictionary, which can say when a key was posted."""

    def __init__(self) -> None:
        self.words: dict[str, str] = {}
        self.changed = threading.Condition()
        self.board = MessageBoard(post=self.post, post_once=self.post_once, read=self.read)

    def post(self, key: str, text: str) -> None:
        with self.changed:
            self.words[key] = text
            self.changed.notify_all()

    def post_once(self, key: str, text: str) -> str:
        with self.changed:
            self.changed.notify_all()
            return self.words.setdefault(key, text)

    def read(self, key: str) -> str | None:
        with self.changed:
            return self.words.get(key)

    def wait_for(self, key: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.words.get(key), 20)


def journal_of(*calls: str, patience_s: float = 0.5) -> CallLog:
    """Make the call log of a rank that has begun these calls, and waits in the last."""
    call_log = CallLog()
    for number, call in enumerate(calls, 1):
        call_log.begin(call, f"train.py:{number} in main", call, patience_s)
    return call_log


def lookout_of(
    notes: Notes, *calls: str, rank: int = 0, size: int = 2, patience_s: float = 0.5
) -> PeerMonitor:
    call_log = journal_of(*calls, patience_s=patience_s)
    return PeerMonitor(board=notes.board, call_log=call_log, rank=rank, size=size)


def position(*calls: str, reductions: int = 0) -> str:
    """Write where a rank waits that has begun these calls."""
    now = journal_of(*calls).current
    return json.dumps([now.number, now.operation, now.site, now.chain.hex(), reductions])


def never(seconds: float) -> bool:
    threading.Event().wait(seconds)
    return False


@pytest.fixture(autouse=True)
def no_thread_stays() -> Generator[None]:
    before = set(threading.enumerate())  # such as those of models that other tests have left to the collector
    yield
    left = [thread for thread in threading.enumerate() if thread.name.startswith("accelfn")]
    for thread in (one for one in left if one not in before):
        thread.join(20)
        assert not thread.is_alive(), thread.name


# --- coming back ---------------------------------------------------------------------------------


def test_who_comes_late_is_waited_for_and_the_board_is_left_clean() -> None:
    notes, there = Notes(), threading.Event()

    def arrived(seconds: float) -> bool:
        if notes.read("at/0"):  # this rank has said where it waits
            there.set()
        return there.wait(seconds)

    lookout_of(notes, "gather", patience_s=20).wait(arrived)
    assert notes.words == {"at/0": ""}


def test_it_never_waits_longer_than_is_left() -> None:
    asked: list[float] = []

    def arrived(seconds: float) -> bool:
        asked.append(seconds)
        return never(seconds)

    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 waited 0\.3 s in call 1"):
        lookout_of(Notes(), "gather", patience_s=0.3).wait(arrived)
    assert asked[0] == 0.2
    assert all(0 < seconds < 0.11 for seconds in asked[1:])


# --- news ----------------------------------------------------------------------------------------


def fail(board: MessageBoard, call_log: CallLog) -> None:
    publish(board, call_log, 1, OSError("disk"))


def end(board: MessageBoard, call_log: CallLog) -> None:
    announce_end(board, call_log, 1)


@pytest.mark.parametrize(
    ("last_word", "kind", "said"),
    [
        (fail, RemoteRankError, "rank 1 failed: OSError: disk"),
        (end, MissingRankError, r"reduce: rank 1 has ended after gather at train\.py:1 in main"),
    ],
)
@pytest.mark.parametrize("before", [True, False])
def test_news_of_a_rank_ends_the_waiting(
    last_word: Callable[[MessageBoard, CallLog], None], kind: type[Exception], said: str, before: bool
) -> None:
    notes = Notes()

    def speak() -> None:
        if not before:
            notes.wait_for("at/0")
        last_word(notes.board, journal_of("gather"))

    other = threading.Thread(target=speak)
    other.start()
    if before:
        other.join(20)
    with pytest.raises(kind, match=said):
        lookout_of(notes, "gather", "reduce", patience_s=30).wait(never)
    other.join(20)
    assert notes.words["at/0"] == ""


def test_positions_that_were_reached_otherwise_are_a_disagreement() -> None:
    notes = Notes()
    notes.post("at/1", position("gather", "scatter"))
    with pytest.raises(MismatchError) as caught:
        lookout_of(notes, "gather", "reduce", patience_s=30).wait(never)
    assert [(row.rank, row.found, row.expected) for row in caught.value.rows] == [
        (1, "call 2: scatter at train.py:2 in main", "call 2: reduce at train.py:2 in main")
    ]
    assert caught.value.callers == (
        Caller(0, "reduce", "train.py:2 in main"),
        Caller(1, "scatter", "train.py:2 in main"),
    )
    # Told to all: whoever comes to wait raises the same.
    with pytest.raises(MismatchError) as again:
        lookout_of(notes, "gather", "scatter", rank=1, patience_s=30).wait(never)
    assert str(again.value) == str(caught.value)


@pytest.mark.parametrize("theirs", [("gather",), ("gather", "reduce"), ("gather", "reduce", "scatter")])
def test_positions_on_one_way_are_no_disagreement(theirs: tuple[str, ...]) -> None:
    notes = Notes()
    notes.post("at/1", position(*theirs))
    with pytest.raises(CollectiveTimeoutError):
        lookout_of(notes, "gather", "reduce").wait(never)


# --- giving up -----------------------------------------------------------------------------------


def test_a_timeout_names_the_missing_and_where_they_are() -> None:
    notes = Notes()
    notes.post("at/1", position("gather"))
    notes.post("at/3", position("gather", "reduce"))
    watching = lookout_of(notes, "gather", "reduce", size=5)
    with pytest.raises(CollectiveTimeoutError) as caught:
        watching.wait(never)
    assert str(caught.value).splitlines()[:4] == [
        (
            "reduce: rank 0 waited 0.5 s in call 2 at train.py:2 in main for ranks 1, 2, 4, "
            "which did not arrive."
        ),
        "  rank 1 waits in call 1, gather at train.py:1 in main",
        "  rank 2 was last seen in call 1, gather at train.py:1 in main",
        "  rank 4 was last seen in call 1, gather at train.py:1 in main",
    ]
    assert "Guard(timeout=...)" in str(caught.value)
    assert watching.call_log.over
    with pytest.raises(CollectiveTimeoutError) as there:  # the others needn't wait for as long
        lookout_of(notes, "gather", "reduce", rank=3, size=5, patience_s=30).wait(never)
    assert str(there.value) == str(caught.value)


def test_a_rank_that_was_seen_in_a_forward_pass_may_wait_in_its_backward_pass() -> None:
    after_forward = str(late_error(journal_of("forward", "gather"), 0, 1.5, [1]))
    assert "may be in its backward pass, waiting for ranks that skip theirs" in after_forward
    assert "backward" not in str(late_error(journal_of("gather", "forward"), 0, 1.5, [1]))


@pytest.mark.parametrize("blocked", ["post", "read", "post_once"])
def test_a_board_that_never_answers_does_not_keep_the_rank(
    blocked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_JOIN_S", "_BOARD_S"):
        monkeypatch.setattr(peer_monitor, name, 0.05)
    release = threading.Event()

    def block(*words: str) -> Any:
        release.wait(60)
        return None if blocked == "read" else words[-1]

    notes = Notes()
    stuck: dict[str, Any] = {blocked: block}
    board = dataclasses.replace(notes.board, **stuck)
    watching = PeerMonitor(board=board, call_log=journal_of("gather"), rank=0, size=2)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            watching.wait(never)
        except Exception as error:  # noqa: BLE001 -- it is the result
            raised.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(20)
    came_back = not waiting.is_alive()
    release.set()
    assert came_back
    assert [type(error) for error in raised] == [CollectiveTimeoutError]
    assert watching.call_log.over


# --- a lost connection ---------------------------------------------------------------------------


def test_a_lost_connection_is_explained_by_what_was_left_word_of() -> None:
    notes = Notes()
    publish(notes.board, journal_of("gather"), 1, OSError("disk"))
    assert isinstance(lookout_of(notes, "gather").explain_loss("reset"), RemoteRankError)


def test_of_two_ranks_the_silent_one_is_the_other() -> None:
    notes = Notes()
    error = lookout_of(notes, "gather", rank=1).explain_loss("Its process has ended.")
    assert isinstance(error, MissingRankError)
    assert "gather: rank 1 lost its connection to rank 0 in call 1 at train.py:1 in main" in str(error)
    assert str(error).endswith("Look at its output first. Its process has ended.")
    assert notes.read("failure")


def test_of_several_those_that_answer_are_not_the_lost() -> None:
    notes = Notes()
    for rank in (0, 3):
        notes.post(f"at/{rank}", position("gather"))
    error = lookout_of(notes, "gather", rank=1, size=4).explain_loss("Connection reset")
    assert "lost its connection to rank 2 in call 1" in str(error)


def test_a_connection_lost_to_a_rank_that_says_so_a_moment_later_is_explained() -> None:
    notes = Notes()

    def speak() -> None:
        notes.wait_for("at/1")  # the roll call
        publish(notes.board, journal_of("gather"), 2, OSError("disk"))

    other = threading.Thread(target=speak)
    other.start()
    error = lookout_of(notes, "gather", rank=1, size=4).explain_loss("Connection reset")
    other.join(20)
    assert isinstance(error, RemoteRankError)


def test_a_rank_that_has_gone_on_without_the_reduction_is_a_disagreement() -> None:
    notes = Notes()
    monitor = lookout_of(notes, "forward", patience_s=20.0)
    monitor.call_log.reducing = True
    notes.post("at/1", position("forward", "gather"))
    with pytest.raises(MismatchError) as caught:
        monitor.wait(never)
    (row,) = caught.value.rows
    assert (row.rank, row.found) == (1, "call 2: gather at train.py:2 in main")
    assert row.expected == "the backward pass of call 1: forward at train.py:1 in main"
    assert notes.read("failure")


def test_a_rank_that_has_been_through_the_reduction_has_done_its_part() -> None:
    notes = Notes()
    monitor = lookout_of(notes, "forward", patience_s=1.0)
    monitor.call_log.reducing = True
    notes.post("at/1", position("forward", "gather", reductions=1))
    with pytest.raises(CollectiveTimeoutError):
        monitor.wait(never)


def test_a_process_that_is_gone_is_not_waited_for_though_its_connections_live() -> None:
    monitor = dataclasses.replace(
        lookout_of(Notes(), "gather", size=3, patience_s=20.0), has_ended=(2).__eq__
    )
    with pytest.raises(MissingRankError, match=r"to rank 2 in call 1 .* The process of rank 2 has ended"):
        monitor.wait(never)


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
    assert "Stacks of each rank:\n--- rank 0 ---" in first
    assert "in waiting_for_the_others" in first
    assert "in busy_elsewhere" not in first
    assert "in busy_elsewhere" in second
    assert "in waiting_for_the_others" not in second
    assert printed.count("Stacks of each rank:") == 1


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
    monkeypatch.setattr(peer_monitor, "_ANSWERS_S", 0.2)
    board = board_of()
    board.post("watched/1", "yes")
    print_all_stacks(board, 0, 3)
    assert capfd.readouterr().err.splitlines()[1:] == [
        "--- rank 1 ---",
        "did not answer: it is stopped, or its process has ended",
    ]
