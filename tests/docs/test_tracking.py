"""The guide to trackers names what is there."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from accelfn import Context
from accelfn.config import LoggerType
from accelfn.launch.main import main
from accelfn.tracking import (
    BuiltInTracker,
    finish,
    init_trackers,
    log,
    log_images,
    log_table,
    plan_trackers,
)

GUIDE = Path(__file__).parents[2] / "docs" / "pages" / "guide"
PAGE = (GUIDE / "tracking.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def test_the_table_has_every_built_in_tracker_and_what_it_needs() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) ?\|", section("The built-in trackers"), re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted(set(LoggerType.values()) - {"all"})
    chosen = plan_trackers("all", "here", installed=lambda _: True).chosen
    trackers = {one.name: one for one in chosen if isinstance(one, type) and issubclass(one, BuiltInTracker)}
    for name, package, directory in rows:
        tracker = trackers[name]
        assert (package == "none") == (not tracker.modules)
        assert all(module in package for module in tracker.modules)
        assert bool(directory) == tracker.requires_logging_directory


@pytest.mark.slow
def test_the_kinds_of_lines_are_those_that_are_written(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    trackers = init_trackers(Context(), "digits", log_with="jsonl", logging_dir=tmp_path, config={})
    log(trackers, {"a": 1})
    log_images(trackers, {"a": torch.zeros(1, 1)})
    log_table(trackers, "a", ["b"], [[1]])
    finish(trackers)
    (file,) = tmp_path.rglob("events.jsonl")
    written = re.findall(r'"kind": "(\w+)"', file.read_text())
    rows = re.findall(r"^\| `(\w+)` \|", section("Runs on the disk"), re.MULTILINE)
    assert rows == ["kind", *written]  # with the head of the table


def test_the_commands_of_the_page_are_ones(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        shlex.split(line, comments=True)
        for line in section("Runs on the disk").splitlines()
        if line[:12] == "accelfn runs"
    ]
    assert [words[2] for words in commands] == ["list", "show"]
    for words in commands:
        assert main([*words[1:3], "--dir", "nowhere", *words[3:]]) == 2
        assert "no directory 'nowhere'" in capsys.readouterr().err
