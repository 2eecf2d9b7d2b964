import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import (
    Call,
    agree,
    broadcast,
    check_later,
    failing_together,
    gather,
    verify_structure,
    wait_for_everyone,
)
from accelfn.comm.agreement import CallRecord, find_mismatch
from accelfn.context import Context
from accelfn.context.config import Guard
from accelfn.errors import Caller, Disagreement, MismatchError, RemoteRankError, UnevenDataError
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import Mismatched, mismatched_trees, rank_trees, worlds
from accelfn.tree import listify
from tests.comm.seam import failure


def payload(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.booleans())
def test_all_ranks_hear_what_all_said(said: list[bytes], debug: bool) -> None:
    def work(ctx: Context) -> list[bytes]:
        heard = agree(ctx, Call("probe", "same"), payload(said[ctx.rank]))
        return [bytes(listify(row)) for row in heard]

    assert run_ranks(work, len(said), debug=debug) == [said] * len(said)


@given(st.integers(2, 5), st.data(), st.booleans())
def test_one_failure_is_raised_by_all(size: int, data: st.DataObject, debug: bool) -> None:
    failing = data.draw(st.sets(st.integers(0, size - 1), min_size=1))
    message = data.draw(st.text(max_size=200))

    def work(ctx: Context) -> Any:
        small = dataclasses.replace(ctx, collectives=dataclasses.replace(ctx.collectives, chunk=1024))
        error = OSError(message) if ctx.rank in failing else None
        return agree(small, Call("probe"), error=error)

    for rank, error in enumerate(run_ranks(failure(work), size, debug=debug, timeout_s=10)):
        if rank in failing:
            assert type(error) is OSError
        else:
            assert isinstance(error, RemoteRankError)
            assert (error.rank, error.cause, error.operation) == (min(failing), "OSError", "probe")
            assert message.startswith(error.message) or not message.isprintable()


@pytest.mark.parametrize("text", ["\U0001f600" * 9000, '"' * 9000, "\x00" * 9000, "\ud800" * 9000])
def test_a_long_message_stays_within_the_exchange(text: str) -> None:
    def work(ctx: Context) -> Any:
        biggest: list[int] = []

        def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
            biggest.append(message.numel())
            return ctx.collectives.all_gather_bytes(message)

        seam = dataclasses.replace(ctx.collectives, all_gather_bytes=all_gather_bytes, chunk=1024)
        watched = dataclasses.replace(ctx, collectives=seam)
        error = ValueError(text) if ctx.rank else None
        return failure(lambda _: agree(watched, Call("probe"), error=error))(ctx), max(biggest)

    (here, _), (there, size) = run_ranks(work, 2, timeout_s=10)
    assert isinstance(here, RemoteRankError)
    assert type(there) is ValueError
    assert size <= 1024


class MuteError(ValueError):
    """An exception of a user's whose text fails."""

    def __str__(self) -> str:
        raise OSError("no text")


@pytest.mark.parametrize("debug", [False, True])
def test_an_exception_whose_text_can_not_be_had_is_raised_itself_and_told_by_name(debug: bool) -> None:
    def refused(ctx: Context) -> Any:
        return failure(lambda ctx: agree(ctx, Call("probe"), error=MuteError() if ctx.rank else None))(ctx)

    def failed(ctx: Context) -> Any:
        with failing_together(ctx, "the block"):
            if ctx.rank:
                raise MuteError
        return agree(ctx, Call("probe"))

    for work in (refused, failure(failed)):
        here, there = run_ranks(work, 2, timeout_s=10, debug=debug)
        assert type(there) is MuteError
        assert isinstance(here, RemoteRankError)
        assert (here.rank, here.cause) == (1, "MuteError")
        assert "whose __str__ raises" in str(here)


