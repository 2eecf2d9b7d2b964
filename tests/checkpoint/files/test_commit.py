"""How a checkpoint appears, what it never replaces, how it is found, and who may write and read at once."""

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import accelfn as af
from accelfn.checkpoint import find_checkpoints, folder_for_files, latest_checkpoint
from accelfn.checkpoint.commit import abandon, begin_save
from accelfn.checkpoint.verify import verify_checkpoint
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from accelfn.storage import disk
from accelfn.storage.disk import REAL_DISK, Disk
from tests.checkpoint.campaign import forked
from tests.checkpoint.model_disk import Killed, Model
from tests.checkpoint.small import names, save, value
from tests.checkpoint.watched_disk import installed, watched

TENSORS = "tensors-00000.safetensors"


# --- appearing -----------------------------------------------------------------------------------


def test_a_save_leaves_nothing_but_the_checkpoint(tmp_path: Path) -> None:
    here = tmp_path / "above" / "here"
    here.mkdir(parents=True)  # an empty directory may become one
    save(here, 0)
    assert names(here) == ["manifest.json", TENSORS]
    for number in range(1, 3):
        before = set(names(here))
        save(here, number)
        assert value(here) == number
        assert before & set(names(here)) == {"manifest.json"}
        assert len(names(here)) == 2
    (here / "manifest.json").write_bytes(b"")  # so may a damaged one
    save(here, 4)
    assert value(here) == 4
    assert len(names(here)) == 2
    assert names(tmp_path / "above") == ["here"]


@pytest.mark.parametrize("spelling", ["{}/here/", "{}/here/../here", "{}/./here", "here"])
def test_a_directory_may_be_spelled_in_any_way(
    tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(spelling.format(tmp_path), 1)
    assert names(tmp_path) == ["here"]
    assert value(spelling.format(tmp_path)) == value(tmp_path / "here") == 1


def test_a_directory_is_synced_unless_its_system_knows_no_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def failing(number: int) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            if os.path.isdir(f"/proc/self/fd/{descriptor}"):
                raise OSError(number, "")
            real(descriptor)

        return sync

    monkeypatch.setattr(os, "fsync", failing(errno.EINVAL))
    save(tmp_path / "here", 1)
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match=str(errno.EIO)):
        save(tmp_path / "there", 1)


@pytest.mark.parametrize("lacks", [False, True])
def test_macos_empties_the_cache_of_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    synced: list[str] = []

    def control(descriptor: int, operation: int, *more: int) -> int:
        assert operation == 51
        if lacks:
            raise OSError(errno.ENOTSUP, "")
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return 0

    monkeypatch.setattr(disk, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)

    def sync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))

    if lacks:
        monkeypatch.setattr(os, "fsync", sync)
    save(tmp_path / "here", 1)
    assert str(tmp_path / "here") in synced
    assert any(TENSORS.split(".")[0] in path for path in synced)


# --- refusing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a file", "here is not a directory"),
        ("a pipe", "here is not a directory"),
        ("notes.txt", r"here contains files but no checkpoint.*: notes\.txt"),
        ("manifest.json", r"here contains files but no checkpoint.*: manifest\.json"),
    ],
)
def test_what_is_not_ours_is_never_replaced(tmp_path: Path, what: str, message: str) -> None:
    here = tmp_path / "here"
    if what == "a file":
        here.write_text("mine")
    elif what == "a pipe":
        os.mkfifo(here)
    else:
        here.mkdir()
        (here / what).write_text("{}")
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "here", 2)
    assert names(tmp_path) == ["here"]
    assert not (tmp_path / "here").is_dir() or len(names(tmp_path / "here")) == 1


@pytest.mark.parametrize("name", [".gitkeep", ".DS_Store"])
def test_a_directory_with_litter_alone_is_saved_to(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / name).touch()
    save(tmp_path / "here", 1)
    assert name in names(tmp_path / "here")
    assert af.load_tree(tmp_path / "here")


def test_a_users_files_in_a_checkpoint_stay_when_it_is_replaced() -> None:
    """Also after a kill at any instant."""
    mine = {"/notes.txt", "/files/thesis.txt"}

    def disk_with_notes() -> Model:
        model = Model()
        model.disk().make_folder("/runs")
        save("/runs/here", 1, disk=model.disk())
        model.disk().create("/runs/here/notes.txt")
        model.disk().make_folder("/runs/here/files")
        model.disk().create("/runs/here/files/thesis.txt")
        return model

    trial = disk_with_notes()
    start = len(trial.steps)
    save("/runs/here", 2, disk=trial.disk())
    assert len(trial.steps) >= start + 8
    for number in range(start, len(trial.steps)):
        model = disk_with_notes()
        model.kill_at = number
        with pytest.raises(Killed):
            save("/runs/here", 2, disk=model.disk())
        model.kill_at = -1
        assert mine <= set(model.files("/runs/here")), number
        save("/runs/here", 3, disk=model.disk())
        assert mine <= set(model.files("/runs/here")), number
        assert len(model.files("/runs/here")) == 5


