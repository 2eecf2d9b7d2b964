"""What a rank remembers of its calls: equal fingerprints for equal histories, and for no others."""

import contextlib
import copy
import pickle
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn.context.call_log
from accelfn.context import CallLog, Entry, Unsettled, call_site

NAMES = st.sampled_from(["gather", "reduce", "gathe", "rgather"])
TEXTS = st.text("ab\0", max_size=4)


class Begun(NamedTuple):
    """What is begun, and where; nothing is compared where there is no material."""

    operation: str
    site: str
    material: str | None


CALLS = st.lists(st.builds(Begun, NAMES, TEXTS, TEXTS | st.none()), max_size=6)


def journal_of(calls: list[Begun]) -> CallLog:
    call_log = CallLog()
    for call in calls:
        call_log.begin(call.operation, call.site, call.material, 1.0)
    return call_log


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
    for call_log in journals:
        call_log.resume(number)
        assert (call_log.number, call_log.checked) == (number, number)
        for call in after:
            call_log.begin(call.operation, call.site, call.material, 1.0)
    assert journals[0].chain == journals[1].chain
    assert journals[0].number == journals[1].number == number + len(after)
    # Still not that of a rank which has only just begun.
    assert journal_of(after).chain != journals[0].chain


@given(CALLS)
def test_calls_are_counted_and_found_by_their_number(calls: list[Begun]) -> None:
    call_log = journal_of(calls)
    assert call_log.number == len(calls)
    for number, call in enumerate(calls, 1):
        entry = call_log.find(number)
        assert entry == Entry(number, call.operation, call.site, journal_of(calls[:number]).chain)
    assert call_log.find(0) is call_log.find(len(calls) + 1) is None
    assert call_log.current.number == len(calls)
    assert call_log.current == (call_log.find(len(calls)) or Entry(0, "", "", bytes(16)))


@given(CALLS, CALLS)
def test_what_is_confirmed_is_no_longer_recent(before: list[Begun], after: list[Begun]) -> None:
    call_log = journal_of(before)
    assert [entry.number for entry in call_log.recent()] == list(range(1, len(before) + 1))
    call_log.confirm()
    assert call_log.recent() == ()
    for call in after:
        call_log.begin(call.operation, call.site, call.material, 1.0)
    assert call_log.checked == len(before)
    assert [entry[1:3] for entry in call_log.recent()] == [(call.operation, call.site) for call in after]
    # Confirmed, and still known by its number.
    assert all(call_log.find(number) for number in range(1, call_log.number + 1))


def test_memory_is_bounded() -> None:
    call_log = CallLog()
    for number in range(1000):
        call_log.begin("gather", f"train.py:{number} in main", "", 1.0)
    assert call_log.number == 1000
    assert [entry.number for entry in call_log.recent()] == list(range(937, 1001))
    assert call_log.find(936) is None
    assert call_log.find(937) is not None


def test_passes_are_listed_while_they_are_open_in_any_order_of_their_ends() -> None:
    call_log = journal_of([Begun("gather", "", "a")])
    first, second = call_log.open_pass(), call_log.open_pass()
    one = first.__enter__()
    call_log.begin("gather", "", "b", 1.0)
    other = second.__enter__()
    assert [found is one or found is other for found in call_log.open_passes] == [True, True]
    assert (one.number, one.batches, one.has_ended, other.number) == (1, 0, False, 2)
    first.__exit__(None, None, None)
    assert call_log.open_passes == [other]
    second.__exit__(None, None, None)
    assert call_log.open_passes == []


def test_a_copy_is_the_journal_of_the_same_group_and_a_pickle_that_of_none() -> None:
    call_log = journal_of([Begun("gather", "", "a")])
    assert copy.deepcopy([call_log]) == [call_log]
    away = pickle.loads(pickle.dumps(call_log))
    assert (away.number, away.chain) == (0, bytes(16))


def opened(told: list[str], error: Exception | None = None) -> CallLog:
    def settle() -> None:
        told.append("heard")
        if error is not None:
            raise error

    call_log = CallLog()
    call_log.unsettled = Unsettled(settle, lambda: told.append("abandoned"))
    return call_log


def test_an_agreement_that_is_let_go_is_not_heard() -> None:
    told: list[str] = []
    call_log = opened(told)
    call_log.abandon()
    call_log.abandon()
    call_log.settle()
    assert told == ["abandoned"]


