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

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

import accelfn as af
from accelfn.context import Context, MessageBoard, store_board
from accelfn.context.failure import append_text, list_texts
from accelfn.elastic.membership import Member
from accelfn.elastic.run import read_seat, without_older_objects
from accelfn.errors import ConfigurationError
from tests.elastic.campaign import FORKS, Plan, plan_run, reference, run, start_command, start_forks

STEPS = 24


@pytest.fixture(scope="module")
def weights() -> dict[str, list[float]]:
    return {kind: reference(kind, STEPS) for kind in ("ddp", "fsdp2")}


def at(*faults: str) -> frozenset[tuple[str, int, str]]:
    return frozenset((name, int(step), what) for name, step, what in (one.split(":") for one in faults))


PLANS = {
    "killed": Plan("ddp", 2, 0, STEPS, at_steps=at("1.0:10:kill")),
    "raised": Plan("ddp", 2, 0, STEPS, at_steps=at("0.0:10:raise")),
    "replaced": Plan("ddp", 2, 1, STEPS, at_steps=at("1.0:5:kill")),
    "two at once": Plan("ddp", 3, 0, STEPS, at_steps=at("0.0:10:kill", "2.0:10:kill")),
    "one after the other": Plan("ddp", 3, 0, STEPS, at_steps=at("0.0:7:kill", "2.0:14:kill")),
    "shards": Plan("fsdp2", 2, 0, STEPS, at_steps=at("1.0:10:kill")),
}


# The others are like these, and are run by CI alone.
QUICK = ("killed", "replaced", "shards")


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(plan, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, plan in PLANS.items()
    ],
)
def test_what_is_left_goes_on_in_memory(plan: Plan, weights: dict[str, list[float]]) -> None:
    outcome = run(plan, weights[plan.kind], start_forks)
    assert outcome.end == "right", outcome.text
    assert " on from step " in outcome.text, outcome.text
    assert " in memory after " in outcome.text, outcome.text


def test_a_rank_that_is_stopped_is_lost(weights: dict[str, list[float]]) -> None:
    plan = Plan("ddp", 2, 0, STEPS, at_steps=at("1.0:10:stop"))
    outcome = run(plan, weights["ddp"], start_forks)
    assert outcome.end == "right", outcome.text
    assert "process 1.0 was killed by signal 9" in outcome.text


def test_when_all_are_lost_the_newest_checkpoint_is_loaded(weights: dict[str, list[float]]) -> None:
    plan = Plan("ddp", 2, 1, STEPS, at_steps=at("0.0:20:kill", "1.0:20:kill"))
    outcome = run(plan, weights["ddp"], start_forks)
    assert outcome.end == "right", outcome.text
    assert "on from the newest checkpoint of" in outcome.text, outcome.text


def test_shards_of_a_lost_rank_and_its_neighbour_come_from_the_checkpoint(
    weights: dict[str, list[float]],
) -> None:
    plan = Plan("fsdp2", 3, 0, STEPS, at_steps=at("1.0:20:kill", "2.0:20:kill"))
    outcome = run(plan, weights["fsdp2"], start_forks)
    assert outcome.end == "right", outcome.text
    assert "1 rank goes on from the newest checkpoint of" in outcome.text, outcome.text


def test_a_fault_that_every_rank_has_ends_the_run_by_name(weights: dict[str, list[float]]) -> None:
    plan = Plan("ddp", 2, 0, STEPS, at_steps=at("0.0:10:raise", "1.0:10:raise"))
    outcome = run(plan, weights["ddp"], start_forks)
    assert "ValueError: a fault at step 10" in outcome.text
    assert outcome.end == "wrong"  # no result, and no error of accelfn's


def test_a_fault_without_a_loss_ends_the_run_when_it_comes_again(weights: dict[str, list[float]]) -> None:
    plan = Plan("ddp", 2, 0, STEPS, at_steps=at("0.0:10:late", "1.0:10:late"))
    outcome = run(plan, weights["ddp"], start_forks)
    assert outcome.end == "error", outcome.text
    assert outcome.text.count("2 ranks go on from step 8") == 1  # it may have been the network
    assert "s; CollectiveTimeoutError: an operation that never ends" in outcome.text
    assert "CollectiveTimeoutError: an operation that never ends" in outcome.text


