import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.comm import Call, agree, check_later
from accelfn.comm.agreement import CallRecord, count_call, find_mismatch
from accelfn.context import Context
from accelfn.errors import Disagreement, MismatchError, RemoteRankError
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import rank_trees, worlds
from tests.comm.seam import failure, same_mismatch


def payload(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5), st.booleans())
def test_all_ranks_hear_what_all_said(said: list[bytes], debug: bool) -> None:
    def work(ctx: Context) -> list[bytes]:
        heard = agree(ctx, Call("probe", "same"), payload(said[ctx.rank]))
        return [bytes(af.tree.listify(row)) for row in heard]

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


@pytest.mark.parametrize("text", ["\U0001f600" * 9000, "\ud800" * 9000])
def test_a_long_message_stays_within_the_exchange(text: str) -> None:
    def work(ctx: Context) -> Any:
        def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
            assert message.numel() <= 1024
            return ctx.collectives.all_gather_bytes(message)

        seam = dataclasses.replace(ctx.collectives, all_gather_bytes=all_gather_bytes, chunk=1024)
        small = dataclasses.replace(ctx, collectives=seam)
        return agree(small, Call("probe"), error=ValueError(text) if ctx.rank else None)

    here, there = run_ranks(failure(work), 2, timeout_s=10)
    assert (type(here), type(there)) == (RemoteRankError, ValueError)


class MuteError(ValueError):
    """An exception of a user's whose text fails."""

    def __str__(self) -> str:
        raise OSError("no text")


def test_an_exception_whose_text_can_not_be_had_is_raised_itself_and_told_by_name() -> None:
    work = failure(lambda ctx: agree(ctx, Call("probe"), error=MuteError() if ctx.rank else None))
    here, there = run_ranks(work, 2, timeout_s=10)
    assert type(there) is MuteError
    assert (here.rank, here.cause) == (1, "MuteError")
    assert "whose __str__ raises" in str(here)


@pytest.mark.parametrize(
    ("usual", "odd", "said"),
    [
        (af.Guard(), af.Guard(mode="off"), 'guard mode "off"'),
        (af.Guard(mode="full"), af.Guard(mode="off"), 'guard mode "off"'),
        (af.Guard(), af.Guard(call_sites=False), 'guard mode "sampled" without call sites'),
    ],
)
def test_ranks_with_different_guards_are_told_so(usual: af.Guard, odd: af.Guard, said: str) -> None:
    work = failure(lambda ctx: af.gather(ctx.replace(guard=odd if ctx.rank == 2 else usual), torch.ones(1)))
    error = same_mismatch(run_ranks(work, 3, timeout_s=10))
    assert [(row.rank, row.found) for row in error.rows] == [(2, said)]
    assert "Use the same guard on all ranks" in error.hint


@settings(max_examples=10)
@given(worlds().flatmap(rank_trees), st.booleans())
def test_equal_structures_pass(ranked: list[Any], debug: bool) -> None:
    assert run_ranks(
        lambda ctx: af.comm.verify_structure(ctx, ranked[ctx.rank]), len(ranked), debug=debug
    ) == ([None] * len(ranked))


@pytest.mark.parametrize(
    ("odd", "found"),
    [(torch.eye(3).to_sparse(), " sparse_coo"), (torch.empty(3, 3, device="meta"), " on meta")],
)
def test_tensors_that_are_not_dense_or_not_real_are_told_from_others(odd: torch.Tensor, found: str) -> None:
    work = failure(lambda ctx: af.comm.verify_structure(ctx, {"x": odd if ctx.rank == 1 else torch.eye(3)}))
    usual = "float32 (3, 3)"
    error = same_mismatch(run_ranks(work, 3, timeout_s=10))
    assert error.rows == (Disagreement(1, "tree['x']", usual, usual + found),)
    run_ranks(lambda ctx: af.comm.verify_structure(ctx, odd), 3, timeout_s=10)


def test_a_description_of_any_length_is_compared() -> None:
    def work(ctx: Context) -> Any:
        return af.gather(ctx, {"k" * 200 + str(index): torch.zeros(1) for index in range(500 + ctx.rank)})

    errors = run_ranks(failure(work), 2)
    assert [type(error) for error in errors] == [MismatchError] * 2
    assert errors[0].rows[0].path.endswith("500']")


@pytest.mark.parametrize(("count", "told"), [(20, ""), (21, "... and 1 more"), (50, "... and 30 more")])
def test_more_than_twenty_rows_are_cut_and_counted(count: int, told: str) -> None:
    error = run_ranks(failure(lambda ctx: af.comm.verify_structure(ctx, [(0, 0.0)[ctx.rank]] * count)), 2)[0]
    assert [row.path for row in error.rows] == [f"tree[{index}]" for index in range(20)]
    assert told in error.hint
    assert ("more" in error.hint) == bool(told)


def test_a_call_that_was_not_compared_is_told_by_the_next_that_is() -> None:
    def work(ctx: Context) -> Any:
        rows, order = torch.ones(2), list(range(9))
        for _ in range(52):  # from then on, in more than eight ranks, every other call is compared
            af.permute(ctx, rows, order)
        af.permute(ctx, rows, order if ctx.rank != 3 else order[::-1])
        return failure(lambda ctx: af.permute(ctx, rows, order))(ctx)

    error = same_mismatch(run_ranks(work, 9))
    assert "have differed since call 53, which was not compared" in error.hint
    line = work.__code__.co_firstlineno + 4
    assert {(caller.operation, caller.site) for caller in error.callers} == {
        ("permute", f"test_agreement.py:{line} in work")
    }