@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [
        (Guard(), Guard(mode="off"), 'guard mode "off"'),
        (Guard(mode="full"), Guard(mode="off"), 'guard mode "off"'),
        (Guard(), Guard(call_sites=False), 'guard mode "sampled" without call sites'),
    ],
)
def test_ranks_with_different_guards_are_told_so(usual: Guard, odd: Guard, said: str) -> None:
    def work(ctx: Context) -> Any:
        own = ctx.replace(guard=odd if ctx.rank == 2 else usual)
        return failure(lambda _: gather(own, torch.ones(1)))(ctx)

    errors = run_ranks(work, 3, timeout_s=10)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, MismatchError)
        assert [(row.rank, row.found) for row in error.rows] == [(2, said)]
        assert "Use the same guard on all ranks" in error.hint


@given(worlds().flatmap(rank_trees), st.booleans())
def test_equal_structures_pass(ranked: list[Any], debug: bool) -> None:
    assert run_ranks(lambda ctx: verify_structure(ctx, ranked[ctx.rank]), len(ranked), debug=debug) == (
        [None] * len(ranked)
    )


@given(st.integers(2, 5).flatmap(mismatched_trees), st.booleans())
def test_unequal_structures_are_one_error_on_every_rank(drawn: Mismatched, debug: bool) -> None:
    size = len(drawn.trees)
    errors = run_ranks(
        failure(lambda ctx: verify_structure(ctx, drawn.trees[ctx.rank])), size, debug=debug, timeout_s=10
    )
    assert {type(error) for error in errors} == {MismatchError}
    assert len({str(error) for error in errors}) == 1
    assert {(row.rank, row.path) for row in errors[0].rows} == {(drawn.rank, path) for path in drawn.paths}


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        (torch.eye(3).to_sparse(), "float32 (3, 3) sparse_coo"),
        (torch.empty(3, 3, device="meta"), "float32 (3, 3) on meta"),
    ],
)
def test_tensors_that_are_not_dense_or_not_real_are_told_from_others(odd: torch.Tensor, found: str) -> None:
    work = failure(lambda ctx: verify_structure(ctx, {"x": odd if ctx.rank == 1 else torch.eye(3)}))
    for error in run_ranks(work, 3, timeout_s=10):
        assert isinstance(error, MismatchError)
        assert error.rows == (Disagreement(1, "tree['x']", "float32 (3, 3)", found),)
    run_ranks(lambda ctx: verify_structure(ctx, odd), 3, timeout_s=10)


def test_a_description_of_any_length_is_compared() -> None:
    def work(ctx: Context) -> Any:
        return gather(ctx, {"k" * 200 + str(index): torch.zeros(1) for index in range(500 + ctx.rank)})

    errors = run_ranks(failure(work), 2)
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert errors[0].rows[0].path.endswith("500']")


# --- which calls are meant to meet ---------------------------------------------------------------


def own(ctx: Context) -> torch.Tensor:
    return torch.tensor([ctx.rank])


@pytest.mark.parametrize("debug", [False, True])
def test_calls_from_other_lines_meet_under_one_tag(debug: bool) -> None:
    def work(ctx: Context) -> Any:
        if ctx.rank == 1:
            return listify(gather(ctx.tagged("data"), own(ctx)))
        return listify(gather(ctx.tagged("data"), own(ctx)))

    assert run_ranks(work, 3, debug=debug) == [[0, 1, 2]] * 3


def test_calls_from_other_lines_do_not_meet_without_one_where_there_are_others_of_their_form() -> None:
    def work(ctx: Context) -> Any:
        gather(ctx, own(ctx))
        if ctx.rank == 1:
            return gather(ctx, own(ctx))
        return gather(ctx, own(ctx))

    errors = run_ranks(failure(work), 3)
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert len({str(error) for error in errors}) == 1
    start = work.__code__.co_firstlineno
    site = f"test_agreement.py:{{}} in work, first test_agreement.py:{start + 1} in work"
    row = errors[0].rows[0]
    assert (row.rank, row.found, row.expected) == (1, site.format(start + 3), site.format(start + 4))
    assert 'ctx.tagged("...")' in str(errors[0])


