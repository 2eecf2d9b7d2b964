"""How a checkpoint appears, what it never replaces, and how it is found."""

import errno
import inspect
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accelfn.checkpoint import Keep, find_checkpoints, latest_checkpoint, prune_checkpoints, verify_checkpoint
from accelfn.checkpoint.commit import abandon, begin_save, find_leftovers, is_dead, scratch_folder
from accelfn.checkpoint.disk import REAL_DISK, Disk, Folder, Status
from accelfn.checkpoint.files import Box, read_boxes
from accelfn.checkpoint.find import OpenCheckpoint, locate, read_checkpoint, scan
from accelfn.checkpoint.manifest import (
    Manifest,
    Piece,
    StoredFile,
    StoredTensor,
    format_manifest,
    parse_head,
    parse_manifest,
)
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError
from tests.checkpoint.model_disk import Killed, Model
from tests.checkpoint.small import load_small, save_small

TENSOR_FILES = ("tensors-00000.safetensors", "tensors-00001.safetensors")


def save(directory: Path, value: int, *, disk: Disk = REAL_DISK, step: int | None = None) -> None:
    save_small(directory, {"x": torch.tensor(value)}, {"y": torch.ones(5)}, disk=disk, step=step)


def value(directory: Path) -> int:
    return int(load_small(directory)["x"])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- appearing -----------------------------------------------------------------------------------


def test_a_save_leaves_nothing_but_the_checkpoint(tmp_path: Path) -> None:
    here = tmp_path / "above" / "here"
    save(here, 0)
    assert names(here) == ["manifest.json", *TENSOR_FILES]
    for number in range(1, 3):
        before = set(names(here))
        save(here, number)
        assert value(here) == number
        assert before & set(names(here)) == {"manifest.json"}
        assert len(names(here)) == 3
    assert names(tmp_path / "above") == ["here"]


def test_an_empty_directory_may_become_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    save(tmp_path / "here", 4)
    assert value(tmp_path / "here") == 4
    assert names(tmp_path / "here") == ["manifest.json", *TENSOR_FILES]


def test_a_damaged_checkpoint_may_be_replaced(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    (tmp_path / "here" / "manifest.json").write_bytes(b"")
    save(tmp_path / "here", 2)
    assert value(tmp_path / "here") == 2
    assert len(names(tmp_path / "here")) == 3


@pytest.mark.parametrize("spelling", ["{}/here/", "{}/here/../here", "{}/./here"])
def test_a_directory_may_be_spelled_in_any_way(tmp_path: Path, spelling: str) -> None:
    save(Path(spelling.format(tmp_path)), 1)
    assert names(tmp_path) == ["here"]
    assert locate(REAL_DISK, spelling.format(tmp_path)) == str(tmp_path / "here")


def test_a_relative_directory_is_one_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("here"), 3)
    assert value(tmp_path / "here") == value(Path("here")) == 3


# --- refusing ------------------------------------------------------------------------------------


def as_file(path: Path) -> None:
    path.write_text("mine")


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def with_notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def with_a_manifest_of_something_else(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text("{}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (as_file, "here is not a directory"),
        (as_pipe, "here is not a directory"),
        (with_notes, r"here contains files but no checkpoint.*: notes\.txt"),
        (with_a_manifest_of_something_else, r"here contains files but no checkpoint.*: manifest\.json"),
    ],
)
def test_what_is_not_ours_is_never_replaced(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "here")
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "here", 2)
    assert names(tmp_path) == ["here"]
    assert not (tmp_path / "here").is_dir() or len(names(tmp_path / "here")) == 1


