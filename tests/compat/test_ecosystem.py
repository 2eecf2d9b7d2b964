"""peft, trl, diffusers and sentence-transformers train under the alias with Accelerate's numbers, bit by bit.

As with the Trainer, nothing but the order of reduction could differ, and it doesn't: losses, rates and sums
of weights are compared without a tolerance, in all modes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.compat import local_glue

PACKAGES = ("accelerate", "diffusers", "peft", "sentence_transformers", "tensorboard", "trl")
for package in PACKAGES:
    pytest.importorskip(package)

ROOT = Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "compat" / "ecosystem_program.py")
MODES = ("peft", "sft", "sft with lora", "dpo", "sentences", "sentences by fit", "diffusion")
THEIRS: dict[int, list[str]] = {
    1: [],
    2: ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
OWN = {1: ["-m", "accelfn.compat"], 2: ["-m", "accelfn", "launch", "--compat", "--num_processes", "2"]}


def start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    local_glue.write_model(folder / "bert")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    # Without this variable Accelerate's ranks don't meet where there is no GPU.
    environment |= {"ACCELERATE_USE_CPU": "true", "HF_HOME": str(folder / "cache")}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command, PROGRAM, str(folder)], env=environment, stdout=log, stderr=log
        )


def finish(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    try:
        assert process.wait(timeout=500) == 0, (folder / "log").read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    results: dict[str, Any] = json.loads((folder / "results-0.json").read_text())
    return results


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("processes", [1, 2])
def test_libraries_train_with_the_numbers_of_accelerate(tmp_path: Path, processes: int) -> None:
    folders = (tmp_path / "theirs", tmp_path / "own")
    commands = (THEIRS[processes], OWN[processes])
    started = [start(command, folder) for command, folder in zip(commands, folders, strict=True)]
    theirs, own = [finish(process, folder) for process, folder in zip(started, folders, strict=True)]
    assert theirs["processes"] == own["processes"] == processes
    inside = [
        {Path(file).is_relative_to(ROOT / "accelfn") for file in side["files"]} for side in (theirs, own)
    ]
    assert inside == [{False}, {True}]
    for mode in MODES:
        assert "error" not in theirs[mode], theirs[mode]
        assert (mode, own[mode]) == (mode, theirs[mode])
