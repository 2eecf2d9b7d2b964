"""Launches: their status, the signals that they get, their last lines, and what they leave behind: nothing.

The scripts don't load torch, and most launches have a stand-in for torch's launcher. The slow ones have
torch's own.
"""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from tests.launch.forked import launched, run_jobs
from tests.launch.processes import finish, free_port, is_alive, wait_for

Launch = Callable[..., "Popen[str]"]
HOST = socket.gethostname()
TWO = ("--cpu", "--num_processes=2")
MACHINES = (*TWO, "--num_machines=2", "--main_process_ip=127.0.0.1")
BY_BOTH = pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["stand-in", "torchrun"]
)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    """Write the script that a test launches."""

    def write(source: str) -> Path:
        (tmp_path / "train.py").write_text(source)
        return tmp_path / "train.py"

    return write


Write = Callable[[str], Path]
PORTRAIT = """
import json, os, pathlib, sys
names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ACCELFN_MIXED_PRECISION")
said = {name: os.environ.get(name) for name in names} | {"argv": sys.argv[1:], "name": __name__}
pathlib.Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(said))
"""


def portraits(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]


@pytest.mark.parametrize("num_processes", [1, 4])
def test_processes_of_one_machine(num_processes: int, launch: Launch, script: Write, tmp_path: Path) -> None:
    script(PORTRAIT)
    flags = ("--cpu", f"--num_processes={num_processes}", "--mixed_precision=bf16")
    assert finish(launch(*flags, "train.py", "--", "-x", real=False)) == (0, "", "")
    size = str(num_processes)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "ACCELFN_MIXED_PRECISION": "bf16"}
    group = "0" if num_processes > 1 else None
    one = {**common, "GROUP_RANK": group, "argv": ["--", "-x"], "name": "__main__"}
    assert portraits(tmp_path) == [one] * num_processes


def test_modules_and_programs(launch: Launch, tmp_path: Path) -> None:
    package = tmp_path / "own"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PORTRAIT)
    module = launch(*TWO, "-m", "own", "--m", "a b", real=False)
    program = launch(*TWO, "--no_python", "sh", "-c", "touch $RANK.sh", real=False)
    assert (finish(module)[0], finish(program)[0]) == (0, 0)
    assert [one["argv"] for one in portraits(tmp_path)] == [["--m", "a b"]] * 2
    assert {path.name for path in tmp_path.glob("*.sh")} == {"0.sh", "1.sh"}


@pytest.mark.parametrize(
    ("source", "status"), [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)]
)
def test_the_status_is_that_of_the_script(source: str, status: int, launch: Launch, script: Write) -> None:
    script(source)
    # A single process takes the launcher's place, which a shell tells by the signal.
    assert finish(launch("--cpu", "train.py"))[0] == (status if status < 128 else 128 - status)
    assert finish(launch(*TWO, "--quiet", "train.py", real=False)) == (status, "", "")


# --- the last lines ------------------------------------------------------------------------------

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


@BY_BOTH
def test_the_last_lines_name_rank_error_frames_and_logs(
    real: bool, launch: Launch, script: Write, tmp_path: Path
) -> None:
    path = script(FAILS_ON_RANK_1)
    flags = (*TWO, "--log_dir=logs", *(("--tee=3", "--monitor_interval=0.05") if real else ()))
    status, _, stderr = finish(launch(*flags, "train.py", real=real))
    *_, last = lines = stderr.splitlines()
    begin = lines.index(f"accelfn launch: rank 1 of 2 failed on {HOST}, with exit status 1:")
    assert status == 1
    assert lines[begin + 1 : -1] == [
        "  RuntimeError: the loss is a teapot",
        f"    {path}:13 in <module>: train()",
        f"    {path}:11 in train: loss_of(batch)",
        f'    {path}:6 in loss_of: raise RuntimeError("the loss is a teapot")',
    ]
    assert last.startswith("  logs: logs")
    if real:
        folder = tmp_path / last.removeprefix("  logs: ")
        assert "teapot" in (folder / "1" / "stderr.log").read_text()