def test_a_disagreement_is_raised_once() -> None:
    told: list[str] = []
    call_log = opened(told, ValueError("they differ"))
    with pytest.raises(ValueError, match="they differ"):
        call_log.settle()
    assert call_log.unsettled is None
    call_log.settle()
    assert told == ["heard"]


def test_the_first_line_of_each_form_is_known_until_the_count_resumes() -> None:
    call_log = CallLog()
    found = [call_log.first_site(1, "a"), call_log.first_site(2, "b"), call_log.first_site(1, "b")]
    assert found == ["a", "b", "a"]
    call_log.resume(3)
    assert call_log.first_site(1, "b") == "b"


SITE = call_site
PACKAGE = Path(accelfn.context.call_log.__file__).parents[1]


def program(path: Path, source: str, **names: Any) -> dict[str, Any]:
    """Run a module that is said to stand at ``path``, and give its names."""
    made = {**names, "call_site": SITE}
    exec(compile(textwrap.dedent(source), str(path), "exec"), made)
    return made


def test_it_is_the_line_of_the_caller_without_the_folder(tmp_path: Path) -> None:
    found = program(
        tmp_path / "deep" / "train.py",
        """
        def main():
            return (
                call_site()
            )
        def again():
            return [call_site(), call_site(),
                    call_site()]
        class Trainer:
            def fit(self):
                return call_site()
        """,
    )
    assert found["main"]() == "train.py:4 in main"
    assert found["again"]() == ["train.py:7 in again", "train.py:7 in again", "train.py:8 in again"]
    assert found["Trainer"]().fit() == "train.py:11 in fit"


def test_it_is_the_same_wherever_the_program_lies(tmp_path: Path) -> None:
    source = "def main():\n    return call_site()\n"
    sites = {program(tmp_path / name / "train.py", source)["main"]() for name in ("a", "b")}
    assert sites == {"train.py:2 in main"}


def test_frames_of_this_package_are_not_the_users(tmp_path: Path) -> None:
    inner = program(PACKAGE / "comm" / "tensors.py", "def gather():\n    return call_site()\n")["gather"]
    outer = program(tmp_path / "train.py", "def main(call):\n    return call()\n")["main"]
    assert outer(inner) == "train.py:2 in main"
    # A neighbour whose name only begins alike is no part of the package.
    beside = PACKAGE.with_name(PACKAGE.name + "_extra") / "loop.py"
    assert program(beside, "def loop():\n    return call_site()\n")["loop"]() == "loop.py:2 in loop"


@pytest.mark.parametrize("installed", ["site-packages", "dist-packages"])
def test_frames_of_installed_packages_are_passed_over(tmp_path: Path, installed: str) -> None:
    bar = program(
        tmp_path / "lib" / installed / "bar" / "std.py",
        """
        def bar(items):
            for item in items:
                yield item
        """,
    )["bar"]
    batches = program(PACKAGE / "data" / "loader.py", "def batches():\n    yield call_site()\n")["batches"]
    main = program(
        tmp_path / "train.py",
        """
        def main(shown):
            for site in bar(batches()) if shown else batches():
                return site
        def own():
            yield call_site()
        def through():
            return next(bar(own()))
        """,
        bar=bar,
        batches=batches,
    )
    # A progress bar may be shown on the first rank alone.
    assert main["main"](True) == main["main"](False) == "train.py:3 in main"
    assert main["through"]() == "train.py:6 in own"


def test_frames_of_the_standard_library_are_passed_over(tmp_path: Path) -> None:
    first = program(PACKAGE / "comm" / "process_control.py", "def first():\n    yield call_site()\n")["first"]
    main = program(
        tmp_path / "train.py",
        """
        def main():
            with first() as site:
                return site
        """,
        first=contextlib.contextmanager(first),
    )["main"]
    assert main() == "train.py:3 in main"


def test_a_program_that_is_installed_gives_its_nearest_line(tmp_path: Path) -> None:
    inner = program(
        tmp_path / "site-packages" / "trainer" / "loop.py", "def loop():\n    return call_site()\n"
    )["loop"]
    # On a thread of a pool there is no other frame than those of threading and of the pool.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inner).result(20) == "loop.py:2 in loop"
        assert pool.submit(SITE).result(20).startswith("thread.py:")
