"""Real launches through torchrun: processes, machines on loopback, restarts, SLURM's variables, mpirun.

The scripts don't load torch, so that a launch costs little more than torchrun itself.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PORTRAIT = """
import json, os, pathlib, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
said = {name: os.environ.get(name) for name in names}
said |= {"argv": sys.argv[1:], "name": __name__}
rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
pathlib.Path(f"rank{rank}.json").write_text(json.dumps(said))
"""


def environment(**more: str) -> dict[str, str]:
    ours = ("ACCELFN_", "SLURM_", "OMP_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**inherited, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": "/nonexistent", **more}


def start(folder: Path, *argv: str, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "accelfn", "launch", *argv],
        cwd=folder,
        env=environment(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    try:
        _, stderr = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, stderr


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def portraits(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.mark.parametrize("num_processes", [1, 4])
def test_processes_of_one_machine(num_processes: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PORTRAIT)
    flags = ("--cpu", "--num_processes", str(num_processes))
    status, stderr = finish(start(tmp_path, *flags, "train.py", "-x"))
    assert (status, stderr if num_processes == 1 else "") == (0, "")
    seen = portraits(tmp_path)
    assert [one["RANK"] for one in seen] == [str(rank) for rank in range(num_processes)]
    assert {one["WORLD_SIZE"] for one in seen} == {str(num_processes)}
    assert all(one["argv"] == ["-x"] and one["name"] == "__main__" for one in seen)


@pytest.mark.parametrize("way", ["static", "c10d", "slurm"])
def test_two_machines_on_loopback(way: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PORTRAIT)
    port = free_port()
    common = ("--num_processes=2", "--cpu", "--main_process_port", port, "--max_restarts=0")
    if way == "slurm":
        # What srun sets for a step of two tasks on two nodes, here both on this machine.
        steps = [
            {
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_NODEID": str(rank),
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_JOB_ID": "7",
                "SLURM_STEP_ID": "0",
            }
            for rank in (0, 1)
        ]
        machines = [start(tmp_path, *common, "train.py", **step) for step in steps]
    else:
        flags = ("--num_machines=2", "--main_process_ip=127.0.0.1", f"--rdzv_backend={way}")
        ranks = [(f"--machine_rank={rank}",) if way == "static" else () for rank in (0, 1)]
        machines = [start(tmp_path, *common, *flags, *rank, "train.py") for rank in ranks]
    ended = [finish(machine) for machine in machines]
    assert [status for status, _ in ended] == [0, 0], ended
    seen = portraits(tmp_path)
    assert [(one["RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in seen] == [
        ("0", "2", "1"),
        ("1", "2", "1"),
    ]
    assert sorted(str(one["GROUP_RANK"]) for one in seen) == ["0", "1"]


# Rank 0 waits for what never comes, or is done at once; it sees no other rank.
APART = """
import os, pathlib, sys, time
rank = int(os.environ["RANK"])
pathlib.Path(f"up{rank}").touch()
while not pathlib.Path("up0").exists() or not pathlib.Path("up1").exists():
    time.sleep(0.05)
if rank == 1 and sys.argv[1] == "fails":
    raise ValueError("no such batch")