# None is stopped before it has failed itself.
FAILS_ON_ALL_RANKS = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
pathlib.Path(os.environ["RANK"]).touch()
while not all(pathlib.Path(rank).exists() for rank in "012"):
    time.sleep(0.01)
def loss_of(batch): raise ValueError('the batch is empty')
loss_of(())
"""


def test_the_traceback_of_ranks_with_the_same_failure_appears_once(launch: Launch, script: Write) -> None:
    path = script(FAILS_ON_ALL_RANKS)
    status, _, stderr = finish(launch("--cpu", "--num_processes=3", "train.py", real=False))
    lines = stderr.splitlines()
    assert status == 1
    assert sum("Traceback" in line for line in lines) == 1, stderr
    alike = [line for line in lines if "failed in the same way: ValueError: the batch is empty" in line]
    assert len(alike) == 2, stderr
    begin = next(index for index, line in enumerate(lines) if " of 3 failed on " in line)
    others = ", ".join(rank for rank in "012" if rank != lines[begin].split()[3])
    assert lines[begin + 1 :] == [
        "  ValueError: the batch is empty",
        f"    {path}:8 in <module>: loss_of(())",
        f"    {path}:7 in loss_of: def loss_of(batch): raise ValueError('the batch is empty')",
        f"  same failure: rank {others}",
        "  logs: above; use --log_dir DIR --tee 3 to keep one per rank",
    ]


FAILS_IN_A_COLLECTIVE = """
import torch
import accelfn as af

def loss_of(ctx, batch):
    if ctx.rank == 1:
        raise ValueError("the batch is empty")
    return af.gather(ctx, batch)

ctx = af.init_context()
loss_of(ctx, torch.ones(1))
"""


@pytest.mark.slow
def test_a_rank_with_a_secondary_error_prints_one_line(launch: Launch, script: Write) -> None:
    script(FAILS_IN_A_COLLECTIVE)
    status, _, stderr = finish(launch(*TWO, "--monitor_interval=8", "train.py"))
    lines = stderr.splitlines()
    (heard,) = (line for line in lines if line.startswith("accelfn launch: rank 0 stops too: "))
    assert "accelfn launch: rank 1 of 2 failed" in stderr
    assert status == 1
    assert heard.endswith("rank 1 failed: ValueError: the batch is empty")
    assert sum("Traceback" in line for line in lines) == 1, stderr
    assert lines[-5] == "  ValueError: the batch is empty"
    assert "in loss_of: raise ValueError" in lines[-3]
    assert lines[-2] == "  failed later: rank 0"


# --- restarts ------------------------------------------------------------------------------------

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


@BY_BOTH
def test_a_killed_worker_is_started_again_as_often_as_allowed(
    real: bool, launch: Launch, script: Write, tmp_path: Path
) -> None:
    script(DIES_ONCE)
    status, _, stderr = finish(launch(*TWO, "--max_restarts=1", "train.py", real=real))
    assert status == 0, stderr
    assert {path.name for path in tmp_path.glob("rank*")} == {"rank0.0", "rank1.0", "rank0.1", "rank1.1"}


TRAINS = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(2)
for step in range(20):
    dist.all_reduce(total)
    if step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
        raise ValueError("once")
open(f"end{dist.get_rank()}", "w").close()
"""


@pytest.mark.slow
def test_ranks_meet_again_after_a_failure(launch: Launch, script: Write, tmp_path: Path) -> None:
    script(TRAINS)
    flags = (*MACHINES, "--max_restarts=3", "--main_process_port", free_port())
    machines = [launch(*flags, f"--machine_rank={rank}", "train.py") for rank in (0, 1)]
    ended = [finish(machine) for machine in machines]
    assert [status for status, *_ in ended] == [0, 0], ended
    assert {path.name for path in tmp_path.glob("end*")} == {"end0", "end1"}


# --- signals -------------------------------------------------------------------------------------

WAITS = """
import os, pathlib, sys, time
sys.path.append("site-packages")
import waiting
pathlib.Path(f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
waiting.sleep(90)
"""


def pids(folder: Path, process: "Popen[str]", size: int = 2) -> list[int]:
    """Wait until all processes run, and return their IDs."""
    paths = [folder / f"{rank}.pid" for rank in range(size)]

    def have_begun() -> bool:
        assert process.poll() is None
        return all(path.exists() and path.read_text() for path in paths)

    wait_for(have_begun)
    return [int(path.read_text()) for path in paths]


