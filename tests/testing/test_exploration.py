"""Bugs that are planted in programs and protocols are found by seed, and shrink to few hand-overs."""

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
from accelfn.context import Context
from accelfn.errors import MissingRankError
from accelfn.testing import Schedule, explore, run_schedule, scheduling_point
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
    (background_race, always_a_checkpoint, 1, "NoCheckpointError: "),
    (lost_update, tempfile.TemporaryDirectory, 0, "(1, 1)"),
)


@pytest.mark.parametrize(("program", "setup", "max_faults", "bug"), PLANTED)
def test_a_planted_bug_is_found_by_seed(program: Any, setup: Any, max_faults: int, bug: str) -> None:
    report = explore(program, 2, setup=setup, budget=BUDGET, max_faults=max_faults)
    outcome = next(outcome for outcome in report.outcomes if outcome.text.startswith(bug))
    assert f"with schedule={outcome.plainest.given}:" in str(report)

    # The seed that is printed leads there again, and so does the trace.
    for schedule in (outcome.plainest.given, outcome.plainest.trace.schedule):
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
    assert (first.num_runs, first.failures) == (50, ())
    assert len(first.outcomes) > 3
    counts = [outcome.count for outcome in first.outcomes]
    assert counts == sorted(counts, reverse=True)


def test_a_budget_may_be_time() -> None:
    assert explore(order, 2, setup=lambda: nullcontext(Came()), budget=timedelta(0)).num_runs == 1
    for budget in (0, 1.5):
        with pytest.raises(ValueError, match=f"must be at least one run, or a timedelta, got {budget}"):
            explore(order, 2, setup=lambda: nullcontext(Came()), budget=cast("Any", budget))


def test_faults_are_one_outcome_wherever_they_were() -> None:
    def barriers(ctx: Context) -> None:
        for _ in range(5):
            af.wait_for_everyone(ctx)

    report = explore(barriers, 2, budget=100, max_faults=1)
    texts = {outcome.text for outcome in report.failures}
    assert {f"InjectedFaultError: injected fault: rank {rank}" for rank in (0, 1)} <= texts
    assert any(isinstance(outcome.plainest.error, MissingRankError) for outcome in report.failures)


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


def test_a_failure_shrinks_to_the_least_number_of_hand_overs() -> None:
    def loses(schedule: Schedule) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            return run_schedule(lambda ctx: lost_update(ctx, folder), 2, schedule).results == (1, 1)

    shortest = find(schedules(2), loses, settings=THOROUGH)
    # Rank 0 reads, and rank 1 does all of its work before rank 0 writes.
    assert len(shortest.switches) == 1
    with tempfile.TemporaryDirectory() as folder:
        trace = run_schedule(lambda ctx: lost_update(ctx, folder), 2, shortest).trace
    done = [(step.rank, step.operation) for step in trace.steps]
    first, *second = (0, "read count"), (1, "read count"), (1, "write count"), (1, "wait_for_everyone")
    assert done[:4] == [first, *second]
    assert trace.num_hand_overs <= 3


def test_faults_shrink_away_unless_they_are_needed() -> None:
    def fails(schedule: Schedule) -> bool:
        return run_schedule(lambda ctx: af.wait_for_everyone(ctx), 2, schedule).error is not None

    shortest = find(schedules(2, max_faults=3), fails, settings=THOROUGH)
    assert (len(shortest.faults), shortest.switches) == (1, ())
    assert shortest.faults[0].kind == "raise"
