"""A few of the kills of :mod:`tests.checkpoint.campaign`, which does hundreds."""

import os
from pathlib import Path

import pytest

from tests.checkpoint.campaign import PHASES, Place, Program, kill_while_saving

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="programs are forked")


PROGRAMS = [
    Program(1, "whole", "program", "replaced", background=True),
    Program(1, "whole", "program", "rotated"),
    Program(2, "whole", "program", "replaced"),
    Program(2, "whole", "program", "rotated", background=True),
    Program(2, "whole", "rank", "replaced", background=True),
    Program(2, "whole", "rank", "rotated"),
    Program(2, "sharded", "rank", "replaced"),
    Program(2, "stages", "program", "replaced", background=True),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_kill_loses_nothing(program: Program, tmp_path: Path) -> None:
    changes = (1, 9, 13, 16) if program.state == "sharded" else ()
    report = kill_while_saving(tmp_path, 4, program, seed=program.ranks, changes=changes)
    assert report.lost == []
    assert report.saves > 0
    assert len(report.told_after_s) == (4 if program.killed == "rank" else 0)


@pytest.mark.parametrize(("place", "missed"), [("replaced", {PHASES[4]}), ("rotated", {PHASES[3]})])
def test_a_kill_in_every_phase_of_a_save_loses_nothing(
    tmp_path: Path, place: Place, missed: set[str]
) -> None:
    report = kill_while_saving(tmp_path, 20, Program(1, place=place), changes=range(20))
    assert report.lost == []
    assert set(PHASES) - report.phases.keys() == missed