@BY_BOTH
def test_an_interrupt_is_a_line_for_each_process(
    real: bool, launch: Launch, script: Write, tmp_path: Path
) -> None:
    path = script(WAITS)
    (tmp_path / "site-packages").mkdir()  # of no interpreter that runs here
    (tmp_path / "site-packages" / "waiting.py").write_text("import time\ndef sleep(s): time.sleep(s)\n")
    process = launch(*TWO, "train.py", real=real)
    ranks = pids(tmp_path, process)
    process.send_signal(signal.SIGINT)
    status, _, stderr = finish(process)
    assert status == 130
    where = f"was interrupted at {path}:6 in <module>."
    assert sorted(stderr.splitlines()) == [f"accelfn launch: rank {rank} {where}" for rank in (0, 1)]
    assert not any(map(is_alive, ranks))


# Ignores what it is told, and has a child in a session of its own.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, f: open("told", "a").write(f"{n} "))
rank = int(os.environ["RANK"])
if rank < 2:
    child = {**os.environ, "RANK": str(rank + 2)}
    subprocess.Popen([sys.executable, __file__], start_new_session=True, env=child)
pathlib.Path(f"{rank}.pid").write_text(str(os.getpid()))
time.sleep(90)
"""


@pytest.mark.slow
@BY_BOTH
@pytest.mark.parametrize("at_once", [False, True])
def test_a_launcher_that_is_killed_leaves_no_process_and_no_folder_behind(
    real: bool, at_once: bool, launch: Launch, script: Write, tmp_path: Path
) -> None:
    script(STUBBORN)
    (tmp_path / "tmp").mkdir()
    process = launch(*TWO, "train.py", real=real, TMPDIR=str(tmp_path / "tmp"))
    if at_once:  # while it begins, with no child but its guard: torch is perhaps not loaded yet
        wait_for(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text)
        ranks: list[int] = []
    else:
        ranks = pids(tmp_path, process, 4)
    process.kill()
    process.wait()
    wait_for(lambda: not any(map(is_alive, ranks)) and not [*(tmp_path / "tmp").iterdir()])
    if at_once:
        assert not any(is_alive(int(path.read_text() or 0)) for path in tmp_path.glob("*.pid"))


@pytest.mark.slow
def test_a_second_interrupt_kills_whatever_is_left(launch: Launch, script: Write, tmp_path: Path) -> None:
    script(STUBBORN)
    process = launch(*TWO, "train.py", real=False)
    ranks = pids(tmp_path, process, 4)
    process.send_signal(signal.SIGINT)
    wait_for((tmp_path / "told").exists)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    wait_for(lambda: not any(map(is_alive, ranks)))


def test_what_is_left_after_a_failure_may_finish_before_it_is_killed(
    launch: Launch, script: Write, tmp_path: Path
) -> None:
    script("""
import os, pathlib, signal, subprocess, sys, time
def finish(number, frame):
    time.sleep(0.5)
    pathlib.Path("uploaded").touch()
    sys.exit()
if os.environ["RANK"] == "1":
    subprocess.Popen([sys.executable, __file__], start_new_session=True, env={**os.environ, "RANK": "child"})
    while not pathlib.Path("up").exists():
        time.sleep(0.02)
    sys.exit(3)
signal.signal(signal.SIGTERM, finish)
if os.environ["RANK"] == "child":
    pathlib.Path("up").touch()
