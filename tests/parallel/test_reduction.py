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
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accelfn as af
from accelfn import Context, DistributedDataParallelKwargs
from accelfn.context.config import Guard
from accelfn.testing import run_ranks
from tests.seen import Seen, look

PATIENCE_S = 20.0


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 300), nn.Linear(300, 3))


def batch(ctx: Context) -> torch.Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(ctx.rank))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [item.grad.clone() for item in model.parameters() if item.grad is not None]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 1},
]


@pytest.mark.parametrize("size", [2, 3])
def test_gradients_are_those_of_torch_bit_by_bit(size: int) -> None:
    def work(ctx: Context) -> list[bool]:
        return [is_equal(ctx, options) for options in OPTIONS]

    def is_equal(ctx: Context, options: dict[str, Any]) -> bool:
        before = ctx.collectives.call_log.reductions
        ddp = DistributedDataParallelKwargs(**options)
        ours = af.prepare_model(ctx.replace(kwargs_handlers=[ddp]), network())
        theirs = DistributedDataParallel(network(), **options)
        for _ in range(3):
            for model in (ours, theirs):
                model.zero_grad()
                model(batch(ctx)).square().sum().backward()
            if not all(map(torch.equal, gradients(ours), gradients(theirs))):
                return False
        own = ctx.collectives.call_log.reductions - before
        return own == (0 if options.get("static_graph") else 3)

    assert run_ranks(work, size, "processes") == [[True] * len(OPTIONS)] * size


def test_a_pass_that_failed_leaves_nothing_behind() -> None:
    def fail(grad: torch.Tensor) -> None:
        raise OSError("a hook of the user's")

    def work(ctx: Context) -> list[float]:
        model = af.prepare_model(ctx, nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)))
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
        first = next(model.parameters())
        handle = cast("Any", first).register_hook(fail)
        with pytest.raises(OSError, match="a hook of the user's"):
            model(torch.ones(1, 1)).sum().backward()
        handle.remove()
        return [float(ctx.rank)]

    assert run_ranks(work, 2, "processes", timeout_s=PATIENCE_S) == [[0.0], [1.0]]


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


def test_without_a_guard_torch_reduces_by_itself() -> None:
    def work(ctx: Context) -> int:
        loop(ctx, lambda number: False)
        return ctx.collectives.call_log.reductions

    assert run_ranks(work, 2, "processes", guard="off") == [0, 0]
