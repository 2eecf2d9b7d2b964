"""Gradients are reduced as torch reduces them, and who waits for them hears of the others."""

# torch leaves backward, hooks and collectives partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import Guard
from accelfn.testing import run_ranks
from tests.seen import Seen, look

PATIENCE_S = 20.0


def batch(ctx: Context) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(ctx.rank))


def loop(ctx: Context, happens: Callable[[int], bool]) -> None:
    """Train; where ``happens`` says so, a step ends before its backward pass."""
    model = af.prepare_model(ctx, nn.Linear(7, 3))
    for number in range(5):
        loss = model(batch(ctx)).sum()
        if not happens(number):
            loss.backward()


@pytest.mark.parametrize(("size", "last"), [(2, False), (3, True)], ids=["amid", "at the end"])
def test_a_backward_pass_that_one_rank_leaves_out_is_an_error_of_all(size: int, last: bool) -> None:
    def work(ctx: Context) -> None:
        loop(ctx, lambda number: ctx.rank == 1 and number == (4 if last else 3))
        if last:
            af.gather(ctx, torch.ones(1))

    seen = run_ranks(lambda ctx: look(lambda: work(ctx)), size, "processes", timeout_s=PATIENCE_S)
    assert {one.error for one in seen} == {"MismatchError"}
    assert len({one.text for one in seen}) == 1
    assert "the backward pass of call " in seen[0].text


def test_a_rank_that_ends_before_its_backward_pass_is_missed() -> None:
    def work(ctx: Context) -> None:
        loop(ctx, lambda number: number == 4 and ctx.rank == 1)

    here, there = run_ranks(lambda ctx: look(lambda: work(ctx)), 2, "processes", timeout_s=PATIENCE_S)
    assert (here.error, there.error) == ("MissingRankError", "")
    assert "rank 1 has ended after forward" in here.text


def test_one_that_fails_and_lingers_is_heard_of_in_the_backward_pass(tmp_path: Path) -> None:
    heard = tmp_path / "heard"

    def work(ctx: Context) -> Any:
        def happens(number: int) -> bool:
            if ctx.rank == 1 and number == 3:
                try:
                    with af.failing_together(ctx, "a step"):
                        raise OSError("the disk is full")
                except OSError:
                    deadline = time.monotonic() + PATIENCE_S / 2
                    while not heard.exists() and time.monotonic() < deadline:
                        time.sleep(0.05)
                    lingered.append(heard.exists())  # while this rank is still there
                    raise
            return False

        lingered: list[bool] = []
        seen = look(lambda: loop(ctx, happens))
        heard.touch()
        return seen.error, seen.text, lingered

    (error, text, _), (other, _, lingered) = run_ranks(work, 2, "processes", timeout_s=PATIENCE_S)
    assert (error, other) == ("RemoteRankError", "OSError")
    assert "rank 1 failed in a step: OSError: the disk is full" in text
    assert lingered == [True]


@pytest.mark.slow
def test_a_backward_pass_gives_up_after_the_guards_timeout_and_names_who_is_missing() -> None:
    def work(ctx: Context) -> Seen:
        def happens(number: int) -> bool:
            if ctx.rank == 1 and number == 3:
                time.sleep(4.0)
            return False

        return look(lambda: loop(ctx, happens))

    guard = Guard(timeout=timedelta(seconds=1))
    seen, _ = run_ranks(work, 2, "processes", timeout_s=PATIENCE_S, guard=guard)
    assert seen.error == "CollectiveTimeoutError"
    assert "rank 0 waited 1 s in call 5" in seen.text
    assert "for rank 1, which did not arrive" in seen.text


def test_a_killed_rank_whose_children_hold_its_connections_is_missed(tmp_path: Path) -> None:
    def work(ctx: Context) -> None:
        def happens(number: int) -> bool:
            if ctx.rank == 1 and number == 3:
                if os.fork() == 0:  # as the worker of a data loader, which has its parent's sockets
                    time.sleep(8.0)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        seen = look(lambda: loop(ctx, happens))
        (tmp_path / "seen").write_text(json.dumps(seen))

    with pytest.raises(Exception, match="rank 1"):
        run_ranks(work, 2, "processes", timeout_s=PATIENCE_S)
    error, text = json.loads((tmp_path / "seen").read_text())
    assert error == "MissingRankError"
    assert "The process of rank 1 has ended." in text