@pytest.mark.parametrize(("odd", "others"), [("labels", "data"), ("", "data"), ("data", "")])
def test_one_line_under_several_tags_is_a_mismatch(odd: str, others: str) -> None:
    def work(ctx: Context) -> Any:
        return gather(ctx.tagged(odd if ctx.rank == 1 else others), own(ctx))

    errors = run_ranks(failure(work), 3)
    assert [type(error) for error in errors] == [MismatchError] * 3
    row = errors[0].rows[0]
    site = f"test_agreement.py:{work.__code__.co_firstlineno + 1} in work"
    assert (row.rank, row.found, row.expected) == (1, odd or site, others or site)


def elsewhere(ctx: Context) -> Any:
    return gather(ctx, own(ctx))


def test_without_one_calls_of_two_functions_do_not_meet() -> None:
    def work(ctx: Context) -> Any:
        return elsewhere(ctx) if ctx.rank == 1 else gather(ctx, own(ctx))

    assert [type(error) for error in run_ranks(failure(work), 2)] == [MismatchError] * 2


def send_ones(ctx: Context) -> Any:
    return broadcast(ctx, torch.ones(2))


@pytest.mark.parametrize("call", [wait_for_everyone, send_ones])
def test_what_brings_no_data_of_each_rank_may_be_called_from_any_line_but_under_one_tag(call: Any) -> None:
    def work(ctx: Context) -> Any:
        for _ in range(2):
            if ctx.rank:
                call(ctx)
            else:
                call(ctx)
        return failure(lambda ctx: call(ctx.tagged("here") if ctx.rank else ctx))(ctx)

    for error in run_ranks(work, 2):
        assert isinstance(error, MismatchError)
        assert error.rows[0].found == "here"


def test_after_a_mismatch_lines_are_learned_anew() -> None:
    def work(ctx: Context) -> Any:
        if ctx.rank == 1:
            error = failure(lambda ctx: gather(ctx, torch.ones(3)))(ctx)
        else:
            error = failure(lambda ctx: gather(ctx, own(ctx)))(ctx)
        return type(error), listify(gather(ctx, own(ctx)))

    assert run_ranks(work, 2) == [(MismatchError, [0, 1])] * 2


# --- a verdict that is heard later ---------------------------------------------------------------

WORLDS: tuple[Where, ...] = ("memory", "gloo", "processes")


def settle(ctx: Context) -> None:
    ctx.collectives.call_log.settle()


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_agree_go_on_and_hear_of_it_later(on: Where, size: int) -> None:
    def work(ctx: Context) -> Any:
        call_log = ctx.collectives.call_log
        seen: list[Any] = []
        for hear in (settle, own_gathered, check_next):
            check_later(ctx, Call("probe"))
            number, waits = call_log.number, call_log.unsettled is not None
            seen.append((waits, call_log.checked == number))
            hear(ctx)
            assert call_log.checked >= number
            settle(ctx)
            settle(ctx)
            assert call_log.unsettled is None
            assert call_log.checked == call_log.number
        return seen

    waits = on != "memory"  # where ranks run one after another there is no meanwhile
    assert run_ranks(work, size, on, timeout_s=20) == [[(waits, not waits)] * 3] * size


def check_next(ctx: Context) -> None:
    check_later(ctx, Call("next"))


