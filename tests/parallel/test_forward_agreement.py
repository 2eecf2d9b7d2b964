"""Ranks agree on each forward pass of a replicated model, and hear of it before gradients are reduced."""

# torch leaves backward and hooks partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import DistributedDataParallelKwargs
from accelfn.context import StartedAllGather
from accelfn.parallel.handle import syncing
from accelfn.testing import Where, run_ranks
from tests.seen import Seen, look

WORLDS: tuple[Where, ...] = ("memory", "processes")
# Long enough that an error found by waiting it out would be a timeout and not the one that is expected.
PATIENCE_S = 20.0
# DistributedDataParallel may order its buckets anew in the second pass; each until then is checked at once.
WARM = 2


def batch(ctx: Context) -> torch.Tensor:
    return torch.full((2, 3), ctx.rank + 1.0)


def listed(tensor: torch.Tensor) -> list[float]:
    return [float(number) for number in tensor.detach().flatten()]


def step(ctx: Context, model: nn.Module, times: int = 1) -> None:
    for _ in range(times):
        model(batch(ctx)).sum().backward()


def with_ddp(ctx: Context, **options: Any) -> Context:
    return ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(**options)])


class Counted:
    """A context whose exchanges are counted."""

    def __init__(self, ctx: Context) -> None:
        self.count = 0
        seam = ctx.collectives
        start = seam.start_all_gather_bytes

        def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
            self.count += 1
            return seam.all_gather_bytes(message)

        def start_all_gather_bytes(message: torch.Tensor) -> StartedAllGather:
            assert start is not None
            self.count += 1
            return start(message)

        counted = dataclasses.replace(
            seam,
            all_gather_bytes=all_gather_bytes,
            start_all_gather_bytes=None if start is None else start_all_gather_bytes,
        )
        self.ctx = dataclasses.replace(ctx, collectives=counted)

    def during(self, action: Callable[[], object]) -> int:
        before = self.count
        action()
        return self.count - before


# --- ranks that disagree -------------------------------------------------------------------------


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("passes", [0, WARM + 1])
def test_another_operation_for_a_forward_pass_is_one_error_and_no_gradient(on: Where, passes: int) -> None:
    def run(ctx: Context) -> tuple[Seen, bool, list[bool], list[float]]:
        model = af.prepare(ctx, nn.Linear(3, 1))
        step(ctx, model, passes)
        model.zero_grad()
        ahead: list[bool] = []

        def train() -> None:
            result = model(batch(ctx))
            ahead.append(True)
            result.sum().backward()

        seen = look(train if ctx.rank != 1 else lambda: af.gather(ctx, batch(ctx)))
        untouched = all(parameter.grad is None for parameter in model.parameters())
        step(ctx, model)  # all have heard of it, so all can go on
        bias = next(value.grad for name, value in model.named_parameters() if name.endswith("bias"))
        assert bias is not None
        return seen, untouched, ahead, listed(bias)

    found = run_ranks(run, 3, on, timeout_s=PATIENCE_S)
    assert {seen.error for seen, *_ in found} == {"MismatchError"}
    assert len({seen.text for seen, *_ in found}) == 1
    for part in ("gather", "forward", "test_forward_agreement.py:"):
        assert part in found[0][0].text
    late = on == "processes" and passes > WARM
    for rank, (_, untouched, ahead, bias) in enumerate(found):
        assert untouched
        assert ahead == ([True] if late and rank != 1 else [])
        assert bias == [2.0]


def meets(rank: int, action: Callable[[Context], object]) -> Callable[[Context], Seen]:
    """Let ranks but ``rank`` train one step with gradients averaged, and that one do something else."""

    def run(ctx: Context) -> Seen:
        model = af.prepare(ctx, nn.Linear(3, 1))
        step(ctx, model, WARM + 1)

        def other() -> None:
            with syncing(False, model):
                step(ctx, model)
            action(ctx)

        def usual() -> None:
            step(ctx, model)
            af.gather(ctx.tagged("after"), batch(ctx))

        return look(other if ctx.rank == rank else usual)

    return run


@pytest.mark.parametrize("on", WORLDS)
def test_a_rank_that_accumulates_where_others_average_is_an_error_of_all(on: Where) -> None:
    seen = run_ranks(
        meets(1, lambda ctx: af.gather(ctx.tagged("after"), batch(ctx))), 3, on, timeout_s=PATIENCE_S
    )
    assert {one.error for one in seen} == {"MismatchError"}
    assert len({one.text for one in seen}) == 1
    assert "forward" in seen[0].text
    assert "gather" in seen[0].text


# --- kinds of models -----------------------------------------------------------------------------


KINDS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "usual": (lambda: nn.Linear(3, 1), {}),
    "buffers": (lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), {}),
    "unused parameters": (lambda: nn.Linear(3, 1), {"find_unused_parameters": True}),
    "static graph": (lambda: nn.Linear(3, 1), {"static_graph": True}),
}


def test_ranks_meet_once_for_each_pass() -> None:
    def run(ctx: Context) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for name, (make, options) in KINDS.items():
            counted = Counted(with_ddp(ctx, **options))
            model = af.prepare(counted.ctx, make())
            found[name] = [counted.during(lambda model=model: step(ctx, model)) for _ in range(WARM + 2)]
        return found

    for found in run_ranks(run, 2, "processes", timeout_s=PATIENCE_S):
        assert found == dict.fromkeys(KINDS, [1] * (WARM + 2))


# --- what is not checked -------------------------------------------------------------------------


def without_gradients(model: nn.Module, ctx: Context) -> None:
    with torch.no_grad():
        model(batch(ctx))


def under_no_sync(model: nn.Module, ctx: Context) -> None:
    with syncing(False, model):
        step(ctx, model)


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("action", [without_gradients, under_no_sync])
def test_a_pass_that_reduces_nothing_makes_no_exchange(
    on: Where, action: Callable[[nn.Module, Context], None]
) -> None:
    def run(ctx: Context) -> list[int]:
        counted = Counted(ctx)
        model = af.prepare(counted.ctx, nn.Linear(3, 1))
        counts: list[int] = []
        for _ in range(WARM + 1):
            counts.append(counted.during(lambda: action(model, ctx)))
            counts.append(counted.during(lambda: model(batch(ctx)).sum()))
        return counts

    assert run_ranks(run, 2, on) == [[0, 1] * (WARM + 1)] * 2


def test_without_a_guard_no_pass_is_checked() -> None:
    def run(ctx: Context) -> int:
        counted = Counted(ctx)
        model = af.prepare(counted.ctx, nn.Linear(3, 1))
        return counted.during(lambda: step(ctx, model, WARM + 1))

    assert run_ranks(run, 2, "processes", guard="off") == [0, 0]