def test_a_parent_that_is_a_file_or_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with pytest.raises(PermissionError, match=r"Permission denied.*here"):
        save(tmp_path / "here", 2, disk=replace(REAL_DISK, make_folder=refuse))
    assert names(tmp_path) == []
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file"):
        save(tmp_path / "file" / "here", 1)


# --- the lock, and what is left behind -----------------------------------------------------------


def test_one_save_at_a_time_writes_to_a_directory(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    running = begin_save(REAL_DISK, tmp_path / "here")
    (tmp_path / "here" / "tensors-00000-0a1b2c3d.safetensors").write_text("of the running save")
    with pytest.raises(CheckpointError, match=r"here is being written or removed by another"):
        save(tmp_path / "here", 2)
    abandon(REAL_DISK, running)
    assert value(tmp_path / "here") == 1
    save(tmp_path / "here", 3)
    assert value(tmp_path / "here") == 3


def without_locks() -> Disk:
    def lock(path: str) -> None:
        del path

    return replace(REAL_DISK, lock=lock)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_without_locks_a_save_removes_its_own_files_and_those_it_replaces_alone(
    tmp_path: Path, is_replaced: bool
) -> None:
    here, disk = tmp_path / "here", without_locks()
    if is_replaced:
        save(here, 1)
    others: list[int] = []

    def rename(source: str, target: str) -> None:
        """Let a second program save, and a third one fail, before the first one commits."""
        if not others:
            others.append(2)
            save(here, 2, disk=disk)
            abandon(disk, begin_save(disk, here))
        os.replace(source, target)

    save(here, 3, disk=replace(disk, rename=rename))
    assert others
    assert value(here) == 3
    verify_checkpoint(here)
    save(here, 4, disk=disk)
    assert value(here) == 4
    # What the second program committed before the first one did stays, since no lock tells whose it is.
    assert len(names(here)) == 3


def test_without_locks_a_checkpoint_is_removed_without_the_files_of_a_save_that_runs(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, step=1)
    running = "tensors-00000-0a1b2c3d.safetensors"
    (tmp_path / "a" / running).write_text("of another program")
    save(tmp_path / "b", 2, step=2)
    for number in (3, 4):
        save(tmp_path / str(number), number, disk=without_locks(), step=number, keep=af.Keep(last=1))
    assert names(tmp_path) == ["4", "a"]
    assert names(tmp_path / "a") == [running]


def test_the_next_save_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save(here, 1)
    left = ("tensors-00000-0a1b2c3d.safetensors", "manifest-0a1b2c3d.json", "files-0a1b2c3d")
    mine = ("tensors-mine.safetensors", "manifest-mine.json", "files", f"{TENSORS}.bak")
    for name in (*left[:2], *mine):
        (here / name).write_bytes(b"part")
    (here / left[2]).mkdir()
    (here / left[2] / "vocab").write_bytes(b"part")
    with pytest.warns(UserWarning, match=r"not part of the checkpoint: files, manifest-mine\.json"):
        af.verify_checkpoint(here)
    save(here, 2)
    assert len(names(here)) == 2 + len(mine)
    assert set(mine) < set(names(here))


def test_a_directory_for_files_is_removed_by_the_next_program_if_its_own_was_killed(tmp_path: Path) -> None:
    def program() -> None:
        with folder_for_files(af.Context(), tmp_path / "here") as folder:
            (tmp_path / "made").write_text(str(folder))
            time.sleep(60)

    child = forked(program)
    while not (tmp_path / "made").exists() or not (tmp_path / "made").read_text():
        time.sleep(0.01)
    left = Path((tmp_path / "made").read_text())
    with folder_for_files(af.Context(), tmp_path / "here"):
        assert left.is_dir()  # its program is running
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with folder_for_files(af.Context(), tmp_path / "other"):
        assert left.is_dir()
    with folder_for_files(af.Context(), tmp_path / "here"):
        assert not left.exists()
    assert names(tmp_path) == ["made"]


# --- finding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "here is not a checkpoint of accelfn: there is no such directory"),
        ([], "the directory is empty"),
        (["random_states_0.pkl", "optimizer.bin"], "a checkpoint of Accelerate.*accelfn checkpoint convert"),
        ([".metadata", "__0_0.distcp"], r"a checkpoint of torch\.distributed\.checkpoint"),
        (["model.safetensors", "config.json"], "the weights of a model"),
        ([TENSORS, "manifest-0a1b2c3d.json"], r"it has no manifest\.json, as after a save that was killed"),
        (["a", "b"], r"has no manifest\.json, but a, b"),
    ],
)
def test_where_there_is_no_checkpoint_the_error_says_what_is_there(
    tmp_path: Path, content: list[str] | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "here").mkdir()
        for name in content:
            (tmp_path / "here" / name).write_bytes(b"")
    for act in (af.verify_checkpoint, latest_checkpoint, value):
        with pytest.raises(NoCheckpointError, match=message):
            act(tmp_path / "here")


