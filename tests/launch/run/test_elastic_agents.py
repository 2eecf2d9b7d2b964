"""Elastic launches: real processes, of which one ends and the others don't.

The workers don't load torch. They do as the test says, which reads and writes the board in their place.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] -- documented

from accelfn.context.failure import Loss, MessageBoard, announce_loss, losses_from, store_board

ROOT = Path(__file__).parents[3]
HOST = socket.gethostname()

WORKER = """
import json, os, pathlib, signal, subprocess, sys, time
name = f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "90"]).pid if "parent" in sys.argv else 0
pathlib.Path(f"{name}.part").write_text(json.dumps({**os.environ, "pid": os.getpid(), "child": child}))
os.rename(f"{name}.part", f"{name}.up")
order, until = pathlib.Path(f"{name}.exit"), time.monotonic() + 90
while not order.exists() and time.monotonic() < until:
    time.sleep(0.02)
if order.read_text():
    raise ValueError(order.read_text())
"""


def wait_for(found: Callable[[], Any]) -> Any:
    until_s = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    # Whoever adopts the process has to reap it.
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


class Launch:
    """A launch of elastic training in a folder."""

    def __init__(self, folder: Path, *argv: str) -> None:
        (folder / "train.py").write_text(WORKER)
        ours = ("ACCELFN_", "SLURM_", "OMP_", "PYTHON")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        self.folder, self.stderr = folder, folder / f"stderr{len([*folder.glob('stderr*')])}"
        command = f"{code}from accelfn.__main__ import main; sys.exit(main())"
        with self.stderr.open("wb") as stderr:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-c", command, "launch", "--cpu", "--elastic", *argv],
                cwd=folder,
                env={**inherited, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": "/nonexistent"},
                stderr=stderr,
            )

    def variables(self, rank: int, attempt: int = 0) -> dict[str, Any]:
        """Wait until a worker runs, and return its variables and its process ID."""
        path = self.folder / f"{rank}.{attempt}.up"
        wait_for(lambda: path.exists() or self.process.poll() is not None)
        return json.loads(path.read_text())

    def pid(self, rank: int, attempt: int = 0) -> int:
        return int(self.variables(rank, attempt)["pid"])

    def board(self) -> MessageBoard:
        host, _, port = self.variables(0)["ACCELFN_ELASTIC_STORE"].rpartition(":")
        return store_board(PrefixStore("accelfn/elastic", TCPStore(host, int(port), None, False)))

    def order(self, rank: int, attempt: int = 0, *, error: str = "") -> None:
        """Let a worker end, by an error if there is one."""
        (self.folder / f"{rank}.{attempt}.part").write_text(error)
        (self.folder / f"{rank}.{attempt}.part").rename(self.folder / f"{rank}.{attempt}.exit")

    def finish(self) -> tuple[int, list[str]]:
        """Return the status, and the lines of the launcher, without tracebacks of workers."""
        self.process.wait(30)  # less than the time after which the launcher stops waiting for its agents
        lines = [
            line
            for line in self.stderr.read_text().splitlines()
            if line.startswith(("accelfn", "  logs", "  ValueError", "  sent"))
            and "waiting for 2 machines" not in line  # said where the other launcher starts late
        ]
        return self.process.returncode, lines

    def wait_for_line(self, text: str) -> None:
        wait_for(lambda: text in self.stderr.read_text())


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    launches: list[Launch] = []

    def start(*argv: str) -> Launch:
        launches.append(Launch(tmp_path, *argv))
        return launches[-1]

    yield start
    for one in launches:
        one.process.kill()
        one.process.wait()


def wait_for_state(board: MessageBoard, rank: int, state: str, attempt: int = 0) -> None:
    def found() -> bool:
        text = board.read(f"slot/{rank}")
        record: dict[str, Any] = json.loads(text) if text else {}
        return (record.get("state"), record.get("attempt")) == (state, attempt)

    wait_for(found)


def test_a_killed_process_is_replaced_until_its_restarts_run_out(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "--max_restarts=1", "train.py", "parent")
    board, other = one.board(), one.pid(0)
    record = {"attempt": 0, "state": "running", "pid": one.pid(1), "host": HOST}
    assert json.loads(board.read("slot/1") or "") == record
    for attempt in (0, 1):
        os.kill(one.pid(1, attempt), signal.SIGKILL)
        wait_for_state(board, 1, *(("running", 1) if attempt == 0 else ("failed", 1)))
        child = int(one.variables(1, attempt)["child"])
        wait_for(lambda child=child: not is_alive(child))
    one.wait_for_line("go on")
    assert is_alive(other)
    assert json.loads(board.read("slot/0") or "") == {**record, "pid": other}
    board.post("over", "")
    one.order(0)
    assert one.finish() == (
        0,
        [
            "accelfn launch: rank 1 was killed by SIGKILL; a replacement starts (1 of 1).",
            "accelfn launch: rank 1 was killed by SIGKILL; the other ranks go on.",
        ],
    )
    assert {path.name for path in one.folder.glob("*.up")} == {"0.0.up", "1.0.up", "1.1.up"}


def test_without_an_end_of_the_training_the_first_failure_counts(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "--max_restarts=1", "train.py")
    one.pid(0)
    for attempt in (0, 1):
        one.pid(1, attempt)
        one.order(1, attempt, error="no such batch")
    one.wait_for_line("go on")
    one.order(0, error="too late")
    one.pid(0, 1)
    one.order(0, 1)
    status, lines = one.finish()
    assert (status, lines) == (
        1,
        [
            "accelfn launch: rank 1 ended with exit status 1; a replacement starts (1 of 1).",
            "accelfn launch: rank 1 ended with exit status 1; the other ranks go on.",
            "accelfn launch: rank 0 ended with exit status 1; a replacement starts (1 of 1).",
            f"accelfn launch: rank 1 of 2 failed on {HOST} after 1 restart, with exit status 1:",
            "  ValueError: no such batch",
            "  logs: above; use --log_dir DIR --tee 3 to keep one per rank",
        ],
    )


@pytest.mark.slow
def test_processes_that_end_well_end_the_launch(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "--max_restarts=1", "--log_dir=logs", "--tee=0:3", "--redirects=2", "train.py")
    for rank in (0, 1):
        variables = one.variables(rank)
        port = variables["MASTER_PORT"]
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "ACCELFN_ELASTIC_STORE": f"127.0.0.1:{port}",
            "ACCELFN_ELASTIC_SLOT": str(rank),
            "ACCELFN_ELASTIC_SIZE": "2",
            "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2)),
        }
        assert {name: variables[name] for name in expected} == expected
    one.order(0, error="once")
    one.pid(0, 1)
    for rank, attempt in ((0, 1), (1, 0)):
        one.order(rank, attempt)
    status, lines = one.finish()
    assert status == 0
    assert lines[-1:] == ["accelfn launch: rank 0 ended with exit status 1; a replacement starts (1 of 1)."]
    logs = {path.relative_to(one.folder).parts[2:] for path in one.folder.glob("logs/none_*/*/*/*.log")}
    first = {("attempt_0", "0", name) for name in ("stdout.log", "stderr.log")}
    assert logs == first | {("attempt_1", *parts[1:]) for parts in first} | {("attempt_0", "1", "stderr.log")}
    (stderr,) = one.folder.glob("logs/none_*/attempt_0/0/stderr.log")
    assert "ValueError: once" in stderr.read_text()


@pytest.mark.slow  # the processes have some seconds to end by themselves
def test_processes_that_go_on_after_the_end_are_stopped(launch: Callable[..., Launch]) -> None:
    one = launch("-n3", "--max_restarts=1", "--shutdown_timeout=1", "train.py", "deaf")
    board, pids = one.board(), [one.pid(rank) for rank in range(3)]
    board.post("over", "")
    os.kill(pids[2], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    assert one.finish() == (0, ["accelfn launch: rank 2 was killed by SIGKILL."])
    assert not (one.folder / "2.1.up").exists()
    assert not any(map(is_alive, pids))


@pytest.mark.parametrize("how", ["error", "killed"])
def test_a_failure_after_the_return_from_the_training_fails_the_launch(
    launch: Callable[..., Launch], how: str
) -> None:
    one = launch("-n2", "--max_restarts=1", "train.py")
    board, pid = one.board(), one.pid(0)
    os.kill(one.pid(1), signal.SIGKILL)
    one.pid(1, 1)
    board.post("over", "")
    board.post("left/0.0", "yes")
    if how == "error":
        one.order(0, error="the final save")
    else:
        os.kill(pid, signal.SIGKILL)
    one.order(1, 1)
    status, lines = one.finish()
    assert status == (1 if how == "error" else 128 + signal.SIGKILL)
    told = "ended with exit status 1" if how == "error" else "was killed by SIGKILL"
    assert lines[1] == f"accelfn launch: rank 0 {told}."
    assert lines[2].startswith(f"accelfn launch: rank 0 of 2 failed on {HOST}, ")  # rank 1 alone was replaced
    assert any("ValueError: the final save" in line for line in lines) == (how == "error")
    assert not (one.folder / "0.1.up").exists()


@pytest.mark.slow  # longer than the others have to end by themselves
def test_what_follows_the_training_may_take_as_long_as_it_likes(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "train.py")
    board, pids = one.board(), [one.pid(rank) for rank in range(2)]
    board.post("left/0.0", "yes")
    board.post("over", "")
    wait_for(lambda: not is_alive(pids[1]))  # it hasn't left
    time.sleep(1.0)
    assert is_alive(pids[0])
    one.order(0)
    assert one.finish() == (0, [])


@pytest.mark.slow  # longer than the others have to end by themselves
def test_without_the_machine_of_the_store_what_follows_the_training_is_no_success(
    launch: Callable[..., Launch],
) -> None:
    first, second = machines(launch)
    board, pids = first.board(), [first.pid(rank) for rank in range(4)]
    for rank in (2, 3):
        board.post(f"left/{rank}.0", "yes")
    board.post("over", "")
    wait_for(lambda: not is_alive(pids[0]))  # it hasn't left, so both launchers know of the end
    first.process.kill()
    first.process.wait()
    status, lines = second.finish()
    assert status != 0
    reason = "the machine that hosts the rendezvous is down, or its agent was killed"
    assert lines[:1] == [f"accelfn launch: {reason}; stopping the processes of this machine."]


def test_a_process_that_ends_well_before_the_training_is_lost(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "train.py")
    board = one.board()
    one.order(0)
    wait_for_state(board, 0, "done")
    assert losses_from(board, 0) == [Loss("0.0", "ended before the training did")]
    board.post("left/1.0", "yes")
    board.post("over", "")
    one.order(1)
    assert one.finish() == (0, [])


def test_an_error_that_ended_a_ranks_training_is_no_failure_after_it(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "train.py")
    board = one.board()
    announce_loss(board, Loss("0.0", "raised ValueError: in the training"))
    board.post("over", "")
    one.order(0, error="in the training")
    one.pid(1)
    one.order(1)
    assert one.finish() == (0, ["accelfn launch: rank 0 ended with exit status 1."])


@pytest.mark.slow  # waits for the timeout
def test_a_process_without_heartbeat_is_killed(launch: Callable[..., Launch]) -> None:
    one = launch("-n3", "--heartbeat_timeout=2", "train.py")
    board, pids = one.board(), [one.pid(rank) for rank in range(3)]
    os.kill(pids[1], signal.SIGSTOP)  # rank 0 has never beaten, and rank 2 goes on
    board.post("beat/1.0", "0")
    numbers = iter(range(1_000_000))

    def beat() -> bool:
        board.post("beat/2.0", str(next(numbers)))
        return not is_alive(pids[1])

    wait_for(beat)
    one.wait_for_line("go on")
    wait_for_state(board, 1, "failed")
    assert is_alive(pids[0])
    assert is_alive(pids[2])
    for rank in (0, 2):
        one.order(rank)
    assert one.finish() == (
        137,
        [
            "accelfn launch: rank 1 has sent no heartbeat for 2 s; killing it.",
            "accelfn launch: rank 1 was killed by SIGKILL; the other ranks go on.",
            f"accelfn launch: rank 1 of 3 failed on {HOST}, killed by SIGKILL:",
            "  sent no heartbeat for 2 s",
            "  logs: above; use --log_dir DIR --tee 3 to keep one per rank",
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_launcher_leaves_no_process(number: signal.Signals, launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "--max_restarts=1", "train.py")
    pids = [one.pid(rank) for rank in (0, 1)]
    one.process.send_signal(number)
    status, lines = one.finish()
    assert status == (-9 if number == signal.SIGKILL else 128 + number)
    assert (lines != []) == (number == signal.SIGINT)  # a line of each process
    wait_for(lambda: not any(map(is_alive, pids)))


def machines(launch: Callable[..., Launch], *argv: str) -> list[Launch]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ("--num_machines=2", "-n4", "--main_process_ip=127.0.0.1", f"--main_process_port={port}")
    return [launch(*common, f"--machine_rank={rank}", *argv, "train.py") for rank in (0, 1)]


@pytest.mark.slow
def test_machines_share_the_board(launch: Callable[..., Launch]) -> None:
    first, second = machines(launch, "--max_restarts=1")
    board = first.board()
    places = [first.variables(rank) for rank in range(4)]
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ACCELFN_ELASTIC_SIZE")
    assert [[place[name] for name in names] for place in places] == [
        [str(rank % 2), "2", str(rank // 2), "4"] for rank in range(4)
    ]
    assert len({place["ACCELFN_ELASTIC_STORE"] for place in places}) == 1
    os.kill(second.pid(3), signal.SIGKILL)
    wait_for_state(board, 3, "running", 1)
    for rank in (0, 1):  # the first machine has no process left, and waits for the other
        first.order(rank, error="no such batch" if rank else "")
    wait_for_state(board, 0, "done")
    first.pid(1, 1)
    first.order(1, 1)
    wait_for_state(board, 1, "done", 1)
    board.post("over", "")
    with pytest.raises(subprocess.TimeoutExpired):  # it hosts the store that the other still needs
        first.process.wait(1.5)
    for rank, attempt in ((2, 0), (3, 1)):
        second.order(rank, attempt)
    assert second.finish() == (
        0,
        ["accelfn launch: rank 3 was killed by SIGKILL; a replacement starts (1 of 1)."],
    )
    assert first.finish()[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_processes_of_a_lost_machine_are_dead(
    number: signal.Signals, launch: Callable[..., Launch]
) -> None:
    first, second = machines(launch, "--heartbeat_timeout=2")
    board = first.board()
    pids = [first.pid(rank) for rank in range(4)]
    second.process.send_signal(number)
    second.process.wait(60)
    for rank in (2, 3):
        wait_for_state(board, rank, "failed")
        wait_for(lambda pid=pids[rank]: not is_alive(pid))
    assert all(map(is_alive, pids[:2]))
    board.post("over", "")
    for rank in (0, 1):
        first.order(rank)
    status, lines = first.finish()
    assert status == 0
    lost = f"accelfn launch: the launcher on machine 1 ({HOST}) was killed, or the machine is down."
    assert lines == ([lost] if number == signal.SIGKILL else [])


@pytest.mark.slow
@pytest.mark.parametrize(("number", "has_ended"), [(signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_the_machine_of_the_store_ends_the_others(
    number: signal.Signals, has_ended: bool, launch: Callable[..., Launch]
) -> None:
    first, second = machines(launch)
    pids = [first.pid(rank) for rank in range(4)]
    for rank in (2, 3) if has_ended else ():  # the second machine only waits
        second.order(rank)
        wait_for_state(first.board(), rank, "done")
    first.process.send_signal(number)
    status, lines = second.finish()
    assert status == 1
    reason = "the machine that hosts the rendezvous is down, or its agent was killed"
    assert lines == [f"accelfn launch: {reason}; stopping the processes of this machine."]
    wait_for(lambda: not any(map(is_alive, pids)))


WORLD = """
import torch, accelfn as af
with af.init_context() as ctx:
    total = af.reduce(ctx, torch.ones(1))
    open(f"sum{ctx.rank}", "w").write(str(int(total)))
"""


@pytest.mark.slow  # loads torch
def test_a_script_without_elastic_training(launch: Callable[..., Launch], tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(WORLD)
    assert launch("-n2", "world.py").finish() == (0, [])
    assert [(tmp_path / f"sum{rank}").read_text() for rank in (0, 1)] == ["2", "2"]
