"""Drawing programs: lawful, by what isn't covered yet, and all of it."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from accelfn.testing.programs import Grammar, Rule, cover, draw, finding_of, needs, simpler, together
from tests.programs.grammar import GRAMMAR

SEEDS = st.integers(0, 10_000)
HOOKS = frozenset([("hook", True)])


@given(SEEDS)
def test_whatever_is_drawn_keeps_the_rules_and_avoids_findings(seed: int) -> None:
    program = draw(GRAMMAR, random.Random(seed), avoid=[HOOKS])
    if program is not None:
        assert GRAMMAR.broken_rule(program) is None
        assert not program.has(HOOKS)
        assert compile(program.source(), str(program), "exec")


@given(SEEDS)
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


def test_what_is_covered_is_drawn_less() -> None:
    rng = random.Random(3)
    covered = needs(GRAMMAR.program("dp=2 clip=norm schedule"))
    program = draw(GRAMMAR, rng, covered=covered, layout=GRAMMAR.program("dp=2"), tries=20)
    assert program is not None
    assert needs(program) - covered


def test_a_cover_has_every_pair_that_can_be() -> None:
    features = tuple(GRAMMAR.by_name[name] for name in ("dp", "clip", "hook", "clamp"))
    rule = Rule("no hook with clamp", together("hook clamp"))
    grammar = Grammar(skeleton="", features=features, rules=(rule,))
    covered = needs(*cover(grammar, random.Random(0)))
    for name in ("clip=norm", "clip=value", "hook", "clamp"):
        for layout in ("dp=2", "dp=3", "dp=4"):
            assert needs(grammar.program(f"{layout} {name}")) <= covered
    assert needs(grammar.program("clip=norm hook")) <= covered


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
