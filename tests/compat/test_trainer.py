"""transformers' Trainer under the alias has the numbers that it has under Accelerate, bit by bit.

Both sides train in each world, all modes in one process (or one launch) of each. Nothing but the order of
reduction could differ, and it doesn't: accelfn averages the same buckets by the same backend. So losses
and sums of weights are compared without a tolerance, in all modes.
"""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = str(ROOT / "tests" / "compat" / "trainer_program.py")
# By world; of two ranks those in which they share data or work.
MODES = {
    1: (
        *("training", "shuffled", "dropout", "accumulation", "bert accumulation", "bf16", "evaluate"),
        *("train with evaluation", "resume", "resume sequential", "best model", "automatic batch size"),
        *("iterable", "datasets", "tensorboard", "compile", "gradient checkpointing", "peft", "seq2seq"),
    ),
    2: (
        *("shuffled", "accumulation", "bf16", "train with evaluation", "resume", "resume sequential"),
        *("best model", "iterable", "datasets"),
    ),
}
RESUMES = ("resume", "resume sequential")
# By world: what starts the program under Accelerate, and under accelfn.
STARTS = {
    1: (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"], ["-m", "accelfn.compat"]),
    2: (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
        ["-m", "accelfn", "launch", "--compat", "--cpu", "--num_processes", "2"],
    ),
}
Results = dict[str, Any]


def start(command: list[str], folder: pathlib.Path, modes: str, *options: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True, parents=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command, PROGRAM, str(folder), "--modes", modes, *options],
            env=environment,
            stdout=log,
            stderr=log,
        )


def finish(process: subprocess.Popen[bytes], folder: pathlib.Path) -> Results:
    try:
        assert process.wait(timeout=400) == 0, (folder / "log").read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    results: Results = json.loads((folder / "results.json").read_text())
    failed = [name for name, result in results.items() if isinstance(result, dict) and "error" in result]
    assert not failed, (folder / "log").read_text()[-4000:]
    return results


def run(command: list[str], folder: pathlib.Path, modes: str, *options: str) -> Results:
    return finish(start(command, folder, modes, *options), folder)


def check_sides(theirs: Results, own: Results) -> None:
    """Check that each side ran what it was meant to run."""
    assert "accelfn" not in theirs["accelerate"].replace(str(ROOT), "")
    assert not [name for name in theirs["bases"] if name.startswith("accelfn.")]
    assert own["accelerate"] == str(ROOT / "accelfn" / "compat" / "accelerate" / "__init__.py")
    assert "accelfn.accelerator.accelerator" in own["bases"]


def test_a_trainer_has_the_numbers_it_had(tmp_path: pathlib.Path) -> None:
    modes = "dropout"
    folders = [tmp_path / "theirs", tmp_path / "own"]
    commands = [[], ["-m", "accelfn.compat"]]
    started = [start(command, folder, modes) for command, folder in zip(commands, folders, strict=True)]
    theirs, own = [finish(process, folder) for process, folder in zip(started, folders, strict=True)]
    check_sides(theirs, own)
    assert own["dropout"] == theirs["dropout"]
    losses = own["dropout"]["losses"]
    assert len(set(losses)) == len(losses) == 5, "it trains"


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.parametrize("world", STARTS)
def test_each_mode_has_the_numbers_it_had(world: int, tmp_path: pathlib.Path) -> None:
    (start_theirs, start_own), modes = STARTS[world], ",".join(MODES[world])
    theirs = run(start_theirs, tmp_path / "theirs", modes)
    own = run(start_own, tmp_path / "own", modes, "--resume", str(tmp_path / "theirs"))
    check_sides(theirs, own)
    for mode in MODES[world]:
        assert own[mode] == theirs[mode], mode
        assert own[mode]["losses"], mode
    sides = [own]  # each goes on with the checkpoints of the other
    if world == 1:
        sides += [run(start_theirs, tmp_path / "back", ",".join(RESUMES), "--resume", str(tmp_path / "own"))]
    for side in sides:
        assert [side[f"{mode} of the other"] for mode in RESUMES] == [theirs[mode] for mode in RESUMES]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sharded_trainer_has_the_losses_of_replicas(tmp_path: pathlib.Path) -> None:
    """Under Accelerate, FSDP on the CPU is silently replication: the comparison is with accelfn's own."""
    pytest.importorskip("deepspeed")
    launch = ["-m", "accelfn", "launch", "--compat", "--cpu", "--num_processes", "2"]
    program = str(ROOT / "tests" / "compat" / "sharded_program.py")
    with (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launch, program, str(tmp_path)]
        status = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=500, check=False)
    assert status.returncode == 0, (tmp_path / "log").read_text()[-4000:]
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["fsdp parameters"] == ["DTensor"]
    assert found["fsdp"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["deepspeed"] == pytest.approx(found["plain"], rel=1e-5)
    assert found["resumed"] == found["fsdp"]  # the first three are the checkpoint's
