"""Drawing programs: lawful, by what isn't covered yet, and few that cover all of it."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from accelfn.testing.programs import Grammar, Rule, cover, draw, needs, together
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


@given(st.integers(0, 10_000))
@settings(max_examples=10)
def test_a_cover_has_every_pair_that_can_be_in_few_programs(seed: int) -> None:
    features = tuple(GRAMMAR.by_name[name] for name in ("dp", "clip", "hook", "clamp"))
    rule = Rule("no hook with clamp", together("hook clamp"))
    grammar = Grammar(skeleton="", features=features, rules=(rule,))
    programs = cover(grammar, random.Random(seed), tries=30)
    # In each of 4 layouts hook and clamp are in 2 programs.
    assert len(programs) == 8
    covered = needs(*programs)
    for name in ("clip=norm", "clip=value", "hook", "clamp"):
        for layout in ("dp=2", "dp=3", "dp=4"):
            assert needs(grammar.program(f"{layout} {name}")) <= covered
    assert needs(grammar.program("clip=norm hook")) <= covered
