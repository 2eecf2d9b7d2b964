"""Shrinking: a program is simplified by the rules, to what was found and no more."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from accelfn.testing.programs import Report, draw, finding_of, simpler
from tests.programs.grammar import GRAMMAR


@given(st.integers(0, 10_000))
def test_a_simpler_program_is_lawful_and_has_no_new_feature(seed: int) -> None:
    program = draw(GRAMMAR, random.Random(seed))
    assert program is not None
    for smaller in simpler(program):
        assert GRAMMAR.broken_rule(smaller) is None
        assert len(smaller.choices) <= len(program.choices)
        new = {name for name, _ in smaller.covered()} - {name for name, _ in program.covered()}
        assert not new or (program["resume"] and not smaller["resume"])


def test_what_shows_without_having_been_saved_is_simpler() -> None:
    assert GRAMMAR.program("shard=2 hook") in simpler(GRAMMAR.program("hook save=middle resume=shard2"))


def test_a_finding_hides_no_more_than_what_was_found() -> None:
    found = {
        "cp=2 block=attention other=conv weighted": {("cp", 2), ("block", "conv")},
        "cp=2 block=full weighted": {("cp", 2), ("block", "full")},
        "cp=2 model=hybrid weighted": {("cp", 2), ("model", "hybrid")},
        "tp=2 sp=2 block=grouped weighted": {("tp", 2), ("sp", 2), ("block", "grouped")},
        "pp=2 api=train_step hook": {("pp", 2), ("api", "train_step"), ("hook", True)},
    }
    for text, features in found.items():
        assert finding_of(GRAMMAR.program(text)) == features


def test_a_report_counts_equal_programs_by_layout() -> None:
    programs = [GRAMMAR.program(text) for text in ("hook", "tp=2 hook", "dp=2", "tp=2")]
    equal = tuple((program, 1.0) for program in programs)
    report = Report(verdicts=Counter(equal=4), covered=frozenset(), findings=(), equal=equal, seconds=4.0)
    assert str(report).splitlines()[1:] == [
        "    1 equal  dp=2",
        "    1 equal  one process",
        "    2 equal  tp=2",
    ]