def test_a_users_files_in_a_checkpoint_stay_when_it_is_replaced() -> None:
    """Also after a kill at any instant."""

    def disk_with_notes() -> Model:
        model = Model()
        model.disk().make_folder("/runs")
        save_small("/runs/here", {"x": torch.tensor(1)}, disk=model.disk())
        model.disk().create("/runs/here/notes.txt")
        model.disk().make_folder("/runs/here/files")
        model.disk().create("/runs/here/files/thesis.txt")
        return model

    trial = disk_with_notes()
    start = len(trial.steps)
    save_small("/runs/here", {"x": torch.tensor(2)}, disk=trial.disk())
    assert len(trial.steps) >= start + 8
    for number in range(start, len(trial.steps)):
        model = disk_with_notes()
        model.kill_at = number
        with pytest.raises(Killed):
            save_small("/runs/here", {"x": torch.tensor(2)}, disk=model.disk())
        model.kill_at = -1
        assert {"/notes.txt", "/files/thesis.txt"} <= set(model.files("/runs/here")), number
        save_small("/runs/here", {"x": torch.tensor(3)}, disk=model.disk())
        assert {"/notes.txt", "/files/thesis.txt"} <= set(model.files("/runs/here")), number
        assert len(model.files("/runs/here")) == 5


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_checkpoint_or_its_parent_may_be_a_link_to_another_file_system(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("both are one file system")
        (tmp_path / "runs").symlink_to(elsewhere)
        (tmp_path / "best").symlink_to(f"{elsewhere}/here")
        for number in range(3):
            save(tmp_path / "runs" / "here", number)
        assert value(tmp_path / "runs" / "here") == 2
        save(tmp_path / "best", 3)
        assert value(tmp_path / "runs" / "here") == 3


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file"):
        save(tmp_path / "file" / "here", 1)


def test_a_parent_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with pytest.raises(PermissionError, match=r"Permission denied.*here"):
        save(tmp_path / "here", 2, disk=replace(REAL_DISK, make_folder=refuse))
    assert names(tmp_path) == []


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


def test_a_disk_without_locks_has_none(tmp_path: Path) -> None:
    def lock(path: str) -> None:
        del path

    disk = replace(REAL_DISK, lock=lock)
    save(tmp_path / "here", 1, disk=disk)
    assert value(tmp_path / "here") == 1
    assert not is_dead(disk, str(tmp_path / "here"))


def test_the_next_save_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save(here, 1)
    left = ("tensors-00000-0a1b2c3d.safetensors", "manifest-0a1b2c3d.json", "files-0a1b2c3d")
    mine = ("tensors-mine.safetensors", "manifest-mine.json", "files", "tensors-00000.safetensors.bak")
    for name in (*left[:2], *mine):
        (here / name).write_bytes(b"part")
    (here / left[2]).mkdir()
    (here / left[2] / "vocab").write_bytes(b"part")
    with pytest.warns(UserWarning, match=r"not part of the checkpoint: files, manifest-mine\.json"):
        verify_checkpoint(here)
    save(here, 2)
    assert len(names(here)) == 3 + len(mine)
    assert set(mine) < set(names(here))
    assert not set(left) & set(names(here))


SCRATCH = """
import sys, accelfn.checkpoint.commit as commit
from accelfn.checkpoint.disk import REAL_DISK
with commit.scratch_folder(REAL_DISK, sys.argv[1]) as path:
    print(path, flush=True)
    sys.stdin.read()
"""


def test_a_directory_to_write_in_is_removed_by_the_next_program_if_its_own_was_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRATCH, str(tmp_path / "here")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        path = program.stdout.readline().strip()
        with scratch_folder(REAL_DISK, str(tmp_path / "here")) as second:
            assert find_leftovers(REAL_DISK, str(tmp_path)) == sorted([path, second])
        assert not is_dead(REAL_DISK, path)
        program.kill()
    with scratch_folder(REAL_DISK, str(tmp_path / "other")):
        assert os.path.isdir(path)
    with scratch_folder(REAL_DISK, str(tmp_path / "here")):
        assert not os.path.exists(path)
    assert names(tmp_path) == []


# --- finding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "here is not a checkpoint of accelfn: there is no such directory"),
        ([], "the directory is empty"),
        (["random_states_0.pkl", "optimizer.bin"], "a checkpoint of Accelerate.*accelfn checkpoint convert"),
        ([".metadata", "__0_0.distcp"], r"a checkpoint of torch\.distributed\.checkpoint"),
        (["model.safetensors", "config.json"], "the weights of a model"),
        (
            ["tensors-00000.safetensors", "manifest-0a1b2c3d.json"],
            r"it has no manifest\.json, as after a save that was killed",
        ),
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
    for act in (verify_checkpoint, latest_checkpoint, value):
        with pytest.raises(NoCheckpointError, match=message):
            act(tmp_path / "here")


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    with pytest.raises(NoCheckpointError, match="it is a file"):
        verify_checkpoint(tmp_path / "here" / "manifest.json")


def test_checkpoints_are_ordered_by_step_then_by_name_then_by_time(tmp_path: Path) -> None:
    for name, step in (("b", 9), ("a", 10), ("c", 1)):
        save(tmp_path / "steps" / name, 0, step=step)
    assert [path.name for path in find_checkpoints(tmp_path / "steps")] == ["c", "b", "a"]
    assert latest_checkpoint(tmp_path / "steps") == tmp_path / "steps" / "a"
    for name, step in (("at-10", None), ("at-9", 50), ("run-3-at-1", None)):
        save(tmp_path / "numbers" / name, 0, step=step)
    assert [path.name for path in find_checkpoints(tmp_path / "numbers")] == ["run-3-at-1", "at-9", "at-10"]
    for epoch in (8, 10, 9):
        save(tmp_path / "epochs" / f"epoch_{epoch}_bf16", epoch)
    assert value(latest_checkpoint(tmp_path / "epochs")) == 10
    for age, name in enumerate(("x", "at-1", "last")):
        save(tmp_path / "times" / name, 0)
        os.utime(tmp_path / "times" / name / "manifest.json", (1000 - age, 1000 - age))
    assert [path.name for path in find_checkpoints(tmp_path / "times")] == ["last", "at-1", "x"]
    assert locate(REAL_DISK, tmp_path / "times") == str(tmp_path / "times" / "x")


def test_other_things_and_links_are_no_checkpoints(tmp_path: Path) -> None:
    save(tmp_path / "one", 1)
    (tmp_path / "latest").symlink_to("one")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "tensors-00000.safetensors").write_bytes(b"part")
    assert find_checkpoints(tmp_path) == (tmp_path / "one",)
    # A link that is passed by name is followed.
    assert value(tmp_path / "latest") == 1