def own_gathered(ctx: Context) -> None:
    assert listify(gather(ctx, own(ctx))) == list(range(ctx.num_processes))


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("hear", [settle, own_gathered])
def test_what_is_heard_later_tells_of_the_call_that_was_open(
    on: Where, size: int, hear: Callable[[Context], None]
) -> None:
    def work(ctx: Context) -> Any:
        if ctx.rank == 1:
            error = failure(lambda ctx: check_later(ctx, Call("other")))(ctx)
        else:
            error = failure(lambda ctx: check_later(ctx, Call("probe")))(ctx)
        first = error
        error = error or failure(hear)(ctx)
        own_gathered(ctx)  # all have heard of it, so all can go on
        return first is None, error

    found = run_ranks(work, size, on, timeout_s=20)
    start = work.__code__.co_firstlineno
    assert {ahead for ahead, _ in found} == {on != "memory"}
    assert {type(error) for _, error in found} == {MismatchError}
    assert len({str(error) for _, error in found}) == 1
    for rank, caller in enumerate(found[0][1].callers):
        assert caller.operation == ("other" if rank == 1 else "probe")
        assert f"test_agreement.py:{start + (2 if rank == 1 else 4)} " in caller.site


@pytest.mark.parametrize("on", ["gloo", "processes"])
def test_what_is_heard_later_tells_of_the_place_in_the_data_that_it_was_called_at(on: Where) -> None:
    def work(ctx: Context) -> Any:
        check_later(ctx, Call("probe", place=f"batch {ctx.rank} of epoch 0"))
        return failure(own_gathered)(ctx)

    for error in run_ranks(work, 2, on, timeout_s=20):
        assert isinstance(error, MismatchError)
        assert [(row.rank, row.found, row.expected) for row in error.rows] == [
            (1, "batch 1 of epoch 0", "batch 0 of epoch 0")
        ]


@pytest.mark.parametrize("on", WORLDS)
def test_a_rank_that_fails_with_an_agreement_open_is_an_error_of_the_others(on: Where) -> None:
    seen: dict[int, Any] = {}

    def work(ctx: Context) -> None:
        check_later(ctx, Call("probe"))
        if ctx.rank == 1:
            raise OSError("disk full")
        error = seen[ctx.rank] = failure(own_gathered)(ctx)
        assert isinstance(error, RemoteRankError)
        assert "rank 1 failed: OSError: disk full" in str(error)

    with pytest.raises(OSError, match="disk full"):
        run_ranks(work, 3, on, timeout_s=20)
    assert sorted(seen) == ([] if on == "processes" else [0, 2])


def test_without_a_guard_nothing_is_opened() -> None:
    def work(ctx: Context) -> Any:
        check_later(ctx, Call(f"probe {ctx.rank}"))
        return ctx.collectives.call_log.unsettled, ctx.collectives.call_log.number

    assert run_ranks(work, 2, "gloo", guard="off") == [(None, 1)] * 2


def said(**changed: Any) -> CallRecord:
    """Say what most ranks say, but for what is changed."""
    usual = CallRecord(
        operation="gather",
        site="train.py:7 in main",
        guard='guard mode "sampled"',
        number=3,
        text="from 0\0dict(x)",
        tag="train.py:7 in main",
        line="train.py:7 in main",
        place="",
        leaves={"tree['x']": "float32 (2,)"},
        passes=[],
        recent=[(3, "gather", "train.py:7 in main", "c3")],
    )
    return usual._replace(**changed)


def with_odd_one(size: int, odd: int, **changed: Any) -> list[CallRecord]:
    return [said(**changed) if rank == odd else said() for rank in range(size)]


# --- one thing after the other, from the coarse to the fine --------------------------------------