time.sleep(int(sys.argv[2]) if rank == 0 else 600)
"""


def wait_for_both(folder: Path) -> None:
    deadline_s = time.monotonic() + 90
    while not (folder / "up1").exists() or not (folder / "up0").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def start_apart(folder: Path, way: str, *arguments: str) -> "list[subprocess.Popen[str]]":
    (folder / "train.py").write_text(APART)
    flags = ("--num_machines=2", "--num_processes=2", "--cpu", "--main_process_ip=127.0.0.1")
    common = (*flags, f"--rdzv_backend={way}", "--main_process_port", free_port())
    return [start(folder, *common, f"--machine_rank={rank}", "train.py", *arguments) for rank in (0, 1)]


@pytest.mark.parametrize(("way", "waits"), [("static", "600"), ("c10d", "600"), ("static", "0")])
def test_a_failure_on_one_machine_ends_the_others_and_is_reported_there(
    way: str, waits: str, tmp_path: Path
) -> None:
    ended = [finish(one) for one in start_apart(tmp_path, way, "fails", waits)]
    assert [status for status, _ in ended] == [1, 1], ended
    host = socket.gethostname()
    output = [
        f"accelfn launch: rank 1 of 2 failed on {host}, with exit status 1:",
        "  ValueError: no such batch",
        f'    {tmp_path}/train.py:8 in <module>: raise ValueError("no such batch")',
    ]
    # Under c10d, ranks are given out by torch.
    own = 1 if 'train.py", line 8' in ended[1][1] else 0
    assert ended[own][1].splitlines()[-3:-1] == output[:2]  # and its traceback above
    lines = ended[1 - own][1].splitlines()
    assert lines[-4:] == [*output, f"  logs: on {host}"]
    if way == "static":  # else the other agent may itself see first that the one that hosts has gone
        reported = (
            f"accelfn launch: machine {own} ({host}) has failed; stopping the processes of this machine."
        )
        assert reported in lines


# One that was killed is missed after half a minute.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGTERM])
def test_a_launcher_that_is_killed_or_stopped_ends_the_others(number: signal.Signals, tmp_path: Path) -> None:
    machines = start_apart(tmp_path, "static", "waits", "600")
    wait_for_both(tmp_path)
    machines[1].send_signal(number)
    (status, stderr), (own, _) = finish(machines[0]), finish(machines[1])
    host = socket.gethostname()
    if number == signal.SIGKILL:
        assert (status, own) == (1, -9)
        assert f"the launcher on machine 1 ({host}) was killed, or the machine is down; " in stderr
    else:
        assert (status, own) == (143, 143)
        assert f"the launch on machine 1 ({host}) was stopped; " in stderr


def test_machines_that_differ_are_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PORTRAIT)
    flags = ("--num_machines=2", "--num_processes=2", "--main_process_ip=127.0.0.1", "--cpu")
    port = f"--main_process_port={free_port()}"
    machines = [
        start(tmp_path, *flags, port, f"--machine_rank={rank}", f"--mixed_precision={precision}", "train.py")
        for rank, precision in ((0, "bf16"), (1, "fp16"))
    ]
    for status, stderr in map(finish, machines):
        assert status == 2
        assert "the machines differ in mixed_precision: bf16 on machine 0" in stderr
        assert len(stderr.splitlines()) == 1
    assert portraits(tmp_path) == []


FAILS_ON_RANK_1 = """
import os, sys, time

def loss_of(batch):
    if os.environ["RANK"] == "1":
        raise RuntimeError("the loss is a teapot")
    time.sleep(60)

def train():
    for batch in range(3):
        loss_of(batch)

train()
"""


def test_the_last_lines_name_rank_error_frames_and_logs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS_ON_RANK_1)
    flags = ("--cpu", "--num_processes=2", "--log_dir=logs", "--tee=3", "--monitor_interval=0.05")
    status, stderr = finish(start(tmp_path, *flags, "train.py"))
    assert status == 1
    last = stderr.splitlines()[-12:]
    begin = next(index for index, line in enumerate(last) if line.startswith("accelfn launch: "))
    assert last[begin:-1] == [
        f"accelfn launch: rank 1 of 2 failed on {socket.gethostname()}, with exit status 1:",
        "  RuntimeError: the loss is a teapot",
        f"    {script}:13 in <module>: train()",
        f"    {script}:11 in train: loss_of(batch)",
        f'    {script}:6 in loss_of: raise RuntimeError("the loss is a teapot")',
    ]
    assert last[-1].startswith("  logs: logs")
    folder = tmp_path / last[-1].removeprefix("  logs: ")
    assert "teapot" in (folder / "1" / "stderr.log").read_text()


FAILS_IN_USER_CODE = """
import torch
import accelfn as af

def loss_of(ctx, batch):
    if ctx.rank == 1:
        raise ValueError("the batch is empty")
    return af.gather(ctx, batch)

ctx = af.init_context()
loss_of(ctx, torch.ones(1))
"""


def test_ranks_with_a_secondary_error_print_one_line(tmp_path: Path) -> None:
    num_processes = 3
    script = tmp_path / "train.py"
    script.write_text(FAILS_IN_USER_CODE)
    process = start(tmp_path, "--cpu", "--num_processes", str(num_processes), "train.py")
    stdout, stderr = process.communicate(timeout=100)
    lines = (stdout + stderr).splitlines()
    assert process.returncode == 1
    assert len(lines) <= 30, stderr
    assert sum("in loss_of" in line for line in lines) == 1, stderr  # its frames, once
    for rank in {*range(num_processes)} - {1}:
        heard = f"accelfn launch: rank {rank} stops too: rank 1 failed: ValueError: the batch is empty"
        assert lines.count(heard) == 1, stderr
    host = socket.gethostname()
    begin = lines.index(f"accelfn launch: rank 1 of {num_processes} failed on {host}, with exit status 1:")
    others = ", ".join(str(rank) for rank in range(num_processes) if rank != 1)
    assert lines[begin + 1 :] == [
        "  ValueError: the batch is empty",
        f"  failed later: rank {others}",
        "  logs: above; use --log_dir DIR --tee 3 to keep one per rank",
    ]


FAILS_ALIKE = """
import accelfn as af

