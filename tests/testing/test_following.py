"""Worlds that follow a schedule: equal runs, faults, background threads, time that is counted."""

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn.context import Context
from accelfn.errors import CollectiveTimeoutError, MismatchError, MissingRankError, RemoteRankError
from accelfn.testing import (
    Fault,
    InjectedFaultError,
    Schedule,
    ScheduledRun,
    Switch,
    run_ranks,
    run_schedule,
    scheduling_point,
)
from accelfn.testing.strategies import schedules


def operations(ctx: Context) -> list[Any]:
    found: list[Any] = []
    for step in range(2):
        scheduling_point(ctx, f"step {step}")
        found.append(af.gather_object(ctx, (ctx.rank, step)))
        found.append(af.tree.listify(af.reduce(ctx, torch.ones(2))))
        found.append((torch.rand(()).item(), random.random()))
    return found


def threads_of(run: ScheduledRun[Any]) -> list[str]:
    return [step.thread for step in run.trace.steps]


@given(
    schedules(3, max_faults=2) | st.builds(Schedule, seed=st.integers(0, 1000), max_faults=st.integers(0, 2))
)
def test_equal_schedules_give_equal_runs_and_a_trace_replays_without_a_seed(drawn: Schedule) -> None:
    torch.default_generator.manual_seed(0)
    random.seed(0)
    first, second = run_schedule(operations, 3, drawn), run_schedule(operations, 3, drawn)
    trace = first.trace
    assert trace.schedule.seed is None
    assert len(trace.schedule.faults) <= max(drawn.max_faults, len(drawn.faults))  # those that were reached
    for run in (second, run_schedule(operations, 3, trace.schedule)):
        assert (run.trace, run.results) == (trace, first.results)
        assert [repr(error) for error in run.errors] == [repr(error) for error in first.errors]


@given(schedules(3))
def test_without_faults_no_schedule_changes_what_a_right_program_computes(drawn: Schedule) -> None:
    torch.default_generator.manual_seed(0)
    random.seed(0)
    assert run_ranks(operations, 3, schedule=drawn) == run_ranks(operations, 3)


def test_a_switch_lets_another_rank_go_first() -> None:
    def order(*switches: Switch) -> list[str]:
        return threads_of(run_schedule(af.wait_for_everyone, 3, Schedule(switches=switches)))[:3]

    assert order() == ["rank 0", "rank 1", "rank 2"]
    assert order(Switch(0, 2))[0] == "rank 2"
    assert order(Switch(1, 1))[0] == "rank 1"


def test_a_trace_names_operations_and_lines_of_the_program() -> None:
    def program(ctx: Context) -> None:
        scheduling_point(ctx, "here")
        af.reduce(ctx, torch.ones(100_000))

    steps = [step for step in run_schedule(program, 2, Schedule()).trace.steps if step.rank == 0]
    assert [step.operation for step in steps] == ["here", "reduce", "reduce: all_reduce sum", "returned"]
    assert [step.at for step in steps] == [0, 1, 2, None]
    assert all(step.site.startswith("test_following.py:") for step in steps[:3])
    assert steps[0].site != steps[1].site == steps[2].site


# --- faults --------------------------------------------------------------------------------------


def test_an_exception_is_every_ranks() -> None:
    run = run_schedule(operations, 3, Schedule(faults=(Fault(kind="raise", rank=1, at=3),)))
    assert isinstance(run.error, InjectedFaultError)
    assert str(run.error) == "injected fault: rank 1 fails at its operation 3, step 1"
    assert [type(one) for one in run.errors] == [RemoteRankError, InjectedFaultError, RemoteRankError]
    assert [step.fault for step in run.trace.steps if step.rank == 1][3] == "raise"


def test_a_rank_that_dies_is_missed() -> None:
    run = run_schedule(operations, 3, Schedule(faults=(Fault(kind="die", rank=2, at=0),)))
    assert isinstance(run.error, MissingRankError)
    assert run.errors[2] is None


def test_a_delay_takes_no_time_and_changes_nothing_unless_it_is_beyond_the_timeout() -> None:
    def delayed(rank: int, seconds: float) -> ScheduledRun[Any]:
        schedule = Schedule(faults=(Fault(kind="delay", rank=rank, at=0, seconds=seconds),))
        return run_schedule(lambda ctx: af.gather_object(ctx, ctx.rank), 2, schedule, timeout_s=4000.0)

    run = delayed(0, 20.0)  # counted, not waited for
    assert run.results == ([0, 1], [0, 1])
    assert threads_of(run) == ["rank 0", "rank 1", "rank 0", "rank 1"]
    assert isinstance(delayed(1, 5000.0).error, CollectiveTimeoutError)


@pytest.mark.parametrize("kind", ["skip", "swap"])
def test_a_collective_that_a_rank_leaves_out_or_swaps_is_a_mismatch_that_replays(kind: Any) -> None:
    # Operation 0 is no collective, so the fault comes at the next one.
    run = run_schedule(operations, 3, Schedule(), faults=[Fault(kind=kind, rank=1, at=0)])
    assert [type(error) for error in run.errors] == [MismatchError] * 3
    assert run.trace.schedule.faults == (Fault(kind=kind, rank=1, at=1),)
    again = run_schedule(operations, 3, run.trace.schedule)
    assert (again.trace, str(again.error)) == (run.trace, str(run.error))


