"""Which checkpoints stay, and that only the others go."""

import math
import os
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.checkpoint import Keep, find_checkpoints, plan_retention, prune_checkpoints, verify_checkpoint
from accelfn.checkpoint.commit import abandon, begin_save
from accelfn.errors import ConfigurationError
from accelfn.storage.disk import REAL_DISK
from tests.checkpoint.small import names, save, value

counts = st.none() | st.integers(1, 4)
modes = st.sampled_from(["min", "max"])
keeps = st.builds(Keep, last=counts, every=counts, best=counts, mode=modes)
metrics = st.none() | st.floats(allow_nan=True)
lists = st.lists(st.tuples(st.integers(0, 12), metrics), max_size=8)


def slow_retention(checkpoints: list[tuple[int, float | None]], keep: Keep) -> set[int]:
    """Return the same indices, by counting for each checkpoint and rule how many are better."""
    if (keep.last, keep.every, keep.best) == (None, None, None):
        return set(range(len(checkpoints)))
    stay: set[int] = set()
    for index, (step, metric) in enumerate(checkpoints):
        newer = sum((other, place) > (step, index) for place, (other, _) in enumerate(checkpoints))
        if newer < (keep.last or 1) or (keep.every and step % keep.every == 0):
            stay.add(index)
        if keep.best and metric is not None and not math.isnan(metric):
            better = 0
            for place, (other, score) in enumerate(checkpoints):
                if score is not None and not math.isnan(score):
                    ahead = score < metric if keep.mode == "min" else score > metric
                    better += ahead or (score == metric and (other, place) > (step, index))
            if better < keep.best:
                stay.add(index)
    return stay


@given(lists, keeps)
def test_those_stay_that_a_rule_wants(checkpoints: list[tuple[int, float | None]], keep: Keep) -> None:
    assert plan_retention(checkpoints, keep) == tuple(sorted(slow_retention(checkpoints, keep)))


def test_of_equal_metrics_the_newer_stays_and_nan_is_never_best() -> None:
    scores = [(1, 0.5), (2, 0.5), (3, math.nan), (4, None), (5, 0.9), (6, math.nan)]
    assert plan_retention(scores, Keep(best=1)) == (1, 5)
    assert plan_retention(scores, Keep(best=2)) == (0, 1, 5)
    assert plan_retention(scores, Keep(best=1, mode="max")) == (4, 5)
    assert plan_retention(scores, Keep(best=5)) == (0, 1, 4, 5)
    assert plan_retention(scores[:1] + scores[2:3] + scores[1:2], Keep(best=1)) == (1, 2)


@given(lists, keeps)
def test_the_newest_always_stays_and_pruning_twice_is_pruning_once(
    checkpoints: list[tuple[int, float | None]], keep: Keep
) -> None:
    stay = plan_retention(checkpoints, keep)
    if checkpoints:
        assert max(range(len(checkpoints)), key=lambda index: (checkpoints[index][0], index)) in stay
    rest = [checkpoints[index] for index in stay]
    assert plan_retention(rest, keep) == tuple(range(len(rest)))


