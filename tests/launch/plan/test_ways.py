"""The other ways to start: under srun and mpirun, by torch_xla, and on pods of TPUs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch import LaunchConfig, LaunchPlan, Script
from accelfn.launch.cluster import expand_hosts, read_mpi, read_step
from accelfn.launch.launch import run_plan
from tests.launch.plan.plans import plan_of
from tests.launch.processes import ROOT


@pytest.mark.parametrize("flag", ["--max_restarts=1", "--monitor_interval=3", "--role=w", "--log_dir=logs"])
def test_torchrun_options_select_torchrun_and_are_refused_elsewhere(flag: str) -> None:
    assert plan_of("--num_processes=1 train.py").way == "single"
    assert plan_of(f"{flag} --num_processes=1 train.py").way == "torchrun"
    name = flag.partition("=")[0]
    with pytest.raises(ConfigurationError, match=f"{name} is for torchrun, and has no effect with xla"):
        plan_of(f"--tpu {flag} train.py")


def test_what_cannot_be_started_is_refused_by_name() -> None:
    with pytest.raises(MissingExtraError, match=r"--tpu needs torch_xla, .*'torch_xla\[tpu\]'"):
        run_plan(plan_of("--tpu train.py"), {}, LaunchConfig(), Script("train.py"))
    with pytest.raises(ConfigurationError, match=r"AMAZON_SAGEMAKER. Call plan_sagemaker"):
        plan_of("--compute_environment=AMAZON_SAGEMAKER t.py")


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_terminal_shows_the_start_line(
    quiet: bool, is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.execvpe", print)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    plan = LaunchPlan(way="torchrun", argv=("true",), local_size=2)
    run_plan(plan, dict(os.environ), LaunchConfig(quiet=quiet), Script("train.py"))
    captured = capsys.readouterr()
    assert captured.out.startswith("true ")
    reported = "accelfn launch: starting 2 processes of train.py; importing torch may take a while.\n"
    assert captured.err == (reported if is_terminal and not quiet else "")


def test_tpus() -> None:
    bf16 = "--tpu --mixed_precision=bf16"
    plan = plan_of(f"{bf16} --main_training_function=train --num_processes=8 t.py")
    assert plan.argv == ("python", "-m", "accelfn.launch.xla", "train", "8", "script", "t.py")
    assert ("ACCELFN_TORCH_DEVICE", "xla") in plan.env_changes
    assert not any(name.startswith("XLA_") for name, _ in plan.env_changes)  # autocast computes in bf16
    assert ("XLA_DOWNCAST_BF16", "1") in plan_of(f"{bf16} --downcast_bf16 t.py").env_changes
    pod = plan_of(
        "--tpu --tpu_cluster --tpu_name=t --tpu_zone=z --tpu_use_sudo --vm=0 --vm=1 --mixed_precision=no",
        *("--env", "A=b c", "t.py", "-x"),
        file="fsdp: {version: 2}",  # without use_fsdp
    )
    assert pod.argv[:8] == ("gcloud", "compute", "tpus", "tpu-vm", "ssh", "t", "--zone", "z")
    assert pod.argv[9] == (
        "sudo env 'A=b c' ACCELFN_IN_TPU_POD=1 ACCELERATE_IN_TPU_POD=1 "
        "accelfn launch --tpu=true --mixed_precision=no t.py -x"
    )
    assert pod.argv[-2:] == ("--worker", "0,1")
    with pytest.raises(ConfigurationError, match="needs --tpu_name and --tpu_zone"):
        plan_of("--tpu --tpu_cluster t.py")


def test_torch_xla_is_asked_for_and_used(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import sys\ndef train(index): print('trains', index, sys.argv)\n")
    # The interface that torch_xla documents, in its place.
    folder = tmp_path / "torch_xla" / "distributed"
    folder.mkdir(parents=True)
    spawn = "def spawn(fn, args=(), nprocs=None, start_method='spawn'): fn(0, *args); print(nprocs)\n"
    (folder / "xla_multiprocessing.py").write_text(spawn)

    def run(function: str, *paths: Path) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "accelfn.launch.xla", function, "8", "script", "t.py", "-x"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout, done.stderr

    assert run("train", ROOT, tmp_path) == ("trains 0 ['t.py', '-x']\nNone\n", "")
    assert "t.py has no function 'main'" in run("main", ROOT, tmp_path)[1]


def values(found: dict[str, tuple[object, str]]) -> dict[str, object]:
    return {name: value for name, (value, _) in found.items()}


def test_steps_of_slurm() -> None:
    batch = {"SLURM_JOB_ID": "9", "SLURM_NNODES": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert read_step(batch) == {}, "a batch script outside of srun is one process"
    one = {**batch, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "1"}
    assert read_step(one) == {}
    four = {**one, "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "3"}
    assert values(read_step({**four, "SLURM_JOB_NODELIST": "n[2-5]"})) == {
        "num_machines": 4,
        "machine_rank": 3,
        "main_process_ip": "n2",
        "main_process_port": 20064,
    }
    with pytest.raises(ConfigurationError, match="srun --ntasks-per-node=1 accelfn launch"):
        read_step({**four, "SLURM_STEP_NUM_TASKS": "8"})
    with pytest.raises(ConfigurationError, match=r"SLURM_NODEID must be an integer\.$"):
        read_step({**four, "SLURM_NODEID": "x"})
    for hosts in ("", "a[1-2", "a]b", "a,,b"):
        with pytest.raises(ConfigurationError, match="unknown format of a SLURM host list"):
            expand_hosts(hosts)


def test_a_launch_under_mpirun() -> None:
    one = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
    assert values(read_mpi(one)) == {"num_machines": 2, "machine_rank": 1}
    assert read_mpi({"PMI_RANK": "0", "PMI_SIZE": "1"}) == {}
    several = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    with pytest.raises(ConfigurationError, match=r"mpirun starts accelfn launch 4 times"):
        read_mpi(several)
    assert read_mpi({**several, "ACCELFN_RUN_DIR": "/tmp/x"}) == {}, "a script that mpirun started may launch"
