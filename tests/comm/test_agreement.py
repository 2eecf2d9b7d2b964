import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import (
    Call,
    agree,
    broadcast,
    catch,
    check_later,
    failing_together,
    gather,
    verify_structure,
    wait_for_everyone,
)
from accelfn.context import Context
from accelfn.context.config import Guard
from accelfn.errors import Disagreement, MismatchError, RemoteRankError
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import Mismatched, mismatched_trees, rank_trees, worlds
from accelfn.tree import listify


def failure(work: Callable[[Context], Any]) -> Callable[[Context], Any]:
    def caught(ctx: Context) -> Any:
        try:
            return work(ctx)
        except Exception as error:  # noqa: BLE001 -- it is the result
            return error

    return caught


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
        assert "whose text can't be had" in str(here)


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
        assert "Give all ranks the same guard" in error.hint


def test_attempt_keeps_the_refusal() -> None:
    assert catch(lambda: 3) == (3, None)
    value, error = catch(lambda: 1 // 0)
    assert value is None
    assert isinstance(error, ZeroDivisionError)


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


def test_leaves_that_are_no_tensors_are_compared_by_type() -> None:
    assert run_ranks(lambda ctx: verify_structure(ctx, {"n": ctx.rank}), 2) == [None, None]
    with pytest.raises(MismatchError, match=r"\n  1 .* tree\['n'\]  str    int\n"):
        run_ranks(lambda ctx: verify_structure(ctx, {"n": "a" if ctx.rank == 1 else 0}), 3)


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


def test_a_long_list_of_differences_is_cut() -> None:
    def work(ctx: Context) -> Any:
        return gather(ctx, [torch.zeros(1 + ctx.rank) for _ in range(50)])

    error = run_ranks(failure(work), 2)[0]
    assert len(error.rows) == 20
    assert "... and 30 more" in str(error)


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


def test_tags_tell_swapped_calls_of_one_line_apart() -> None:
    def work(ctx: Context) -> Any:
        tags = ["data", "labels"]
        return [gather(ctx.tagged(tag), own(ctx)) for tag in (reversed(tags) if ctx.rank else tags)]

    errors = run_ranks(failure(work), 2)
    assert [type(error) for error in errors] == [MismatchError] * 2


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
