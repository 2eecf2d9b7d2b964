"""Ranks that disagree: each way ends in a named error on every other rank, in every kind of world."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.testing import run_ranks
from accelfn.testing.ranks import Where
from tests.seen import Seen, look

WORLDS: tuple[Where, ...] = ("memory", "processes")
MISMATCH, REMOTE, MISSING, LATE = (
    "MismatchError",
    "RemoteRankError",
    "MissingRankError",
    "CollectiveTimeoutError",
)
# Long enough that an error found by waiting it out would be a timeout and not the one that is expected.
PATIENCE_S = 20.0


def listed(tensor: torch.Tensor) -> list[float]:
    return [float(number) for number in tensor]


def on_each(size: int, on: Where, action: Callable[[af.Context], object], **options: Any) -> list[Seen]:
    return run_ranks(lambda ctx: look(lambda: action(ctx)), size, on, timeout_s=PATIENCE_S, **options)


def are_one_error(size: int, on: Where, attempts: dict[str, Callable[[af.Context], object]]) -> list[str]:
    """Let ranks disagree, one time after the other in one world; give the text of each error."""

    def work(ctx: af.Context) -> list[Seen]:
        return [look(lambda attempt=attempt: attempt(ctx)) for attempt in attempts.values()]

    found = run_ranks(work, size, on, timeout_s=PATIENCE_S)
    for name, *seen in zip(attempts, *found, strict=True):
        assert {rank.error for rank in seen} == {MISMATCH}, name
        assert len({rank.text for rank in seen}) == 1, name
    return [seen.text for seen in found[0]]


ONE, TWO, SIX = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.arange(6.0)
LARGE = torch.zeros(200_000)

TREES: dict[str, tuple[Any, Any]] = {
    "shape": (ONE, torch.ones(3)),
    "same number of elements": (SIX.view(2, 3), SIX.view(3, 2)),
    "dtype": (ONE, ONE.int()),
    "fp16 for bf16": (ONE.half(), ONE.bfloat16()),
    "missing key": ({"a": ONE, "b": TWO}, {"a": ONE}),
    "tuple for list": ([ONE, TWO], (ONE, TWO)),
    "None for a tensor": ({"a": ONE, "b": TWO}, {"a": ONE, "b": None}),
    "shape of a large leaf": (LARGE, LARGE[:-1]),
    "dtype of a large leaf": (LARGE, LARGE.int()),
    "large for small": (LARGE, ONE),
}


each_world = pytest.mark.parametrize(("on", "size"), [("memory", 3), ("processes", 2), ("processes", 3)])


@each_world
@pytest.mark.parametrize("operation", [af.gather, af.reduce])
def test_other_trees_are_one_error(on: Where, size: int, operation: Any) -> None:
    attempts: dict[str, Callable[[af.Context], object]] = {
        name: lambda ctx, usual=usual, other=other: operation(ctx, other if ctx.rank == 1 else usual)
        for name, (usual, other) in TREES.items()
    }
    assert all("test_campaign.py:" in text for text in are_one_error(size, on, attempts))


CALLS: dict[str, tuple[Callable[[af.Context], Any], Callable[[af.Context], Any]]] = {
    "other operation": (lambda ctx: af.gather(ctx, ONE), lambda ctx: af.broadcast(ctx, ONE)),
    "barrier for a gather": (lambda ctx: af.gather(ctx, ONE), lambda ctx: af.wait_for_everyone(ctx)),
    "objects for tensors": (lambda ctx: af.gather(ctx, ONE), lambda ctx: af.gather_object(ctx, [1])),
    "other reduction": (lambda ctx: af.reduce(ctx, ONE, "sum"), lambda ctx: af.reduce(ctx, ONE, "max")),
    "no reduction": (lambda ctx: af.reduce(ctx, ONE, "sum"), lambda ctx: af.reduce(ctx, ONE, "none")),
    "other reduction of a large leaf": (
        lambda ctx: af.reduce(ctx, LARGE, "sum"),
        lambda ctx: af.reduce(ctx, LARGE, "mean"),
    ),
    "other source": (lambda ctx: af.broadcast(ctx, ONE, 0), lambda ctx: af.broadcast(ctx, ONE, 1)),
}


@each_world
def test_other_calls_are_one_error(on: Where, size: int) -> None:
    attempts: dict[str, Callable[[af.Context], object]] = {
        name: lambda ctx, usual=usual, other=other: (other if ctx.rank == 1 else usual)(ctx)
        for name, (usual, other) in CALLS.items()
    }
    are_one_error(size, on, attempts)


def swapped(ctx: af.Context) -> Any:
    if ctx.rank != 1:
        first = af.gather(ctx, ONE)
        second = af.gather(ctx, TWO)
    else:
        second = af.gather(ctx, TWO)
        first = af.gather(ctx, ONE)
    return first, second


def skipped(ctx: af.Context) -> Any:
    if ctx.rank != 1:
        af.gather(ctx, ONE)
    return af.gather(ctx, TWO)


def swapped_lines(ctx: af.Context) -> None:
    def first() -> None:
        af.gather(ctx, ONE)

    def second() -> None:
        af.gather(ctx, TWO)

    for step in (second, first) if ctx.rank == 1 else (first, second):
        step()


def skipped_later(ctx: af.Context) -> None:
    for number in range(2):
        if ctx.rank != 1 or number != 1:
            af.gather(ctx, ONE)
        af.gather(ctx, TWO)


def in_other_functions(ctx: af.Context) -> None:
    if ctx.rank == 1:
        skipped(ctx)
    else:
        swapped(ctx)


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("action", [swapped, swapped_lines, skipped_later, in_other_functions])
def test_equal_calls_of_other_lines_are_one_error(on: Where, action: Callable[[af.Context], Any]) -> None:
    assert all("ctx.tagged" in text for text in are_one_error(3, on, {"": action}))


@each_world
def test_a_first_call_that_is_left_out_is_found_when_the_next_is_missing(on: Where, size: int) -> None:
    seen = on_each(size, on, skipped)
    assert [rank.error for rank in seen] == ["" if rank == 1 else MISSING for rank in range(size)]
    for text in (rank.text for rank in seen if rank.error):
        assert "rank 1 has ended after gather at test_campaign.py:" in text
        assert "call 1" in text


def branched_broadcast(ctx: af.Context) -> Any:
    if ctx.is_main_process:
        small, large = af.broadcast(ctx, ONE), af.broadcast(ctx, LARGE + 1)
    else:
        small = af.broadcast(ctx, torch.zeros(2))
        large = af.broadcast(ctx, torch.empty_like(LARGE))
    return listed(small), float(large.sum())


def branched_scatter(ctx: af.Context) -> Any:
    if ctx.is_main_process:
        return listed(af.scatter(ctx, torch.arange(2.0).repeat(ctx.num_processes)))
    return listed(af.scatter(ctx, None))


def branched_objects(ctx: af.Context) -> Any:
    nothing: list[Any] = []
    if ctx.is_main_process:
        first, second = af.broadcast_object_list(ctx, ["a", 1]), af.broadcast_object_list(ctx, ["b", 2])
    else:
        first = af.broadcast_object_list(ctx, nothing)
        second = af.broadcast_object_list(ctx, [None])
    return first, second


def branched_gather(ctx: af.Context) -> Any:
    found: list[float] = []
    for number in range(3):
        if ctx.is_main_process:
            row = af.gather(ctx, torch.tensor([float(number)]))
        else:
            row = af.gather(ctx, torch.tensor([float(number)]))
        found += listed(af.gather(ctx, row.sum()))
    return found


@each_world
def test_what_has_a_source_may_be_called_from_a_branch_and_one_call_in_two(on: Where, size: int) -> None:
    def act(ctx: af.Context) -> Any:
        sent = branched_broadcast(ctx), branched_scatter(ctx), branched_objects(ctx)
        return [*sent, branched_gather(ctx)]

    rows = [float(number * size) for number in range(3) for _ in range(size)]
    expected = repr([([1.0, 2.0], 200_000.0), [0.0, 1.0], (["a", 1], ["b", 2]), rows])
    assert on_each(size, on, act) == [Seen("", expected)] * size


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("guard", ["sampled", "off"])
def test_calls_that_are_meant_to_meet_carry_a_tag(on: Where, guard: str) -> None:
    def meet(ctx: af.Context) -> Any:
        if ctx.rank == 0:
            return listed(af.broadcast(ctx.tagged("weights"), ONE))
        return listed(af.broadcast(ctx.tagged("weights"), TWO))

    assert on_each(2, on, meet, guard=guard) == [Seen("", "[1.0, 2.0]")] * 2


@each_world
@pytest.mark.parametrize("error", [OSError("the disk is full"), SystemExit(3)], ids=["raises", "exits"])
def test_one_rank_that_fails_is_an_error_of_all(
    on: Where, size: int, error: BaseException, tmp_path: Path
) -> None:
    def act(ctx: af.Context) -> Any:
        af.gather(ctx, ONE)
        if ctx.rank == 1:
            raise error
        return af.gather(ctx, TWO)

    with pytest.raises(type(error)):
        run_ranks(on_all_but_one(act, tmp_path), size, on, timeout_s=PATIENCE_S)
    for rank in set(range(size)) - {1}:
        kind, text = json.loads((tmp_path / str(rank)).read_text())
        assert kind == REMOTE
        assert f"rank 1 failed: {type(error).__name__}: {error}" in text


def on_all_but_one(action: Callable[[af.Context], Any], folder: Path) -> Callable[[af.Context], None]:
    """Write down what ranks other than 1 see; rank 1's error goes its way."""

    def act(ctx: af.Context) -> None:
        if ctx.rank == 1:
            action(ctx)
        else:
            (folder / str(ctx.rank)).write_text(json.dumps(look(lambda: action(ctx))))

    return act


