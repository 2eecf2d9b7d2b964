"""Draw programs by what isn't covered yet, run them, and shrink what isn't equal."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from accelfn.testing.programs.grammar import Choice, Grammar, Program
from accelfn.testing.programs.habits import resumed
from accelfn.testing.programs.layouts import is_replicated
from accelfn.testing.programs.run import TIMEOUT_S
from accelfn.testing.programs.verdict import Verdict, check_programs

# A set of features that together don't train: programs that have it aren't drawn again, so that one fault
# hides no other.
Finding = frozenset[Choice]
# Programs of a batch, in all their ranks where these share a model; replicas cost little.
_SIZE_OF_A_BATCH = 8


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
    """Return what programs cover: their pairs of features, and each feature beside a complete layout."""
    covered: set[Finding] = set()
    for program in programs:
        layout = program.layout.covered()
        covered.update(program.pairs())
        covered.update(layout | {one} for one in program.covered() - layout)
    return covered


def cover(
    grammar: Grammar, rng: random.Random, *, avoid: Sequence[Finding] = (), first: Iterable[Program] = ()
) -> list[Program]:
    """Return programs that together have every pair of features, and every feature in every layout.

    Args:
        grammar: Of the programs.
        rng: Source of random numbers.
        avoid: Features that no program has together.
        first: Programs that are among them, unless they are to be avoided.
    """
    programs = [program for program in first if not is_known(program, avoid)]
    covered = needs(*programs)

    def take(program: Program | None, least: int) -> bool:
        if program is None or len(needs(program) - covered) < least:
            return False
        programs.append(program)
        covered.update(needs(program))
        return True

    # Programs with many features, as long as each has many new ones.
    layouts = layouts_of(grammar)
    for layout in layouts:
        while take(
            draw(grammar, rng, covered=covered, avoid=avoid, layout=layout, size=12, tries=12), least=12
        ):
            pass
    singles = dict.fromkeys(
        (one.counts_as or one.name, value) for one in grammar.features for value in one.values[1:]
    )
    wanted = [frozenset(pair) for pair in itertools.combinations(singles, 2)]
    wanted += [layout.covered() | {single} for layout in layouts for single in singles]
    for need in wanted:
        if need not in covered:
            drawn = filter(None, (_with(grammar, rng, need, layouts, avoid) for _ in range(6)))
            take(max(drawn, key=lambda one: len(needs(one) - covered), default=None), least=1)
    return _without_needless(programs)


def _without_needless(programs: Sequence[Program]) -> list[Program]:
    """Return programs without those whose needs the others have, looking at large worlds first."""
    having = Counter(need for program in programs for need in needs(program))
    needless: set[Program] = set()
    for program in sorted(programs, key=lambda one: -one.num_ranks):
        own = needs(program)
        if all(having[need] > 1 for need in own):
            having.subtract(own)
            needless.add(program)
    return [program for program in programs if program not in needless]


def _with(
    grammar: Grammar, rng: random.Random, need: Finding, layouts: Sequence[Program], avoid: Sequence[Finding]
) -> Program | None:
    """Return a program with some features, and more; None if there is none."""
    values: dict[str, Any] = {}
    doubled = {one.counts_as: one.name for one in grammar.features if one.counts_as}
    for name, value in sorted(need, key=str):
        if name in values and name not in doubled:
            return None  # two values of one feature
        values[doubled[name] if name in values else name] = value
    for number in range(24):
        # Others may have to be there: one more feature at a time, and then a layout as well.
        extra = rng.choice([one for one in grammar.features if not one.is_layout and one.name not in values])
        tried = {**values, extra.name: rng.choice(extra.values)} if number else dict(values)
        if number >= 12:
            tried = {**dict(rng.choice(layouts).choices), **tried}
        program = _completed(grammar, rng, tried, avoid)
        if program is not None and need <= program.covered():
            return _grown(program, rng, 10, avoid)
    return None


def simpler(program: Program) -> list[Program]:
    """Return the programs with one feature less, or with a smaller size."""
    made: list[Program] = []
    grammar = program.grammar
    for name, value in program.choices:
        varied = grammar.by_name[name]
        before = [program.but(**{name: other}) for other in varied.values[: varied.values.index(value)]]
        lawful = [one for one in before if grammar.broken_rule(one) is None]
        made += lawful[:1]
        if varied.is_axis or varied.is_size:
            made += [one for one in lawful[1:] if one[name] == 2]
    if "resume" in grammar.by_name and program["resume"]:  # what shows without having been saved
        there = resumed(program).but(save="")
        made += [there] if grammar.broken_rule(there) is None else []
    # Values that two features share are simpler in one of them.
    for one in grammar.features:
        if one.counts_as and program[one.name] != one.values[0]:
            moved = program.but(**{one.counts_as: program[one.name], one.name: one.values[0]})
            if grammar.broken_rule(moved) is None:
                made.append(moved)
    return list(dict.fromkeys(one for one in made if one != program))


def shrink(program: Program, verdict: Verdict, *, limit_s: float = 90.0) -> tuple[Program, Verdict]:
    """Take features away from a program for as long as its verdict stays.

    Args:
        program: The program.
        verdict: Of it.
        limit_s: No more are tried after so many seconds.

    Returns:
        The smaller program, and its verdict.
    """
    until, tried, again = time.monotonic() + limit_s, {program}, True
    wait = 4.0 if verdict.kind in ("hang", "crash") else TIMEOUT_S
    while again:
        again = False
        for smaller in simpler(program):
            if smaller in tried or len(smaller.choices) > len(program.choices):
                continue
            if time.monotonic() > until:
                return program, verdict
            tried.add(smaller)
            (own,) = check_programs([smaller], timeout_s=wait)
            if own.is_like(verdict):
                program, verdict, again = smaller, own, True
                break
    return program, verdict


def finding_of(program: Program) -> Finding:
    """Return the features of a shrunk program, without those that the others ask for by a rule.

    Ranks that share sequences ask for attention: a finding that had it would miss other kinds of attention.
    Of several values that a rule asks for, a later one is there because the first doesn't show the fault.
    """
    grammar, known = program.grammar, program.grammar.by_name

    def is_asked_for(name: str, value: Any) -> bool:
        broken = grammar.broken_rule(program.but(**{name: grammar.plainest[name]}))
        asked = (word.partition("=") for word in (broken.mend.split() if broken else ()))
        return any(name == other and str(value) == texts.partition("|")[0] for other, _, texts in asked)

    kept = [one for one in program.choices if not is_asked_for(*one)]
    return frozenset((known[name].counts_as or name, value) for name, value in kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A program that isn't equal, with as few features as show it.

    Attributes:
        program: The program.
        verdict: Of it.
        first: The program that was drawn.
    """

    program: Program
    verdict: Verdict
    first: Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a campaign came to.

    Attributes:
        verdicts: Number of programs by the kind of their verdict.
        covered: What :func:`needs` returns for the programs that were equal to their reference.
        findings: What wasn't equal, one for each kind.
        equal: Programs that were, with seconds of each.
        seconds: It took so long.
    """

    verdicts: Counter[str]
    covered: frozenset[Finding]
    findings: tuple[Shrunk, ...]
    equal: tuple[tuple[Program, float], ...]
    seconds: float

    def __str__(self) -> str:
        """Return the numbers, and a line for each finding."""
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.verdicts.most_common())
        number = sum(self.verdicts.values())
        pairs = f"{sum(len(one) == 2 for one in self.covered)} pairs of features equal"
        lines = [f"{number} programs in {self.seconds:.0f} s: {kinds}; {pairs}"]
        lines += [
            f"{one.verdict.kind:9} {one.program}\n          {one.verdict.what[:300]}" for one in self.findings
        ]
        return "\n".join(lines)


def campaign(
    grammar: Grammar,
    *,
    minutes: float = 1.0,
    max_programs: int | None = None,
    max_findings: int | None = None,
    seed: int = 0,
    avoid: Sequence[Finding] = (),
    found: Callable[[Shrunk], None] | None = None,
) -> Report:
    """Draw programs, run them, and shrink what isn't equal, until the time is up.

    Args:
        grammar: Of the programs.
        minutes: Limit; a shrinking that has begun is finished.
        max_programs: Limit of what is drawn, up to a batch more.
        max_findings: No more is drawn after so many.
        seed: Of the draws.
        avoid: What is known not to be equal: programs with it aren't drawn.
        found: Called with each finding when it is shrunk.

    Returns:
        What was seen.
    """
    rng, begun = random.Random(seed), time.monotonic()
    verdicts: Counter[str] = Counter()
    used: Counter[Program] = Counter(dict.fromkeys(layouts_of(grammar), 0))
    covered: set[Finding] = set()
    known = [*avoid]
    findings: list[Shrunk] = []
    equal: list[tuple[Program, float]] = []

    def goes_on() -> bool:
        return (
            time.monotonic() - begun < 60 * minutes
            and (max_programs is None or sum(verdicts.values()) < max_programs)
            and (max_findings is None or len(findings) < max_findings)
        )

    def batch_of(layout: Program) -> list[Program]:
        aimed, programs = {*covered}, dict[Program, None]()
        size = _SIZE_OF_A_BATCH // (1 if is_replicated(layout) else layout.num_ranks)
        for _ in range(size):
            program = draw(grammar, rng, covered=aimed, avoid=known, layout=layout)
            if program is not None:
                programs[program] = None
                aimed |= needs(program)
        return [*programs]

    while goes_on():
        layout = min(used, key=lambda one: (used[one], one.num_ranks))
        used[layout] += 1
        programs = batch_of(layout)
        start = time.monotonic()
        batch = list(zip(programs, check_programs(programs), strict=True))
        seconds = (time.monotonic() - start) / max(1, len(batch))
        for program, verdict in batch:
            verdicts[verdict.kind] += 1
            if verdict.kind == "equal":
                covered.update(needs(program))
                equal.append((program, seconds))
            is_enough = max_findings is not None and len(findings) >= max_findings
            if verdict.kind in ("equal", "invalid") or is_known(program, known) or is_enough:
                continue
            small, own = shrink(program, verdict)
            findings.append(Shrunk(program=small, verdict=own, first=program))
            known.append(finding_of(small))
            if found is not None:
                found(findings[-1])
    return Report(
        verdicts=verdicts,
        covered=frozenset(covered),
        findings=tuple(findings),
        equal=tuple(equal),
        seconds=time.monotonic() - begun,
    )
