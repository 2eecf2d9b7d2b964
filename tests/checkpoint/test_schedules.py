"""Checkpoints under schedules: background saves, several programs in one directory, and faults."""

import contextlib
import errno
import os
import tempfile
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import accelfn as af
from accelfn.checkpoint import Keep
from accelfn.checkpoint.commit import begin_save
from accelfn.checkpoint.disk import REAL_DISK
from accelfn.checkpoint.find import scan
from accelfn.checkpoint.scheduled_disk import announcing
from accelfn.context import Collectives, Context, MakeError
from accelfn.errors import CheckpointError, MissingRankError, NoCheckpointError, RemoteRankError
from accelfn.testing import Fault, Schedule, explore, run_schedule


@contextlib.contextmanager
def folder() -> Generator[str, None, None]:
    """Check that whole checkpoints are left, one at least once one has been committed."""
    with tempfile.TemporaryDirectory() as path:
        yield path
        left = af.checkpoint.find_checkpoints(path)
        for one in left:
            af.verify_checkpoint(one)
        assert left or not was_committed(path), os.listdir(path)


def was_committed(path: str) -> bool:
    return os.path.exists(f"{path}/committed")


def note_commit(path: str) -> None:
    Path(path, "committed").touch()


def state(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((4,), float(step)), "y": torch.full((4,), float(step))}


def loaded(ctx: Context, path: str) -> float:
    found = af.load_state(ctx, path, state(-1))
    assert torch.equal(found["x"], found["y"])
    return found["x"][0].item()


def as_program(ctx: Context) -> Context:
    """Return a context in which a rank is a program of its own, under the same schedule."""
    return replace(Context(), collectives=Collectives(threads=ctx.collectives.threads))


def rotation(ctx: Context, path: str) -> float:
    """Save in the background, in rotation."""
    for step in range(3):
        kept = Keep(last=1)
        handle = af.save_state(ctx, f"{path}/step_{step}", state(step), True, step=step, keep=kept)
        if step == 1:
            handle.result()
            note_commit(path)
        af.wait_for_everyone(ctx)
    return loaded(ctx, path)  # waits for the last save


def replacement(ctx: Context, path: str) -> float:
    """Replace one checkpoint, in the foreground and in the background."""
    for step in range(3):
        af.save_state(ctx, f"{path}/at", state(step), step == 1, step=step)
        if step == 0:
            note_commit(path)
    return loaded(ctx, path)


def same_directory(ctx: Context, path: str) -> float | str:
    """Be two programs that save to the same new directory."""
    me = as_program(ctx)
    try:
        af.save_state(me, f"{path}/at", state(ctx.rank))
    except CheckpointError:
        return "refused"
    note_commit(path)
    return loaded(me, f"{path}/at")


def reader(ctx: Context, path: str) -> str:
    """Be a program that saves in rotation, and one that always finds a checkpoint."""
    me = as_program(ctx)
    if ctx.rank == 0:
        for step in range(3):
            af.save_state(me, f"{path}/{'cba'[step]}", state(step), step=step, keep=Keep(last=1))
            note_commit(path)
    for _ in range(2):
        was_there = was_committed(path)
        try:
            loaded(me, path)
        except NoCheckpointError:
            assert not was_there
    return "read"


PROTOCOLS: tuple[tuple[Callable[[Context, str], Any], set[str]], ...] = (
    (rotation, {"(2.0, 2.0)"}),
    (replacement, {"(2.0, 2.0)"}),
    (
        same_directory,
        {*("('refused', 1.0)", "(0.0, 'refused')"), *(f"({a}.0, {b}.0)" for a in (0, 1) for b in (0, 1))},
    ),
    (reader, {"('read', 'read')"}),
)
each_protocol = pytest.mark.parametrize(
    ("program", "outcomes"), PROTOCOLS, ids=[one.__name__ for one, _ in PROTOCOLS]
)


