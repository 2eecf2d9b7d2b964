"""Drawing programs: lawful, and by what isn't covered yet."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from accelfn.testing.programs import draw, needs
from tests.programs.grammar import GRAMMAR

HOOKS = frozenset([("hook", True)])


@given(st.integers(0, 10_000))
def test_whatever_is_drawn_keeps_the_rules_and_avoids_findings(seed: int) -> None:
    program = draw(GRAMMAR, random.Random(seed), avoid=[HOOKS])
    if program is not None:
        assert GRAMMAR.broken_rule(program) is None
        assert not program.has(HOOKS)
        assert compile(program.source(), str(program), "exec")


def test_what_is_covered_is_drawn_less() -> None:
    rng = random.Random(3)
    covered = needs(GRAMMAR.program("dp=2 clip=norm schedule"))
    program = draw(GRAMMAR, rng, covered=covered, layout=GRAMMAR.program("dp=2"), tries=20)
    assert program is not None
    assert needs(program) - covered
