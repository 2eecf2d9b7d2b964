"""Draw programs by what isn't covered yet, and choose few that cover everything."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from accelfn.testing.programs.grammar import Choice, Grammar, Program
from accelfn.testing.programs.habits import resumed

# A set of features that together don't train: programs that have it aren't drawn again, so that one fault
# hides no other.
Finding = frozenset[Choice]


def layouts_of(grammar: Grammar) -> list[Program]:
    """Return the plainest program of each layout that isn't ruled out, those of few ranks first."""
    parts = [one for one in grammar.features if one.is_layout]
    values = itertools.product(*(one.values for one in parts))
    rng = random.Random(0)  # for what rules ask for
    named = ({one.name: value for one, value in zip(parts, chosen, strict=True)} for chosen in values)
    lawful = filter(None, (_completed(grammar, rng, one, ()) for one in named))
    return sorted(dict.fromkeys(one.layout for one in lawful), key=lambda one: one.num_ranks)


def draw(
    grammar: Grammar,
    rng: random.Random,
    *,
    covered: Iterable[Finding] = (),
    avoid: Sequence[Finding] = (),
    layout: Program | None = None,
    size: int | None = None,
    tries: int = 6,
) -> Program | None:
    """Draw some programs, and return the one with the most pairs of features that aren't covered yet.

    Args:
        grammar: Of the programs.
        rng: Source of random numbers.
        covered: What :func:`needs` returned for earlier programs.
        avoid: Features that the program doesn't have together.
        layout: From :func:`layouts_of`; None: any of these.
        size: Number of features at most, besides the layout; None: between 1 and 8.
        tries: Programs to choose from.

    Returns:
        The program; None if the layout is to be avoided.
    """
    known = covered if isinstance(covered, (set, frozenset)) else set(covered)
    place = rng.choice(layouts_of(grammar)) if layout is None else layout
    best, most = None, -1
    for _ in range(tries):
        wanted = rng.choice((1, 2, 2, 3, 3, 4, 5, 6, 8)) if size is None else size
        start = _completed(grammar, rng, dict(place.choices), avoid)
        if start is None:
            continue
        program = _grown(start, rng, wanted, avoid)
        new = sum(need not in known for need in needs(program))
        if new > most:
            best, most = program, new
    return best


def _grown(program: Program, rng: random.Random, size: int, avoid: Sequence[Finding]) -> Program:
    """Return a program with up to ``size`` more features, as far as the rules allow."""
    grammar = program.grammar
    others = [one for one in grammar.features if not one.is_layout and len(one.values) > 1]
    # In random order, but a feature of many values sooner: each value is as likely.
    for one in sorted(others, key=lambda one: rng.expovariate(len(one.values) - 1)):
        if not size:
            break
        if program[one.name] != one.values[0]:
            continue
        values = {**dict(program.choices), one.name: rng.choice(one.values[1:])}
        grown = _completed(grammar, rng, values, avoid)
        if grown is not None:
            program, size = grown, size - 1
    return program


def _completed(
    grammar: Grammar, rng: random.Random, values: dict[str, Any], avoid: Sequence[Finding]
) -> Program | None:
    """Return the program with what its rules ask for; None if it breaks one, or is to be avoided."""
    program = grammar.any_program(values)
    asked: set[str] = set()
    while (broken := grammar.broken_rule(program)) is not None:
        if not broken.mend or broken.name in asked:
            return None
        asked.add(broken.name)
        name, _, allowed = rng.choice(broken.mend.split()).partition("=")
        texts = allowed.split("|")
        known = [value for value in grammar.by_name[name].values if str(value) in texts]
        if not known:
            return None
        program = program.but(**{name: rng.choice(known)})
    return None if is_known(program, avoid) else program


def is_known(program: Program, findings: Iterable[Finding]) -> bool:
    """Return whether a program, or the world that takes it up, has the features of a finding."""
    worlds = [program]
    if "resume" in program.grammar.by_name and program["resume"]:
        worlds.append(resumed(program))
    return any(world.has(finding) for finding in findings for world in worlds)


def needs(*programs: Program) -> set[Finding]:
    """Return what programs cover: their pairs of features, their layouts, and each feature in a layout."""
    covered: set[Finding] = set()
    for program in programs:
        layout = program.layout.covered()
        covered.add(layout)
        covered.update(program.pairs())
        covered.update(layout | {one} for one in program.covered() - layout)
    return covered