def loss_of(ctx, batch):
    raise ValueError("the batch is empty")

ctx = af.init_context()
loss_of(ctx, ())
"""


def test_frames_of_ranks_with_the_same_failure_appear_once(tmp_path: Path) -> None:
    num_processes = 3
    (tmp_path / "train.py").write_text(FAILS_ALIKE)
    # The interval gives all ranks time to fail before the agent stops them.
    flags = ("--cpu", "--num_processes", str(num_processes), "--monitor_interval=8")
    process = start(tmp_path, *flags, "train.py")
    stdout, stderr = process.communicate(timeout=100)
    lines = (stdout + stderr).splitlines()
    assert process.returncode == 1
    assert len(lines) <= 30, stderr
    assert sum("in loss_of" in line for line in lines) == 1, stderr
    alike = [
        line for line in lines if line.endswith(" failed in the same way: ValueError: the batch is empty")
    ]
    assert len(alike) == num_processes - 1, stderr
    begin = next(index for index, line in enumerate(lines) if f" of {num_processes} failed on " in line)
    first = lines[begin].split()[3]
    others = ", ".join(str(rank) for rank in range(num_processes) if str(rank) != first)
    assert lines[begin + 1 :] == [
        "  ValueError: the batch is empty",
        f"  same failure: rank {others}",
        "  logs: above; use --log_dir DIR --tee 3 to keep one per rank",
    ]


LOSES_RANK_1 = """
import os, sys
import torch
import accelfn as af

def loss_of(ctx, batch):
    if ctx.rank == 1:
        return batch if sys.argv[1] == "returns" else os._exit(3)
    if sys.argv[1] == "exits amid torch":
        return torch.distributed.all_reduce(batch)
    return af.gather(ctx, batch)

