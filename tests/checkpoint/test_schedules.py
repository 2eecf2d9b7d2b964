"""Checkpoints under schedules: background saves, several programs in one directory, and faults."""

import contextlib
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
from accelfn.context import Collectives, Context
from accelfn.errors import CheckpointError, NoCheckpointError, RemoteRankError
from accelfn.storage.disk import REAL_DISK
from accelfn.testing import Fault, Schedule, explore, run_schedule
from tests.checkpoint.small import names, save, value


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


REFUSED = {"('refused', 1.0)", "(0.0, 'refused')", *(f"({a}.0, {b}.0)" for a in (0, 1) for b in (0, 1))}
PROTOCOLS: dict[Callable[[Context, str], Any], set[str]] = {
    rotation: {"(2.0, 2.0)"},
    replacement: {"(2.0, 2.0)"},
    same_directory: REFUSED,
    reader: {"('read', 'read')"},
}
each_protocol = pytest.mark.parametrize("program", PROTOCOLS, ids=lambda program: program.__name__)


@each_protocol
@pytest.mark.parametrize("budget", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_every_schedule_ends_well(program: Any, budget: int) -> None:
    report = explore(program, 2, setup=folder, budget=budget)
    assert {outcome.text for outcome in report.outcomes} <= PROTOCOLS[program], str(report)


@each_protocol
@pytest.mark.parametrize("budget", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_fault_loses_no_checkpoint_and_is_every_ranks(program: Any, budget: int) -> None:
    report = explore(program, 2, setup=folder, budget=budget, max_faults=1, seed=1000)
    for failure in report.failures:
        run = failure.plainest
        assert not isinstance(run.error, (AssertionError, CheckpointError)), str(report)
        injected = [step.fault for step in run.trace.steps if step.fault]
        if injected == ["raise"] and program in (rotation, replacement):
            assert sum(isinstance(error, RemoteRankError) for error in run.errors) == 1, str(report)


# --- found by exploring, and mended --------------------------------------------------------------


@pytest.mark.parametrize("meanwhile", ["filled", "removed"])
def test_a_directory_may_change_before_a_save_has_its_lock(meanwhile: str, tmp_path: Path) -> None:
    """By another save: one that ends, whose files have the names of a first one; or one that fails."""
    at = tmp_path / "at"
    locks: list[str] = []

    def lock(path: str) -> Callable[[], None] | None:
        locks.append(path)
        if len(locks) == 1:
            if meanwhile == "filled":
                save(at, 1)
            else:
                at.rmdir()
        return REAL_DISK.lock(path)

    save(at, 2, disk=replace(REAL_DISK, lock=lock))
    assert value(at) == 2
    assert len(names(at)) == 2


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