def cover(
    grammar: Grammar,
    rng: random.Random,
    *,
    avoid: Sequence[Finding] = (),
    first: Iterable[Program] = (),
    tries: int = 10,
) -> list[Program]:
    """Return programs that together have every pair of features, and every feature in every layout.

    What the rules allow is found by drawing: a pair that has many conditions may be missed.

    Args:
        grammar: Of the programs.
        rng: Source of random numbers.
        avoid: Features that no program has together.
        first: Programs to begin with; those that are to be avoided are left out.
        tries: How often, for each program, fewer are looked for that cover the same.
    """
    programs = [program for program in first if not is_known(program, avoid)]
    covered = needs(*programs)
    layouts = layouts_of(grammar)
    singles = dict.fromkeys(
        (one.counts_as or one.name, value) for one in grammar.features for value in one.values[1:]
    )
    wanted = [layout.covered() for layout in layouts]
    wanted += [frozenset(pair) for pair in itertools.combinations(singles, 2)]
    wanted += [layout.covered() | {single} for layout in layouts for single in singles]
    for need in wanted:
        first_drawn = None if need in covered else _drawn_with(need, layouts, rng, avoid)
        if first_drawn is not None:
            others = filter(None, (_drawn_with(need, layouts, rng, avoid) for _ in range(3)))
            programs.append(max([first_drawn, *others], key=lambda one: len(needs(one) - covered)))
            covered |= needs(programs[-1])
    for layout in layouts * 8:  # what has more conditions than one more feature
        program = draw(grammar, rng, covered=covered, avoid=avoid, layout=layout)
        if program is not None and needs(program) - covered:
            programs.append(program)
            covered |= needs(program)
    return _fewer(programs, rng, avoid, tries * len(programs))


def _drawn_with(
    need: Finding, layouts: Sequence[Program], rng: random.Random, avoid: Sequence[Finding]
) -> Program | None:
    """Return a program with some features, and more; None if none is found."""
    grammar = layouts[0].grammar
    others = [one for one in grammar.features if not one.is_layout]
    for number in range(24):
        # Others may have to be there: one more feature at a time, and then a layout as well.
        start = grammar.any_program({}) if number < 12 else rng.choice(layouts)
        if number:
            extra = rng.choice(others)
            start = _with(start, frozenset([(extra.name, rng.choice(extra.values))]), rng, avoid) or start
        program = _with(start, need, rng, avoid)
        if program is not None:
            return _grown(program, rng, 10, avoid)
    return None


def _with(program: Program, need: Finding, rng: random.Random, avoid: Sequence[Finding]) -> Program | None:
    """Return the program with some more features; None if it can't have them as well."""
    grammar, values = program.grammar, dict(program.choices)
    doubled = {one.counts_as: one.name for one in grammar.features if one.counts_as}
    for name, value in sorted(need - program.covered(), key=str):
        free = doubled.get(name, name) if name in values else name
        if free in values:
            return None
        values[free] = value
    grown = _completed(grammar, rng, values, avoid)
    return grown if grown is not None and grown.covered() >= program.covered() | need else None


def _fewer(
    programs: Sequence[Program], rng: random.Random, avoid: Sequence[Finding], tries: int
) -> list[Program]:
    """Return programs that cover the same in fewer ranks: some give way to others with what only they had."""
    own = {program: needs(program) for program in programs}
    having = Counter(need for each in own.values() for need in each)
    for _ in range(tries):
        known = [*own]
        if rng.random() < 0.6:  # most of what large worlds cover needs their layout
            place = rng.choice(known).layout
            known = [one for one in known if one.layout == place]
        taken = rng.sample(known, min(len(known), rng.choice((1, 2, 2, 3, 3, 4))))
        shared = Counter(need for one in taken for need in own[one])
        made = _instead(
            taken, {need for need, number in shared.items() if number == having[need]}, rng, avoid
        )
        if made is None or any(one in own for one in made):
            continue
        having.subtract(shared)
        for one in taken:
            del own[one]
        own.update((one, needs(one)) for one in made)
        having.update(need for one in made for need in own[one])
    return [*own]


def _instead(
    programs: Sequence[Program], lost: set[Finding], rng: random.Random, avoid: Sequence[Finding]
) -> dict[Program, None] | None:
    """Return programs with what is lost without some others, in no more ranks; None if none are found."""
    made: dict[Program, None] = {}
    free = sum(one.num_ranks for one in programs)
    while lost:
        places = [rng.choice(programs).layout for _ in range(3)]
        drawn = [_joined(place, lost, rng, avoid) for place in places]
        best = max(drawn, key=lambda one: len(lost & needs(one)) / one.num_ranks)
        best = _grown(best, rng, rng.choice((0, 2, 4)), avoid)
        free -= best.num_ranks
        if free < 0 or best in made or not lost & needs(best):
            return None
        lost -= needs(best)
        made[best] = None
    return made


def _joined(place: Program, wanted: set[Finding], rng: random.Random, avoid: Sequence[Finding]) -> Program:
    """Return a program of a layout that has as much of what is wanted as one after the other allows."""
    program = place
    for need in rng.sample(sorted(wanted, key=lambda one: sorted(map(str, one))), len(wanted)):
        grown = _with(program, need, rng, avoid)
        if grown is not None and grown.layout == place:
            program = grown
    return program
