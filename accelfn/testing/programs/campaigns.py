"""Run drawn programs, and shrink what isn't equal to the fewest features."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from accelfn.testing.programs.drawing import Finding, draw, is_known, layouts_of, needs
from accelfn.testing.programs.grammar import Grammar, Program
from accelfn.testing.programs.habits import resumed
from accelfn.testing.programs.layouts import is_replicated
from accelfn.testing.programs.run import TIMEOUT_S
from accelfn.testing.programs.verdict import Verdict, check_programs

# Programs of a batch, in all their ranks where these share a model; replicas cost little.
_SIZE_OF_A_BATCH = 8


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
        """Return the numbers, those of programs that were equal by layout, and a line for each finding."""
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.verdicts.most_common())
        number = sum(self.verdicts.values())
        pairs = f"{sum(len(one) == 2 for one in self.covered)} pairs of features equal"
        lines = [f"{number} programs in {self.seconds:.0f} s: {kinds}; {pairs}"]
        layouts = Counter(str(program.layout) or "one process" for program, _ in self.equal)
        lines += [f"{number:5} equal  {layout}" for layout, number in sorted(layouts.items())]
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
