"""transformers' Trainer under the alias has the numbers that it has under Accelerate, bit by bit.

Nothing but the order of reduction could differ, and it doesn't: accelfn averages the same buckets by the same
backend. So losses and sums of weights are compared without a tolerance, in all modes.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.forked import Job, launched, run_jobs
from tests.launch.processes import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(850)]

PROGRAM = str(ROOT / "tests" / "compat" / "trainer_program.py")
# By world: one for each part of accelfn that a Trainer reaches.
MODES = {
    1: (
        *(
            "shuffled",
            "divided accumulation",
            "bf16",
            "resume",
            "automatic batch size",
            "iterable",
            "compile",
        ),
        "seq2seq",
    ),
    2: ("accumulation", "train with evaluation", "resume", "iterable", "seq2seq"),
}
Results = dict[str, Any]


def test_each_mode_has_the_numbers_it_had(tmp_path: Path) -> None:
    for package in ("accelerate", "transformers"):
        pytest.importorskip(package)
    jobs: list[Job] = []
    for world, modes in MODES.items():
        theirs, own, back = (tmp_path / f"{name}-{world}" for name in ("theirs", "own", "back"))
        for folder in (theirs, own, back):
            folder.mkdir()
        jobs += [
            Job(PROGRAM, [str(theirs), ",".join(modes), ""], world),
            Job(PROGRAM, [str(own), ",".join(modes), str(theirs)], world, aliased=True),
        ]
        if world == 1:
            jobs.append(Job(PROGRAM, [str(back), "resume", str(own)]))
    run_jobs(jobs, tmp_path, timeout_s=800)
    log = (tmp_path / "log").read_text()[-4000:]

    def read(name: str) -> Results:
        results: Results = json.loads((tmp_path / name / "results.json").read_text())
        assert not [one for one in results.values() if isinstance(one, dict) and "error" in one], log
        return results

    for world, modes in MODES.items():
        theirs, own = read(f"theirs-{world}"), read(f"own-{world}")
        # Each side ran what it was meant to run.
        assert not Path(theirs["accelerate"]).is_relative_to(ROOT / "accelfn")
        assert not [name for name in theirs["bases"] if name.startswith("accelfn.")]
        assert Path(own["accelerate"]).is_relative_to(ROOT / "accelfn" / "compat")
        assert "accelfn.accelerator.accelerator" in own["bases"]
        for mode in modes:
            assert own[mode] == theirs[mode], mode
            losses = own[mode]["losses"]
            assert len(set(losses)) == len(losses) > 1, "it trains"
        # Each goes on with the checkpoint of the other.
        assert own["resume of the other"] == theirs["resume"]
    assert read("back-1")["resume of the other"] == read("theirs-1")["resume"]


@pytest.mark.usefixtures("deepspeed_ops")
def test_a_sharded_trainer_has_the_losses_of_replicas(tmp_path: Path) -> None:
    """Under Accelerate, FSDP on the CPU is silently replication: the comparison is with accelfn's own."""
    for package in ("deepspeed", "transformers"):
        pytest.importorskip(package)
    program = str(ROOT / "tests" / "compat" / "sharded_program.py")
    file = "use_deepspeed: true\ngradient_accumulation_steps: 2\ndeepspeed: {zero_stage: 2}\n"
    by_file = launched("-n2", ROOT / program, str(tmp_path), "launched", file=file)._replace(aliased=True)
    run_jobs([Job(program, [str(tmp_path)], 2, aliased=True), by_file], tmp_path, timeout_s=700)
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["fsdp parameters"] == ["DTensor"]
    assert found["fsdp"] == pytest.approx(found["plain"], rel=1e-5)
    for name in ("cp", "deepspeed", "deepspeed, stage 1"):
        assert found[name] == pytest.approx(found["plain"], rel=1e-5)
    kind, its_losses = json.loads((tmp_path / "launched.json").read_text())
    assert kind == "DeepSpeedEngine"
    assert its_losses == pytest.approx(found["windows"], rel=1e-5)
    # DeepSpeed's own schedule begins one step later.
    assert found["deepspeed, auto"] == pytest.approx(found["windows"], rel=2e-3)
    assert found["resumed"] == found["fsdp"]  # the first three are the checkpoint's
