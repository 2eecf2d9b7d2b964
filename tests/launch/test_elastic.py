"""Elastic launches: real processes, of which one ends and the others don't.

The workers don't load torch. They do as the test says, which reads and writes the board in their place.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] -- documented

from accelfn.context.failure import Loss, MessageBoard, announce_loss, losses_from, store_board
from tests.launch.processes import environment, free_port, is_alive, wait_for

pytestmark = pytest.mark.slow  # each launcher loads torch

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


class Launch:
    """A launch of elastic training in a folder."""

    def __init__(self, folder: Path, *argv: str) -> None:
        (folder / "train.py").write_text(WORKER)
        self.folder, self.stderr = folder, folder / f"stderr{len([*folder.glob('stderr*')])}"
        with self.stderr.open("wb") as stderr:
            command = [sys.executable, "-m", "accelfn", "launch", "--cpu", "--elastic", *argv]
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command, cwd=folder, env=environment(), stderr=stderr
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

    def finish(self, timeout_s: float = 30) -> tuple[int, list[str]]:
        """Return the status, and the lines of the launcher, without tracebacks of workers.

        The default is less than the time after which the launcher stops waiting for its agents.
        """
        self.process.wait(timeout_s)
        lines = [
            line.removeprefix("accelfn launch: ")
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
            "rank 1 was killed by SIGKILL; a replacement starts (1 of 1).",
            "rank 1 was killed by SIGKILL; the other ranks go on.",
        ],
    )
    assert {path.name for path in one.folder.glob("*.up")} == {"0.0.up", "1.0.up", "1.1.up"}


def test_without_an_end_of_the_training_the_first_failure_counts(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "--max_restarts=1", "--log_dir=logs", "--tee=0:3", "--redirects=2", "train.py")
    for rank in (0, 1):
        variables = one.variables(rank)
        expected = {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ACCELFN_ELASTIC_SLOT"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "ACCELFN_ELASTIC_SIZE"), "2"),
            "MASTER_ADDR": "127.0.0.1",
            "ACCELFN_ELASTIC_STORE": f"127.0.0.1:{variables['MASTER_PORT']}",
        }
        assert {name: variables[name] for name in expected} == expected
    for attempt in (0, 1):
        one.pid(1, attempt)
        one.order(1, attempt, error="no such batch")
    one.wait_for_line("go on")
    one.order(0, error="too late")
    one.pid(0, 1)
    one.order(0, 1)
    status, lines = one.finish()
    assert (status, lines[:-1]) == (
        1,
        [
            "rank 1 ended with exit status 1; a replacement starts (1 of 1).",
            "rank 1 ended with exit status 1; the other ranks go on.",
            "rank 0 ended with exit status 1; a replacement starts (1 of 1).",
            f"rank 1 of 2 failed on {HOST} after 1 restart, with exit status 1:",
            "  ValueError: no such batch",
        ],
    )
    assert lines[-1].startswith("  logs: logs/rank_1/none_")
    assert lines[-1].endswith("/attempt_1")
    logs = [path.relative_to(one.folder).parts for path in one.folder.glob("logs/*/none_*/*/0/*.log")]
    kept = {("rank_0", "stdout.log"), ("rank_0", "stderr.log"), ("rank_1", "stderr.log")}
    assert {(rank, attempt, name) for _, rank, _, attempt, _, name in logs} == {
        (rank, f"attempt_{attempt}", name) for rank, name in kept for attempt in (0, 1)
    }


def test_processes_that_go_on_after_the_end_are_stopped(launch: Callable[..., Launch]) -> None:
    one = launch("-n3", "--max_restarts=1", "--shutdown_timeout=1", "train.py", "deaf")
    board, pids = one.board(), [one.pid(rank) for rank in range(3)]
    board.post("over", "")
    os.kill(pids[2], signal.SIGKILL)
    os.kill(pids[1], signal.SIGSTOP)
    assert one.finish() == (0, ["rank 2 was killed by SIGKILL."])
    assert not (one.folder / "2.1.up").exists()
    assert not any(map(is_alive, pids))


def test_a_failure_after_the_return_from_the_training_fails_the_launch(launch: Callable[..., Launch]) -> None:
    one = launch("-n3", "--max_restarts=1", "train.py")
    board, pids = one.board(), [one.pid(rank) for rank in range(3)]
    os.kill(pids[1], signal.SIGKILL)
    one.pid(1, 1)
    board.post("over", "")
    for rank in (0, 2):
        board.post(f"left/{rank}.0", "yes")
    one.order(0, error="the final save")
    one.wait_for_line("rank 0 ended")
    os.kill(pids[2], signal.SIGKILL)
    one.order(1, 1)
    status, lines = one.finish()
    assert status == 1
    assert lines[1:3] == ["rank 0 ended with exit status 1.", "rank 2 was killed by SIGKILL."]
    assert lines[3].startswith(f"rank 0 of 3 failed on {HOST}, ")  # rank 1 alone was replaced
    assert lines[4] == "  ValueError: the final save"
    assert not [*one.folder.glob("[02].1.up")]


def test_a_process_that_ends_before_the_training_is_lost(launch: Callable[..., Launch]) -> None:
    one = launch("-n3", "train.py")
    board = one.board()
    one.order(0)
    wait_for_state(board, 0, "done")
    assert losses_from(board, 0) == [Loss("0.0", "ended before the training did")]
    announce_loss(board, Loss("1.0", "raised ValueError: in the training"))
    board.post("left/2.0", "yes")
    board.post("over", "")
    one.order(1, error="in the training")  # which is no failure after it
    one.pid(2)
    one.order(2)
    assert one.finish() == (0, ["rank 1 ended with exit status 1."])


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
    assert all(is_alive(pids[rank]) for rank in (0, 2))
    for rank in (0, 2):
        one.order(rank)
    status, lines = one.finish()
    assert (status, lines[:-1]) == (
        137,
        [
            "rank 1 has sent no heartbeat for 2 s; killing it.",
            "rank 1 was killed by SIGKILL; the other ranks go on.",
            f"rank 1 of 3 failed on {HOST}, killed by SIGKILL:",
            "  sent no heartbeat for 2 s",
        ],
    )


def test_an_interrupted_launcher_leaves_no_process(launch: Callable[..., Launch]) -> None:
    one = launch("-n2", "--max_restarts=1", "train.py")
    pids = [one.pid(rank) for rank in (0, 1)]
    one.process.send_signal(signal.SIGINT)
    status, lines = one.finish()
    assert status == 130
    assert lines  # a line of each process
    wait_for(lambda: not any(map(is_alive, pids)))


def machines(launch: Callable[..., Launch], *argv: str) -> list[Launch]:
    common = ("--num_machines=2", "-n4", "--main_process_ip=127.0.0.1", "--main_process_port", free_port())
    return [launch(*common, f"--machine_rank={rank}", *argv, "train.py") for rank in (0, 1)]


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
    assert second.finish() == (0, ["rank 3 was killed by SIGKILL; a replacement starts (1 of 1)."])
    assert first.finish()[0] == 0


def test_the_processes_of_a_lost_machine_are_dead(launch: Callable[..., Launch]) -> None:
    first, second = machines(launch, "--heartbeat_timeout=2")
    board = first.board()
    pids = [first.pid(rank) for rank in range(4)]
    second.process.kill()
    second.process.wait()
    for rank in (2, 3):
        wait_for_state(board, rank, "failed")
        wait_for(lambda pid=pids[rank]: not is_alive(pid))
    assert all(map(is_alive, pids[:2]))
    board.post("over", "")
    for rank in (0, 1):
        first.order(rank)
    lost = f"the launcher on machine 1 ({HOST}) was killed, or the machine is down."
    assert first.finish() == (0, [lost])


def test_the_machine_of_the_store_ends_the_others(launch: Callable[..., Launch]) -> None:
    first, second = machines(launch)
    board, pids = first.board(), [first.pid(rank) for rank in range(4)]
    for rank in (2, 3):  # what follows the training is no success without the store
        board.post(f"left/{rank}.0", "yes")
    board.post("over", "")
    wait_for(lambda: not is_alive(pids[0]))  # it hasn't left, so both launchers know of the end
    first.process.kill()
    first.process.wait()
    status, lines = second.finish()
    assert status != 0
    reason = "the machine that hosts the rendezvous is down, or its agent was killed"
    assert lines[:1] == [f"{reason}; stopping the processes of this machine."]
    wait_for(lambda: not any(map(is_alive, pids)))


def test_a_script_without_elastic_training(launch: Callable[..., Launch], tmp_path: Path) -> None:
    (tmp_path / "world.py").write_text(
        "import torch, accelfn as af\nwith af.init_context() as ctx:\n"
        "    total = af.reduce(ctx, torch.ones(1))\n    open(f'{int(total)} on {ctx.rank}', 'w').close()\n"
    )
    assert launch("-n2", "world.py").finish(240) == (0, [])
    assert sorted(path.name for path in tmp_path.glob("* on *")) == ["2 on 0", "2 on 1"]