def test_checkpoints_are_ordered_by_step_then_by_name_then_by_time(tmp_path: Path) -> None:
    orders: dict[str, tuple[list[tuple[str, int | None]], list[str]]] = {
        "steps": ([("b", 9), ("a", 10), ("c", 1)], ["c", "b", "a"]),
        "numbers": ([("at-9", 50), ("run-3-at-1", None)], ["run-3-at-1", "at-9"]),
        "epochs": ([(f"epoch_{n}_bf16", None) for n in (8, 10, 9)], [f"epoch_{n}_bf16" for n in (8, 9, 10)]),
        "two numbers": (
            [(f"e_{e}_s_{s}", None) for e, s in ((2, 500), (2, 10), (1, 500))],
            ["e_1_s_500", "e_2_s_10", "e_2_s_500"],
        ),
        "times": ([("x", None), ("at-1", None), ("last", None)], ["last", "at-1", "x"]),
    }
    for kind, (saved, expected) in orders.items():
        for age, (name, step) in enumerate(saved):
            path = save(tmp_path / kind / name, 0, step=step)
            os.utime(path / "manifest.json", (1000 - age, 1000 - age))
        assert [path.name for path in find_checkpoints(tmp_path / kind)] == expected
        assert latest_checkpoint(tmp_path / kind) == tmp_path / kind / expected[-1]


def test_other_things_and_links_are_no_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "absent") == ()
    save(tmp_path / "one", 1)
    (tmp_path / "latest").symlink_to("one")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / TENSORS).write_bytes(b"part")
    assert find_checkpoints(tmp_path) == (tmp_path / "one",)
    assert value(tmp_path / "latest") == 1  # a link that is passed by name is followed
    with pytest.raises(NotADirectoryError):
        find_checkpoints(tmp_path / "file")
    with pytest.raises(NoCheckpointError, match="it is a file"):
        af.verify_checkpoint(tmp_path / "one" / "manifest.json")


def test_a_damaged_newest_one_is_an_error_and_an_older_one_is_not(tmp_path: Path) -> None:
    for step in range(3):
        path = save(tmp_path / f"at-{step}", step, step=step)
        os.utime(path / "manifest.json", (1000 + step, 1000 + step))
    (tmp_path / "at-1" / TENSORS).unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "at-2"
    (tmp_path / "at-2" / "manifest.json").write_bytes(b"{}\n")
    with pytest.raises(DamagedCheckpointError, match=r"at-2/manifest\.json is damaged"):
        latest_checkpoint(tmp_path)
    assert find_checkpoints(tmp_path) == (tmp_path / "at-0",)


# --- reading while others write ------------------------------------------------------------------


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    opened: list[str] = []

    def watch(kind: str, path: str) -> None:
        if kind == "open_file" and path.endswith(".safetensors"):
            opened.append(path)
            if len(opened) == 1:
                save(tmp_path / "here", 2)

    with installed(watched(watch)):
        assert value(tmp_path / "here") == 2
    assert len(opened) == 2
    (tmp_path / "here" / os.path.basename(opened[-1])).unlink()  # really missing: not looked for again
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        value(tmp_path / "here")


def test_one_that_is_removed_before_it_is_opened_is_looked_for_again(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"at-{step}", step, step=step)
    opens: list[str] = []

    def watch(kind: str, path: str) -> None:
        opens.extend([path] * (kind == "open_folder"))
        if opens.count(str(tmp_path / "at-2")) == 2:  # after the scan
            opens.clear()
            save(tmp_path / "at-3", 3, step=3, keep=af.Keep(last=1))

    with installed(watched(watch)):
        assert value(tmp_path) == 3


@pytest.mark.parametrize("text", ["plain", ',"tensors":', '"', '\\","tensors":{}', ',\\"tensors\\":'])
def test_a_listing_reads_the_head_of_any_manifest(tmp_path: Path, text: str) -> None:
    """Which ends before the tensors, whose names and tree may look like anything."""
    af.save_state(af.Context(), tmp_path / "at", {text: text, f"{text}2": torch.ones(1)}, step=4, metric=0.25)
    assert find_checkpoints(tmp_path) == (tmp_path / "at",)
    report = af.verify_checkpoint(tmp_path)
    assert (report.step, report.metric) == (4, 0.25)
    manifest = tmp_path / "at" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"float32", b"float64"))
    assert find_checkpoints(tmp_path) == ()