def test_a_call_that_only_counts_is_told_by_the_next_that_communicates() -> None:
    def work(ctx: Context) -> Any:
        af.gather(ctx, own(ctx))
        count_call(ctx, Call("second" if ctx.rank == 2 else "first"))
        return failure(lambda ctx: af.gather(ctx, own(ctx)))(ctx)

    for error in run_ranks(work, 3):
        assert isinstance(error, MismatchError)
        assert error.operation == "first"
        assert [(row.rank, row.found.partition(" at ")[0]) for row in error.rows] == [(2, "call 2: second")]


# --- which calls are meant to meet ---------------------------------------------------------------


def own(ctx: Context) -> torch.Tensor:
    return torch.tensor([ctx.rank])


@pytest.mark.parametrize("debug", [False, True])
def test_calls_from_other_lines_meet_under_one_tag(debug: bool) -> None:
    def work(ctx: Context) -> Any:
        if ctx.rank == 1:
            return af.tree.listify(af.gather(ctx.tagged("data"), own(ctx)))
        return af.tree.listify(af.gather(ctx.tagged("data"), own(ctx)))

    assert run_ranks(work, 3, debug=debug) == [[0, 1, 2]] * 3


def test_calls_from_other_lines_do_not_meet_without_one_where_there_are_others_of_their_form() -> None:
    def work(ctx: Context) -> Any:
        af.gather(ctx, own(ctx))
        if ctx.rank == 1:
            return af.gather(ctx, own(ctx))
        return af.gather(ctx, own(ctx))

    error = same_mismatch(run_ranks(failure(work), 3))
    start = work.__code__.co_firstlineno
    site = f"test_agreement.py:{{}} in work, first test_agreement.py:{start + 1} in work"
    row = error.rows[0]
    assert (row.rank, row.found, row.expected) == (1, site.format(start + 3), site.format(start + 4))
    assert 'ctx.tagged("...")' in str(error)


@pytest.mark.parametrize(("odd", "others"), [("labels", "data"), ("", "data"), ("data", "")])
def test_one_line_under_several_tags_is_a_mismatch(odd: str, others: str) -> None:
    def work(ctx: Context) -> Any:
        return af.gather(ctx.tagged(odd if ctx.rank == 1 else others), own(ctx))

    row = same_mismatch(run_ranks(failure(work), 3)).rows[0]
    site = f"test_agreement.py:{work.__code__.co_firstlineno + 1} in work"
    assert (row.rank, row.found, row.expected) == (1, odd or site, others or site)


def send_ones(ctx: Context) -> Any:
    return af.broadcast(ctx, torch.ones(2))


@pytest.mark.parametrize("call", [af.wait_for_everyone, send_ones])
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
            error = failure(lambda ctx: af.gather(ctx, torch.ones(3)))(ctx)
        else:
            error = failure(lambda ctx: af.gather(ctx, own(ctx)))(ctx)
        return type(error), af.tree.listify(af.gather(ctx, own(ctx)))

    assert run_ranks(work, 2) == [(MismatchError, [0, 1])] * 2


# --- a verdict that is heard later ---------------------------------------------------------------

WORLDS: tuple[Where, ...] = ("memory", "processes")


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
    assert af.tree.listify(af.gather(ctx, own(ctx))) == list(range(ctx.num_processes))


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


def test_what_is_heard_later_tells_of_the_place_in_the_data_that_it_was_called_at() -> None:
    def work(ctx: Context) -> Any:
        check_later(ctx, Call("probe", place=f"batch {ctx.rank} of epoch 0"))
        return failure(own_gathered)(ctx)

    (row,) = same_mismatch(run_ranks(work, 2, "processes", timeout_s=20)).rows
    assert (row.rank, row.found, row.expected) == (1, "batch 1 of epoch 0", "batch 0 of epoch 0")


@pytest.mark.parametrize("on", WORLDS)
@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_that_fails_or_ends_with_an_agreement_open_is_an_error_of_the_others(
    on: Where, fails: bool, tmp_path: Path
) -> None:
    def work(ctx: Context) -> None:
        check_later(ctx, Call("probe"))
        if ctx.rank != 1:
            error = failure(own_gathered)(ctx)
            (tmp_path / str(ctx.rank)).write_text(f"{type(error).__name__}: {error}")
        elif fails:
            raise OSError("disk full")

    if fails:
        with pytest.raises(OSError, match="disk full"):
            run_ranks(work, 3, on, timeout_s=20)
    else:
        run_ranks(work, 3, on, timeout_s=20)
    said = "RemoteRankError: rank 1 failed: OSError: disk full" if fails else "MissingRankError: "
    for rank in (0, 2):
        text = (tmp_path / str(rank)).read_text()
        assert text.startswith(said)
        assert fails or "rank 1 has ended after probe" in text


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


def as_sent(record: CallRecord) -> CallRecord:
    """Bring it to another rank and back."""
    return CallRecord(**json.loads(json.dumps(record._asdict())))


@given(st.lists(ANY, min_size=1, max_size=4))
def test_anything_can_be_said_and_every_rank_finds_the_same(ranks: list[CallRecord]) -> None:
    before = repr(ranks)
    first, again = find_mismatch(ranks), find_mismatch([as_sent(record) for record in ranks])
    assert repr(ranks) == before
    assert type(first) is type(again)
    assert str(first) == str(again)
    assert vars(first) == vars(again)
    assert all(0 <= row.rank < len(ranks) for row in first.rows)
    assert len(first.rows) <= 20
