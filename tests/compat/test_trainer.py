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
MODES = (
    *("training", "shuffled", "dropout", "accumulation", "bert accumulation", "bf16", "evaluate"),
    *("train with evaluation", "resume", "resume sequential", "best model", "automatic batch size"),
    *("iterable", "datasets", "tensorboard", "compile", "gradient checkpointing", "peft", "seq2seq"),
)
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


@pytest.fixture(scope="module", params=STARTS, ids=lambda world: f"{world} ranks")
def sides(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Run all modes by both sides; the second one also resumes the first one's checkpoints."""
    folder = tmp_path_factory.mktemp("trainer")
    theirs, own = STARTS[request.param]
    found = {"theirs": run(theirs, folder / "theirs", ",".join(MODES))}
    found["own"] = run(own, folder / "own", ",".join(MODES), "--resume", str(folder / "theirs"))
    if request.param == 1:
        found["back"] = run(theirs, folder / "back", ",".join(RESUMES), "--resume", str(folder / "own"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_side_ran_its_own_code(sides: Results) -> None:
    check_sides(sides["theirs"], sides["own"])
    assert set(MODES) <= sides["own"].keys()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_has_the_numbers_it_had(sides: Results, mode: str) -> None:
    assert sides["own"][mode] == sides["theirs"][mode]
    assert sides["own"][mode]["losses"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", RESUMES)
def test_a_checkpoint_of_one_side_is_resumed_by_the_other(sides: Results, mode: str) -> None:
    straight = sides["theirs"][mode]
    assert sides["own"][f"{mode} of the other"] == straight
    if "back" in sides:
        assert sides["back"][f"{mode} of the other"] == straight
