"""peft, trl, diffusers and sentence-transformers train under the alias with Accelerate's numbers, bit by bit.

As with the Trainer, nothing but the order of reduction could differ, and it doesn't: losses, rates and sums
of weights are compared without a tolerance, in all modes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.compat import local_glue
from tests.launch.forked import Job, run_jobs
from tests.launch.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(850)]

PACKAGES = ("accelerate", "diffusers", "peft", "sentence_transformers", "tensorboard", "trl")
PROGRAM = str(ROOT / "tests" / "compat" / "ecosystem_program.py")
MODES = ("sft", "dpo", "sentences", "diffusion")


def test_libraries_train_with_the_numbers_of_accelerate(tmp_path: Path) -> None:
    for package in PACKAGES:
        pytest.importorskip(package)
    folders = {(side, world): tmp_path / f"{side}-{world}" for world in (1, 2) for side in ("theirs", "own")}
    for folder in folders.values():
        folder.mkdir()
        local_glue.write_model(folder / "bert")
    jobs = [
        Job(PROGRAM, [str(folder)], world, aliased=side == "own") for (side, world), folder in folders.items()
    ]
    run_jobs(jobs, tmp_path, 800)
    found: dict[tuple[str, int], dict[str, Any]] = {
        key: json.loads((folder / "results.json").read_text()) for key, folder in folders.items()
    }
    for (side, world), results in found.items():
        assert results["processes"] == world
        assert Path(results["file"]).is_relative_to(ROOT / "accelfn") == (side == "own")
        for mode in MODES:
            assert "error" not in results[mode], results[mode]
            assert (world, mode, results[mode]) == (world, mode, found["theirs", world][mode])
