"""A power cut at any instant of a save or a removal leaves the old checkpoint or the new one, whole."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch

from accelfn.checkpoint.commit import clean
from accelfn.checkpoint.disk import make_folders
from accelfn.checkpoint.find import find_checkpoints
from accelfn.checkpoint.keep import Keep, prune_checkpoints
from accelfn.checkpoint.verify import verify_checkpoint
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from tests.checkpoint.model_disk import Killed, Model, Operation, crashes, settled
from tests.checkpoint.small import save_small

HERE = "/runs/all/here"
FILES = "/runs/files"
Outcome = frozenset[int | None]  # steps of checkpoints; None for no checkpoint


class Scenario(NamedTuple):
    """What is done to a disk, and what may be found on it after a power cut."""

    before: Sequence[str]  # checkpoints of steps 0, 1, ...; FILES for a directory of files
    act: Callable[[Model], None]
    until: Mapping[str, Outcome]  # before the end is acknowledged
    after: Mapping[str, Outcome]


def save(model: Model, directory: str, step: int) -> None:
    tensors = ({"a": torch.tensor([step, 7])}, {"b": torch.full((3,), float(step))})
    save_small(directory, *tensors, disk=model.disk(), step=step)


def acknowledge(model: Model) -> None:
    model.log.append(Operation("acknowledged", 0))


def one_save(model: Model) -> None:
    save(model, HERE, 5)
    acknowledge(model)


def prune(model: Model) -> None:
    prune_checkpoints("/runs/all", Keep(last=1), disk=model.disk())


def one_prune(model: Model) -> None:
    prune(model)
    acknowledge(model)


def save_with_files(model: Model) -> None:
    """A save takes over a file that was written and not synced."""
    disk = model.disk()
    descriptor = disk.create(f"{FILES}/inner/config")
    disk.write(descriptor, memoryview(b"five"), 0)
    disk.close(descriptor)
    save_small(HERE, {"a": torch.tensor(5)}, disk=disk, step=5, files=FILES)
    acknowledge(model)


def save_to_empty(model: Model) -> None:
    model.disk().make_folder(f"{HERE}")
    one_save(model)


def killed_at_its_last(kind: str, act: Callable[[Model], None]) -> Callable[[Model], None]:
    """Return a program that is killed at its last operation of a kind."""

    def carry_out(model: Model) -> None:
        trial = settled(model)
        act(trial)
        model.kill_at = max(number for number, step in enumerate(trial.steps) if step == kind)
        with contextlib.suppress(Killed):
            act(model)
        model.kill_at = -1

    return carry_out


def then(*acts: Callable[[Model], None]) -> Callable[[Model], None]:
    def carry_out(model: Model) -> None:
        for act in acts:
            act(model)

    return carry_out


def tidy(model: Model) -> None:
    clean(model.disk(), HERE)


def failing_save(model: Model) -> None:
    """The disk fails to sync the directory after the manifest was swapped."""
    trial = settled(model)
    one_save(trial)
    model.fail_at = 1 + max(number for number, step in enumerate(trial.steps) if step == "rename")
    with pytest.raises(OSError, match=r"the disk failed.*/runs/all/here"):
        save(model, HERE, 5)


def outcome(*steps: int | None) -> Outcome:
    return frozenset(steps)


PRUNED = {"/runs/all/a": outcome(0, None), "/runs/all/b": outcome(1, None), "/runs/all/c": outcome(2)}
SCENARIOS = {
    "first": Scenario((), one_save, {HERE: outcome(None, 5)}, {HERE: outcome(5)}),
    "over an empty directory": Scenario(
        ("/runs/all/other",), save_to_empty, {HERE: outcome(None, 5)}, {HERE: outcome(5)}
    ),
    "replacing": Scenario((HERE,), one_save, {HERE: outcome(0, 5)}, {HERE: outcome(5)}),
    "replacing twice": Scenario((HERE,), then(one_save, one_save), {HERE: outcome(0, 5)}, {HERE: outcome(5)}),
    "with files": Scenario((FILES,), save_with_files, {HERE: outcome(None, 5)}, {HERE: outcome(5)}),
    "replacing, with files": Scenario(
        (HERE, FILES), save_with_files, {HERE: outcome(0, 5)}, {HERE: outcome(5)}
    ),
    "killed before its last sync, then cleaned": Scenario(
        (HERE,), then(killed_at_its_last("sync_folder", one_save), tidy), {HERE: outcome(0, 5)}, {}
    ),
    "killed before its swap, then done again": Scenario(
        (HERE,),
        then(killed_at_its_last("rename", one_save), one_save),
        {HERE: outcome(0, 5)},
        {HERE: outcome(5)},
    ),
    "failing": Scenario((HERE,), failing_save, {HERE: outcome(0, 5)}, {}),
    "prune": Scenario(
        tuple(PRUNED),
        one_prune,
        PRUNED,
        {path: found - {0, 1} for path, found in PRUNED.items()},
    ),
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


def reading(model: Model, directory: str) -> int | str | None:
    """Return the step of a checkpoint; None for no checkpoint, a text for a torn one."""
    try:
        return verify_checkpoint(directory, disk=model.disk()).step
    except NoCheckpointError:
        return None
    except DamagedCheckpointError as error:
        return str(error)


def violations(scenario: Scenario, skip: tuple[str, int] | None = None) -> tuple[list[str], Model, int]:
    """Cut the power at every instant, in every way, and list what broke a promise."""
    model = disk_with(scenario.before)
    model.skip = skip
    scenario.act(model)
    found: list[str] = []
    seen: set[object] = set()
    for end in range(len(model.log) + 1):
        done = any(step.kind == "acknowledged" for step in model.log[:end])
        expected = {**scenario.until, **(scenario.after if done else {})}
        for state in crashes(model.start, model.log[:end]):
            tree = (done, *state.files().items())
            if tree in seen:
                continue
            seen.add(tree)
            for path, allowed in expected.items():
                step = reading(state, path)
                if step not in allowed:
                    found.append(f"after {end} operations {path} has {step}")
        if skip is not None and found:
            break
    return found, model, len(seen)


@pytest.mark.parametrize("name", SCENARIOS)
def test_old_or_new_is_there_whole_after_any_power_cut(name: str) -> None:
    found, model, num_states = violations(SCENARIOS[name])
    assert found == []
    assert num_states > 5
    assert len(model.log) > 5


def test_every_sync_is_needed() -> None:
    sites: set[tuple[str, int]] = set()
    for scenario in SCENARIOS.values():
        model = disk_with(scenario.before)
        model.sites.clear()
        scenario.act(model)
        sites |= model.sites
    assert len(sites) >= 7
    needless = [
        site
        for site in sorted(sites)
        if not any(violations(scenario, site)[0] for scenario in SCENARIOS.values())
    ]
    assert needless == []


def test_what_is_listed_after_a_power_cut_is_whole() -> None:
    model = disk_with(tuple(PRUNED))
    one_prune(model)
    for end in range(len(model.log) + 1):
        for state in crashes(model.start, model.log[:end]):
            listed = find_checkpoints("/runs/all", disk=state.disk())
            assert [reading(state, str(path)) for path in listed][-1] == 2


@pytest.mark.parametrize("name", ["first", "replacing"])
def test_a_save_that_is_killed_anywhere_leaves_old_or_new_and_the_next_one_works(name: str) -> None:
    scenario = SCENARIOS[name]
    trial = disk_with(scenario.before)
    scenario.act(trial)
    for number in range(len(trial.steps)):
        model = disk_with(scenario.before)
        model.kill_at = number
        with pytest.raises(Killed):
            scenario.act(model)
        model.kill_at = -1
        assert reading(model, HERE) in scenario.until[HERE]
        save(model, HERE, 9)
        assert reading(model, HERE) == 9
        assert len(model.files(HERE)) == 3  # two files of tensors and the manifest


@pytest.mark.parametrize("name", ["first", "replacing"])
def test_a_save_whose_disk_fails_anywhere_leaves_the_old_one_or_is_complete(name: str) -> None:
    scenario = SCENARIOS[name]
    trial = disk_with(scenario.before)
    scenario.act(trial)
    swap = max(number for number, step in enumerate(trial.steps) if step == "rename")
    for number in range(len(trial.steps)):
        model = disk_with(scenario.before)
        model.fail_at = number
        if number <= swap + 1:
            with pytest.raises(OSError, match="the disk failed"):
                scenario.act(model)
            old = 0 if scenario.before else None
            assert reading(model, HERE) == (old if number <= swap else 5)
            assert old == 0 or number > swap or f"{HERE}/" not in model.files()
        else:
            scenario.act(model)  # only the removal of old files failed
            assert reading(model, HERE) == 5
        save(model, HERE, 9)
        assert reading(model, HERE) == 9
        assert len(model.files(HERE)) == 3
