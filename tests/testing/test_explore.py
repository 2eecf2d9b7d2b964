"""Bugs that are planted in programs and protocols are found by seed, and shrink to few hand-overs."""

import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import find, settings

import accelfn as af
from accelfn.checkpoint.disk import REAL_DISK, Disk, write_file
from accelfn.checkpoint.scheduled_disk import disk_of
from accelfn.context import Context
from accelfn.errors import MissingRankError
from accelfn.testing import Schedule, Switch, explore, run_ranks, run_schedule, scheduling_point
from accelfn.testing.strategies import schedules

BUDGET = 30  # runs, within a few seconds

# --- programs with a bug -------------------------------------------------------------------------


def main_process_only(ctx: Context, folder: str) -> float:
    """Gather on the main process only, in the branch of those that came first."""
    ready = Path(folder, "ready")
    scheduling_point(ctx, "look for ready")
    if not ready.exists():
        ready.touch()
        af.gather_object(ctx, "I prepare the data")
    return af.reduce(ctx, torch.ones(())).item()


def missing_barrier(ctx: Context, folder: str) -> str:
    """Read what another rank has written, without waiting for it."""
    path = Path(folder, "vocabulary.txt")
    if ctx.is_main_process:
        scheduling_point(ctx, "write vocabulary.txt")
        path.write_text("a b c")
    scheduling_point(ctx, "read vocabulary.txt")
    return path.read_text()


def background_race(ctx: Context, folder: str) -> str:
    """Remove the old checkpoint while the new one is still being written."""
    af.save_state(ctx, f"{folder}/step_1", {"step": 1})
    af.save_state(ctx, f"{folder}/step_2", {"step": 2}, asynchronous=True)
    if ctx.is_main_process:
        scheduling_point(ctx, "remove step_1")
        shutil.rmtree(f"{folder}/step_1")
    return "done"


