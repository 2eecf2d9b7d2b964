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
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.testing import Fault, run_ranks
from accelfn.testing.ranks import Where
from accelfn.testing.strategies import mismatched_trees, worlds
from tests.seen import Seen, look

WORLDS: tuple[Where, ...] = ("memory", "gloo", "processes")
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


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", list(TREES))
def test_other_trees_are_one_error(on: Where, size: int, name: str) -> None:
    usual, other = TREES[name]
    for operation in (af.gather, af.reduce):
        seen = on_each(size, on, lambda ctx, call=operation: call(ctx, other if ctx.rank == 1 else usual))
        assert {one.error for one in seen} == {MISMATCH}
        assert len({one.text for one in seen}) == 1
        assert "test_campaign.py:" in seen[0].text


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_order_of_keys_just_works(on: Where, size: int) -> None:
    def gather(ctx: af.Context) -> Any:
        tree = {"a": ONE, "b": TWO} if ctx.rank == 1 else {"b": TWO, "a": ONE}
        gathered = af.gather(ctx, tree)
        return listed(gathered["a"]), listed(gathered["b"])

    expected = repr(([1.0, 2.0] * size, [3.0, 4.0] * size))
    assert on_each(size, on, gather) == [Seen("", expected)] * size


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


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", list(CALLS))
def test_other_calls_are_one_error(on: Where, size: int, name: str) -> None:
    usual, other = CALLS[name]
    seen = on_each(size, on, lambda ctx: (other if ctx.rank == 1 else usual)(ctx))
    assert {one.error for one in seen} == {MISMATCH}
    assert len({one.text for one in seen}) == 1


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
    steps = (
        lambda: af.gather(ctx, ONE),
        lambda: af.gather(ctx, TWO),
    )
    for step in reversed(steps) if ctx.rank == 1 else steps:
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
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("action", [swapped, swapped_lines, skipped_later, in_other_functions])
def test_equal_calls_of_other_lines_are_one_error(
    on: Where, size: int, action: Callable[[af.Context], Any]
) -> None:
    seen = on_each(size, on, action)
    assert {one.error for one in seen} == {MISMATCH}
    assert len({one.text for one in seen}) == 1
    assert "ctx.tagged" in seen[0].text


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_first_call_that_is_left_out_is_found_when_the_next_is_missing(on: Where, size: int) -> None:
    seen = on_each(size, on, skipped)
    assert [one.error for one in seen] == ["" if rank == 1 else MISSING for rank in range(size)]
    for one in (seen[0], *seen[2:]):
        assert "rank 1 has ended after gather at test_campaign.py:" in one.text


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


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (branched_broadcast, ([1.0, 2.0], 200_000.0)),
        (branched_scatter, [0.0, 1.0]),
        (branched_objects, (["a", 1], ["b", 2])),
    ],
)
def test_what_has_a_source_may_be_called_from_a_branch(
    on: Where, size: int, action: Callable[[af.Context], Any], expected: Any
) -> None:
    assert on_each(size, on, action) == [Seen("", repr(expected))] * size


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
def test_one_call_may_stand_in_two_branches(on: Where, size: int) -> None:
    expected = repr([float(number * size) for number in range(3) for _ in range(size)])
    assert on_each(size, on, branched_gather) == [Seen("", expected)] * size


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("guard", ["sampled", "off"])
def test_calls_that_are_meant_to_meet_carry_a_tag(on: Where, guard: str) -> None:
    def meet(ctx: af.Context) -> Any:
        if ctx.rank == 0:
            return listed(af.broadcast(ctx.tagged("weights"), ONE))
        return listed(af.broadcast(ctx.tagged("weights"), TWO))

    assert on_each(2, on, meet, guard=guard) == [Seen("", "[1.0, 2.0]")] * 2


