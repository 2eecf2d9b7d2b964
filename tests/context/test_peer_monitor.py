"""Waiting for the others: for news of them, no longer than agreed, and with where they were last seen."""

import contextlib
import dataclasses
import json
import re
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from accelfn.comm import all_gather, gather_object, permute, wait_for_everyone
from accelfn.config import Guard
from accelfn.context import (
    CallLog,
    Context,
    MessageBoard,
    PeerMonitor,
    announce_end,
    late_error,
    peer_monitor,
)
from accelfn.errors import CollectiveTimeoutError, MismatchError, MissingRankError, RemoteRankError
from accelfn.testing import Where, run_ranks
from tests.comm.seam import failure, same_mismatch


def call_log_of(*calls: str, patience_s: float = 0.5) -> CallLog:
    """Make the call log of a rank that has begun these calls, and waits in the last."""
    call_log = CallLog()
    for number, call in enumerate(calls, 1):
        call_log.begin(call, f"train.py:{number} in main", call, patience_s)
    return call_log


def never(seconds: float) -> bool:
    threading.Event().wait(seconds)
    return False


def guard(seconds: float, **options: Any) -> Guard:
    return Guard(timeout=timedelta(seconds=seconds), long_timeout=timedelta(seconds=seconds), **options)


def test_a_timeout_names_the_missing_and_where_they_are() -> None:
    def work(ctx: Context) -> str:
        gather_object(ctx, ctx.rank)
        if ctx.rank == 1:
            threading.Event().wait(3.5)
        caught = failure(wait_for_everyone)(ctx)
        return f"{type(caught).__name__}: {caught}"

    here, _, there = run_ranks(work, 3, "processes", guard=guard(1.5), timeout_s=20)
    said = (
        r"CollectiveTimeoutError: wait_for_everyone: rank [02] waited 1\.5 s in call 2 at .* in caught for "
        r"rank 1, which did not arrive\.\n  rank 1 was last seen in call 1, gather_object at test_peer_mon"
    )
    for text in (here, there):
        assert re.match(said, text)
        assert "Guard(timeout=...)" in text


@pytest.mark.slow
def test_positions_that_were_reached_otherwise_are_a_disagreement() -> None:
    def work(ctx: Context) -> Any:
        own, order = torch.ones(2), list(range(9))
        for _ in range(52):  # from then on every other call is compared
            permute(ctx, own, order)
        if ctx.rank == 3:
            return failure(lambda ctx: all_gather(ctx, own))(ctx)
        return failure(lambda ctx: permute(ctx, own, order))(ctx)

    error = same_mismatch(run_ranks(work, 9, "processes", timeout_s=30))
    assert {caller.operation for caller in error.callers} == {"all_gather", "permute"}


def test_a_rank_that_was_seen_in_a_forward_pass_may_wait_in_its_backward_pass() -> None:
    after_forward = str(late_error(call_log_of("forward", "gather"), 0, 1.5, [1]))
    assert "may be in its backward pass, waiting for ranks that skip theirs" in after_forward
    assert "backward" not in str(late_error(call_log_of("gather", "forward"), 0, 1.5, [1]))


@pytest.mark.parametrize("gathers", [4, 5])
@pytest.mark.parametrize("has_ended", [False, True])
def test_a_rank_that_is_ahead_has_skipped_what_it_did_not_finish(has_ended: bool, gathers: int) -> None:
    """A slow network, or machine, is no error: the fifth unit comes late to rank 1 alone."""
    notes = dict[str, str]()
    board = MessageBoard(read=notes.get, post=notes.__setitem__, post_once=notes.setdefault)
    ahead, behind = (
        call_log_of(*["forward"] * (1 if has_ended else 2), patience_s=9.0),
        call_log_of("forward"),
    )
    ahead.gathers, behind.gathers, behind.inside, behind.patience_s = gathers, 4, "units in the pass of", 9.0
    start, done = time.monotonic(), threading.Event()
    if has_ended:
        announce_end(board, ahead, 0)
        done.set()
    other = PeerMonitor(board=board, call_log=ahead, rank=0, size=2)

    def wait_there() -> None:
        with contextlib.suppress(MismatchError):
            other.wait(done.wait)

    thread = threading.Thread(target=wait_there)
    thread.start()
    try:
        error = MissingRankError if has_ended else MismatchError
        advice = "ended" if has_ended else r"add 0 \* output\.sum\(\) to the loss"
        with pytest.raises(error, match=advice) if gathers == 4 else contextlib.nullcontext():
            PeerMonitor(board=board, call_log=behind, rank=1, size=2).wait(
                lambda seconds: never(seconds) or time.monotonic() - start > 2.0
            )
    finally:
        done.set()
        thread.join()


