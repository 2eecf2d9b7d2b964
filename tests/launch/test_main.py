"""The command line as a user runs it: in processes of their own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RANK_SCRIPT = """
import json, os, pathlib, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
names = ("RANK", "WORLD_SIZE", "ACCELFN_MIXED_PRECISION", "OMP_NUM_THREADS", "MASTER_ADDR", "MASTER_PORT")
seen = {name: os.environ.get(name) for name in names}
seen |= {"argv": sys.argv[1:], "total": total.item()}
pathlib.Path(f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))
dist.barrier()
dist.destroy_process_group()
"""


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ACCELFN_")}
    inherited.pop("OMP_NUM_THREADS", None)
    return {**inherited, "PYTHONPATH": str(ROOT)}


def accelfn(*argv: str, cwd: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "accelfn.launch", *argv],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["launch", "--help"], 0),
        (["launch", "--dry_run", "pyproject.toml"], 0),
        (["launch", "absent.py"], 2),
        (["launch", "--nonsense"], 2),
        (["data-plan", "--help"], 0),
        (["data-plan", "--num_samples", "3", "--batch_size", "0"], 2),
        (["plan-memory", "--help"], 0),
        (["plan-memory", "train:build", "--max-memory", "0"], 2),
        (["estimate-memory", "--help"], 0),
        (["estimate-memory", "bert-base-cased"], 2),
        (["env", "--help"], 0),
        (["env", "--nonsense"], 2),
        (["test", "--help"], 0),
        (["test", "train.py"], 2),
        (["merge-weights", "--help"], 0),
        (["merge-weights", "absent", "out"], 2),
        (["to-fsdp2", "--config_file", "absent.yaml", "--overwrite"], 2),
        (["tpu-config", "--tpu_name", "t", "--command", "ls", "--debug"], 0),
        ([], 2),
    ],
    ids=str,
)
def test_answers_do_not_import_torch(argv: list[str], status: int) -> None:
    probe = """
import sys
from accelfn.launch.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
heavy = sorted({"torch", "optree", "safetensors", "numpy"} & set(sys.modules))
print(f"\\nstatus={status} heavy={heavy}")
"""
    done = subprocess.run(
        [sys.executable, "-c", probe, *argv],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == f"status={status} heavy=[]"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["launhc"], "invalid choice: 'launhc'"),
        (["launch"], "no script given"),
        (["launch", "--num_proc", "2", "train.py"], "unrecognized arguments: --num_proc"),
        (
            ["launch", "--num_processes", "two", "train.py"],
            "argument --num_processes: invalid int value: 'two'",
        ),
        (["launch", "--num_processes"], "argument --num_processes: expected one argument"),
        (["launch", "--mixed-precision", "bf15", "train.py"], "argument --mixed_precision: invalid choice"),
        (["launch", "--num_processes", "0", "train.py"], "--num_processes must be at least 1, got 0"),
        (["launch", "-m", "--no-python", "train"], "Give one of the two"),
        (["launch", "absent.py"], "there is no script 'absent.py'"),
        (["launch", "docs"], "there is no script 'docs'"),
        (["launch", "--no_python", "absent-program"], "there is no program 'absent-program'"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(argv: list[str], message: str) -> None:
    done = accelfn(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_dry_run_prints_the_whole_command_and_starts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "my script.py"
    script.write_text("raise SystemExit('started')")
    done = accelfn(
        "launch", "--num-processes=2", "--cpu", "--dry-run", "my script.py", "--lr", "1", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "ACCELFN_USE_CPU=true \\"
    assert lines[-1].startswith(f"{sys.executable} -m torch.distributed.run --nnodes=1 --nproc-per-node=2 ")
    assert lines[-1].endswith(" -- 'my script.py' --lr 1")


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = str(listener.getsockname()[1])
        done = accelfn("launch", "--main_process_port", port, "train.py", cwd=tmp_path)
    assert done.returncode == 2
    assert f"port {port} of this machine is taken" in done.stderr


@pytest.mark.parametrize("flags", [(), ("--main_process_port", "free")], ids=["any port", "chosen port"])
def test_two_processes_meet_and_get_their_arguments(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free = str(probe.getsockname()[1])
    flags = tuple(free if flag == "free" else flag for flag in flags)
    (tmp_path / "train.py").write_text(RANK_SCRIPT)
    argv = ("--num_processes", "2", "--mixed_precision", "bf16", "--num_cpu_threads_per_process", "1")
    script_args = ["--", "--m", "a b", "--num_processes"]
    done = accelfn("launch", *flags, *argv, "train.py", *script_args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for rank, one in enumerate(seen):
        port = one.pop("MASTER_PORT")
        assert port == free or not flags
        assert one == {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "ACCELFN_MIXED_PRECISION": "bf16",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "argv": script_args,
            "total": 3.0,
        }


def test_a_failing_script_gives_a_status_and_its_own_message(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise RuntimeError('the loss is a teapot')")
    done = accelfn("launch", "train.py", cwd=tmp_path)
    assert done.returncode not in (0, 2)
    assert "RuntimeError: the loss is a teapot" in done.stderr


def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['RANK']).write_text(str(os.getpid()))\n"
        "time.sleep(90)\n"
    )
    pids = [tmp_path / "0", tmp_path / "1"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "accelfn.launch", "launch", "--num_processes", "2", "train.py"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not all(path.exists() and path.read_text() for path in pids):
            assert launcher.poll() is None, "the launch ended by itself"
            assert time.monotonic() < deadline, "the processes did not start"
            time.sleep(0.05)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(timeout=50) != 0
    finally:
        launcher.kill()
        launcher.wait()
    for path in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