def test_an_error_says_how_to_replay() -> None:
    def failing(ctx: Context) -> None:
        af.wait_for_everyone(ctx)
        if ctx.rank:
            raise KeyError("the cause")

    with pytest.raises(KeyError) as caught:
        run_ranks(failing, 2, schedule=Schedule(seed=5))
    notes = getattr(caught.value, "__notes__", None)
    if notes is not None:  # Python 3.11
        assert notes[-1].startswith("To replay this run: schedule=Schedule(seed=5)\n")
        assert "failed with KeyError" in notes[-1]


def test_only_ranks_in_memory_follow_a_schedule() -> None:
    with pytest.raises(ValueError, match=r"only ranks in memory .* got on=\'processes\'"):
        run_ranks(operations, 2, "processes", schedule=Schedule())
    with pytest.raises(ValueError, match="a fault names rank 2"):
        run_ranks(operations, 2, schedule=Schedule(faults=(Fault(kind="die", rank=2),)))
    with pytest.raises(TypeError, match=r"schedule must be a Schedule, such as Schedule\(seed=7\), got 7"):
        run_ranks(operations, 2, schedule=cast("Any", 7))


def test_of_ranks_that_do_not_end_the_one_that_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelfn.testing.threads._GRACE_S", 0.1)
    go_on = threading.Event()

    def program(ctx: Context) -> None:
        if ctx.rank == 1:
            go_on.wait(30.0)
        af.wait_for_everyone(ctx)

    try:
        with pytest.raises(CollectiveTimeoutError, match=r"^rank 1 did not end within 0\.1 s"):
            run_ranks(program, 2, schedule=Schedule(), timeout_s=0.1)
    finally:
        go_on.set()


# --- background threads --------------------------------------------------------------------------


def saving(folder: Path) -> Callable[[Context], Any]:
    def run(ctx: Context) -> Any:
        handle = af.save_state(ctx, folder / "at", {"x": torch.arange(3.0)}, True)
        af.wait_for_everyone(ctx)
        handle.result()
        return af.tree.listify(af.load_state(ctx, folder / "at", {"x": torch.zeros(3)})["x"])

    return run


@settings(max_examples=6)
@given(st.integers(0, 10_000))
def test_background_saves_take_part_and_replay(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    first = run_schedule(saving(tmp_path_factory.mktemp("a")), 2, Schedule(seed=seed))
    assert first.results == ([0.0, 1.0, 2.0],) * 2
    assert {"rank 0 save", "rank 1 save"} <= set(threads_of(first))
    assert all(step.site for step in first.trace.steps if step.at is not None)
    second = run_schedule(saving(tmp_path_factory.mktemp("a")), 2, first.trace.schedule)
    assert threads_of(second) == threads_of(first)
    assert second.trace.schedule == first.trace.schedule


def failing_in(folder: Path, kind: Any, rank: int, operation: str) -> ScheduledRun[Any]:
    """Save with a fault where a rank reaches an operation of the disk."""
    steps = run_schedule(saving(folder / "plain"), 2, Schedule()).trace.steps
    at = next(step.at for step in steps if (step.rank, step.operation) == (rank, operation))
    assert at is not None
    fault = Fault(kind=kind, rank=rank, at=at)
    return run_schedule(saving(folder / "faulty"), 2, Schedule(faults=(fault,)))


def test_a_fault_in_the_background_reaches_every_rank(tmp_path: Path) -> None:
    run = failing_in(tmp_path, "raise", 1, "write tensors-00001.safetensors")
    assert [type(error) for error in run.errors] == [RemoteRankError, OSError]
    assert "injected fault" in str(run.error)


def test_a_rank_dies_in_all_its_threads_and_its_locks_are_released(tmp_path: Path) -> None:
    run = failing_in(tmp_path, "die", 0, "rename manifest-*.json to manifest.json")
    assert run.results[0] is None
    assert [step.thread for step in run.trace.steps if step.operation == "died"] == ["rank 0 save", "rank 0"]
    assert "manifest.json" not in os.listdir(tmp_path / "faulty" / "at")  # nobody cleaned up
    assert run_ranks(saving(tmp_path / "faulty"), 2) == [[0.0, 1.0, 2.0]] * 2


def test_a_wait_that_nothing_can_end_is_an_error_and_no_hang_and_one_with_a_timeout_is_over() -> None:
    def waiting(ctx: Context, seconds: float | None) -> bool:
        return ctx.collectives.threads.wait(lambda _: False, seconds, "a thread that isn't there")

    with pytest.raises(CollectiveTimeoutError, match="rank 0 waits for a thread that isn't there, and no"):
        run_ranks(lambda ctx: waiting(ctx, None), 2, schedule=Schedule())
    assert run_ranks(lambda ctx: waiting(ctx, 1000.0), 2, schedule=Schedule()) == [False, False]


def test_a_thread_that_ctx_starts_is_part_of_the_schedule() -> None:
    def racing(ctx: Context) -> list[str]:
        seen: list[str] = []

        def work() -> None:
            scheduling_point(ctx, "work")
            seen.append("thread")

        ctx.collectives.threads.start("upload", work)
        scheduling_point(ctx, "go on")
        seen.append("rank")
        ctx.collectives.threads.wait(lambda seconds: len(seen) == 2, None, "the upload")
        return seen

    found = {str(run_ranks(racing, 1, schedule=Schedule(seed=seed))) for seed in range(30)}
    assert found == {"[['rank', 'thread']]", "[['thread', 'rank']]"}
    # Beside a schedule these are threads of the system.
    assert sorted(run_ranks(racing, 1)[0]) == ["rank", "thread"]
