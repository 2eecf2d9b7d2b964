"""The other ways to start: mpirun, DeepSpeed's launcher, torch_xla, TPU pods, SLURM's scripts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch import LaunchPlan, Machine, Script, parse_flags, plan_launch, resolve
from accelfn.launch.launch import run_plan
from accelfn.launch.plan.commands import WORKER
from accelfn.launch.plan.platforms import expand_hosts, read_mpi, read_step, write_sbatch

OPEN_MPI = Machine(cores=8, mpirun="/usr/bin/mpirun", is_open_mpi=True)
HYDRA = Machine(cores=8, mpirun="mpiexec")


def plan_of(*argv: str, machine: Machine | None = None, env: dict[str, str] | None = None) -> LaunchPlan:
    parsed = parse_flags(argv)
    assert parsed.script is not None
    script = Script(parsed.script, parsed.script_args)
    given = {"OMP_NUM_THREADS": "1"} if env is None else env
    return plan_launch(resolve(parsed.flags, {}), script, given, machine or Machine(cores=8))


MPI = ("--num_processes=16", "--num_machines=4", "--mpirun_hostfile=/h/hosts", "--mixed_precision=no")


def test_mpirun_of_intel_and_mpich() -> None:
    plan = plan_of(*MPI, "train.py", "-x", machine=HYDRA)
    assert plan.argv[:7] == ("mpiexec", "-f", "/h/hosts", "-ppn", "4", "-n", "16")
    assert plan.argv[7:10] == ("-genv", "ACCELERATE_MIXED_PRECISION", "no")
    assert plan.argv[-4:] == ("python", WORKER, "train.py", "-x")


def test_mpirun_of_open_mpi_hands_variables_and_the_address_on() -> None:
    plan = plan_of(*MPI, "--main_process_ip=n0", "--main_process_port=77", "-m", "train", machine=OPEN_MPI)
    assert plan.argv[:9] == (
        *("/usr/bin/mpirun", "--hostfile", "/h/hosts", "--npernode", "4", "-n", "16"),
        *("--bind-to", "socket"),
    )
    handed = [plan.argv[index + 1] for index, word in enumerate(plan.argv) if word == "-x"]
    assert handed == ["ACCELERATE_MIXED_PRECISION", "ACCELFN_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"]
    assert {("MASTER_ADDR", "n0"), ("MASTER_PORT", "77")} <= set(plan.env_changes)
    assert plan.argv[-4:] == ("python", WORKER, "-m", "train")


def test_mpirun_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match="needs mpirun or mpiexec on the PATH"):
        plan_of(*MPI, "train.py")


ELASTIC = ("--max_restarts=1", "--monitor_interval=3", "--shutdown_timeout=9", "--role=w", "--log_dir=logs")


@pytest.mark.parametrize("flag", ELASTIC)
def test_torchrun_options_select_torchrun_and_are_refused_elsewhere(flag: str) -> None:
    assert plan_of("--num_processes=1", "train.py").way == "single"
    name, _, value = flag.partition("=")
    started = plan_of(flag, "--num_processes=1", "train.py").argv
    assert any(word.startswith(f"--{name[2:].replace('_', '-')}={value}") for word in started)
    with pytest.raises(ConfigurationError, match=f"{name} is for torchrun, and has no effect with mpirun"):
        plan_of(*MPI, flag, "train.py", machine=OPEN_MPI)


def test_what_cannot_be_started_is_refused_by_name() -> None:
    with pytest.raises(MissingExtraError, match=r"--tpu needs torch_xla, .*'torch_xla\[tpu\]'"):
        run_plan(plan_of("--tpu", "train.py"), {})
    with pytest.raises(ConfigurationError, match=r"AMAZON_SAGEMAKER. Call plan_sagemaker"):
        plan_of("--compute_environment=AMAZON_SAGEMAKER", "t.py")


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_shows_the_start_line(
    quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LaunchPlan(way="torchrun", argv=("true",), local_size=2)
    monkeypatch.setattr("os.execvpe", print)
    for is_terminal in (False, True):
        monkeypatch.setattr("sys.stderr.isatty", lambda shown=is_terminal: shown)
        run_plan(plan, dict(os.environ), script="train.py", quiet=quiet)
        reported = "accelfn launch: starting 2 processes of train.py; importing torch may take a while.\n"
        captured = capsys.readouterr()
        assert captured.out.startswith("true ")
        assert captured.err == (reported if is_terminal and not quiet else "")


def test_tpus() -> None:
    plan = plan_of(
        "--tpu", "--mixed_precision=bf16", "--main_training_function=train", "--num_processes=8", "t.py"
    )
    assert plan.argv == ("python", "-m", "accelfn.launch.run.xla", "train", "8", "script", "t.py")
    assert ("ACCELFN_TORCH_DEVICE", "xla") in plan.env_changes
    assert not any(name.startswith("XLA_") for name, _ in plan.env_changes)  # autocast computes in bf16
    plan = plan_of("--tpu", "--mixed_precision=bf16", "--downcast_bf16", "t.py")
    assert ("XLA_DOWNCAST_BF16", "1") in plan.env_changes
    pod = plan_of(
        *("--tpu", "--tpu_cluster", "--tpu_name=t", "--tpu_zone=z", "--tpu_use_sudo", "--vm=0", "--vm=1"),
        *("--env", "A=b c", "--mixed_precision=no", "t.py", "-x"),
    )
    assert pod.argv[:8] == ("gcloud", "compute", "tpus", "tpu-vm", "ssh", "t", "--zone", "z")
    assert pod.argv[9] == (
        "sudo env 'A=b c' ACCELFN_IN_TPU_POD=1 ACCELERATE_IN_TPU_POD=1 "
        "accelfn launch --tpu=true --mixed_precision=no t.py -x"
    )
    assert pod.argv[-2:] == ("--worker", "0,1")
    with pytest.raises(ConfigurationError, match="needs --tpu_name and --tpu_zone"):
        plan_of("--tpu", "--tpu_cluster", "t.py")


def run_module(tmp_path: Path, *argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[3]}{os.pathsep}{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_torch_xla_is_asked_for_and_used(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import sys\ndef train(index): print('trains', index, sys.argv)\n")
    done = run_module(tmp_path, "accelfn.launch.run.xla", "train", "8", "script", "t.py", "-x")
    assert (done.returncode, "needs torch_xla. Run: pip install" in done.stderr) == (1, True)
    # The interface that torch_xla documents, in its place.
    folder = tmp_path / "torch_xla" / "distributed"
    folder.mkdir(parents=True)
    (tmp_path / "torch_xla" / "__init__.py").touch()
    spawn = "def spawn(fn, args=(), nprocs=None, start_method='spawn'): fn(0, *args); print(nprocs)\n"
    (folder / "__init__.py").touch()
    (folder / "xla_multiprocessing.py").write_text(spawn)
    done = run_module(tmp_path, "accelfn.launch.run.xla", "train", "8", "script", "t.py", "-x")
    assert done.stdout == "trains 0 ['t.py', '-x']\nNone\n", done.stderr
    done = run_module(tmp_path, "accelfn.launch.run.xla", "main", "8", "script", "t.py")
    assert "t.py has no function 'main'" in done.stderr


def test_steps_of_slurm() -> None:
    batch = {"SLURM_JOB_ID": "9", "SLURM_NNODES": "4", "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert read_step(batch) == {}, "a batch script outside of srun is one process"
    one = {**batch, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "1"}
    assert read_step(one) == {}
    four = {**one, "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NODEID": "3"}
    found = read_step({**four, "SLURM_JOB_NODELIST": "n[2-5]"})
    assert {name: value for name, (value, _) in found.items()} == {
        "num_machines": 4,
        "machine_rank": 3,
        "main_process_ip": "n2",
        "main_process_port": 20064,
    }
    with pytest.raises(ConfigurationError, match="srun --ntasks-per-node=1 accelfn launch"):
        read_step({**four, "SLURM_STEP_NUM_TASKS": "8"})
    with pytest.raises(ConfigurationError, match="SLURM_NODEID must be an integer, got 'x'"):
        read_step({**four, "SLURM_NODEID": "x"})


def test_a_launch_under_mpirun() -> None:
    one = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1"}
    assert {name: value for name, (value, _) in read_mpi(one).items()} == {
        "num_machines": 2,
        "machine_rank": 1,
    }
    assert read_mpi({"PMI_RANK": "0", "PMI_SIZE": "1"}) == {}
    several = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    with pytest.raises(ConfigurationError, match=r"mpirun starts accelfn launch 4 times"):
        read_mpi(several)
    assert read_mpi({**several, "ACCELFN_RUN_DIR": "/tmp/x"}) == {}, "a script that mpirun started may launch"


@pytest.mark.parametrize("hosts", ["", "a[1-2", "a]b", "a,,b"])
def test_host_lists_that_make_no_sense(hosts: str) -> None:
    with pytest.raises(ConfigurationError, match="unknown format of a SLURM host list"):
        expand_hosts(hosts)


def test_a_script_for_sbatch_is_a_launch_on_every_node() -> None:
    argv = ("--num_processes=8", "--num_machines=2", "--slurm_time=1:00:00", "--slurm_extra=--qos=high")
    argv += ("--slurm_job_name", "my job")
    parsed = parse_flags((*argv, "--slurm_setup", "module load cuda", "train.py", "a b"))
    step = {"machine_rank": (0, "srun"), "main_process_ip": ("n0", "srun")}
    config = resolve(parsed.flags, {}, None, step, writes_sbatch=True).config
    text = write_sbatch(config, Script("train.py", ("a b",)), argv[:2], Machine(python="/v/python"))
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    for wanted in (
        *("#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=4"),
        *("#SBATCH --time=1:00:00", "#SBATCH --qos=high", "module load cuda", "#SBATCH --job-name='my job'"),
    ):
        assert wanted in lines
    assert lines[-1] == (
        "srun --ntasks-per-node=1 --kill-on-bad-exit=1 /v/python -m accelfn launch "
        "--num_processes=8 --num_machines=2 train.py 'a b'"
    )
    assert subprocess.run(["bash", "-n", "-c", text], check=False).returncode == 0
