"""What run_ranks promises on each kind of world."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import gather, gather_object, wait_for_everyone
from accelfn.context import Context
from accelfn.errors import CollectiveTimeoutError, MissingRankError, RemoteRankError
from accelfn.testing import Fault, InjectedFaultError, Where, run_ranks
from accelfn.tree import listify

KINDS: tuple[Where, ...] = ("memory", "processes")
on_each_world = pytest.mark.parametrize("on", KINDS)


@on_each_world
@pytest.mark.parametrize("size", [1, 3])
def test_results_come_in_rank_order_and_may_be_tensors(on: Where, size: int) -> None:
    def work(ctx: Context) -> Any:
        return {"rank": torch.tensor([ctx.rank]), "all": gather(ctx, torch.tensor([ctx.rank]))}

    assert [listify(result) for result in run_ranks(work, size, on)] == [
        {"rank": [rank], "all": list(range(size))} for rank in range(size)
    ]


@on_each_world
def test_options_reach_every_rank_and_ranks_are_laid_out_as_nodes(on: Where) -> None:
    def work(ctx: Context) -> Any:
        world = ctx.world
        options = (ctx.mixed_precision, ctx.gradient_accumulation_steps, ctx.debug)
        return options, world.local_rank, world.local_size, world.node_rank, world.num_nodes

    options: Any = {"mixed_precision": "bf16", "gradient_accumulation_steps": 3, "debug": True}
    assert run_ranks(work, 4, on, num_nodes=2, **options) == [
        (("bf16", 3, True), rank % 2, 2, rank // 2, 2) for rank in range(4)
    ]


@on_each_world
def test_the_error_of_a_rank_is_raised_and_not_what_followed_from_it(on: Where) -> None:
    seen: list[Any] = []

    def work(ctx: Context) -> None:
        if ctx.rank == 1:
            raise KeyError("the cause")
        try:
            wait_for_everyone(ctx)
        except Exception as error:
            seen.append(type(error))
            raise

    with pytest.raises(KeyError, match="the cause") as caught:
        run_ranks(work, 3, on, timeout_s=10)
    notes = "".join(getattr(caught.value, "__notes__", ()))
    assert not notes or "raised on rank 1 of 3" in notes
    if on == "memory":
        assert seen == [RemoteRankError] * 2
    if on == "processes":
        assert 'raise KeyError("the cause")' in str(caught.value.__cause__)


@on_each_world
def test_a_rank_that_stays_away_is_a_timeout(on: Where) -> None:
    def work(ctx: Context) -> None:
        if ctx.rank == 0:
            wait_for_everyone(ctx)
        else:
            time.sleep(2)

    with pytest.raises(CollectiveTimeoutError):
        run_ranks(work, 2, on, timeout_s=0.3)


@on_each_world
def test_a_fault_raises_at_the_operation_it_names(on: Where) -> None:
    def work(ctx: Context) -> None:
        for _ in range(3):
            gather_object(ctx, ctx.rank)

    with pytest.raises(InjectedFaultError, match="rank 1 fails at its operation 1, gather_object"):
        run_ranks(work, 2, on, faults=[Fault(kind="raise", rank=1, at=1)], timeout_s=10)


@on_each_world
def test_a_fault_delays_and_changes_nothing_else(on: Where) -> None:
    faults = [Fault(kind="delay", rank=0, at=1, seconds=0.05)]
    found = run_ranks(lambda ctx: [gather_object(ctx, ctx.rank) for _ in range(3)], 2, on, faults=faults)
    assert found == [[[0, 1]] * 3] * 2


@on_each_world
@pytest.mark.parametrize("faults", [[], [Fault(kind="die", rank=1, at=1)]], ids=("returns", "dies"))
def test_a_rank_that_returns_early_or_dies_is_missed(on: Where, faults: list[Fault]) -> None:
    def work(ctx: Context) -> None:
        for _ in range(3 if ctx.rank != 1 or faults else 1):
            wait_for_everyone(ctx)

    with pytest.raises(MissingRankError):
        run_ranks(work, 3, on, faults=faults, timeout_s=10)


@on_each_world
def test_exits_and_interrupts_of_a_rank_are_its_error(on: Where) -> None:
    def work(ctx: Context) -> None:
        if ctx.rank:
            raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        run_ranks(work, 2, on, timeout_s=10)


UNKNOWN: Any = "mars"
REFUSED: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: run_ranks(listify, 0), "world_size must be at least 1, got 0"),
    (
        lambda: run_ranks(cast("Any", 2), cast("Any", listify)),
        "world_size must be a whole number, got <function",
    ),
    (lambda: run_ranks(listify, cast("Any", 2.0)), "a whole number, got 2.0. Write run_ranks(fn, 2)"),
    (lambda: run_ranks(listify, 2, UNKNOWN), 'on must be "memory" or "processes", got \'mars\''),
    (lambda: run_ranks(listify, 2, faults=[Fault(kind="die", rank=2)]), "a fault names rank 2"),
    (lambda: run_ranks(listify, 3, num_nodes=2), "num_nodes must divide world_size"),
    (lambda: run_ranks(listify, 3, "processes", num_nodes=2), "num_nodes must divide world_size"),
)


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_world_that_can_not_be_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:  # the message holds characters of patterns
        call()
    assert said in str(caught.value)


def test_worlds_do_not_meet() -> None:
    """Eight worlds at once, each in a thread."""

    def world(number: int) -> list[list[tuple[int, int]]]:
        return run_ranks(lambda ctx: gather_object(ctx, (number, ctx.rank)), 3)

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(world, range(8)))
    assert results == [[[(number, rank) for rank in range(3)]] * 3 for number in range(8)]


@given(st.integers(1, 4), st.integers(0, 3))
def test_in_memory_one_rank_runs_at_a_time_and_always_in_the_same_order(size: int, rounds: int) -> None:
    def run() -> list[tuple[int, int]]:
        log: list[tuple[int, int]] = []

        def work(ctx: Context) -> None:
            for number in range(rounds + 1):
                log.append((number, ctx.rank))
                time.sleep(0)  # gives way to any other thread that is free to run
                log.append((number, ctx.rank))
                if number < rounds:
                    wait_for_everyone(ctx)

        run_ranks(work, size)
        return log

    log = run()
    assert log[::2] == log[1::2], "a rank ran while another one had its turn"
    assert log == run()


def test_of_several_that_are_missing_the_one_that_runs_is_named() -> None:
    def work(ctx: Context) -> None:
        if ctx.rank == 1:
            time.sleep(1)
        else:
            wait_for_everyone(ctx)

    # Rank 1 has the turn; rank 2 only waits for it.
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 waited 0\.05 s in call 1 .* for rank 1,"):
        run_ranks(work, 3, timeout_s=0.05)


def test_each_rank_draws_as_the_only_one_and_whoever_calls_draws_on() -> None:
    def draw(ctx: Context) -> list[float]:
        found: list[float] = []
        for _ in range(3):
            found += [torch.rand(()).item(), random.random()]
            wait_for_everyone(ctx)
        return found

    torch.default_generator.manual_seed(3)
    random.seed(4)
    drawn = run_ranks(draw, 3)
    assert len(set(drawn[0])) == 6
    assert drawn == [[number for _ in range(3) for number in (torch.rand(()).item(), random.random())]] * 3
