"""Programs print the same losses before and after they are migrated."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.launch.migrate import Level, plan_migration
from tests.launch.migrate.programs import (
    BY_HAND,
    CORE_TRAINING,
    CORE_TRAINING_PREPARED,
    IN_A_FUNCTION,
    QUICK_TOUR,
    WINDOWS,
)

ROOT = Path(__file__).parents[3]

# Runs each program in a process of its own, after one import of torch and of both packages.
DRIVER = """
import json, os, sys, warnings
import torch, accelerate, accelfn.accelerator, accelfn.training, accelfn.checkpoint
warnings.simplefilter("ignore")
torch.set_num_threads(1)
optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # the first one imports much of torch
optimizer.step()
for file in sys.argv[1:]:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        sys.stdout = open(file + ".out", "w")
        sys.argv = [file]
        exec(compile(open(file).read(), file, "exec"), {"__name__": "__main__"})
        sys.stdout.close()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(file)
"""

CASES: dict[str, tuple[str, Level]] = {
    "quick_tour_functions": (QUICK_TOUR, "functions"),
    "quick_tour_shim": (QUICK_TOUR, "shim"),
    "core_training_shim": (CORE_TRAINING, "shim"),
    "core_training_functions": (CORE_TRAINING_PREPARED, "functions"),
    "by_hand_functions": (BY_HAND, "functions"),
    "by_hand_shim": (BY_HAND, "shim"),
    "in_a_function_functions": (IN_A_FUNCTION, "functions"),
    "in_a_function_shim": (IN_A_FUNCTION, "shim"),
    "windows_functions": (WINDOWS, "functions"),
    "windows_shim": (WINDOWS, "shim"),
}


def run(command: list[str], folder: Path, **variables: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def write(folder: Path) -> dict[str, tuple[Path, Path]]:
    files: dict[str, tuple[Path, Path]] = {}
    for name, (source, to) in CASES.items():
        migrated = plan_migration(source, name, to=to)
        assert migrated.refusals == ()
        files[name] = (folder / f"{name}_before.py", folder / f"{name}_after.py")
        for file, text in zip(files[name], (source, migrated.text), strict=True):
            file.write_text(text)
    return files


@pytest.mark.parametrize(
    "program", [QUICK_TOUR, BY_HAND, IN_A_FUNCTION], ids=["tour", "by_hand", "in_a_function"]
)
def test_both_levels_print_the_same_losses(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed: list[str] = []
    levels: tuple[Level, Level] = ("functions", "shim")
    for to in levels:
        exec(plan_migration(program, to=to).text, {"__name__": "__main__"})
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert printed[0].count("\n") >= 15


@pytest.mark.slow
def test_losses_are_equal_on_one_process(tmp_path: Path) -> None:
    files = write(tmp_path)
    run([sys.executable, "-c", DRIVER, *(str(file) for pair in files.values() for file in pair)], tmp_path)
    for name, pair in files.items():
        before, after = (Path(f"{file}.out").read_text() for file in pair)
        assert before.count("\n") >= 8, name
        assert after == before, name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["quick_tour_functions", "windows_functions"])
def test_losses_are_equal_on_two_processes(name: str, tmp_path: Path) -> None:
    before, after = write(tmp_path)[name]
    for file in (before, after):
        # Both write checkpoints: all ranks into one folder.
        file.write_text(file.read_text().replace("FOLDER = None", f"FOLDER = {str(file.with_suffix(''))!r}"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    expected = run([*torchrun, str(before)], tmp_path, ACCELERATE_USE_CPU="true")
    found = run(
        [sys.executable, "-m", "accelfn", "launch", "--num_processes=2", "--cpu", str(after)], tmp_path
    )
    assert expected.count("\n") >= 4
    numbers = [json.loads(f"[{', '.join(text.split())}]") for text in (expected, found)]
    assert numbers[1] == pytest.approx(numbers[0], rel=1e-6)