time.sleep(60)
""")
    assert finish(launch(*TWO, "train.py", real=False))[0] == 3
    assert (tmp_path / "uploaded").exists()


HANDLES = """
import os, pathlib, signal, sys, time
signal.signal(int(sys.argv[1]), lambda n, f: sys.exit(int(sys.argv[2])))
pathlib.Path(f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
time.sleep(60)
"""
PROGRAM = "trap 'exit 0' USR1; echo $$ > $RANK.pid; while :; do sleep 0.02; done"


@pytest.mark.parametrize(
    ("name", "answer", "status"),
    [
        *(("SIGTERM", 0, 143), ("SIGHUP", 0, 129), ("SIGINT", 0, 130)),
        ("SIGTERM", 75, 75),  # the scripts' own status, which is preemption's
        *(
            ("SIGUSR1", 0, 0),
            ("SIGUSR1", None, 0),
        ),  # schedulers send it to the scripts; None: in another language
    ],
)
def test_signals_are_handed_on_and_named_in_the_status(
    name: str, answer: int | None, status: int, launch: Launch, script: Write, tmp_path: Path
) -> None:
    script(HANDLES)
    number = signal.Signals[name]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a launch inherits that nohup has it ignored
    ours = ("train.py", str(int(number)), str(answer))
    command = ("--no_python", "sh", "-c", PROGRAM) if answer is None else ours
    process = launch(*TWO, *command, real=False)
    pids(tmp_path, process)
    process.send_signal(number)
    assert finish(process)[0] == status


def test_a_launch_by_nohup_outlives_the_terminal(launch: Launch, script: Write, tmp_path: Path) -> None:
    script(
        "import os, pathlib, time\npathlib.Path(f\"{os.environ['RANK']}.pid\").write_text(str(os.getpid()))\n"
        "while not pathlib.Path('go').exists():\n    time.sleep(0.02)\n"
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launch(*TWO, "train.py", real=False)
    finally:
        signal.signal(signal.SIGHUP, before)
    pids(tmp_path, process)
    process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    assert finish(process)[0] == 0


# --- machines ------------------------------------------------------------------------------------

# Rank 0 waits for what never comes; it sees no other rank.
APART = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
pathlib.Path(f"{rank}.pid").write_text(str(os.getpid()))
while not all(pathlib.Path(f"{other}.pid").exists() for other in (0, 1)):
    time.sleep(0.05)
if rank == "1" and sys.argv[1] == "fails":
    raise ValueError("no such batch")
time.sleep(600)
"""


@pytest.mark.slow
def test_a_failure_on_one_machine_ends_the_others(launch: Launch, script: Write) -> None:
    path = script(APART)
    flags = (*MACHINES, "--main_process_port", free_port())
    machines = [launch(*flags, f"--machine_rank={rank}", "train.py", "fails") for rank in (0, 1)]
    ended = [finish(machine) for machine in machines]
    assert [status for status, *_ in ended] == [1, 1], ended
    report = [
        f"accelfn launch: rank 1 of 2 failed on {HOST}, with exit status 1:",
        "  ValueError: no such batch",
        f'    {path}:8 in <module>: raise ValueError("no such batch")',
        f"  logs: on {HOST}",
    ]
    assert ended[1][2].splitlines()[-4:-1] == report[:3]
    lines = ended[0][2].splitlines()
    assert lines[-4:] == report
    stopping = f"machine 1 ({HOST}) has failed; stopping the processes of this machine."
    assert f"accelfn launch: {stopping}" in lines


@pytest.mark.slow  # it is missed after half a minute
def test_a_launcher_that_is_killed_ends_the_others(launch: Launch, script: Write, tmp_path: Path) -> None:
    script(APART)
    flags = (*MACHINES, "--main_process_port", free_port())
    first, second = (launch(*flags, f"--machine_rank={rank}", "train.py", "waits") for rank in (0, 1))
    pids(tmp_path, first)
    second.kill()
    status, _, stderr = finish(first)
    assert status == 1
    assert f"the launcher on machine 1 ({HOST}) was killed, or the machine is down; " in stderr


# --- torch in the ranks --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_script_that_is_still_written_for_accelerate(script: Write, tmp_path: Path) -> None:
    path = script(
        "import pathlib\nfrom accelerate import Accelerator\na = Accelerator()\n"
        "said = (a.num_processes, a.mixed_precision, a.gradient_accumulation_steps, a.device.type)\n"
        "pathlib.Path(f'{a.process_index}.txt').write_text(repr(said))\na.end_training()\n"
    )
    flags = "--num_processes=2 --mixed_precision=bf16 --gradient_accumulation_steps=3"
    run_jobs([launched(flags, path)], tmp_path, 100, ("accelerate",))
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["(2, 'bf16', 3, 'cpu')"] * 2