ctx = af.init_context()
loss_of(ctx, torch.ones(1))
"""


@pytest.mark.parametrize("way", ["exits", "exits amid torch", "returns"])
def test_a_rank_reports_a_lost_connection_in_one_line(way: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOSES_RANK_1)
    process = start(tmp_path, "--cpu", "--num_processes=2", "--monitor_interval=8", "train.py", way)
    stdout, stderr = process.communicate(timeout=100)
    lines = (stdout + stderr).splitlines()
    assert "Traceback" not in stderr
    reported = [line for line in lines if line.startswith("accelfn launch: rank 0 stops too: ")]
    assert len(reported) == 1, stderr
    assert ("gloo/transport" if way == "exits amid torch" else "rank 1") in reported[0]
    if way != "returns":
        assert process.returncode == 3
        assert "accelfn launch: rank 1 of 2 failed" in stderr
    else:  # it has done no wrong itself, so where rank 0 waited is what there is to see
        assert process.returncode == 1
        assert f"    {script}:11 in loss_of: return af.gather(ctx, batch)" in lines


INTERRUPTED = """
import pathlib, os, sys
sys.path.append("site-packages")
import waiting
pathlib.Path(f"{os.environ['RANK']}.up").touch()
waiting.sleep(60)
"""


def test_an_interrupt_is_a_line_for_each_process(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(INTERRUPTED)
    (tmp_path / "site-packages").mkdir()  # of no interpreter that runs here
    (tmp_path / "site-packages" / "waiting.py").write_text("import time\ndef sleep(s): time.sleep(s)\n")
    foreground = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code = foreground + "from accelfn.__main__ import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "launch", "--cpu", "--num_processes=2", "train.py"],
        cwd=tmp_path,
        env=environment(),
        text=True,
        stderr=subprocess.PIPE,
    )
    while not all((tmp_path / f"{rank}.up").exists() for rank in (0, 1)):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    status, stderr = finish(process)
    assert status == 130
    where = f"was interrupted at {tmp_path / 'train.py'}:6 in <module>."
    assert sorted(stderr.splitlines()) == [f"accelfn launch: rank {rank} {where}" for rank in (0, 1)]


@pytest.mark.parametrize("module", ["accelfn.launch.main", "accelfn.launch.plan"])
def test_an_interrupt_while_the_command_loads_is_silent(module: str, tmp_path: Path) -> None:
    # Raised by the import of a module, as the signal would come there.
    code = f"""
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Interrupts(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
from accelfn.__main__ import main
sys.exit(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", code, "launch", "--help"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


DIES_ONCE = """
import os, pathlib, signal, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
pathlib.Path(f"rank{os.environ['RANK']}.{attempt}").touch()
if attempt == "0":
    if os.environ["RANK"] == "1":
        while not pathlib.Path("rank0.0").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


@pytest.mark.parametrize("max_restarts", [1, 0])
def test_a_killed_worker_is_started_again_as_often_as_allowed(max_restarts: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(DIES_ONCE)
    flags = ("--cpu", "--num_processes=2", f"--max_restarts={max_restarts}", "--monitor_interval=0.05")
    status, stderr = finish(start(tmp_path, *flags, "train.py"))
    if max_restarts:
        assert status == 0, stderr
        assert {path.name for path in tmp_path.glob("rank*")} == {"rank0.0", "rank1.0", "rank0.1", "rank1.1"}
    else:
        assert status == 137
        assert "accelfn launch: rank 1 of 2 failed" in stderr.splitlines()[-2]
        assert "killed by SIGKILL" in stderr.splitlines()[-2]


TRAINS = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(2)
for step in range(20):
    dist.all_reduce(total)
    if step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        raise ValueError("once")
open(f"end{dist.get_rank()}", "w").close()
"""


@pytest.mark.parametrize("num_machines", [1, 2])
def test_ranks_meet_again_after_a_failure(num_machines: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    flags = ("--cpu", "--num_processes=2", "--max_restarts=3", f"--num_machines={num_machines}")
    if num_machines > 1:
        flags = (*flags, "--main_process_ip=127.0.0.1", "--main_process_port", free_port())
    machines = [start(tmp_path, *flags, f"--machine_rank={rank}", "train.py") for rank in range(num_machines)]
    ended = [finish(machine) for machine in machines]
    assert [status for status, _ in ended] == [0] * num_machines, ended
    assert {path.name for path in tmp_path.glob("end*")} == {"end0", "end1"}


def test_modules_and_programs(tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").touch()
    # Rank 1's end stops rank 0, so it waits for what rank 0 writes.
    ends = """import time
until = time.monotonic() + 60
while rank == "1" and not pathlib.Path("rank0.json").exists() and time.monotonic() < until:
    time.sleep(0.01)
sys.exit(int(rank) * 3)
"""
    (package / "__main__.py").write_text(PORTRAIT + ends)
    module = start(tmp_path, "--cpu", "--num_processes=2", "-m", "own", "--m", "a b")
    program = start(tmp_path, "--cpu", "--num_processes=2", "--no_python", "sh", "-c", "touch $RANK.sh")
    status, stderr = finish(module)
    assert status == 3
    assert "rank 1 of 2 failed" in stderr
    assert [one["argv"] for one in portraits(tmp_path)] == [["--m", "a b"]] * 2
    status, stderr = finish(program)
    assert status == 0, stderr
    assert {path.name for path in tmp_path.glob("*.sh")} == {"0.sh", "1.sh"}


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_mpirun_starts_two_processes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PORTRAIT)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    # In a container the tests may run as root, which Open MPI refuses, and with fewer cores than processes.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    flags = ("--cpu", "--num_processes=2", "--mpirun_hostfile=hosts", "--mixed_precision=bf16")
    status, stderr = finish(start(tmp_path, *flags, "train.py", **root))
    assert status == 0, stderr
    assert len(portraits(tmp_path)) == 2


FOR_ACCELERATE = """
import pathlib
from accelerate import Accelerator
accelerator = Accelerator()
rank, size = accelerator.process_index, accelerator.num_processes
steps, device = accelerator.gradient_accumulation_steps, accelerator.device.type
pathlib.Path(f"{rank}.txt").write_text(f"{size} {accelerator.mixed_precision} {steps} {device}")
accelerator.end_training()
"""


# Two interpreters that import torch and accelerate: that their variables are understood is for them to say.
def test_a_script_that_is_still_written_for_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(FOR_ACCELERATE)
    flags = ("--cpu", "--num_processes=2", "--mixed_precision=bf16", "--gradient_accumulation_steps=3")
    status, stderr = finish(start(tmp_path, *flags, "train.py"))
    assert status == 0, stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["2 bf16 3 cpu"] * 2
