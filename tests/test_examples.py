"""The programs of docs/examples run as their readers would start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
PROGRAMS = tuple(sorted(path.name for path in EXAMPLES.glob("*.py")))
TRAINING = ("train_digits.py", "train_digits_accelerator.py")


def launch(name: str, folder: Path, *arguments: str, num_processes: int = 2) -> str:
    command = [sys.executable, "-m", "accelfn.launch", "launch", "--num_processes", str(num_processes)]
    done = subprocess.run(
        [*command, "--cpu", str(EXAMPLES / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_trainings_learn_the_digits_and_end_with_equal_weights(tmp_path: Path) -> None:
    weights: list[bytes] = []
    for name in TRAINING:
        output = launch(name, tmp_path, "--output", name)
        found = re.search(r"accuracy on 360 held-out digits: (\d+\.\d+)% \(2 processes\)", output)
        assert found is not None, output
        assert float(found[1]) >= 97.0
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in TRAINING])
def test_every_other_example_runs(name: str, tmp_path: Path) -> None:
    assert launch(name, tmp_path)