def test_a_damaged_newest_one_is_an_error_and_an_older_one_is_not(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path / f"at-{step}", step, step=step)
        os.utime(tmp_path / f"at-{step}" / "manifest.json", (1000 + step, 1000 + step))
    (tmp_path / "at-1" / "tensors-00000.safetensors").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "at-2"
    (tmp_path / "at-2" / "manifest.json").write_bytes(b"{}\n")
    with pytest.raises(DamagedCheckpointError, match=r"at-2/manifest\.json is damaged"):
        latest_checkpoint(tmp_path)
    assert find_checkpoints(tmp_path) == (tmp_path / "at-0",)


def test_a_missing_directory_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_checkpoints(tmp_path / "absent") == ()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        find_checkpoints(tmp_path / "file")


def test_help_shows_no_addresses() -> None:
    for one in (find_checkpoints, latest_checkpoint, prune_checkpoints, verify_checkpoint):
        shown = str(inspect.signature(one))
        assert " at 0x" not in shown
        assert len(shown) < 200


# --- reading while others write ------------------------------------------------------------------


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    calls: list[int] = []

    def read(checkpoint: OpenCheckpoint) -> int:
        calls.append(len(calls))
        if len(calls) == 1:
            save(tmp_path / "here", 2)
        box = Box("x", "int64", checkpoint.manifest.tensors["x"].pieces[0])
        return int(read_boxes(REAL_DISK, checkpoint.folder, checkpoint.manifest, [box])[0])

    assert read_checkpoint(REAL_DISK, tmp_path / "here", read) == 2
    assert calls == [0, 1]


