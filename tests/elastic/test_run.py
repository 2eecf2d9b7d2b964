"""Elastic runs of real processes: whoever is lost, the weights are those of a run that nobody disturbed."""

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

import accelfn as af
from accelfn.context import Context, EnvironmentPlan, Meeting, MessageBoard, join_meeting, store_board
from accelfn.context.failure import append_text
from accelfn.elastic.membership import Member
from accelfn.elastic.run import read_seat
from accelfn.errors import ConfigurationError, DistributedError
from tests.elastic.campaign import FORKS, End, Plan, plan_run, reference, run, start_command, start_forks
from tests.elastic.program import parse_faults

STEPS = 24


@pytest.fixture(scope="module")
def weights() -> dict[str, list[float]]:
    return {kind: reference(kind, STEPS) for kind in ("ddp", "fsdp2")}


def plan(kind: str, size: int, restarts: int, *faults: str) -> Plan:
    """Return a run with faults as ``PROCESS:STEP:FAULT``."""
    return Plan(kind, size, restarts, STEPS, at_steps=parse_faults(faults))


IN_MEMORY = (" on from step ", " in memory after ")
FROM_DISK = "on from the newest checkpoint of"
LATE = "CollectiveTimeoutError: an operation that never ends"
RUNS: dict[str, tuple[Plan, End, tuple[str, ...]]] = {
    "killed": (plan("ddp", 2, 0, "1.0:10:kill"), "right", IN_MEMORY),
    "raised": (plan("ddp", 2, 0, "0.0:10:raise"), "right", IN_MEMORY),
    "two at once": (plan("ddp", 3, 0, "0.0:10:kill", "2.0:10:kill"), "right", IN_MEMORY),
    "one after the other": (plan("ddp", 3, 0, "0.0:7:kill", "2.0:14:kill"), "right", IN_MEMORY),
    "shards": (plan("fsdp2", 2, 0, "1.0:10:kill"), "right", IN_MEMORY),
    "stopped": (plan("ddp", 2, 0, "1.0:10:stop"), "right", ("process 1.0 was killed by signal 9",)),
    "all lost": (plan("ddp", 2, 1, "0.0:20:kill", "1.0:20:kill"), "right", (FROM_DISK,)),
    "a shard and its copy lost": (plan("fsdp2", 3, 0, "1.0:20:kill", "2.0:20:kill"), "right", (FROM_DISK,)),
    # No result, and no error of accelfn's: the program's own.
    "all raised": (plan("ddp", 2, 0, "0.0:10:raise", "1.0:10:raise"), "wrong", ("a fault at step 10",)),
    "a background save that fails": (plan("ddp", 1, 0, "0.0:14:disk"), "wrong", ("no disk",)),
    # It may have been the network, so they go on once.
    "late twice": (
        plan("ddp", 2, 0, "0.0:10:late", "1.0:10:late"),
        "error",
        ("2 ranks go on from step 8", LATE),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_whatever_is_lost_the_run_ends_with_the_right_weights_or_an_error(
    name: str, weights: dict[str, list[float]]
) -> None:
    planned, end, texts = RUNS[name]
    outcome = run(planned, weights[planned.kind], start_forks)
    assert outcome.end == end, outcome.text
    assert all(text in outcome.text for text in texts), outcome.text


@pytest.mark.slow
def test_the_launcher_replaces_what_is_lost(weights: dict[str, list[float]]) -> None:
    outcome = run(plan("ddp", 2, 1, "1.0:10:kill"), weights["ddp"], start_command)
    assert outcome.end == "right", outcome.text
    assert "rank 1 was killed by SIGKILL; a replacement starts (1 of 1)" in outcome.text
    assert "on from step 8 in memory" in outcome.text


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_some_runs_of_the_campaign(seed: int, weights: dict[str, list[float]]) -> None:
    planned = plan_run(seed)._replace(steps=STEPS)
    outcome = run(planned, weights[planned.kind], start_forks)
    assert outcome.end in ("right", "error"), f"{outcome.end}\n{outcome.text}"


# --- one process, and a test that stands for the others --------------------------------------------


def start_member(size: int, calls: int) -> tuple[BaseProcess, MessageBoard]:
    """Start a process of a launch, and return it with the board of the launch."""
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    process = FORKS.Process(target=run_member, args=(store.port, size, calls))
    process.start()
    return process, store_board(PrefixStore("accelfn/elastic", store))


def run_member(port: int, size: int, calls: int) -> None:
    places = {"STORE": f"127.0.0.1:{port}", "SIZE": str(size), "SLOT": "0"}
    os.environ.update({f"ACCELFN_ELASTIC_{name}": value for name, value in places.items()})
    os.environ.update(LOCAL_RANK="0", GROUP_RANK="0", TORCHELASTIC_RESTART_COUNT="0")
    for _ in range(calls - 1):
        af.run_elastic(train_nothing, make_nothing, cpu=True)
    refused = pytest.raises(ConfigurationError, match="this program has called it before")
    with refused if calls > 1 else nullcontext():
        af.run_elastic(train_nothing, make_nothing, cpu=True)


def train_nothing(ctx: Context, state: int) -> None:
    assert gc.get_freeze_count() > 0  # collections leave out what was there before


def make_nothing(ctx: Context) -> int:
    return 0


@pytest.mark.slow
def test_a_second_run_in_a_launch_is_refused() -> None:
    process, _ = start_member(1, calls=2)
    process.join(60)
    assert process.exitcode == 0


def join_worlds(port: int, rank: int, fails_first: bool) -> None:
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    place = EnvironmentPlan(launcher="elastic", rank=rank, size=2, local_rank=rank, local_size=2)

    def meeting(name: str, seconds: float) -> Meeting:
        return Meeting(place, PrefixStore(name, store), rank, timedelta(seconds=seconds))

    if fails_first:
        with pytest.raises(DistributedError, match="could not join its world"):
            join_meeting(meeting("alone", 0.5), {"cpu": True})
    with join_meeting(meeting("together", 20.0), {"cpu": True}) as ctx:
        assert af.gather_object(ctx, ctx.rank) == [0, 1]


def test_who_could_not_join_a_world_joins_the_next_one_with_others() -> None:
    store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    members = [FORKS.Process(target=join_worlds, args=(store.port, rank, rank == 0)) for rank in range(2)]
    for one in members:
        one.start()
    for one in members:
        one.join(60)
    assert [one.exitcode for one in members] == [0, 0]


@pytest.mark.slow
def test_heartbeats_go_on_while_a_world_connects() -> None:
    process, board = start_member(2, calls=1)
    append_text(board, "joining/0/1", json.dumps(Member(0, 1, 0)))
    board.post("here/0/1", "yes")  # and it never connects
    wait_until(lambda: board.read("all here/0") is not None)
    beat = int(board.read("beat/0.0") or 0)
    wait_until(lambda: int(board.read("beat/0.0") or 0) > beat + 3 or not process.is_alive())
    assert process.is_alive()
    process.kill()
    process.join()


# The result is saved later than the launcher waits for the others, and for a heartbeat.
SAVES_LATE = """
import os, pathlib, sys, time
import accelfn as af

result = af.run_elastic(lambda ctx, state: ctx.num_processes, lambda ctx: 0, cpu=True)
time.sleep(12)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(result))
"""

# A rank leaves the program where the others return from the training.
LEAVES = """
import faulthandler, os, pathlib, sys
import accelfn as af

def train(ctx, state):
    af.wait_for_everyone(ctx)
    if os.environ["RANK"] == "1":
        sys.exit(0)
    return ctx.num_processes

result = af.run_elastic(train, lambda ctx: 0, cpu=True)
faulthandler.dump_traceback_later(6)  # where it hangs, if its end does: heartbeats stop there
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(result))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "expected"), [(SAVES_LATE, "22"), (LEAVES, "1")])
def test_the_end_of_a_program(tmp_path: Path, text: str, expected: str) -> None:
    program, results = tmp_path / "train.py", tmp_path / "results"
    program.write_text(text)
    results.mkdir()
    flags = ("--num_processes=2", "--heartbeat_timeout=8", "--cpu")
    command = (sys.executable, "-m", "accelfn", "launch", "--elastic", *flags, str(program), str(results))
    subprocess.run(command, check=True, timeout=120)
    assert "".join(path.read_text() for path in sorted(results.iterdir())) == expected


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- without a launcher ----------------------------------------------------------------------------


def test_alone_it_runs_once_and_resumes_from_the_newest_checkpoint(tmp_path: Path) -> None:
    def train(ctx: Context, state: dict[str, int]) -> tuple[int, int]:
        first = state["step"]
        for step in range(first, first + 3):
            state["step"] = step + 1
            af.snapshot(ctx, state)
        af.save_state(ctx, tmp_path / f"step-{state['step']}", state, step=state["step"])
        return first, state["step"]

    def start() -> object:
        return af.run_elastic(train, lambda ctx: {"step": 0}, checkpoints=tmp_path, cpu=True)

    assert [start(), start()] == [(0, 3), (3, 6)]


def test_what_train_raises_alone_is_raised() -> None:
    def train(ctx: Context, state: object) -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        af.run_elastic(train, lambda ctx: 0, cpu=True)


@pytest.mark.parametrize(
    ("variables", "options", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "Start the program with accelfn launch --elastic"),
        ({}, {"min_processes": 0}, "min_processes must be at least 1, got 0"),
        ({}, {"min_processes": 2}, "min_processes is 2, but this program is one process"),
        ({}, {"join_timeout": 0}, "join_timeout must be a positive number of seconds, got 0"),
    ],
)
def test_other_launchers_and_worlds_without_processes_are_refused(
    variables: dict[str, str], options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=message):
        af.run_elastic(lambda ctx, state: None, lambda ctx: 0, **options)


def test_a_seat_is_read_from_the_variables_of_the_launcher() -> None:
    names = {"STORE": "10.0.0.1:29500", "SIZE": "4", "SLOT": "3"}
    places = {"LOCAL_RANK": "1", "GROUP_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2"}
    seat = read_seat({**{f"ACCELFN_ELASTIC_{name}": value for name, value in names.items()}, **places})
    assert seat is not None
    assert (seat.store, seat.size, seat.device_index, seat.me.name) == (("10.0.0.1", 29500), 4, 1, "3.2")