@pytest.mark.parametrize(
    ("changed", "row", "hint"),
    [
        (
            {"operation": "reduce"},
            Disagreement(1, "", "a call of gather", "a call of reduce"),
            "Every rank must call the same operation",
        ),
        ({"number": 4}, Disagreement(1, "", "call 3", "call 4"), "A rank has skipped a call"),
        (
            {"place": "batch 2 of epoch 0"},
            Disagreement(1, "", "", "batch 2 of epoch 0"),
            "The ranks are at different positions in their data.",
        ),
        (
            {"leaves": {"tree['x']": "float32 (3,)"}},
            Disagreement(1, "tree['x']", "float32 (2,)", "float32 (3,)"),
            "Every rank must call",
        ),
        (
            {"leaves": {}},
            Disagreement(1, "tree['x']", "float32 (2,)", "no such leaf"),
            "Every rank must call",
        ),
        ({"text": "from 1\0dict(x)"}, Disagreement(1, "", "from 0", "from 1"), "Every rank must call"),
        ({"text": "from 0\0list(x)"}, Disagreement(1, "", "dict(x)", "list(x)"), "Every rank must call"),
        (
            {"tag": "train.py:9 in main", "line": "train.py:9 in main"},
            Disagreement(1, "", "train.py:7 in main", "train.py:9 in main"),
            'give them one name: pass ctx.tagged("...")',
        ),
        (
            {"guard": 'guard mode "off"'},
            Disagreement(1, "", 'guard mode "sampled"', 'guard mode "off"'),
            "Use the same guard on all ranks",
        ),
    ],
    ids=("operation", "number", "place", "leaf", "no leaf", "option", "container", "tag", "guard"),
)
def test_each_kind_of_difference_is_named(changed: dict[str, Any], row: Disagreement, hint: str) -> None:
    error = find_mismatch(with_odd_one(3, 1, **changed))
    assert type(error) is MismatchError
    assert error.rows == (row,)
    assert hint in error.hint
    assert error.operation == "gather"
    assert error.callers == tuple(
        Caller(rank, changed.get("operation", "gather") if rank == 1 else "gather", "train.py:7 in main")
        for rank in range(3)
    )


def test_the_coarsest_difference_is_the_one_that_is_told() -> None:
    finer: dict[str, Any] = {}
    differences: tuple[dict[str, Any], ...] = (
        {"tag": "elsewhere"},
        {"text": "from 0\0list(x)"},
        {"text": "from 1\0list(x)"},
        {"leaves": {}},
        {"place": "batch 1"},
        {"number": 9},
        {"operation": "reduce"},
        {"guard": 'guard mode "full"'},
    )
    for coarser in differences:
        alone = find_mismatch(with_odd_one(3, 2, **coarser))
        finer |= coarser
        assert find_mismatch(with_odd_one(3, 2, **finer)).rows == alone.rows


def test_more_than_twenty_rows_are_cut_and_counted() -> None:
    def leaves(kind: str, count: int) -> dict[str, str]:
        return {f"tree[{index}]": kind for index in range(count)}

    for count, told in ((20, ""), (21, "... and 1 more"), (50, "... and 30 more")):
        error = find_mismatch([said(leaves=leaves(kind, count)) for kind in ("int64 ()", "int32 ()")])
        assert [row.path for row in error.rows] == [f"tree[{index}]" for index in range(20)]
        assert told in error.hint
        assert ("more" in error.hint) == bool(told)


# --- calls that were counted and not compared ----------------------------------------------------


def calls(*chains: str, last: int = 3) -> list[tuple[int, str, str, str]]:
    first = last - len(chains) + 1
    return [
        (number, f"operation {number}", f"train.py:{number} in main", chain)
        for number, chain in enumerate(chains, first)
    ]


def test_the_first_earlier_call_that_differed_is_told() -> None:
    odd = calls("c1", "d2", "d3")
    odd[1] = (2, "reduce", "other.py:2 in main", "d2")
    error = find_mismatch([said(recent=calls("c1", "c2", "c3"))] * 2 + [said(recent=odd, operation="reduce")])
    assert type(error) is MismatchError
    assert error.rows == (
        Disagreement(
            2, "", "call 2: operation 2 at train.py:2 in main", "call 2: reduce at other.py:2 in main"
        ),
    )
    assert "have differed since call 2" in error.hint
    assert error.operation == "operation 2"
    assert error.callers == (
        Caller(0, "operation 2", "train.py:2 in main"),
        Caller(1, "operation 2", "train.py:2 in main"),
        Caller(2, "reduce", "other.py:2 in main"),
    )