def test_who_waits_long_asks_seldom_and_hears_of_errors_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_POLL_S", "_NEWS_S", "_PLACES_S"):
        monkeypatch.setattr(peer_monitor, name, getattr(peer_monitor, name) / 50)
    notes, asked = dict[str, str](), list[float]()

    def read(key: str) -> str | None:
        asked.append(time.monotonic())
        return notes.get(key)

    def await_error(seconds: float) -> bool:
        if not notes.get("failure") and time.monotonic() - start > 1.0:
            notes["failure"] = json.dumps(
                {"rank": 5, "cause": "KeyError", "message": "x", "doing": "", "traceback": "", "details": []}
            )
            notes["news"] = "yes"
        return never(seconds)

    board = MessageBoard(read=read, post=lambda key, text: None)
    monitor = PeerMonitor(board=board, call_log=call_log_of("gather", patience_s=9.0), rank=0, size=1000)
    start = time.monotonic()
    with pytest.raises(RemoteRankError, match="rank 5 failed: KeyError: x"):
        monitor.wait(await_error)
    late = [at for at in asked if 0.5 < at - start < 1.0]
    assert len(late) < 1.4 * 25  # each of these 25 times stands for a second


@pytest.mark.parametrize("blocked", ["post", "read", "post_once"])
def test_a_board_that_never_answers_keeps_no_rank(blocked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_JOIN_S", "_BOARD_S"):
        monkeypatch.setattr(peer_monitor, name, 0.05)
    release = threading.Event()

    def block(*words: str) -> Any:
        release.wait(60)
        return None if blocked == "read" else words[-1]

    stuck: dict[str, Any] = {blocked: block}
    board = dataclasses.replace(MessageBoard(), **stuck)
    monitor = PeerMonitor(board=board, call_log=call_log_of("gather"), rank=0, size=2)
    with pytest.raises(CollectiveTimeoutError), contextlib.closing(Releasing(release)):
        monitor.wait(never)
    assert monitor.call_log.over


class Releasing:
    def __init__(self, event: threading.Event) -> None:
        self.close = event.set


def busy_elsewhere(on: Where, done: threading.Event) -> None:
    """Stand on the stack of a rank that doesn't come."""
    if on == "processes":
        time.sleep(3600)  # until it is killed
    done.wait(60)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_ranks_that_wait_and_the_one_that_does_not_come_print_where_they_are(
    on: Where, capfd: pytest.CaptureFixture[str]
) -> None:
    done = threading.Event()

    def work(ctx: Context) -> None:
        if ctx.rank == 1:
            busy_elsewhere(on, done)
        else:
            waiting_for_the_others(ctx)

    def waiting_for_the_others(ctx: Context) -> None:
        try:
            wait_for_everyone(ctx)
        finally:
            done.set()

    with pytest.raises(CollectiveTimeoutError, match="rank 0 waited 1 s"):
        run_ranks(work, 2, on, guard=guard(1, watchdog=True))
    printed = capfd.readouterr().err
    assert "has begun no operation across ranks for 1 s. Its stacks:\n" in printed
    assert "in waiting_for_the_others" in printed
    assert "in busy_elsewhere" in printed
