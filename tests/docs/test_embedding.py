"""The examples of embedding run inside of their frameworks, and the guide shows what they print."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn import find_checkpoints, verify_checkpoint
from tests.launch import forked
from tests.launch.forked import Job

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples" / "embedding"
PAGE = (ROOT / "docs" / "pages" / "guide" / "embedding.md").read_text()

# Ray on the loopback device, without reports of its use.
LOCAL_RAY = """
import runpy, sys, ray
ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
OF_RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def run(folder: Path, *command: str, **variables: str) -> list[str]:
    """Return the lines that a program prints."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def job(num_processes: int, name: str, *arguments: str) -> Job:
    return Job(str(EXAMPLES / name), arguments, num_processes, by_torchrun=True)


def run_jobs(folder: Path, *jobs: Job, shared: tuple[str, ...] = ("torch._dynamo",)) -> list[list[str]]:
    """Return the lines that each program prints, on ranks with the variables of torchrun."""
    return [output.splitlines() for output in forked.run_jobs(jobs, folder, 250, shared)]


def shown(name: str) -> list[str]:
    """Return what the guide says that an example prints."""
    lines = PAGE.partition(f'--8<-- "examples/embedding/{name}"')[2].partition("```text\n")[2]
    return lines.partition("\n```")[0].splitlines()


def test_the_guide_shows_every_example_and_its_output() -> None:
    names = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(names) == 5
    for name in names:
        assert len(shown(name)) >= 1, name


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_torchrun_script_resumes_on_another_number_of_processes(tmp_path: Path) -> None:
    name = "plain_torchrun.py"
    whole, _, rest = run_jobs(
        tmp_path, job(2, name, "whole"), job(2, name, "parts", "5"), job(1, name, "parts")
    )
    assert whole == shown(name)
    assert [line.partition(", loss")[0] for line in rest] == ["epoch 6: 50 samples", "epoch 9: 50 samples"]
    for checkpoint in find_checkpoints(tmp_path / "parts"):
        verify_checkpoint(checkpoint)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_with_its_own_mesh_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    runs = (("whole", "20"), ("parts", "10"), ("parts", "20"))
    whole, *parts = run_jobs(tmp_path, *(job(2, "own_trainer.py", *arguments) for arguments in runs))
    assert whole == shown("own_trainer.py")
    assert parts == [whole[:1], whole[1:]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_trainer_of_transformers_resumes_from_the_state(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    jobs = [job(2, "hf_trainer.py", "run", *resume) for resume in ((), ("run/checkpoint-4",))]
    libraries = ("torch._dynamo", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2")
    whole, rest = (
        [line for line in lines if "loss'" in line or "sum" in line]
        for lines in run_jobs(tmp_path, *jobs, shared=libraries)
    )
    *lines, last = [line for line in whole if "train_loss" not in line]
    *printed, total = shown("hf_trainer.py")
    assert lines == printed
    # The last digits are the machine's.
    assert float(last.split()[-1]) == pytest.approx(float(total.split()[-1]), rel=1e-5)
    assert rest[:4] == whole[4:8]  # bit-equal losses and norms, with dropout
    assert rest[-1] == whole[-1]
    checkpoint = tmp_path / "run" / "checkpoint-4"
    assert not [path.name for path in checkpoint.iterdir() if path.suffix in (".pt", ".pth", ".pkl")]
    verify_checkpoint(checkpoint / "state")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_loop_of_fabric_learns_as_the_torchrun_script_does(tmp_path: Path) -> None:
    pytest.importorskip("lightning_fabric")
    assert run(tmp_path, str(EXAMPLES / "fabric.py"), "whole")[-4:] == shown("fabric.py")
    assert shown("fabric.py") == shown("plain_torchrun.py")
    assert len(find_checkpoints(tmp_path / "whole")) == 2


@pytest.mark.slow
@pytest.mark.timeout(850)
def test_workers_of_ray_resume_in_another_number(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    example = ("-c", LOCAL_RAY, str(EXAMPLES / "ray_train.py"), str(tmp_path / "run"))
    first = run(tmp_path, *example, "2", "5", **OF_RAY)[-1]
    second = run(tmp_path, *example, "1", "10", **OF_RAY)[-1]
    assert [first, second] == shown("ray_train.py")
