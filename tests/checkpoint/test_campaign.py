"""A few of the kills of :mod:`tests.checkpoint.campaign`, which does hundreds."""

import os
from pathlib import Path

import pytest

from tests.checkpoint.campaign import PHASES, Killed, Place, State, kill_while_saving

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="programs are forked")


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("place", ["replaced", "rotated"])
@pytest.mark.parametrize(("ranks", "killed"), [(1, "program"), (2, "program"), (2, "rank")])
def test_a_kill_loses_nothing(
    tmp_path: Path, ranks: int, killed: Killed, place: Place, background: bool
) -> None:
    report = kill_while_saving(
        tmp_path, 6, ranks=ranks, place=place, killed=killed, background=background, seed=ranks
    )
    assert report.lost == []
    assert len(report.told_after_s) == (6 if killed == "rank" else 0)


@pytest.mark.parametrize(
    ("killed", "background", "changes"), [("rank", False, (1, 9, 13, 16)), ("program", True, ())]
)
@pytest.mark.parametrize("state", ["sharded", "stages"])
def test_a_kill_loses_nothing_that_ranks_have_parts_of(
    tmp_path: Path, state: State, killed: Killed, background: bool, changes: tuple[int, ...]
) -> None:
    report = kill_while_saving(
        tmp_path,
        4,
        ranks=2,
        place="replaced",
        killed=killed,
        background=background,
        state=state,
        seed=2,
        changes=changes,
    )
    assert report.lost == []
    assert report.saves > 0
    assert len(report.told_after_s) == (4 if killed == "rank" else 0)


@pytest.mark.parametrize(("place", "missed"), [("replaced", {PHASES[4]}), ("rotated", {PHASES[3]})])
def test_a_kill_in_every_phase_of_a_save_loses_nothing(
    tmp_path: Path, place: Place, missed: set[str]
) -> None:
    report = kill_while_saving(tmp_path, 20, ranks=1, place=place, changes=range(20))
    assert report.lost == []
    assert set(PHASES) - report.phases.keys() == missed