# --- uneven data ---------------------------------------------------------------------------------


def test_a_rank_that_ran_out_of_batches_is_uneven_data() -> None:
    error = find_mismatch(
        [
            said(passes=[(0, 9, False), (2, 4, False)], place="batch 4 of epoch 0"),
            said(passes=[(0, 9, False), (2, 3, True)], operation="reduce"),
            said(passes=[(0, 9, False), (2, 4, False), (5, 1, False)], place="batch 4 of epoch 0"),
        ]
    )
    assert isinstance(error, UnevenDataError)
    assert error.counts == (4, 3, 4)
    assert "rank(s) 1 had no more" in error.hint
    assert "4, 3, 4 by rank" in str(error)
    assert error.rows == (Disagreement(1, "", "a call of gather", "a call of reduce"),)


@pytest.mark.parametrize(
    "passes",
    [
        [[(0, 3, False)], [(0, 4, False)]],  # nobody is at an end: out of step, but not uneven
        [[(0, 4, True)], [(0, 4, False)]],  # the same number
        [[(0, 4, True)], [(1, 3, False)]],  # not the same pass
        [[(0, 4, False), (2, 3, True)], [(0, 4, False)]],  # one rank evaluates
        [[], [(0, 4, True)]],
        [[], []],
    ],
)
def test_other_differences_between_batches_are_no_uneven_data(passes: Any) -> None:
    ranks = [said(passes=one) for one in passes]
    ranks[1] = ranks[1]._replace(operation="reduce")
    assert type(find_mismatch(ranks)) is MismatchError


# --- laws ----------------------------------------------------------------------------------------

SHORT = st.text("ab\0", max_size=3)
ANY = st.builds(
    CallRecord,
    operation=SHORT,
    site=SHORT,
    guard=SHORT,
    number=st.integers(0, 4),
    text=SHORT,
    tag=SHORT,
    line=SHORT,
    place=SHORT,
    leaves=st.dictionaries(SHORT, SHORT, max_size=3),
    passes=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=2),
    recent=st.lists(st.tuples(st.integers(0, 4), SHORT, SHORT, SHORT), max_size=3),
)


def as_sent(one: CallRecord) -> CallRecord:
    """Bring it to another rank and back."""
    return CallRecord(**json.loads(json.dumps(one._asdict())))


@given(st.lists(ANY, min_size=1, max_size=4))
def test_anything_can_be_said_and_every_rank_finds_the_same(ranks: list[CallRecord]) -> None:
    before = repr(ranks)
    first, again = find_mismatch(ranks), find_mismatch([as_sent(one) for one in ranks])
    assert repr(ranks) == before
    assert type(first) is type(again)
    assert str(first) == str(again)
    assert vars(first) == vars(again)
    assert all(0 <= row.rank < len(ranks) for row in first.rows)
    assert len(first.rows) <= 20


@given(ANY, st.integers(2, 5), st.data())
def test_ranks_that_say_what_most_say_have_no_row(usual: CallRecord, size: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, size))
    ranks = [usual] * (size + 1)
    ranks[odd] = data.draw(ANY)._replace(recent=usual.recent)
    assert {row.rank for row in find_mismatch(ranks).rows} <= {odd}


@given(st.lists(ANY, min_size=5, max_size=5), st.permutations(range(5)))
def test_it_does_not_matter_which_number_a_rank_has(drawn: Sequence[CallRecord], order: list[int]) -> None:
    # One against four that agree: with a tie the lowest rank would be taken for right.
    ranks = [drawn[0], *[drawn[1]] * 4]
    turned = [ranks[index] for index in order]
    place: Callable[[int], int] = order.index
    here, there = find_mismatch(ranks), find_mismatch(turned)
    assert here.operation == there.operation
    if here.rows and here.rows[0].found:  # not the row which only says that nothing can be told apart
        assert {row._replace(rank=place(row.rank)) for row in here.rows} == set(there.rows)
