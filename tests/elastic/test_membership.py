"""Who forms the next world: all who are left read the same roster, in whatever order they come and go."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given

from accelfn.context import Context, MessageBoard
from accelfn.context.failure import Loss, announce_loss
from accelfn.elastic.membership import (
    OVER,
    Member,
    Roster,
    Waiting,
    can_grow,
    finish,
    join_generation,
    meet,
    place_in,
)
from accelfn.errors import MissingRankError
from accelfn.testing import Schedule, explore, run_ranks, scheduling_point
from tests.exchanges import Exchanges

WAITING = Waiting(settle_s=0.5, join_s=5.0)


def member(slot: int, attempt: int = 0) -> Member:
    return Member(slot // 2, slot, attempt)


def board_of(ctx: Context) -> MessageBoard:
    """Return the board, before each write to which other ranks may run."""
    board = ctx.collectives.board

    def post(key: str, text: str) -> None:
        scheduling_point(ctx, f"post {key}")
        board.post(key, text)

    def post_once(key: str, text: str) -> str:
        scheduling_point(ctx, f"post {key}")
        return board.post_once(key, text)

    return replace(board, post=post, post_once=post_once)


def join(
    ctx: Context, me: Member, last: Roster | None, size: int, waiting: Waiting = WAITING
) -> Roster | None:
    return join_generation(board_of(ctx), ctx.collectives.threads, me, last, size, waiting)


def grows(ctx: Context, roster: Roster, seconds: float) -> bool:
    return can_grow(ctx.collectives.board, roster, 3, lambda count: count)


def slots_of(roster: Roster) -> tuple[int, ...]:
    return tuple(member.slot for member in roster.members)


def generations(ctx: Context, leaves: Sequence[int | None]) -> list[tuple[int, tuple[int, ...]]]:
    """Go through generations; a slot leaves after the generation that ``leaves`` names."""
    me, roster, seen = member(ctx.rank), None, list[tuple[int, tuple[int, ...]]]()
    for _ in range(3):
        roster = join(ctx, me, roster, ctx.num_processes)
        assert roster is not None
        seen.append((roster.generation, slots_of(roster)))
        if leaves[ctx.rank] == len(seen) - 1:
            announce_loss(board_of(ctx), Loss(me.name, "has ended"))
            break
    return seen


@given(
    leaves=st.lists(st.none() | st.integers(0, 1), min_size=1, max_size=4).filter(
        lambda found: None in found
    ),
    seed=st.integers(0, 1000),
)
def test_those_who_are_left_form_one_world_after_the_other(leaves: list[int | None], seed: int) -> None:
    ranks = run_ranks(lambda ctx: generations(ctx, leaves), len(leaves), schedule=Schedule(seed=seed))
    rosters = {generation: set[tuple[int, ...]]() for found in ranks for generation, _ in found}
    for rank, found in enumerate(ranks):
        for generation, slots in found:
            rosters[generation].add(slots)
            assert rank in slots
    for number in range(3):
        left = tuple(slot for slot, end in enumerate(leaves) if end is None or end >= number)
        assert rosters[number] == {left}


def test_no_schedule_splits_the_world() -> None:
    def program(ctx: Context) -> list[tuple[int, tuple[int, ...]]]:
        return generations(ctx, [None, 0, None])

    report = explore(program, 3, budget=150)
    assert len(report.outcomes) == 1, report


def test_a_process_that_comes_late_waits_until_the_others_take_it_in() -> None:
    def program(ctx: Context) -> list[int]:
        board, me = ctx.collectives.board, member(ctx.rank)
        if ctx.rank == 2:  # not before the first world is there, whose slot it doesn't have
            ctx.collectives.threads.wait(lambda seconds: board.read("roster/0") is not None, None, "them")
            roster = join(ctx, member(2, 1), None, 3)
            assert roster is not None
            return [roster.generation, *slots_of(roster)]
        roster = join(ctx, me, None, 2)
        assert roster is not None
        ctx.collectives.threads.wait(partial(grows, ctx, roster), None, "the newcomer")
        roster = join(ctx, me, roster, 3)
        assert roster is not None
        return [roster.generation, *slots_of(roster)]

    for seed in range(20):
        found = run_ranks(program, 3, schedule=Schedule(seed=seed))
        assert found == [[1, 0, 1, 2]] * 3


def test_a_member_that_is_busy_is_not_waited_for_and_joins_later() -> None:
    def program(ctx: Context) -> list[tuple[int, int]]:
        board, threads = ctx.collectives.board, ctx.collectives.threads
        roster = join(ctx, member(ctx.rank), None, 3)
        assert roster is not None
        if ctx.rank == 1:  # until the others have gone on
            threads.wait(lambda seconds: board.read("roster/1") is not None, None, "the others")
        seen: list[tuple[int, int]] = []
        while len(seen) < 2 - (ctx.rank == 1):
            roster = join(ctx, member(ctx.rank), roster, 3)
            assert roster is not None
            seen.append((roster.generation, len(roster.members)))
            if ctx.rank != 1 and len(seen) == 1:
                threads.wait(partial(grows, ctx, roster), None, "the busy one")
        return seen

    found = run_ranks(program, 3, schedule=Schedule(seed=1))
    assert found == [[(1, 2), (2, 3)], [(2, 3)], [(1, 2), (2, 3)]]


def test_too_few_are_an_error_as_soon_as_no_one_can_come() -> None:
    def program(ctx: Context) -> str:
        board = ctx.collectives.board
        board.post("slot/1", json.dumps({"state": "failed"}))
        with pytest.raises(MissingRankError) as caught:
            join(ctx, member(0), None, 2, WAITING._replace(min_processes=2, join_s=1e9))
        return str(caught.value)

    [text] = run_ranks(program, 1, schedule=Schedule())
    assert text.startswith("run_elastic: 1 processes are left, and min_processes is 2.")


def test_all_who_joined_raise_where_too_few_did_and_those_who_come_later_begin_anew() -> None:
    def program(ctx: Context) -> object:
        board, threads = ctx.collectives.board, ctx.collectives.threads
        if ctx.rank == 2:
            threads.wait(lambda seconds: board.read("gave up/0/0") is not None, None, "the others to give up")
            for slot in range(2):
                announce_loss(board_of(ctx), Loss(member(slot).name, "raised MissingRankError"))
        waiting = WAITING._replace(min_processes=1 if ctx.rank == 2 else 3)
        try:
            roster = join(ctx, member(ctx.rank), None, 3, waiting)
        except MissingRankError as error:
            return str(error)
        return None if roster is None else slots_of(roster)

    text = "run_elastic: 2 processes are left, and min_processes is 3."
    for seed in range(10):
        first, second, third = run_ranks(program, 3, schedule=Schedule(seed=seed))
        assert str(first).startswith(text)
        assert second == first
        assert third == (2,)


def test_if_the_one_who_looks_for_the_others_is_lost_another_one_does() -> None:
    def program(ctx: Context) -> tuple[int, ...] | None:
        board, threads = board_of(ctx), ctx.collectives.threads
        if ctx.rank == 0:  # joins, and ends
            for key in ("joining/0/0/0", "leader/0/0"):
                board.post_once(key, json.dumps(member(0)))
            board.post("joining/0", "yes")
            threads.wait(lambda seconds: board.read("joining/0/2/0") is not None, None, "the others")
            announce_loss(board, Loss(member(0).name, "was killed"))
            board.post("slot/0", json.dumps({"state": "failed"}))
            return None
        threads.wait(lambda seconds: board.read("joining/0") is not None, None, "the first one")
        roster = join(ctx, member(ctx.rank), None, 3)
        return None if roster is None else slots_of(roster)

    for seed in range(20):
        assert run_ranks(program, 3, schedule=Schedule(seed=seed)) == [None, (1, 2), (1, 2)]


def joins(size: int) -> list[Exchanges]:
    """Let a world form, meet, lose its last rank, form again, take one in and finish; count of each rank."""

    def program(ctx: Context) -> Exchanges:
        counted, threads, me = Exchanges(), ctx.collectives.threads, member(ctx.rank)
        board, last = counted.board(ctx.collectives.board), member(size - 1)
        roster = join_generation(board, threads, me, None, size, WAITING)
        assert roster is not None
        assert len(roster.members) == size
        meet(board, threads, me, roster)
        if me == last:
            announce_loss(ctx.collectives.board, Loss(me.name, "was killed"))
            me = member(me.slot, 1)  # its replacement
        again = join_generation(board, threads, me, None if me.attempt else roster, size, WAITING)
        assert again is not None
        meet(board, threads, me, again)
        assert not can_grow(ctx.collectives.board, again, size, lambda count: count)
        finish(board, threads, me, again, lambda: None)
        return counted

    return run_ranks(program, size, schedule=Schedule())


def test_what_a_rank_asks_and_posts_to_join_does_not_grow_with_the_ranks() -> None:
    small, large = joins(4), joins(16)

    def without_rosters(one: Exchanges) -> int:
        return sum(count for key, count in one.asked.items() if not key.startswith("roster/"))

    measures: dict[str, tuple[Callable[[Exchanges], int], int]] = {
        "texts asked for": (lambda one: len(one.asked), 0),
        "characters read": (without_rosters, 8),  # longer numbers
        "texts posted": (lambda one: len(one.posted), 0),
        "characters posted": (lambda one: sum(one.posted.values()), 16),
    }
    for name, (measure, more) in measures.items():
        few, many = ([measure(one) for one in ranks] for ranks in (small, large))
        print(f"{name} of each rank of 4: {few}, of 16: {many}")
        # Rank 0 has joined first, so it alone looks for the others.
        assert max(many[1:]) <= max(few[1:]) + more
    rosters = [count for one in large for key, count in one.asked.items() if key.startswith("roster/")]
    assert max(rosters) <= 16 * len("[10, 10, 10], ")


def test_the_rest_waits_where_only_some_numbers_of_processes_work() -> None:
    def even_number(count: int) -> int:
        return count // 2 * 2

    even = WAITING._replace(usable=even_number)

    def program(ctx: Context) -> tuple[int, ...] | None:
        board, threads, me = ctx.collectives.board, ctx.collectives.threads, member(ctx.rank)
        if ctx.rank == 2:
            others = ("joining/0/0/0", "joining/0/1/0")
            threads.wait(lambda seconds: all(map(board.read, others)), None, "two of them")
        roster = join(ctx, me, None, 3, even)
        if roster is not None:
            assert not can_grow(board, roster, 3, even.usable)
            board.post(OVER, "yes")
        return None if roster is None else slots_of(roster)

    assert run_ranks(program, 3, schedule=Schedule(seed=3)) == [(0, 1), (0, 1), None]


def test_who_comes_after_the_end_has_nothing_to_do() -> None:
    def program(ctx: Context) -> Roster | None:
        ctx.collectives.board.post(OVER, "yes")
        return join(ctx, member(0, 1), None, 2)

    assert run_ranks(program, 1, schedule=Schedule()) == [None]


@given(st.lists(st.integers(0, 9), unique=True, min_size=1), st.data())
def test_ranks_are_in_the_order_of_machines(slots: list[int], data: st.DataObject) -> None:
    members = tuple(sorted(member(slot) for slot in slots))
    me = data.draw(st.sampled_from(members))
    place = place_in(Roster(0, members), me)
    assert (place.rank, place.size) == (sorted(slots).index(me.slot), len(slots))
    assert place.local_size == len([slot for slot in slots if slot // 2 == me.machine])