def ended_by(number: int) -> Callable[[af.Context], Any]:
    def act(ctx: af.Context) -> Any:
        af.gather(ctx, ONE)
        if ctx.rank == 1:
            if number:
                os.kill(os.getpid(), number)
            else:
                os._exit(7)
        return af.gather(ctx, TWO)

    return act


@pytest.mark.parametrize(
    ("size", "num_nodes"),
    # Processes of one node exchange through shared memory, those of several through sockets.
    [(3, 1), (2, 2), (4, 2)],
    ids=["3 through memory", "2 through sockets", "4 through sockets"],
)
@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, MISSING), (signal.SIGKILL, MISSING), pytest.param(signal.SIGSTOP, LATE, marks=pytest.mark.slow)],
    ids=["os._exit", "SIGKILL", "SIGSTOP"],
)
def test_a_process_that_ends_or_stops_is_named(
    size: int, num_nodes: int, number: int, expected: str, tmp_path: Path
) -> None:
    act = on_all_but_one(ended_by(number), tmp_path)
    guard = af.Guard(timeout=timedelta(seconds=1.5 if expected == LATE else PATIENCE_S))
    timeout_s = 3.0 if expected == LATE else PATIENCE_S
    with pytest.raises((af.errors.MissingRankError, af.errors.CollectiveTimeoutError)):
        run_ranks(act, size, "processes", timeout_s=timeout_s, num_nodes=num_nodes, guard=guard)
    for rank in set(range(size)) - {1}:
        kind, text = json.loads((tmp_path / str(rank)).read_text())
        assert kind == expected
        assert "rank 1" in text
        assert "call 2 at test_campaign.py:" in text
