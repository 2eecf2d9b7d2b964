"""``accelfn launch``, dry: what becomes of variables, files and flags together."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]

STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_JOB_ID": "7",
}


@pytest.fixture
def dry_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    Path("t.py").touch()

    def run(line: str, script: str = "t.py") -> tuple[int, str]:
        status, stdout, stderr = command(f"launch {line} --cpu --dry_run {script}")
        return status, stdout + stderr

    return run


DryRun = Callable[..., tuple[int, str]]


@pytest.fixture
def _in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)


# --- a step of SLURM -----------------------------------------------------------------------------


@pytest.mark.usefixtures("_in_a_step")
@pytest.mark.parametrize("tasks", ["2", "4"])  # several launches on a node too, if that is asked for
@pytest.mark.parametrize("flags", ["--num_machines=1", ""])
def test_one_machine_beats_the_step_wholly(
    flags: str, tasks: str, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
    if not flags:
        monkeypatch.setenv("ACCELFN_NUM_MACHINES", "1")
    status, output = dry_run(f"{flags} --num_processes=2")
    assert status == 0, output
    assert "--nnodes=1" in output
    assert "gpu1" not in output


@pytest.mark.usefixtures("_in_a_step")
def test_only_the_steps_own_number_of_machines_takes_its_rank_and_address(dry_run: DryRun) -> None:
    _, bare = dry_run("--num_processes=2")
    _, same = dry_run("--num_machines=2 --num_processes=2")
    assert bare == same
    assert "--rdzv-endpoint=gpu1:20049" in bare
    assert "--node-rank=1" in bare
    status, output = dry_run("--num_machines=4 --num_processes=4")
    assert (status, "--num_machines 4 needs --main_process_ip" in output) == (2, True)
    assert "SLURM" not in output
    status, output = dry_run("--num_machines=two")
    assert (status, "argument --num_machines: it must be an integer" in output) == (2, True)


# --- files ---------------------------------------------------------------------------------------


def test_a_configuration_file_counts_and_is_named(dry_run: DryRun, command: Command) -> None:
    Path("own.yaml").write_text("cpu: yes\nnum_processes: 3\nmixed_precision: no\n")
    named = "--config-file own.yaml --num_processes 2"
    status, stdout, _ = command(f"launch {named} --print-config")
    rows = [line.split() for line in stdout.splitlines()]
    assert (status, ["num_processes", "2", "flag", "--num_processes"] in rows) == (0, True)
    assert [*("mixed_precision", "no", "file", "own.yaml,", "line", "3")] in rows
    _, output = dry_run(named)
    assert "ACCELFN_MIXED_PRECISION=no \\\n" in output
    assert "--nproc-per-node=2" in output


OF_ACCELERATE = """
{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_CPU, downcast_bf16: 'no', use_xpu: true,
machine_rank: 0, main_training_function: main, mixed_precision: bf16, num_machines: 1, num_processes: 2,
rdzv_backend: static, use_cpu: true}
"""


def test_a_config_file_of_accelerate_is_imported_with_a_note(dry_run: DryRun, command: Command) -> None:
    Path("default_config.yaml").write_text(OF_ACCELERATE)
    named = "--config_file default_config.yaml"
    _, stdout, stderr = command(f"launch {named} --print_config")
    assert stderr.splitlines() == [
        "accelfn launch: default_config.yaml is a config file of Accelerate, and was imported.",
        "accelfn launch: use_xpu: dropped; torch detects an XPU itself.",
    ]
    rows = {line.split()[0]: line.split()[1:] for line in stdout.splitlines()}
    assert rows["num_processes"] == ["2", "file", "default_config.yaml,", "line", "3"]
    assert (rows["mixed_precision"][0], rows["cpu"][0]) == ("bf16", "true")
    assert "--nproc-per-node=3" in dry_run(f"{named} -n 3")[1]


def test_a_module_is_found_without_an_import(tmp_path: Path, dry_run: DryRun, command: Command) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("raise SystemExit('was run')")
    (tmp_path / "space").mkdir()
    for name in ("json.tool", "own.train", "space.train"):
        assert dry_run("-m", name)[0] == 0
    assert not {"own", "space"} & set(sys.modules)
    assert dry_run("--no_python", sys.executable)[0] == 0
    # The script is on the machines of the pod.
    assert command("launch --tpu --tpu_cluster --tpu_name=t --tpu_zone=z --dry_run absent.py")[0] == 0
