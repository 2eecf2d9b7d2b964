"""Where calls differ, found by every rank for itself from what all of them said."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm.difference import Said, find_difference
from accelfn.errors import Caller, Disagreement, MismatchError, UnevenDataError


def said(**changed: Any) -> Said:
    """Say what most ranks say, but for what is changed."""
    usual = Said(
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


def with_odd_one(size: int, odd: int, **changed: Any) -> list[Said]:
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
        ({"number": 4}, Disagreement(1, "", "call 3", "call 4"), "A rank has left out a call"),
        (
            {"place": "batch 2 of epoch 0"},
            Disagreement(1, "", "", "batch 2 of epoch 0"),
            "The ranks are at different places in their data.",
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
            "Give all ranks the same guard",
        ),
    ],
    ids=("operation", "number", "place", "leaf", "no leaf", "option", "container", "tag", "guard"),
)
def test_each_kind_of_difference_is_named(changed: dict[str, Any], row: Disagreement, hint: str) -> None:
    error = find_difference(with_odd_one(3, 1, **changed))
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
        alone = find_difference(with_odd_one(3, 2, **coarser))
        finer |= coarser
        assert find_difference(with_odd_one(3, 2, **finer)).rows == alone.rows


def test_of_two_ranks_the_first_one_is_taken_for_right() -> None:
    error = find_difference([said(operation="reduce"), said()])
    assert error.operation == "reduce"
    assert [row.rank for row in error.rows] == [1]


def test_every_leaf_that_differs_has_a_row() -> None:
    error = find_difference(
        [
            said(leaves={"a": "float32 ()", "b": "int64 ()"}),
            said(leaves={"a": "float32 ()", "b": "int64 ()"}),
            said(leaves={"a": "float64 ()", "c": "int64 ()"}),
        ]
    )
    assert error.rows == (
        Disagreement(2, "a", "float32 ()", "float64 ()"),
        Disagreement(2, "b", "int64 ()", "no such leaf"),
        Disagreement(2, "c", "no such leaf", "int64 ()"),
    )


def test_more_than_twenty_rows_are_cut_and_counted() -> None:
    def leaves(kind: str, count: int) -> dict[str, str]:
        return {f"tree[{index}]": kind for index in range(count)}

    for count, told in ((20, ""), (21, "... and 1 more"), (50, "... and 30 more")):
        error = find_difference([said(leaves=leaves(kind, count)) for kind in ("int64 ()", "int32 ()")])
        assert [row.path for row in error.rows] == [f"tree[{index}]" for index in range(20)]
        assert told in error.hint
        assert ("more" in error.hint) == bool(told)


def test_what_is_long_is_cut() -> None:
    error = find_difference([said(), said(text="x" * 500 + "\0dict(x)")])
    assert error.rows[0].found == "x" * 200


def test_ranks_that_differ_in_nothing_they_remember_say_so() -> None:
    error = find_difference([said(), said(), said()])
    assert error.rows == ()
    assert "since an earlier call that was not compared and is no longer remembered" in error.hint
    assert 'guard="full"' in error.hint


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
    error = find_difference(
        [said(recent=calls("c1", "c2", "c3"))] * 2 + [said(recent=odd, operation="reduce")]
    )
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


def test_an_earlier_call_that_looks_alike_is_still_named() -> None:
    error = find_difference([said(recent=calls("c2", "c3")), said(recent=calls("d2", "d3"))])
    assert [(row.rank, row.found) for row in error.rows] == [(0, "call 2: operation 2 at train.py:2 in main")]


def test_only_calls_that_all_remember_are_compared() -> None:
    short, long = calls("c3"), calls("d1", "d2", "d3")
    error = find_difference([said(recent=short), said(recent=long, operation="reduce")])
    assert error.rows == (Disagreement(1, "", "a call of gather", "a call of reduce"),)


def test_the_current_call_is_no_earlier_one() -> None:
    ahead = said(number=4, recent=calls("c3", "d4", last=4))
    error = find_difference([said(recent=calls("c2", "c3")), ahead])
    assert error.rows == (Disagreement(1, "", "call 3", "call 4"),)


# --- uneven data ---------------------------------------------------------------------------------


def test_a_rank_that_ran_out_of_batches_is_uneven_data() -> None:
    error = find_difference(
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
    assert type(find_difference(ranks)) is MismatchError


# --- laws ----------------------------------------------------------------------------------------

SHORT = st.text("ab\0", max_size=3)
ANY = st.builds(
    Said,
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


def as_sent(one: Said) -> Said:
    """Bring it to another rank and back."""
    return Said(**json.loads(json.dumps(one._asdict())))


@given(st.lists(ANY, min_size=1, max_size=4))
def test_anything_can_be_said_and_every_rank_finds_the_same(ranks: list[Said]) -> None:
    before = repr(ranks)
    first, again = find_difference(ranks), find_difference([as_sent(one) for one in ranks])
    assert repr(ranks) == before
    assert type(first) is type(again)
    assert str(first) == str(again)
    assert vars(first) == vars(again)
    assert all(0 <= row.rank < len(ranks) for row in first.rows)
    assert len(first.rows) <= 20


@given(ANY, st.integers(2, 5), st.data())
def test_ranks_that_say_what_most_say_have_no_row(usual: Said, size: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, size))
    ranks = [usual] * (size + 1)
    ranks[odd] = data.draw(ANY)._replace(recent=usual.recent)
    assert {row.rank for row in find_difference(ranks).rows} <= {odd}


@given(st.lists(ANY, min_size=5, max_size=5), st.permutations(range(5)))
def test_it_does_not_matter_which_number_a_rank_has(drawn: Sequence[Said], order: list[int]) -> None:
    # One against four that agree: with a tie the lowest rank would be taken for right.
    ranks = [drawn[0], *[drawn[1]] * 4]
    turned = [ranks[index] for index in order]
    place: Callable[[int], int] = order.index
    here, there = find_difference(ranks), find_difference(turned)
    assert here.operation == there.operation
    if here.rows and here.rows[0].found:  # not the row which only says that nothing can be told apart
        assert {row._replace(rank=place(row.rank)) for row in here.rows} == set(there.rows)