def test_a_background_save_that_fails_is_an_error_even_if_nothing_asks_for_it(
    weights: dict[str, list[float]],
) -> None:
    outcome = run(Plan("ddp", 1, 0, STEPS, at_steps=at("0.0:14:disk")), weights["ddp"], start_forks)
    assert "no disk" in outcome.text
    assert outcome.end == "wrong"  # no result, and no error of accelfn's


def test_the_launcher_replaces_what_is_lost(weights: dict[str, list[float]]) -> None:
    plan = Plan("ddp", 2, 1, STEPS, at_steps=at("1.0:10:kill"))
    outcome = run(plan, weights["ddp"], start_command)
    assert outcome.end == "right", outcome.text
    assert "rank 1 was killed by SIGKILL; a replacement starts (1 of 1)" in outcome.text
    assert "on from step 8 in memory" in outcome.text


@pytest.mark.parametrize("was_frozen", [False, True])
def test_collections_leave_out_what_existed_before_the_run(was_frozen: bool) -> None:
    if was_frozen:
        gc.freeze()
    before = gc.get_freeze_count()
    made = [[number] for number in range(10_000)]
    try:
        with without_older_objects():
            # A few frozen objects may be freed meanwhile.
            added = gc.get_freeze_count() - before
            assert (added > len(made) // 2) == (not was_frozen)
        assert (gc.get_freeze_count() > 0) == was_frozen
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", [start_forks, start_command])
def test_some_runs_of_the_campaign(start: object, weights: dict[str, list[float]]) -> None:
    count = 6 if start is start_forks else 2
    for seed in range(count):
        plan = plan_run(seed)._replace(steps=STEPS)
        outcome = run(plan, weights[plan.kind], start_forks if start is start_forks else start_command)
        assert outcome.end in ("right", "error"), f"seed {seed}: {outcome.end}\n{outcome.text}"


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
    pass


def make_nothing(ctx: Context) -> int:
    return 0


def test_a_second_run_in_a_launch_is_refused() -> None:
    process, _ = start_member(1, calls=2)
    process.join(60)
    assert process.exitcode == 0


def test_heartbeats_go_on_while_a_world_connects() -> None:
    process, board = start_member(2, calls=1)
    append_text(board, "joining/0", json.dumps(Member(0, 1, 0)))
    append_text(board, "here/0", "1.0")  # and it never connects
    wait_until(lambda: len(list_texts(board, "here/0", 0)) == 2)
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
time.sleep(8)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(result))
"""

# A rank leaves the program where the others return from the training.
LEAVES = """
import os, pathlib, sys
import accelfn as af

def train(ctx, state):
    af.wait_for_everyone(ctx)
    if os.environ["RANK"] == "1":
        sys.exit(0)
    return ctx.num_processes

result = af.run_elastic(train, lambda ctx: 0, cpu=True)
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(result))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("text", "expected"), [(SAVES_LATE, "22"), (LEAVES, "1")])
def test_the_end_of_a_program(tmp_path: Path, text: str, expected: str) -> None:
    program, results = tmp_path / "train.py", tmp_path / "results"
    program.write_text(text)
    results.mkdir()
    flags = ("--num_processes=2", "--heartbeat_timeout=3", "--cpu")
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
            af.remember(ctx, state)
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


def test_other_launchers_and_worlds_without_processes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="Start the program with accelfn launch --elastic"):
        read_seat({"RANK": "0", "WORLD_SIZE": "2"})
    assert read_seat({"RANK": "0", "WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigurationError, match="min_processes must be at least 1, got 0"):
        af.run_elastic(lambda ctx, state: None, lambda ctx: 0, min_processes=0)
    with pytest.raises(ConfigurationError, match="min_processes is 2, but this program is one process"):
        af.run_elastic(lambda ctx, state: None, lambda ctx: 0, min_processes=2)
    with pytest.raises(ConfigurationError, match="join_timeout must be a positive number of seconds, got 0"):
        af.run_elastic(lambda ctx, state: None, lambda ctx: 0, join_timeout=0)


def test_a_seat_is_read_from_the_variables_of_the_launcher() -> None:
    seat = read_seat(
        {
            "ACCELFN_ELASTIC_STORE": "10.0.0.1:29500",
            "ACCELFN_ELASTIC_SIZE": "4",
            "ACCELFN_ELASTIC_SLOT": "3",
            "LOCAL_RANK": "1",
            "GROUP_RANK": "1",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    )
    assert seat is not None
    assert (seat.store, seat.size, seat.device_index, seat.me.name) == (("10.0.0.1", 29500), 4, 1, "3.2")
