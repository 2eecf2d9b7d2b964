"""A few of the kills of :mod:`tests.checkpoint.campaign`, which does hundreds."""

from pathlib import Path

import pytest

from tests.checkpoint.campaign import Place, kill_while_saving


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("place", ["replaced", "rotated"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_kill_loses_nothing(tmp_path: Path, ranks: int, place: Place, background: bool) -> None:
    report = kill_while_saving(tmp_path, 6, ranks=ranks, place=place, seed=ranks, background=background)
    assert report.lost == ()
    assert report.saves > 0
