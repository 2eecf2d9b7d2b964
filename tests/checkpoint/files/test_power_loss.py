"""A power cut at any instant of a save or a removal leaves the old checkpoint or the new one, whole."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch

import accelfn as af
from accelfn.checkpoint.commit import begin_save, clean
from accelfn.context import Context
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.storage.disk import make_folders
from accelfn.testing import run_ranks
from tests.checkpoint.model_disk import Killed, Model, Operation, crashes, settled
from tests.checkpoint.watched_disk import installed, locked

RUNS = "/runs/all"
HERE = f"{RUNS}/here"
FILES = "/runs/files"
Act = Callable[[Model], None]
Outcome = frozenset[int | None]  # steps of checkpoints; None for no checkpoint


class Scenario(NamedTuple):
    """What is done to a disk, and what may be found on it after a power cut."""

    before: Sequence[str]  # checkpoints of steps 0, 1, ...; FILES for a directory of files
    act: Act
    until: Mapping[str, Outcome]  # before the end is acknowledged
    after: Mapping[str, Outcome]


def save(
    model: Model,
    directory: str = HERE,
    step: int = 5,
    ranks: int = 1,
    keep: af.Keep | None = None,
    files: str | None = None,
) -> None:
    def run(ctx: Context) -> None:
        tree = {"a": torch.tensor([step, 7]), "b": torch.full((3,), float(step))}
        af.save_state(ctx, directory, tree, step=step, keep=keep, files=files)

    with installed(model.disk() if ranks == 1 else locked(model.disk())):
        run(Context()) if ranks == 1 else run_ranks(run, ranks)
    model.log.append(Operation("acknowledged", 0))


def prune(model: Model) -> None:
    af.checkpoint.prune_checkpoints(RUNS, af.Keep(last=1), disk=model.disk())


def one_prune(model: Model) -> None:
    prune(model)
    model.log.append(Operation("acknowledged", 0))


def save_with_files(model: Model) -> None:
    """A save takes over a file that was written and not synced."""
    disk = model.disk()
    descriptor = disk.create(f"{FILES}/inner/config")
    disk.write(descriptor, memoryview(b"five"), 0)
    disk.close(descriptor)
    save(model, files=FILES)


def save_to_empty(model: Model) -> None:
    model.disk().make_folder(HERE)
    save(model)


def killed_at_its_last(kind: str, act: Act) -> Act:
    """Return a program that is killed at its last operation of a kind."""

    def carry_out(model: Model) -> None:
        trial = settled(model)
        act(trial)
        model.kill_at = max(number for number, step in enumerate(trial.steps) if step == kind)
        with contextlib.suppress(Killed):
            act(model)
        model.kill_at = -1

    return carry_out


def then(*acts: Act) -> Act:
    def carry_out(model: Model) -> None:
        for act in acts:
            act(model)

    return carry_out


def failing_save(model: Model) -> None:
    """The disk fails to sync the directory after the manifest was swapped."""
    trial = settled(model)
    save(trial)
    model.fail_at = 1 + max(number for number, step in enumerate(trial.steps) if step == "rename")
    with pytest.raises(OSError, match=r"the disk failed.*/runs/all/here"):
        save(model)


def tidy(model: Model) -> None:
    disk = model.disk()
    clean(disk, begin_save(disk, HERE))


def outcome(*steps: int | None) -> Outcome:
    return frozenset(steps)


FIRST, REPLACED, NEW = {HERE: outcome(None, 5)}, {HERE: outcome(0, 5)}, {HERE: outcome(5)}
PRUNED = {f"{RUNS}/a": outcome(0, None), f"{RUNS}/b": outcome(1, None), f"{RUNS}/c": outcome(2)}
KEPT = {path: found - {0, 1} for path, found in PRUNED.items()}
ROTATED = {f"{RUNS}/a": outcome(0, None), **FIRST}
rotated = partial(save, keep=af.Keep(last=1))
SCENARIOS = {
    "first": Scenario((), save, FIRST, NEW),
    "first, of two ranks": Scenario((), partial(save, ranks=2), FIRST, NEW),
    "over an empty directory": Scenario((f"{RUNS}/other",), save_to_empty, FIRST, NEW),
    "replacing": Scenario((HERE,), save, REPLACED, NEW),
    "replacing, of two ranks": Scenario((HERE,), partial(save, ranks=2), REPLACED, NEW),
    "replacing twice": Scenario((HERE,), then(save, save), REPLACED, NEW),
    "rotating": Scenario((f"{RUNS}/a",), rotated, ROTATED, NEW),
    "rotating, of two ranks": Scenario((f"{RUNS}/a",), partial(rotated, ranks=2), ROTATED, NEW),
    "with files": Scenario((FILES,), save_with_files, FIRST, NEW),
    "replacing, with files": Scenario((HERE, FILES), save_with_files, REPLACED, NEW),
    "killed before its last sync, then cleaned": Scenario(
        (HERE,), then(killed_at_its_last("sync_folder", save), tidy), REPLACED, {}
    ),
    "killed before its swap, then done again": Scenario(
        (HERE,), then(killed_at_its_last("rename", save), save), REPLACED, NEW
    ),
    "failing": Scenario((HERE,), failing_save, REPLACED, {}),
    "prune": Scenario(tuple(PRUNED), one_prune, PRUNED, KEPT),
    "prune, killed before its sync, then done again": Scenario(
        tuple(PRUNED), then(killed_at_its_last("sync_folder", prune), prune), PRUNED, {}
    ),
}


def disk_with(names: Sequence[str]) -> Model:
    model = Model()
    for step, name in enumerate(names):
        if name == FILES:
            make_folders(model.disk(), f"{FILES}/inner")
        else:
            save(model, name, step)
    return settled(model)


def reading(model: Model, directory: str = HERE) -> int | str | None:
    """Return the step of a checkpoint; None for no checkpoint, a text for a torn one."""
    try:
        return af.verify_checkpoint(directory, disk=model.disk()).step
    except NoCheckpointError:
        return None
    except DamagedCheckpointError as error:
        return str(error)


def violations(scenario: Scenario, skip: tuple[str, int] | None = None) -> tuple[list[str], int]:
    """Cut the power at every instant, in every way, and list what broke a promise; count the states."""
    model = disk_with(scenario.before)
    model.skip = skip
    scenario.act(model)
    broken: list[str] = []
    seen: set[object] = set()
    for end in range(len(model.log) + 1):
        done = any(step.kind == "acknowledged" for step in model.log[:end])
        expected = {**scenario.until, **(scenario.after if done else {})}
        for state in crashes(model.start, model.log[:end]):
            tree = (done, *state.files().items())
            if tree in seen:
                continue
            seen.add(tree)
            steps = {path: reading(state, path) for path in expected}
            had_one = not expected.keys().isdisjoint(scenario.before)
            if any(step not in expected[path] for path, step in steps.items()) or (
                had_one and set(steps.values()) == {None}
            ):
                broken.append(f"after {end} operations: {steps}")
        if skip is not None and broken:
            break
    return broken, len(seen)


@pytest.mark.parametrize("name", SCENARIOS)
def test_old_or_new_is_there_whole_after_any_power_cut(name: str) -> None:
    broken, num_states = violations(SCENARIOS[name])
    assert broken == []
    assert num_states > 5


def test_every_sync_is_needed() -> None:
    alone = {name: scenario for name, scenario in SCENARIOS.items() if "two ranks" not in name}
    sites: set[tuple[str, int]] = set()
    for scenario in alone.values():
        model = disk_with(scenario.before)
        model.sites.clear()
        scenario.act(model)
        sites |= model.sites
    assert len(sites) >= 7
    needless = [
        site
        for site in sorted(sites)
        if not any(violations(scenario, site)[0] for scenario in alone.values())
    ]
    assert needless == []


def test_what_is_listed_after_a_power_cut_is_whole() -> None:
    model = disk_with(tuple(PRUNED))
    one_prune(model)
    for end in range(len(model.log) + 1):
        for state in crashes(model.start, model.log[:end]):
            listed = af.find_checkpoints(RUNS, disk=state.disk())
            assert [reading(state, str(path)) for path in listed][-1] == 2


@pytest.mark.parametrize("fails", [False, True], ids=["killed", "failing"])
@pytest.mark.parametrize("name", ["first", "replacing"])
def test_a_save_that_ends_anywhere_leaves_old_or_new_and_the_next_one_works(name: str, fails: bool) -> None:
    scenario = SCENARIOS[name]
    trial = disk_with(scenario.before)
    save(trial)
    swap = max(number for number, step in enumerate(trial.steps) if step == "rename")
    for number in range(len(trial.steps)):
        model = disk_with(scenario.before)
        setattr(model, "fail_at" if fails else "kill_at", number)
        if not fails or number <= swap + 1:
            with pytest.raises(OSError if fails else Killed):
                save(model)
        else:
            save(model)  # only the removal of old files failed
        model.kill_at = -1
        found = reading(model)
        assert found in scenario.until[HERE]
        assert not fails or (found == 5) == (number > swap)
        assert not fails or scenario.before or number > swap or f"{HERE}/" not in model.files()
        save(model, step=9)
        assert reading(model) == 9
        assert len(model.files(HERE)) == 2  # the manifest and the tensors