@each_protocol
@pytest.mark.parametrize("budget", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_every_schedule_ends_well(program: Any, outcomes: set[str], budget: int) -> None:
    report = explore(program, 2, setup=folder, budget=budget)
    assert {one.text for one in report.outcomes} <= outcomes, str(report)


@each_protocol
@pytest.mark.parametrize("budget", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_fault_loses_no_checkpoint_and_is_every_ranks(
    program: Any, outcomes: set[str], budget: int
) -> None:
    del outcomes
    report = explore(program, 2, setup=folder, budget=budget, max_faults=1, seed=1000)
    for one in report.failures:
        run = one.plainest
        assert not isinstance(run.error, (AssertionError, CheckpointError)), str(report)
        injected = [step.fault for step in run.trace.steps if step.fault]
        if injected == ["raise"] and program in (rotation, replacement):
            assert sum(isinstance(error, RemoteRankError) for error in run.errors) == 1, str(report)


# --- found by exploring, and mended --------------------------------------------------------------


def acting_at(number: int, operation: str, action: Callable[[], None]) -> Callable[[str, MakeError], None]:
    """Return a function that acts before the n-th operation of a name, counted from 0."""
    left = [number]

    def reach(name: str, make_error: MakeError) -> None:
        del make_error
        if name == operation:
            left[0] -= 1
            if left[0] == -1:
                action()

    return reach


def test_a_checkpoint_that_is_committed_while_another_is_removed_is_found(tmp_path: Path) -> None:
    """Seed 91 of ``reader``: an unfinished save was seen, and later the one before it was removed."""
    at = tmp_path / "at"
    ctx = Context()
    af.save_state(ctx, at / "step_1", state(1), step=1)
    (at / "step_2").mkdir()

    def go_on() -> None:
        af.save_state(ctx, at / "step_2", state(2), step=2)
        af.save_state(ctx, at / "step_3", state(3), step=3, keep=Keep(last=1))

    # While the names are looked at for the second time, since step_2 had no manifest before.
    disk = announcing(REAL_DISK, acting_at(1, "look at step_1", go_on))
    found, _ = scan(disk, at)
    assert [os.path.basename(one.path) for one in found] == ["step_3"]


def test_a_directory_that_another_program_has_filled_before_the_lock_is_no_new_one(tmp_path: Path) -> None:
    """Seed 4 of ``same_directory``: its files would have had the names of the other program's."""
    at = tmp_path / "at"

    def fill() -> None:
        af.save_tree(at, state(1))

    disk = announcing(REAL_DISK, acting_at(0, "lock at", fill))
    save = begin_save(disk, at)
    assert save.release is not None
    save.release()
    assert save.suffix == f"-{save.token}"


def test_a_directory_that_another_program_removes_before_the_lock_is_made_again(tmp_path: Path) -> None:
    """Seed 26 of ``same_directory`` with a fault: a save that fails removes what it has made."""
    at = tmp_path / "at"
    save = begin_save(announcing(REAL_DISK, acting_at(0, "lock at", at.rmdir)), at)
    assert save.release is not None
    save.release()
    assert at.is_dir()


def test_the_lock_of_a_directory_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    at = tmp_path / "at"
    at.mkdir()
    flock = fcntl.flock

    def late(descriptor: int, flags: int) -> None:
        at.rmdir()
        at.mkdir()  # another one, of the same name
        flock(descriptor, flags)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(FileNotFoundError) as caught:
        REAL_DISK.lock(str(at))
    assert caught.value.errno == errno.ENOENT
    monkeypatch.undo()
    release = REAL_DISK.lock(str(at))
    assert release is not None
    release()


def test_a_save_for_which_there_is_no_thread_is_done_at_once(tmp_path: Path) -> None:
    def run(ctx: Context, path: Path) -> float:
        af.save_state(ctx, path / "at", state(1), True)
        af.save_state(ctx, path / "at", state(2), True).result()
        return loaded(ctx, str(path))

    plain = run_schedule(lambda ctx: run(ctx, tmp_path / "a"), 2, Schedule())
    at = next(one.at for one in plain.trace.steps if one.operation == "start rank 1 save")
    faults = (Fault(kind="raise", rank=1, at=at or 0),)
    without = run_schedule(lambda ctx: run(ctx, tmp_path / "b"), 2, Schedule(faults=faults))
    assert without.error is None
    assert without.results == (2.0, 2.0)
    starts = [one.fault for one in without.trace.steps if one.operation == "start rank 1 save"]
    assert starts == ["raise", ""]


def test_a_rank_that_dies_in_a_background_save_is_an_error_of_the_others(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", state(1), True)
        af.wait_for_everyone(ctx)

    plain = run_schedule(run, 2, Schedule())
    at = next(one.at for one in plain.trace.steps if (one.rank, one.operation[:6]) == (1, "create"))
    died = run_schedule(run, 2, Schedule(faults=(Fault(kind="die", rank=1, at=at or 0),)))
    assert isinstance(died.error, (MissingRankError, af.errors.CollectiveTimeoutError))