@pytest.mark.parametrize("name", ["last", "every", "best"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_rule_that_makes_no_sense_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a whole number from 1 on"):
        Keep(**{name: value})  # pyright: ignore[reportArgumentType]


def test_an_unknown_mode_is_refused() -> None:
    mode: Literal["min"] = "best"  # pyright: ignore[reportAssignmentType]
    with pytest.raises(ConfigurationError, match="mode must be 'min' or 'max', got 'best'"):
        Keep(mode=mode)


def test_the_others_are_removed_and_what_stays_is_whole(tmp_path: Path) -> None:
    for step, metric in enumerate([0.5, 0.1, 0.4, 0.3]):
        save(tmp_path / f"at-{step}", step, step=step, metric=metric)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "more").mkdir()
    removed = prune_checkpoints(tmp_path, Keep(last=1, best=1))
    assert removed == (tmp_path / "at-0", tmp_path / "at-2")
    assert names(tmp_path) == ["at-1", "at-3", "more", "notes.txt"]
    assert all(verify_checkpoint(path) for path in find_checkpoints(tmp_path))
    assert prune_checkpoints(tmp_path, Keep(last=1, best=1)) == ()


def test_what_was_just_saved_stays_whatever_the_rules_say(tmp_path: Path) -> None:
    assert plan_retention([(300, None), (400, None), (250, None)], Keep(last=2), saved=2) == (0, 1, 2)
    for step in (300, 400, 250):
        assert value(save(tmp_path / f"step-{step}", step, step=step, keep=Keep(last=2))) == step
    save(tmp_path / "step-260", 260, step=260, keep=Keep(last=2))
    assert [path.name for path in find_checkpoints(tmp_path)] == ["step-260", "step-300", "step-400"]


def test_names_are_ordered_by_all_their_numbers(tmp_path: Path) -> None:
    for epoch in (8, 9, 10):
        save(tmp_path / f"epoch_{epoch}_bf16", epoch)
    assert prune_checkpoints(tmp_path, Keep(last=2)) == (tmp_path / "epoch_8_bf16",)
    for epoch, step in ((1, 500), (2, 10), (2, 500)):
        save(tmp_path / "two" / f"epoch_{epoch}_step_{step}", epoch)
    assert prune_checkpoints(tmp_path / "two", Keep(last=1, every=500)) == (tmp_path / "two/epoch_2_step_10",)


def test_a_checkpoint_with_a_users_files_stays_and_litter_goes_with_it(tmp_path: Path) -> None:
    for step in range(4):
        save(tmp_path / f"at-{step}", step, step=step)
    (tmp_path / "at-0" / "notes.txt").write_text("mine")
    (tmp_path / "at-1" / ".DS_Store").write_text("")
    (tmp_path / "at-2" / ".env").write_text("mine")
    with (
        pytest.warns(UserWarning, match=r"at-0 was not removed.*notes\.txt"),
        pytest.warns(UserWarning, match=r"at-2 was not removed.*\.env"),
    ):
        assert prune_checkpoints(tmp_path, Keep(last=1)) == (tmp_path / "at-1",)
    assert (tmp_path / "at-0" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "at-2" / ".env").read_text() == "mine"


def test_what_is_damaged_or_being_written_is_left_alone(tmp_path: Path) -> None:
    for step in range(5):
        save(tmp_path / f"at-{step}", step, step=step)
    (tmp_path / "at-4" / "manifest.json").write_bytes(b"{}")
    (tmp_path / "at-3" / "tensors-00000.safetensors").unlink()
    running = [begin_save(REAL_DISK, tmp_path / name) for name in ("at-1", "new")]
    (tmp_path / "new" / "tensors-00000.safetensors").write_bytes(b"part")
    assert prune_checkpoints(tmp_path, Keep(last=1)) == (tmp_path / "at-0",)
    assert names(tmp_path) == ["at-1", "at-2", "at-3", "at-4", "new"]
    for other in running:
        abandon(REAL_DISK, other)


def test_what_killed_saves_left_is_removed(tmp_path: Path) -> None:
    save(tmp_path / "at-1", 1, step=1)
    for name in ("at-2/tensors-00000.safetensors", ".at-3.staging-0a1b2c3d/vocab", "mine/notes"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"part")
    (tmp_path / ".at-3.staging-0a1b2c3d" / "link").symlink_to(tmp_path / "mine")
    assert prune_checkpoints(tmp_path, Keep(last=1)) == ()
    assert names(tmp_path) == ["at-1", "at-2", "mine"]  # at-2 may be a copy on its way
    for path in (tmp_path / "at-2" / "tensors-00000.safetensors", tmp_path / "at-2", tmp_path / "mine"):
        os.utime(path, (1000, 1000))
    assert prune_checkpoints(tmp_path, Keep(last=1)) == ()
    assert names(tmp_path) == ["at-1", "mine"]
    assert names(tmp_path / "mine") == ["notes"]  # no link is followed
