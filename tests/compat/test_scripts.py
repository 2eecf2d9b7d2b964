"""Accelerate's own test scripts, under the alias: what they raise is what the page about them says."""

import json
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest

from tests.compat import local_glue
from tests.launch.forked import Job, run_jobs
from tests.launch.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(850), pytest.mark.usefixtures("peer")]

PAGE = (ROOT / "docs" / "pages" / "guide" / "accelerate-test-scripts.md").read_text()
PROGRAM = str(ROOT / "tests" / "compat" / "script_program.py")
# The last needs two processes.
SCRIPTS = (
    *("test_cli", "test_ops", "test_sync", "test_script", "test_ddp_comm_hook", "test_merge_weights"),
    *("external_deps.test_pippy", "test_distributed_data_loop"),
)
TRAINING = (
    "external_deps.test_peak_memory_usage",
    "external_deps.test_performance",
    "external_deps.test_checkpointing",
)
Report = dict[str, Any]
# By script and number of processes: by line, the exceptions.
Failures = dict[str, tuple[str, ...]]


def documented(script: str, processes: int) -> Failures:
    """Return the lines that raise, as the page has them."""
    rows = re.findall(r"^\| `(\S+)` \| ([12, ]+) \| `(.+?)` \| (.+?) \| .+ \|$", PAGE, re.M)
    return {
        line: tuple(re.findall(r"`(\w+)`", raised))
        for name, numbers, line, raised in rows
        if name == script and str(processes) in numbers
    }


def check(folder: Path, scripts: dict[int, list[list[str]]], variables: dict[str, str] | None = None) -> None:
    """Run scripts, by number of processes, and compare what they raise with the page."""
    jobs: list[Job] = []
    for processes, some in scripts.items():
        (folder / str(processes)).mkdir()
        argv = [str(folder / str(processes)), json.dumps(some)]
        jobs.append(Job(PROGRAM, argv, processes, variables or {}, aliased=True))
    run_jobs(jobs, folder, 800)
    for processes, some in scripts.items():
        of_ranks = [json.loads(one.read_text()) for one in sorted((folder / str(processes)).glob("*.json"))]
        reports: list[tuple[str, Report]] = of_ranks[0][0]
        for by_script, files in of_ranks:
            assert [one["failed"] for _, one in by_script] == [one["failed"] for _, one in reports]
            # Nothing of Accelerate itself was imported.
            assert {Path(file).is_relative_to(ROOT / "accelfn") for file in files} == {True}
        assert [name for name, _ in reports] == [name for name, *_ in some]
        for name, report in reports:
            raised = {line: tuple(dict.fromkeys(errors)) for line, errors in report["failed"].items()}
            assert (name, raised) == (name, documented(name, processes))
            assert report["passed"] or "import" in raised


def test_the_page_lists_every_script(peer: Any) -> None:
    package = Path(str(peer.__file__)).parent / "test_utils" / "scripts"
    inside = ["external_deps", ""]
    found = {
        f"{folder}.{module.name}" if folder else module.name
        for folder in inside
        for module in pkgutil.iter_modules([str(package / folder)])
        if not module.ispkg
    }
    rows = re.findall(r"^\| `([\w.]+)` \| ([^`|]+) \| ([^`|]+) \|$", PAGE, re.M)
    assert {script for script, _, _ in rows} == found
    for script, *results in rows:
        for processes, result in enumerate(results, 1):
            number = len(documented(script, processes))
            expected = f"but for {number} line{'s' if number > 1 else ''}" if number else "passes"
            assert result in (expected, *(() if number else ("needs GPUs", "asks for 2")))
    tried = {*SCRIPTS, *TRAINING, "test_notebook", "external_deps.test_metrics"}
    assert {script for script, one, _ in rows if one != "needs GPUs"} == tried


def test_scripts_raise_what_is_documented(tmp_path: Path) -> None:
    scripts = [[name] for name in SCRIPTS]
    check(tmp_path, {1: scripts[:-1], 2: scripts})


def test_notebooks_raise_what_is_documented(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")  # without it the script leaves out a line
    # With two, all that it launches takes twice as long; the page says the same of both.
    check(tmp_path, {1: [["test_notebook"]]}, {"ACCELERATE_NUM_PROCESSES": "1"})


def test_scripts_that_train_a_model_raise_what_is_documented(tmp_path: Path) -> None:
    pytest.importorskip("evaluate")
    model = ["--model_name_or_path", str(local_glue.write(tmp_path)), "--output_dir", str(tmp_path)]
    scripts = [
        ["external_deps.test_metrics"],
        *([script, *model] for script in TRAINING[:-1]),
        [TRAINING[-1], *model, "--partial_train_epoch", "1"],
        [TRAINING[-1], *model, "--resume_from_checkpoint", str(tmp_path / "epoch_0")],
    ]
    check(tmp_path, {1: scripts, 2: scripts})
