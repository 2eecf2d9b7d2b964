"""Training programs of every pair of features, and of every feature in every layout, train as one process."""

from __future__ import annotations

import itertools
import random

import pytest

from accelfn.testing.programs import Program, check_programs, draw, needs, script
from tests.programs import records
from tests.programs.grammar import GRAMMAR

# Programs of a test, and of one in the quick suite: they share a world of ranks where they can.
_SIZE, _QUICK_SIZE = 16, 4
_QUICK = ("", "dp=2", "dp=2 world=memory", "dp=3 world=memory", "shard=2", "tp=2", "dp=2 pp=2", "dp=2 cp=2")


def is_slow(program: Program) -> bool:
    """Return whether a program is of transformers, resumed, or in a layout that isn't of the quick suite."""
    return str(program.layout) not in _QUICK or program["model"] != "blocks" or bool(program["resume"])


def parameters_of(programs: list[Program]) -> list[object]:
    """Return the parameters of tests: in the quick suite the first of a layout."""
    parameters: list[object] = []

    def place(program: Program) -> tuple[str, bool]:
        return str(program.layout), is_slow(program)

    for (layout, slow), group in itertools.groupby(sorted(programs, key=place), place):
        waiting = [*group]
        starts = [0, *range(_SIZE if slow else _QUICK_SIZE, len(waiting), _SIZE)]
        for number, (start, end) in enumerate(itertools.pairwise([*starts, len(waiting)])):
            marks = pytest.mark.slow if slow or number else ()
            name = f"{layout or 'one rank'}{', slow' if slow and layout in _QUICK else ''} {number}"
            parameters.append(pytest.param(waiting[start:end], marks=marks, id=name))
    return parameters


@pytest.mark.timeout(600)
@pytest.mark.parametrize("programs", parameters_of(records.read_sample()))
def test_programs_train_as_one_process(programs: list[Program]) -> None:
    for program, verdict in zip(programs, check_programs(programs), strict=True):
        assert verdict.kind == "equal", f"{program}: {verdict.kind}: {verdict.what}\n{script(program)}"


@pytest.mark.slow
def test_the_sample_has_what_any_program_has() -> None:
    covered = needs(*records.read_sample())
    rng = random.Random(1)
    drawn = (draw(GRAMMAR, rng, avoid=records.findings(mended=True), size=8, tries=1) for _ in range(300))
    missing = {need for program in drawn if program is not None for need in needs(program)} - covered
    assert missing == set()