@contextmanager
def always_a_checkpoint() -> Generator[str, None, None]:
    """Check that a checkpoint is left, whatever has happened."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder
        af.latest_checkpoint(folder)


def manifest_first(ctx: Context, folder: str) -> str:
    """Commit by a manifest that is written before the data that it names."""
    disk = disk_of(ctx, REAL_DISK)
    if ctx.rank == 0:
        write_file(disk, f"{folder}/manifest", b"data")
        write_file(disk, f"{folder}/data", b"12345678")
        return "written"
    if not is_there(disk, f"{folder}/manifest"):
        return "nothing"
    with open(f"{folder}/data") as file:
        return file.read()


def is_there(disk: Disk, path: str) -> bool:
    try:
        disk.status(path)
    except FileNotFoundError:
        return False
    return True


def lost_update(ctx: Context, folder: str) -> int:
    """Count in a file that both ranks read and then write."""
    path = Path(folder, "count")
    scheduling_point(ctx, "read count")
    count = int(path.read_text()) if path.exists() else 0
    scheduling_point(ctx, "write count")
    path.write_text(str(count + 1))
    af.wait_for_everyone(ctx)
    return int(path.read_text())


PLANTED: tuple[tuple[Callable[[Context, str], Any], Any, int, str], ...] = (
    (main_process_only, tempfile.TemporaryDirectory, 0, "MismatchError: gather_object: "),
    (missing_barrier, tempfile.TemporaryDirectory, 0, "FileNotFoundError: "),
    (background_race, always_a_checkpoint, 1, "NoCheckpointError: "),
    (manifest_first, tempfile.TemporaryDirectory, 0, "FileNotFoundError: "),
    (lost_update, tempfile.TemporaryDirectory, 0, "(1, 1)"),
)


@pytest.mark.parametrize(
    ("program", "setup", "max_faults", "bug"), PLANTED, ids=[one.__name__ for one, *_ in PLANTED]
)
def test_a_planted_bug_is_found_by_seed(program: Any, setup: Any, max_faults: int, bug: str) -> None:
    report = explore(program, 2, setup=setup, budget=BUDGET, max_faults=max_faults)
    found = [one for one in report.outcomes if one.text.startswith(bug)]
    assert found, str(report)
    print(f"{program.__name__}: {found[0].plainest.given}")
    assert f"with schedule={found[0].plainest.given}:" in str(report)

    # The seed that is printed leads there again, and so does the trace.
    for schedule in (found[0].plainest.given, found[0].plainest.trace.schedule):
        assert outcome_of(program, setup, schedule).startswith(bug)


def outcome_of(program: Any, setup: Any, schedule: Schedule) -> str:
    try:
        with setup() as folder:
            run = run_schedule(lambda ctx: program(ctx, folder), 2, schedule)
        if run.error is not None:
            raise run.error
    except Exception as error:  # noqa: BLE001 -- it is the outcome
        return f"{type(error).__name__}: {error}"
    return str(run.results)


@pytest.mark.parametrize("program", [one for one, _, _, _ in PLANTED if one is not background_race])
def test_without_a_schedule_they_all_look_right_or_are_found_by_luck(program: Any, tmp_path: Path) -> None:
    outcomes = set[str]()
    for number in range(3):
        os.mkdir(folder := f"{tmp_path}/{number}")
        try:
            outcomes.add(str(run_ranks(lambda ctx, at=folder: program(ctx, at), 2)))
        except Exception as error:  # noqa: BLE001 -- it is an outcome
            outcomes.add(type(error).__name__)
    assert len(outcomes) == 1  # a run without a schedule is always the same


# --- the report ----------------------------------------------------------------------------------


@dataclass
class Came:
    """The ranks in the order in which they came."""

    ranks: list[int] = field(default_factory=list[int])


def order(ctx: Context, came: Came) -> str:
    scheduling_point(ctx, "come")
    came.ranks.append(ctx.rank)
    af.wait_for_everyone(ctx)
    return "".join(map(str, came.ranks))


def test_the_same_number_of_runs_gives_the_same_report() -> None:
    first, second = (explore(order, 3, setup=lambda: nullcontext(Came()), budget=50) for _ in range(2))
    assert first == second
    assert str(first) == str(second)
    assert first.num_runs == 50
    assert len(first.outcomes) > 3
    assert first.failures == ()
    counts = [one.count for one in first.outcomes]
    assert counts == sorted(counts, reverse=True)


def test_the_first_seed_is_the_first_one_that_leads_there() -> None:
    report = explore(order, 3, setup=lambda: nullcontext(Came()), budget=20, seed=100)
    for outcome in report.outcomes:
        for seed in range(100, outcome.seed + 1):
            run = run_ranks(order_of(Came()), 3, schedule=Schedule(seed=seed))
            assert (str(tuple(run)) == outcome.text) == (seed == outcome.seed) or seed > outcome.seed


def order_of(came: Came) -> Callable[[Context], str]:
    return lambda ctx: order(ctx, came)


def test_a_budget_may_be_time() -> None:
    assert explore(order, 2, setup=lambda: nullcontext(Came()), budget=timedelta(0)).num_runs == 1
    assert explore(order, 2, setup=lambda: nullcontext(Came()), budget=timedelta(seconds=0.3)).num_runs > 1
    with pytest.raises(ValueError, match="budget must be at least one run, or a timedelta, got 0"):
        explore(order, 2, setup=lambda: nullcontext(Came()), budget=0)
    with pytest.raises(ValueError, match=r"budget must be at least one run, or a timedelta, got 1\.5"):
        explore(order, 2, setup=lambda: nullcontext(Came()), budget=cast("Any", 1.5))


def test_faults_are_one_outcome_wherever_they_were() -> None:
    def barriers(ctx: Context) -> None:
        for _ in range(5):
            af.wait_for_everyone(ctx)

    report = explore(barriers, 2, budget=100, max_faults=1)
    texts = {one.text for one in report.failures}
    assert {f"InjectedFaultError: injected fault: rank {rank}" for rank in (0, 1)} <= texts
    assert any(isinstance(one.plainest.error, MissingRankError) for one in report.failures)


def test_what_checks_the_ranks_work_can_be_the_error() -> None:
    @contextmanager
    def setup() -> Generator[Came, None, None]:
        came = Came()
        yield came
        if came.ranks != [0, 1]:
            raise AssertionError(f"came as {came.ranks}")

    report = explore(order, 2, setup=setup, budget=30)
    assert [one.text for one in report.failures] == ["AssertionError: came as [1, 0]"]


def test_an_error_of_the_setup_itself_is_raised() -> None:
    with pytest.raises(FileNotFoundError):
        explore(lost_update, 2, setup=lambda: tempfile.TemporaryDirectory(dir="/no/such/directory"))


# --- shrinking -----------------------------------------------------------------------------------

THOROUGH = settings(max_examples=500, derandomize=True, database=None, deadline=None)


def ends_as(program: Callable[[Context, str], Any], expected: Any) -> Callable[[Schedule], bool]:
    def condition(schedule: Schedule) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            return run_schedule(lambda ctx: program(ctx, folder), 2, schedule).results == expected

    return condition


def test_a_failure_shrinks_to_the_least_number_of_hand_overs() -> None:
    shortest = find(schedules(2), ends_as(lost_update, (1, 1)), settings=THOROUGH)
    # Rank 0 reads, and rank 1 does all of its work before rank 0 writes.
    assert len(shortest.switches) == 1
    with tempfile.TemporaryDirectory() as folder:
        trace = run_schedule(lambda ctx: lost_update(ctx, folder), 2, shortest).trace
    done = [f"{step.thread}: {step.operation}" for step in trace.steps]
    assert done[:4] == [
        "rank 0: read count",
        "rank 1: read count",
        "rank 1: write count",
        "rank 1: wait_for_everyone",
    ]
    assert trace.num_hand_overs <= 3


def last_writer(ctx: Context, folder: str) -> tuple[int, str]:
    """As ``lost_update``, and tell who has written last."""
    path = Path(folder, "last")
    scheduling_point(ctx, "read")
    seen = path.exists()
    scheduling_point(ctx, "write")
    path.write_text(str(ctx.rank))
    af.wait_for_everyone(ctx)
    return int(seen), path.read_text()


def test_a_failure_that_needs_two_switches_keeps_two() -> None:
    # Both look before one has written, and rank 1 writes last: it comes in between, and stops again.
    condition = ends_as(last_writer, ((0, "1"), (0, "1")))
    assert not any(condition(Schedule(switches=(Switch(one),))) for one in range(10))
    assert len(find(schedules(2), condition, settings=THOROUGH).switches) == 2


def test_the_simplest_schedule_is_the_plain_one() -> None:
    assert find(schedules(3, max_faults=2), lambda one: True, settings=THOROUGH) == Schedule()


def test_faults_shrink_away_unless_they_are_needed() -> None:
    def fails(schedule: Schedule) -> bool:
        return run_schedule(lambda ctx: af.wait_for_everyone(ctx), 2, schedule).error is not None

    shortest = find(schedules(2, max_faults=3), fails, settings=THOROUGH)
    assert (len(shortest.faults), shortest.switches) == (1, ())
    assert shortest.faults[0].kind == "raise"