def test_a_file_that_is_really_missing_is_not_looked_for_again(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    calls: list[int] = []

    def read(checkpoint: OpenCheckpoint) -> None:
        calls.append(1)
        raise DamagedCheckpointError("a file is missing", "x")

    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(REAL_DISK, tmp_path / "here", read)
    assert calls == [1]


def coarse_disk() -> Disk:
    """Return a disk on which all times are equal."""

    def status(path: str) -> Status:
        return REAL_DISK.status(path)._replace(modified_s=0.0)

    def status_of(descriptor: int) -> Status:
        return REAL_DISK.status_of(descriptor)._replace(modified_s=0.0)

    return replace(REAL_DISK, status=status, status_of=status_of)


def test_one_that_is_removed_before_it_is_opened_is_looked_for_again(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path / f"at-{step}", step, step=step)
    opens: list[str] = []

    def open_folder(path: str) -> Folder:
        opens.append(path)
        if opens.count(str(tmp_path / "at-2")) == 2:  # after the scan
            save(tmp_path / "at-3", 3, step=3)
            prune_checkpoints(tmp_path, Keep(last=1))
        return REAL_DISK.open_folder(path)

    disk = replace(REAL_DISK, open_folder=open_folder)
    assert read_checkpoint(disk, tmp_path, lambda found: found.path) == str(tmp_path / "at-3")


def test_one_that_is_replaced_while_it_is_listed_is_not_listed_as_damaged(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    looks: list[str] = []

    def status(path: str) -> Status:
        if path.endswith(".safetensors"):
            looks.append(path)
            if len(looks) == 1:
                save_small(tmp_path / "here", {"x": torch.ones(999)}, {"y": torch.ones(5)})
        return coarse.status(path)

    coarse = coarse_disk()
    found, broken = scan(replace(coarse, status=status), tmp_path)
    assert len(looks) > 2
    assert (broken, [item.path for item in found]) == ([], [str(tmp_path / "here")])


def test_readers_always_find_a_whole_checkpoint_while_another_thread_saves(tmp_path: Path) -> None:
    save(tmp_path / "here", 0)
    done = threading.Event()
    seen: list[int] = []
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            while not done.is_set():
                verify_checkpoint(tmp_path / "here", disk=coarse_disk())
                seen.append(value(tmp_path / "here"))
        except BaseException as error:  # noqa: BLE001 - shown below
            errors.append(error)

    # In place of fsync, so that there are many saves in little time.
    def nothing(what: object) -> None:
        pass

    disk = replace(REAL_DISK, sync=nothing, sync_folder=nothing)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for number in range(1, 60):
        save(tmp_path / "here", number, disk=disk)
    done.set()
    watcher.join()
    assert errors == []
    assert seen == sorted(seen)
    assert value(tmp_path / "here") == 59


def test_the_head_of_a_manifest_is_that_of_the_whole_one() -> None:
    for text in ("plain", ',"tensors":', '"', '\\","tensors":{}', ',\\"tensors\\":'):
        whole = Manifest(
            tree={text: text},
            tensors={text: StoredTensor("int8", (1,), (Piece("f", text, (0,), (1,), (5,)),))},
            files={"f": StoredFile(9, 7, 0)},
            step=4,
            metric=0.25,
            num_nodes=2,
            node=0,
            created_by=text,
        )
        content = format_manifest(whole)
        assert parse_manifest(content) == whole
        assert parse_head(content) == replace(whole, tree=None, tensors={})
        with pytest.raises(DamagedCheckpointError):
            parse_head(content.replace(b"int8", b"int4"))
