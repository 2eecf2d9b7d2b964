"""What run_ranks promises on each kind of world."""

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import gather, gather_object, wait_for_everyone
from accelfn.context import Context
from accelfn.errors import CollectiveTimeoutError, MissingRankError, RemoteRankError
from accelfn.testing import Fault, InjectedFaultError, Where, run_ranks
from accelfn.testing.part import Outcome, conclude
from accelfn.testing.strategies import worlds
from accelfn.tree import listify

KINDS: tuple[Where, ...] = ("memory", "gloo", "processes")
on_each_world = pytest.mark.parametrize("on", KINDS)


@given(worlds(), st.integers(1, 3))
def test_ranks_are_laid_out_as_nodes(local_size: int, num_nodes: int) -> None:
    size = local_size * num_nodes

    def work(ctx: Context) -> Any:
        world = ctx.world
        return (world.rank, world.size, world.local_rank, world.local_size, world.node_rank, world.num_nodes)

    assert run_ranks(work, size, num_nodes=num_nodes) == [
        (rank, size, rank % local_size, local_size, rank // local_size, num_nodes) for rank in range(size)
    ]


@on_each_world
@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_come_in_rank_order_and_may_be_tensors(on: Where, size: int) -> None:
    def work(ctx: Context) -> Any:
        return {"rank": torch.tensor([ctx.rank]), "all": gather(ctx, torch.tensor([ctx.rank]))}

    assert [listify(result) for result in run_ranks(work, size, on)] == [
        {"rank": [rank], "all": list(range(size))} for rank in range(size)
    ]


@on_each_world
def test_options_reach_every_rank(on: Where) -> None:
    def work(ctx: Context) -> Any:
        return ctx.mixed_precision, ctx.gradient_accumulation_steps, ctx.debug

    assert run_ranks(work, 2, on, mixed_precision="bf16", gradient_accumulation_steps=3, debug=True) == (
        [("bf16", 3, True)] * 2
    )


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
def test_a_rank_that_returns_early_is_missed(on: Where) -> None:
    with pytest.raises(MissingRankError):
        run_ranks(lambda ctx: wait_for_everyone(ctx) if ctx.rank else None, 3, on, timeout_s=10)


@on_each_world
def test_a_rank_that_stays_away_is_a_timeout(on: Where) -> None:
    release = threading.Event()

    def work(ctx: Context) -> None:
        if ctx.rank == 0:
            wait_for_everyone(ctx)
        elif on == "processes":
            time.sleep(3)
        else:
            release.wait(60)

    try:
        with pytest.raises(CollectiveTimeoutError):
            run_ranks(work, 2, on, timeout_s=0.3)
    finally:
        release.set()


@on_each_world
def test_a_fault_raises_at_the_collective_it_names(on: Where) -> None:
    def work(ctx: Context) -> None:
        for _ in range(3):
            gather_object(ctx, ctx.rank)

    with pytest.raises(InjectedFaultError, match="rank 1 raises at its collective 1"):
        run_ranks(work, 2, on, faults=[Fault(kind="raise", rank=1, at=1)], timeout_s=10)


@on_each_world
def test_a_fault_delays_and_changes_nothing_else(on: Where) -> None:
    faults = [Fault(kind="delay", rank=0, at=1, seconds=0.05)]
    assert run_ranks(lambda ctx: [gather_object(ctx, ctx.rank) for _ in range(3)], 2, on, faults=faults) == (
        [[[0, 1]] * 3] * 2
    )


@on_each_world
def test_a_rank_that_dies_is_missed(on: Where) -> None:
    with pytest.raises(MissingRankError):
        run_ranks(
            lambda ctx: [gather_object(ctx, ctx.rank) for _ in range(3)],
            2,
            on,
            faults=[Fault(kind="die", rank=1, at=1)],
            timeout_s=10,
        )


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
    (lambda: run_ranks(listify, 2, UNKNOWN), 'on must be "memory", "gloo" or "processes", got \'mars\''),
    (lambda: run_ranks(listify, 2, faults=[Fault(kind="die", rank=2)]), "a fault names rank 2"),
    (lambda: run_ranks(listify, 3, num_nodes=2), "num_nodes must divide world_size"),
    (lambda: run_ranks(listify, 3, "gloo", num_nodes=2), "num_nodes must divide world_size"),
    (lambda: run_ranks(listify, 3, "processes", num_nodes=2), "num_nodes must divide world_size"),
)


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=[said for _, said in REFUSED])
def test_a_world_that_can_not_be_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 -- the message holds characters of patterns
        call()
    assert said in str(caught.value)


def test_worlds_do_not_meet() -> None:
    """Eight worlds at once, each in a thread, each in its own rendezvous."""
    results: dict[int, Any] = {}

    def world(number: int) -> None:
        results[number] = run_ranks(lambda ctx: gather_object(ctx, (number, ctx.rank)), 3)

    threads = [threading.Thread(target=world, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[(number, rank) for rank in range(3)]] * 3 for number in range(8)}


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
    assert drawn == [drawn[0]] * 3
    assert len(set(drawn[0])) == 6
    assert drawn[0] == [number for _ in range(3) for number in (torch.rand(()).item(), random.random())]


FINE = Outcome(value=7)
OWN = Outcome(error=OSError("the disk"))
TIMED_OUT = Outcome(error=CollectiveTimeoutError("nobody came"))
MISSED = Outcome(error=MissingRankError("gone"))
TOLD = Outcome(error=RemoteRankError(1, "OSError", "the disk"))
LINGERING = Outcome(error=CollectiveTimeoutError("ended"), ended=False)
KILLED = Outcome(error=MissingRankError("killed"), seen_to_die=True)

# From the likeliest cause to the surest consequence; a rank that was ended has said nothing at all.
ORDER = (OWN, TIMED_OUT, MISSED, TOLD, LINGERING)


@given(st.permutations((*ORDER, FINE)), st.integers(1, 6))
def test_the_likeliest_cause_is_raised_whatever_its_rank(drawn: Sequence[Outcome], size: int) -> None:
    outcomes = drawn[:size]
    failed = [one for one in ORDER if one in outcomes]
    if not failed:
        assert conclude(outcomes, "memory") == [7]
        return
    with pytest.raises(BaseException) as caught:  # noqa: PT011 -- which one is asserted
        conclude(outcomes, "memory")
    assert caught.value is failed[0].error


def test_a_rank_that_was_seen_to_die_comes_before_what_is_only_heard() -> None:
    with pytest.raises(MissingRankError, match="killed"):
        conclude([TOLD, TIMED_OUT, MISSED, LINGERING, KILLED], "processes")


def test_the_note_tells_who_failed_too_and_who_did_not_end() -> None:
    with pytest.raises(RemoteRankError) as caught:
        conclude([FINE, TOLD, LINGERING, TOLD, LINGERING], "processes")
    # Notes are of Python 3.11 and later. The error is one for all tests, so the last note is ours.
    for note in getattr(caught.value, "__notes__", [])[-1:]:
        assert note == (
            "raised on rank 1 of 5 (processes); also failed: rank 3 RemoteRankError; "
            "did not end in time: rank 2, rank 4"
        )


def test_ranks_of_which_none_ended_are_a_timeout() -> None:
    with pytest.raises(CollectiveTimeoutError, match="ended"):
        conclude([FINE, LINGERING, LINGERING], "processes")
