"""What a rank remembers of its calls: equal fingerprints for equal histories, and for no others."""

import copy
import gc
import pickle
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import Entry, Journal, Unsettled

NAMES = st.sampled_from(["gather", "reduce", "gathe", "rgather"])
TEXTS = st.text("ab\0", max_size=4)


class Begun(NamedTuple):
    """What is begun, and where; nothing is compared where there is no material."""

    operation: str
    site: str
    material: str | None


CALLS = st.lists(st.builds(Begun, NAMES, TEXTS, TEXTS | st.none()), max_size=6)


def journal_of(calls: list[Begun]) -> Journal:
    journal = Journal()
    for call in calls:
        journal.begin(call.operation, call.site, call.material, 1.0)
    return journal


def compared(calls: list[Begun]) -> list[str]:
    return [call.material for call in calls if call.material is not None]


@given(CALLS, CALLS)
def test_chains_are_equal_where_all_that_was_compared_is(first: list[Begun], second: list[Begun]) -> None:
    chains = journal_of(first).chain, journal_of(second).chain
    assert (chains[0] == chains[1]) == (compared(first) == compared(second))
    assert {len(chain) for chain in chains} == {16}


@given(CALLS.filter(bool), st.data())
def test_an_early_difference_shows_for_ever(calls: list[Begun], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(calls) - 1))
    changed = [*calls]
    changed[place] = calls[place]._replace(material=(calls[place].material or "") + "c")
    assert journal_of(calls).chain != journal_of(changed).chain
    left_out = [call for index, call in enumerate(calls) if index != place]
    if calls[place].material is not None:
        assert journal_of(calls).chain != journal_of(left_out).chain


@given(CALLS, CALLS, CALLS, st.integers(0, 99))
def test_ranks_that_resume_alike_are_equal_again(
    first: list[Begun], second: list[Begun], after: list[Begun], number: int
) -> None:
    journals = journal_of(first), journal_of(second)
    for journal in journals:
        journal.resume(number)
        assert (journal.number, journal.checked) == (number, number)
        for call in after:
            journal.begin(call.operation, call.site, call.material, 1.0)
    assert journals[0].chain == journals[1].chain
    assert journals[0].number == journals[1].number == number + len(after)
    # Still not that of a rank which has only just begun.
    assert journal_of(after).chain != journals[0].chain


@given(st.integers(0, 99), st.integers(0, 99))
def test_ranks_that_resume_at_other_calls_differ(one: int, other: int) -> None:
    first, second = Journal(), Journal()
    first.resume(one)
    second.resume(other)
    assert (first.chain == second.chain) == (one == other)


@given(CALLS)
def test_calls_are_counted_and_found_by_their_number(calls: list[Begun]) -> None:
    journal = journal_of(calls)
    assert journal.number == len(calls)
    for number, call in enumerate(calls, 1):
        entry = journal.find(number)
        assert entry == Entry(number, call.operation, call.site, journal_of(calls[:number]).chain)
    assert journal.find(0) is journal.find(len(calls) + 1) is None
    assert journal.current.number == len(calls)
    assert journal.current == (journal.find(len(calls)) or Entry(0, "", "", bytes(16)))


@given(CALLS, CALLS)
def test_what_is_confirmed_is_no_longer_recent(before: list[Begun], after: list[Begun]) -> None:
    journal = journal_of(before)
    assert [entry.number for entry in journal.recent()] == list(range(1, len(before) + 1))
    journal.confirm()
    assert journal.recent() == ()
    for call in after:
        journal.begin(call.operation, call.site, call.material, 1.0)
    assert journal.checked == len(before)
    assert [entry[1:3] for entry in journal.recent()] == [(call.operation, call.site) for call in after]
    # Confirmed, and still known by its number.
    assert all(journal.find(number) for number in range(1, journal.number + 1))


def test_memory_is_bounded() -> None:
    journal = Journal()
    for number in range(1000):
        journal.begin("gather", f"train.py:{number} in main", "", 1.0)
    assert journal.number == 1000
    assert [entry.number for entry in journal.recent()] == list(range(937, 1001))
    assert journal.find(936) is None
    assert journal.find(937) is not None


def test_a_call_says_how_long_it_may_take_and_the_seam_has_time_before_the_first() -> None:
    journal = Journal()
    assert journal.patience_s == 300.0
    journal.begin("gather", "", None, 7.0)
    assert journal.patience_s == 7.0


def test_things_are_counted_each_for_itself_and_kept_alive_by_nobody() -> None:
    class Thing:
        pass

    journal = Journal()
    one, other = Thing(), Thing()
    assert [journal.count(thing) for thing in (one, one, other, one)] == [1, 2, 1, 3]
    del one
    gc.collect()
    assert len(journal._counts) == 1  # pyright: ignore[reportPrivateUsage]
    assert journal.count(other) == 2


def test_a_copy_is_the_journal_of_the_same_group_and_a_pickle_that_of_none() -> None:
    journal = journal_of([Begun("gather", "", "a")])
    assert copy.deepcopy([journal]) == [journal]
    away = pickle.loads(pickle.dumps(journal))
    assert (away.number, away.chain) == (0, bytes(16))


def opened(told: list[str], error: Exception | None = None) -> Journal:
    def settle() -> None:
        told.append("heard")
        if error is not None:
            raise error

    journal = Journal()
    journal.unsettled = Unsettled(settle, lambda: told.append("abandoned"))
    return journal


def test_an_open_agreement_is_heard_once() -> None:
    told: list[str] = []
    journal = opened(told)
    journal.settle()
    journal.settle()
    journal.abandon()
    assert told == ["heard"]


def test_an_agreement_that_is_let_go_is_not_heard() -> None:
    told: list[str] = []
    journal = opened(told)
    journal.abandon()
    journal.abandon()
    journal.settle()
    assert told == ["abandoned"]


def test_a_disagreement_is_raised_once() -> None:
    told: list[str] = []
    journal = opened(told, ValueError("they differ"))
    with pytest.raises(ValueError, match="they differ"):
        journal.settle()
    assert journal.unsettled is None
    journal.settle()
    assert told == ["heard"]


def test_an_agreement_is_closed_before_it_is_heard() -> None:
    journal = Journal()
    open_then: list[bool] = []
    journal.unsettled = Unsettled(lambda: open_then.append(journal.unsettled is not None), lambda: None)
    journal.settle()
    assert open_then == [False]


def test_a_pickle_leaves_an_open_agreement_behind() -> None:
    journal = opened([])
    assert pickle.loads(pickle.dumps(journal)).unsettled is None


def test_the_first_line_of_each_form_is_known_until_the_count_resumes() -> None:
    journal = Journal()
    found = [journal.first_site(1, "a"), journal.first_site(2, "b"), journal.first_site(1, "b")]
    assert found == ["a", "b", "a"]
    journal.resume(3)
    assert journal.first_site(1, "b") == "b"


def test_only_so_many_forms_are_remembered() -> None:
    journal = Journal()
    for form in range(10_000):
        assert journal.first_site(form, str(form)) == str(form)
    assert journal.first_site(9_999, "other") == "9999"
    assert journal.first_site(0, "other") == "other"
