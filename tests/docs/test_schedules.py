"""The page on schedules shows what its program does and prints."""

import importlib
import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest

from accelfn.errors import MissingRankError
from accelfn.testing import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "schedules.md").read_text()
# Not typed: the program is on the path only while pytest runs.
EXAMPLE: Any = importlib.import_module("schedules")


def test_the_page_shows_the_functions() -> None:
    for function in (EXAMPLE.keep_best, EXAMPLE.find_the_branch, EXAMPLE.rotate, EXAMPLE.find_the_race):
        assert inspect.getsource(function) in PAGE
    assert inspect.getsource(EXAMPLE.one_checkpoint) in PAGE


@pytest.mark.slow
def test_the_branch_is_found_as_the_page_shows() -> None:
    assert f"```text\n{EXAMPLE.find_the_branch()}\n```" in PAGE


def test_the_race_is_found_as_the_page_shows() -> None:
    lost = next(one for one in EXAMPLE.find_the_race().failures if one.text.startswith("NoCheckpointError"))
    text = lost.text.replace(tempfile.gettempdir(), "/tmp")
    shown = f"{text}\nwith schedule={lost.plainest.given}:\n{lost.plainest.trace.table()}"
    assert f"```text\n{shown}\n```" in PAGE


def test_without_a_schedule_the_program_is_right() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(lambda ctx: EXAMPLE.keep_best(ctx, folder), 2) == [1.0, 1.0]


def test_the_seed_of_the_page_replays_it() -> None:
    branch = next(one for one in EXAMPLE.find_the_branch().failures if "Missing" in one.text)
    schedule = branch.plainest.given
    assert f"schedule={schedule})" in PAGE
    with tempfile.TemporaryDirectory() as folder, pytest.raises(MissingRankError):
        run_ranks(lambda ctx: EXAMPLE.keep_best(ctx, folder), 2, schedule=schedule)