def fewer(ctx: af.Context) -> Any:
    af.gather(ctx, ONE)
    if ctx.rank != 1:
        af.gather(ctx, TWO)


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
def test_who_waits_for_a_rank_that_has_ended_is_told_where_it_was(on: Where, size: int) -> None:
    seen = on_each(size, on, fewer)
    assert [one.error for one in seen if one.error] == [MISSING] * (size - 1)
    assert not seen[1].error
    for one in (seen[0], *seen[2:]):
        assert "rank 1 has ended after gather at test_campaign.py:" in one.text
        assert "call 1" in one.text


def failing(error: BaseException) -> Callable[[af.Context], Any]:
    def act(ctx: af.Context) -> Any:
        af.gather(ctx, ONE)
        if ctx.rank == 1:
            raise error
        return af.gather(ctx, TWO)

    return act


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("error", [OSError("the disk is full"), SystemExit(3)], ids=["raises", "exits"])
def test_one_rank_that_fails_is_an_error_of_all(
    on: Where, size: int, error: BaseException, tmp_path: Path
) -> None:
    def act(ctx: af.Context) -> None:
        seen = look(lambda: failing(error)(ctx))
        (tmp_path / str(ctx.rank)).write_text(json.dumps(seen))

    with pytest.raises(type(error)):
        run_ranks(act if not isinstance(error, OSError) else failing(error), size, on, timeout_s=PATIENCE_S)
    if isinstance(error, OSError):  # once more, with the rank's error on its way up and the others' kept
        act_all = on_all_but_one(failing(error), tmp_path)
        with pytest.raises(OSError, match="the disk is full"):
            run_ranks(act_all, size, on, timeout_s=PATIENCE_S)
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
    [(2, 1), (3, 1), (2, 2), (4, 2)],
    ids=["2 through memory", "3 through memory", "2 through sockets", "4 through sockets"],
)
@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, MISSING), (signal.SIGKILL, MISSING), (signal.SIGSTOP, LATE)],
    ids=["os._exit", "SIGKILL", "SIGSTOP"],
)
def test_a_process_that_ends_or_stops_is_named(
    size: int, num_nodes: int, number: int, expected: str, tmp_path: Path
) -> None:
    act = on_all_but_one(ended_by(number), tmp_path)
    guard = af.Guard(timeout=timedelta(seconds=1.5 if expected == LATE else PATIENCE_S))
    with pytest.raises((af.errors.MissingRankError, af.errors.CollectiveTimeoutError)):
        run_ranks(
            act,
            size,
            "processes",
            timeout_s=3.0 if expected == LATE else PATIENCE_S,
            num_nodes=num_nodes,
            guard=guard,
        )
    for rank in set(range(size)) - {1}:
        kind, text = json.loads((tmp_path / str(rank)).read_text())
        assert kind == expected
        assert "rank 1" in text
        assert "call 2 at test_campaign.py:" in text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["die", "skip", "swap", "raise"])
def test_faults_on_purpose_are_found(size: int, kind: Any) -> None:
    def act(ctx: af.Context) -> Any:
        return af.gather(ctx, ONE), af.reduce(ctx, TWO), af.gather(ctx, SIX)

    for at in range(2):
        expected = {"die": MISSING, "raise": REMOTE}.get(kind, MISMATCH)
        faults = [Fault(kind=kind, rank=1, at=at)]
        if kind == "raise":  # what is raised inside of an operation goes up, unless it is caught
            with pytest.raises(RuntimeError, match="injected fault"):
                run_ranks(act, size, faults=faults)
            continue
        seen = run_ranks(lambda ctx: look(lambda: act(ctx)), size, faults=faults)
        assert {one.error for one in seen if one} == {expected}


@settings(max_examples=100)
@given(st.data())
def test_random_trees_that_differ_are_one_error(data: st.DataObject) -> None:
    size = data.draw(worlds(4).filter(lambda number: number > 1), label="size")
    drawn = data.draw(mismatched_trees(size), label="trees")
    seen = on_each(size, "memory", lambda ctx: af.gather(ctx, drawn.trees[ctx.rank]))
    assert {one.error for one in seen} == {MISMATCH}
    assert len({one.text for one in seen}) == 1
    assert f"\n  {drawn.rank} " in seen[0].text or size == 2
