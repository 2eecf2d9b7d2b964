"""Saves that don't wait for the disk: what they promise without it, and what they still protect."""

import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import accelfn as af
from accelfn.checkpoint import Keep, verify_checkpoint
from accelfn.checkpoint.background import finish_background
from accelfn.context import Context
from accelfn.errors import CheckpointError
from accelfn.testing import run_ranks
from tests.checkpoint.files.test_power_loss import reading
from tests.checkpoint.model_disk import Model, Operation, crashes, settled
from tests.checkpoint.state.test_save_order import ALL, locked
from tests.checkpoint.watched_disk import installed, watched


def save(model: Model, ranks: int, name: str, step: int, **options: Any) -> None:
    """Save on a disk in memory; log that the save returned, and that the disk was waited for."""

    def run(ctx: Context) -> None:
        tree = {"a": torch.tensor([step, 7]), "b": torch.full((3,), float(step))}
        af.save_state(ctx, f"{ALL}/{name}", tree, step=step, **options)
        finish_background(ctx)

    with installed(locked(model.disk())):
        run_ranks(run, ranks)
    model.log.append(Operation("acknowledged", 0))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_power_cut_before_the_disk_was_waited_for_leaves_the_one_before(ranks: int) -> None:
    model = Model()
    save(model, ranks, "a", 1)
    model = settled(model)
    save(model, ranks, "b", 2, keep=Keep(last=1), durability="deferred")
    found: set[tuple[bool, object]] = set()
    seen: set[tuple[object, ...]] = set()
    for end in range(len(model.log) + 1):
        done = any(one.kind == "acknowledged" for one in model.log[:end])
        for state in crashes(model.start, model.log[:end]):
            tree = (done, *state.files().items())
            if tree in seen:
                continue
            seen.add(tree)
            old, new = (reading(state, f"{ALL}/{name}") for name in "ab")
            assert new == 2 or (old == 1 and not done)  # a torn one is never taken for a checkpoint
            found.add((old == 1, new if isinstance(new, int) else "torn" if new else None))
    assert found == {(True, None), (True, "torn"), (True, 2), (False, 2)}


def test_a_torn_one_is_found_when_it_is_loaded_and_the_one_before_is_loaded(tmp_path: Path) -> None:
    ctx = Context()
    af.save_state(ctx, tmp_path / "a", {"w": torch.ones(9)}, step=1)
    af.save_state(ctx, tmp_path / "b", {"w": torch.zeros(9)}, step=2, durability="deferred")
    finish_background(ctx)
    (file,) = (tmp_path / "b").glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-8] + b"\1" * 8)  # as bytes that never reached the disk
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        loaded = cast("dict[str, Any]", af.load_latest(ctx, tmp_path, {"w": torch.zeros(9)}))
    assert loaded["w"].sum() == 9
    assert "Loading" in str(raised[0].message)


def test_it_is_committed_before_the_disk_is_waited_for(tmp_path: Path) -> None:
    may_sync = threading.Event()
    synced: list[str] = []

    def watch(kind: str, path: str) -> None:
        if kind == "sync":
            assert may_sync.wait(30)
            synced.append(Path(path).name.partition("-")[0])

    ctx, tree = Context(), {"w": torch.ones(3)}
    af.save_state(ctx, tmp_path / "a", tree, step=1)
    with installed(watched(watch)):
        af.save_state(ctx, tmp_path / "b", tree, step=2, keep=Keep(last=1), durability="deferred")
        assert [verify_checkpoint(tmp_path / name).step for name in "ab"] == [1, 2]
        with pytest.raises(CheckpointError, match="b is being written"):
            af.save_tree(tmp_path / "b", tree)  # another program's
        may_sync.set()
        finish_background(ctx)
    assert synced == ["tensors", "manifest.json"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    af.save_tree(tmp_path / "b", tree)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_of_the_disk_reaches_the_next_save_and_nothing_is_removed(
    tmp_path: Path, ranks: int
) -> None:
    def run(ctx: Context) -> None:
        def watch(kind: str, path: str) -> None:
            if kind == "sync" and path.endswith(".safetensors"):
                raise OSError(5, "the disk failed", path)

        tree = {"a": torch.ones(3), "b": torch.ones(3)}
        af.save_state(ctx, tmp_path / "a", tree, step=1)
        with installed(watched(watch)):
            af.save_state(ctx, tmp_path / "b", tree, step=2, keep=Keep(last=1), durability="deferred")
            with pytest.raises(OSError, match="the disk failed"):
                af.save_state(ctx, tmp_path / "c", tree, step=3)
        af.save_state(ctx, tmp_path / "b", tree, step=4)  # its lock was released

    run_ranks(run, ranks, on="processes")
    assert {path.name: verify_checkpoint(path).step for path in tmp_path.iterdir()} == {"a": 1, "b": 4}


def test_one_that_replaces_another_waits_for_the_disk(tmp_path: Path) -> None:
    kinds: list[str] = []
    ctx = Context()
    af.save_state(ctx, tmp_path / "at", {"step": 1})
    with installed(watched(lambda kind, path: kinds.append(kind))):
        af.save_state(ctx, tmp_path / "at", {"step": 2}, durability="deferred")
    manifest = kinds.index("rename")
    assert "sync" in kinds[:manifest]
    assert "sync" not in kinds[manifest:]
    assert af.load_tree(tmp_path / "at") == {"step": 2}


def test_it_survives_a_kill_at_once(tmp_path: Path) -> None:
    program = (
        "import os, sys, torch, accelfn as af; "
        "af.save_state(af.Context(), sys.argv[1], {'w': torch.arange(1 << 20)}, durability='deferred'); "
        "os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path / "at")], check=False, timeout=120)
    assert ended.returncode == -9
    assert torch.equal(af.load_tree(tmp_path / "at")["w"], torch.arange(1 << 20))
    af.save_state(Context(), tmp_path / "at", {"step": 2})  # the lock has ended with the program


def test_its_values_are_checked(tmp_path: Path) -> None:
    save: Any = af.save_state
    with pytest.raises(ValueError, match='"immediate" or "deferred", got \'later\''):
        save(Context(), tmp_path / "at", {}, durability="later")
    with pytest.raises(ValueError, match="leave durability out"):
        save(Context(), tmp_path / "at", {}, True, durability="deferred")
    assert not (tmp_path / "at").exists()


def test_the_accelerator_passes_it_on(tmp_path: Path) -> None:
    accelerator = af.Accelerator(cpu=True)
    model: Any = accelerator.prepare(torch.nn.Linear(1, 1))
    kinds: list[str] = []
    with installed(watched(lambda kind, path: kinds.append(f"{kind} {threading.current_thread().name}"))):
        accelerator.save_state(str(tmp_path / "at"), durability="deferred")
        finish_background(accelerator.context)
    assert any(kind.startswith("sync accelfn-save") for kind in kinds)
    assert not any(kind.startswith("sync MainThread") for kind in kinds)
    del model
