"""The command: what it makes of a step's variables and the flags together."""

from pathlib import Path

import pytest

from accelfn.launch.main import main

STEP = {
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
    "SLURM_JOB_ID": "7",
}


@pytest.fixture(autouse=True)
def _in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()


def dry_run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(["launch", *argv, "--cpu", "--dry_run", "t.py"])
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize("by_flag", [True, False])
def test_one_machine_beats_the_step_wholly(
    by_flag: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not by_flag:
        monkeypatch.setenv("ACCELFN_NUM_MACHINES", "1")
    flags = ("--num_machines=1",) if by_flag else ()
    for tasks in ("2", "4"):  # several launches on a node, each a world of its own, as was asked for
        monkeypatch.setenv("SLURM_STEP_NUM_TASKS", tasks)
        status, output = dry_run(capsys, *flags, "--num_processes=2")
        assert status == 0, output
        assert "--nnodes=1" in output
        assert "gpu1" not in output


def test_another_number_of_machines_takes_neither_rank_nor_address(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, output = dry_run(capsys, "--num_machines=4", "--num_processes=4")
    assert status == 2
    assert "--num_machines 4 needs --main_process_ip" in output
    assert "SLURM" not in output


def test_the_steps_own_number_of_machines_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _, bare = dry_run(capsys, "--num_processes=2")
    _, same = dry_run(capsys, "--num_machines=2", "--num_processes=2")
    assert bare == same
    assert "--rdzv-endpoint=gpu1:20049" in bare
    assert "--node-rank=1" in bare


def test_an_invalid_number_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    status, output = dry_run(capsys, "--num_machines=two")
    assert (status, "argument --num_machines: it must be an integer" in output) == (2, True)


def test_sbatch_writes_over_its_own_scripts_only(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.sh").write_text("echo mine\n")
    flags = ("--num_machines=2", "--num_processes=2", "--cpu")
    assert main(["launch", *flags, "--sbatch", "own.sh", "t.py"]) == 2
    assert "--sbatch own.sh exists" in capsys.readouterr().err
    assert Path("own.sh").read_text() == "echo mine\n"
    for verb in ("wrote", "replaced"):
        assert main(["launch", *flags, "--sbatch", "job.sh", "t.py"]) == 0
        assert capsys.readouterr().out == f"{verb} job.sh; submit it with: sbatch job.sh\n"


def test_a_dry_run_of_sbatch_prints_the_script_and_writes_none(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num_machines=2", "--num_processes=2", "--cpu", "--sbatch", "job.sh", "--slurm_time=1:00:00")
    assert main(["launch", *flags, "--dry-run", "t.py"]) == 0
    printed = capsys.readouterr().out
    assert not Path("job.sh").exists()
    assert main(["launch", *flags, "t.py"]) == 0
    assert Path("job.sh").read_text() == printed
    assert "dry" not in printed
    short = ("--num_machines=2", "-n", "2", "--cpu", "--sbatch", "short.sh", "--dry_run")
    assert main(["launch", *short, "t.py"]) == 0
    assert "launch --num_processes=2 --num_machines=2 --cpu=true t.py" in capsys.readouterr().out


OF_ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
use_xpu: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
use_cpu: true
"""


def test_a_config_file_of_accelerate_is_imported_with_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in STEP:
        monkeypatch.delenv(name)
    Path("default_config.yaml").write_text(OF_ACCELERATE)
    assert main(["launch", "--config_file", "default_config.yaml", "--print_config"]) == 0
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "accelfn launch: default_config.yaml is a config file of Accelerate, and was imported.",
        "accelfn launch: use_xpu: dropped; torch detects an XPU itself.",
    ]
    rows = {line.split()[0]: line.split()[1:] for line in captured.out.splitlines()}
    assert rows["num_processes"] == ["2", "file", "default_config.yaml"]
    assert (rows["mixed_precision"][0], rows["cpu"][0]) == ("bf16", "true")
    assert main(["launch", "--config_file", "default_config.yaml", "-n", "3", "--dry_run", "t.py"]) == 0
    assert "--nproc-per-node=3" in capsys.readouterr().out


def test_a_folder_that_has_gone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    tmp_path.rename(tmp_path.with_name("moved"))
    tmp_path.with_name("moved").joinpath("t.py").unlink()
    tmp_path.with_name("moved").rmdir()
    assert main(["launch", "t.py"]) == 2
    assert "the current directory no longer exists" in capsys.readouterr().err


def test_a_folder_of_logs_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/proc/self").exists():
        pytest.skip("there is no /proc")
    assert (
        main(["launch", "--cpu", "--num_machines=1", "--num_processes=2", "--log_dir=/proc/x", "t.py"]) == 2
    )
    assert "can't create --log_dir /proc/x" in capsys.readouterr().err
