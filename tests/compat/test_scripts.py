"""Accelerate's own test scripts, under the alias: what they raise is what the page about them says."""

import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat import local_glue

peer: Any = pytest.importorskip("accelerate", minversion="1.15.0")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "accelerate-test-scripts.md").read_text()
PROGRAM = str(ROOT / "tests" / "compat" / "script_program.py")
# Those of two processes come last.
SCRIPTS = (
    *("test_cli", "test_ops", "test_sync", "test_script", "test_ddp_comm_hook", "test_merge_weights"),
    *("external_deps.test_pippy", "test_distributed_data_loop"),
)
NUM_ON_ONE = len(SCRIPTS) - 1
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


def run_scripts(
    folder: Path, command: list[str], scripts: list[list[str]], **variables: str
) -> list[tuple[str, Report]]:
    """Run scripts in one process of each rank, and return what rank 0 reports."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, *command, PROGRAM, str(folder), json.dumps(scripts)],
        cwd=folder,
        env={**environment, **offline, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    reports = sorted(folder.glob("reports-*.json"))
    of_ranks = [json.loads(report.read_text()) for report in reports]
    for by_script, files in of_ranks:
        assert [report["failed"] for _, report in by_script] == [
            report["failed"] for _, report in of_ranks[0][0]
        ]
        # Nothing of Accelerate itself was imported.
        assert files
        assert {Path(file).is_relative_to(ROOT / "accelfn") for file in files} == {True}
    return of_ranks[0][0]


def launch(processes: int) -> list[str]:
    return ["-m", "accelfn", "launch", "--compat", "--cpu", "--num_processes", str(processes)]


def check(reports: list[tuple[str, Report]], scripts: list[list[str]], processes: int) -> None:
    assert [name for name, _ in reports] == [name for name, *_ in scripts]
    for name, report in reports:
        raised = {line: tuple(dict.fromkeys(errors)) for line, errors in report["failed"].items()}
        assert (name, raised) == (name, documented(name, processes))
        assert report["passed"] or "import" in raised


def test_a_script_runs_under_the_alias(tmp_path: Path) -> None:
    scripts = [["test_ops"]]
    check(run_scripts(tmp_path, ["-m", "accelfn.compat"], scripts), scripts, 1)


def test_the_page_lists_every_script() -> None:
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


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("processes", [1, 2])
def test_scripts_raise_what_is_documented(tmp_path: Path, processes: int) -> None:
    scripts = [[name] for name in SCRIPTS[: len(SCRIPTS) if processes > 1 else NUM_ON_ONE]]
    check(run_scripts(tmp_path, launch(processes), scripts), scripts, processes)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("processes", [1, 2])
def test_notebooks_raise_what_is_documented(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("bitsandbytes")  # without it the script leaves out a line
    scripts = [["test_notebook"]]
    reports = run_scripts(
        tmp_path, ["-m", "accelfn.compat"], scripts, ACCELERATE_NUM_PROCESSES=str(processes)
    )
    check(reports, scripts, processes)


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("processes", [1, 2])
def test_scripts_that_train_a_model_raise_what_is_documented(tmp_path: Path, processes: int) -> None:
    pytest.importorskip("evaluate")
    model = ["--model_name_or_path", str(local_glue.write(tmp_path)), "--output_dir", str(tmp_path)]
    scripts = [
        ["external_deps.test_metrics"],
        *([script, *model] for script in TRAINING[:-1]),
        [TRAINING[-1], *model, "--partial_train_epoch", "1"],
        [TRAINING[-1], *model, "--resume_from_checkpoint", str(tmp_path / "epoch_0")],
    ]
    check(run_scripts(tmp_path, launch(processes), scripts), scripts, processes)
