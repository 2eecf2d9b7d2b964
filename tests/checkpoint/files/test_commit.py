"""How a checkpoint appears, what it never replaces, and where it is looked for."""

import errno
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from accelfn.checkpoint import find_checkpoints, latest_checkpoint, prune_checkpoints, verify_checkpoint
from accelfn.checkpoint.commit import (
    begin_stage,
    clean,
    leftover_path,
    make_nonce,
    parse_leftover,
    publish,
)
from accelfn.checkpoint.disk import REAL_DISK, Disk, Folder, Status
from accelfn.checkpoint.files import Box, read_boxes
from accelfn.checkpoint.find import OpenCheckpoint, locate, read_checkpoint, resolve, scan
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


def dead_nonce() -> str:
    """Give a nonce of a process of this machine that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    host, _, rest = make_nonce().split("-", 2)
    return f"{host}-{process.pid}-{rest}"


# --- appearing -----------------------------------------------------------------------------------


def test_a_save_leaves_nothing_but_the_checkpoint(tmp_path: Path) -> None:
    for number in range(3):
        save(tmp_path / "above" / "here", number)
        assert value(tmp_path / "above" / "here") == number
        assert names(tmp_path / "above") == ["here"]
        assert verify_checkpoint(tmp_path / "above" / "here").generation == number


def test_an_empty_directory_may_become_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    save(tmp_path / "here", 4)
    assert value(tmp_path / "here") == 4


def test_a_damaged_checkpoint_may_be_replaced(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    (tmp_path / "here" / "manifest.json").write_bytes(b"")
    save(tmp_path / "here", 2)
    assert value(tmp_path / "here") == 2


@pytest.mark.parametrize("spelling", ["{}/here/", "{}/here/../here", "{}/./here"])
def test_a_directory_may_be_spelled_in_any_way(tmp_path: Path, spelling: str) -> None:
    save(Path(spelling.format(tmp_path)), 1)
    assert names(tmp_path) == ["here"]
    assert resolve(REAL_DISK, spelling.format(tmp_path)) == str(tmp_path / "here")


def test_a_relative_directory_is_one_of_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("here"), 3)
    assert value(tmp_path / "here") == value(Path("here")) == 3


# --- refusing ------------------------------------------------------------------------------------


def as_file(path: Path) -> None:
    path.write_text("mine")


def as_link(path: Path) -> None:
    (path.parent / "real").mkdir()
    path.symlink_to(path.parent / "real")


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def with_notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def with_notes_in_a_damaged_checkpoint(path: Path) -> None:
    save(path, 1)
    (path / "manifest.json").write_bytes(b"")
    (path / "notes.txt").write_text("mine")


def with_tensors_only(path: Path) -> None:
    path.mkdir()
    (path / "tensors-00000.safetensors").write_text("mine")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (as_file, "it is a file"),
        (as_link, "it is a link"),
        (as_pipe, "it is neither file nor directory"),
        (with_notes, r"files that are not part of a checkpoint: notes\.txt"),
        (with_notes_in_a_damaged_checkpoint, r"files that are not part of a checkpoint: notes\.txt"),
        (with_tensors_only, r"files that are not part of a checkpoint: tensors-00000\.safetensors"),
    ],
)
def test_what_is_not_ours_is_never_replaced(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    make(tmp_path / "here")
    before = names(tmp_path)
    with pytest.raises(CheckpointError, match=f"here can't be replaced by a checkpoint.*{message}"):
        save(tmp_path / "here", 2)
    assert names(tmp_path) == before
    # And no more where it appears only while the save is on its way.
    shutil.rmtree(tmp_path / "here") if make not in (as_file, as_link, as_pipe) else (
        tmp_path / "here"
    ).unlink()
    shutil.rmtree(tmp_path / "real", ignore_errors=True)
    stage = begin_stage(REAL_DISK, tmp_path / "here", make_nonce())
    make(tmp_path / "here")
    with pytest.raises(CheckpointError, match=message):
        publish(REAL_DISK, stage)
    assert names(tmp_path) == before


def test_files_that_are_not_part_of_a_checkpoint_move_to_the_one_that_replaces_it(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save(here, 1)
    (here / "notes.txt").write_text("mine")
    (here / "plots").mkdir()
    (here / "plots" / "loss.svg").write_text("mine too")
    for name in (".DS_Store", ".nfs0001"):
        (here / name).write_text("")
    (here / ".ipynb_checkpoints").mkdir()
    with pytest.warns(UserWarning, match=r"not part of the checkpoint: .*notes\.txt"):
        save(here, 2)
    assert value(here) == 2
    assert names(tmp_path) == ["here"]
    assert names(here) == ["manifest.json", "notes.txt", "plots", *TENSOR_FILES]
    assert (here / "plots" / "loss.svg").read_text() == "mine too"


def test_a_kill_at_any_instant_of_replacing_loses_nobodys_file() -> None:
    def disk_with_notes() -> Model:
        model = Model()
        model.disk().make_folder("/runs")
        save_small("/runs/here", {"x": torch.tensor(1)}, disk=model.disk())
        model.disk().create("/runs/here/notes.txt")
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = disk_with_notes()
        start = len(trial.steps)
        save_small("/runs/here", {"x": torch.tensor(2)}, disk=trial.disk())
        assert len(trial.steps) > start + 15
        for number in range(start, len(trial.steps)):
            model = disk_with_notes()
            model.kill_at = number
            with pytest.raises(Killed):
                save_small("/runs/here", {"x": torch.tensor(2)}, disk=model.disk())
            model.kill_at = -1
            assert [path for path in model.files("/runs") if path.endswith("/notes.txt")], number
            save_small("/runs/here", {"x": torch.tensor(3)}, disk=model.disk())
            assert "/notes.txt" in model.files("/runs/here"), number


def test_a_file_of_a_name_that_the_new_checkpoint_has_itself_is_kept_under_another(tmp_path: Path) -> None:
    here, files = tmp_path / "here", tmp_path / "files"
    save(here, 1)
    (here / "vocab.txt").write_text("mine")
    files.mkdir()
    (files / "vocab.txt").write_text("of the checkpoint")
    with pytest.warns(UserWarning, match=r"vocab\.txt"):
        save_small(here, {"x": torch.tensor(2)}, files=str(files))
    assert (here / "vocab.txt").read_text() == "of the checkpoint"
    assert (here / "vocab.txt~").read_text() == "mine"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a second file system")
def test_a_parent_may_be_a_link_to_another_file_system(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as elsewhere:
        if os.stat(elsewhere).st_dev == tmp_path.stat().st_dev:
            pytest.skip("both are one file system")
        (tmp_path / "runs").symlink_to(elsewhere)
        for number in range(3):
            save(tmp_path / "runs" / "here", number)
        assert value(tmp_path / "runs" / "here") == 2


def test_a_place_without_a_name_is_refused() -> None:
    with pytest.raises(CheckpointError, match="it has no name"):
        save(Path("/"), 2)


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file"):
        save(tmp_path / "file" / "here", 1)


def test_a_parent_that_may_not_be_written_to_is_named(tmp_path: Path) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    save(tmp_path / "here", 1)
    with pytest.raises(PermissionError, match=r"Permission denied.*\.here\.staging-"):
        save(tmp_path / "here", 2, disk=replace(REAL_DISK, make_folder=refuse))
    assert names(tmp_path) == ["here"]


# --- what is left behind -------------------------------------------------------------------------


def test_names_of_leftovers_are_told_apart() -> None:
    nonce = make_nonce()
    for kind in ("staging", "replaced", "trash"):
        path = leftover_path("/a/my.run", kind, nonce)
        found = parse_leftover("/a", path.removeprefix("/a/"))
        assert found is not None
        assert (found.path, found.name, found.kind, found.pid) == (path, "my.run", kind, os.getpid())
    for name in (
        "here",
        ".here",
        ".here.staging",
        ".here.staging-1",
        f"here.staging-{nonce}",
        f".here.old-{nonce}",
    ):
        assert parse_leftover("/a", name) is None
    with pytest.raises(CheckpointError, match="unfinished saves have such names"):
        begin_stage(REAL_DISK, f"/a/.here.trash-{nonce}", nonce)


def test_the_next_save_removes_what_dead_ones_left_and_nothing_else(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save(here, 1)
    dead = Path(begin_stage(REAL_DISK, here, dead_nonce()).path)
    (dead / "tensors-00000.safetensors").write_bytes(b"part")
    alive = Path(begin_stage(REAL_DISK, here, make_nonce()).path)
    assert not dead.exists()
    others = [
        f".here.staging-{'0' * 12}-1-1-{'a' * 8}",  # of another machine, and new
        f".elsewhere.staging-{dead_nonce()}",
        ".here.staging-of-mine",
    ]
    for name in others:
        (tmp_path / name).mkdir()
    old = tmp_path / f".here.staging-{'0' * 12}-2-1-{'a' * 8}"
    old.mkdir()
    os.utime(old, (time.time() - 100_000, time.time() - 100_000))
    save(here, 2)
    assert names(tmp_path) == sorted(["here", alive.name, *others])
    assert clean(REAL_DISK, str(tmp_path)) == (str(tmp_path / others[1]),)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs the start times of processes")
def test_a_process_that_was_given_the_number_of_a_dead_one_keeps_nothing_of_it(tmp_path: Path) -> None:
    script = (
        "import sys; from accelfn.checkpoint.commit import begin_stage, make_nonce; "
        "from accelfn.checkpoint.disk import Disk; "
        "print(begin_stage(Disk(), sys.argv[1], make_nonce()).path)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "here")], capture_output=True, text=True, check=True
    )
    left = Path(done.stdout.strip())
    dead = parse_leftover(str(tmp_path), left.name)
    assert dead is not None
    # As if this program had started in a new container, where it has the number that the dead one had.
    recycled = left.rename(left.with_name(left.name.replace(f"-{dead.pid}-", f"-{os.getpid()}-")))
    save(tmp_path / "here", 1)
    assert not recycled.exists()
    assert names(tmp_path) == ["here"]


def killed_between_renames(here: Path) -> Path:
    """Leave what a save leaves that is killed between its renames; give where the old checkpoint is."""
    stage = begin_stage(REAL_DISK, here, dead_nonce())
    replaced = Path(leftover_path(str(here), "replaced", stage.nonce))
    here.rename(replaced)
    return replaced


def test_a_replaced_checkpoint_is_found_until_the_new_one_is_there(tmp_path: Path) -> None:
    here = tmp_path / "here"
    save(here, 1)
    replaced = killed_between_renames(here)
    assert resolve(REAL_DISK, here) == str(replaced)
    assert value(here) == 1
    assert find_checkpoints(tmp_path) == (here,)
    assert value(tmp_path) == 1
    clean(REAL_DISK, str(tmp_path))
    assert names(tmp_path) == [replaced.name]
    save(here, 2)
    assert value(here) == 2
    assert names(tmp_path) == ["here"]
    assert verify_checkpoint(here).generation == 1


def test_of_several_replaced_ones_the_newest_whole_one_counts(tmp_path: Path) -> None:
    here = tmp_path / "here"
    for number in range(4):
        save(here, number)
        shutil.copytree(here, tmp_path / str(number))
    shutil.rmtree(here)
    for number in range(4):
        (tmp_path / str(number)).rename(leftover_path(str(here), "replaced", make_nonce()))
    assert value(here) == 3
    newest = Path(resolve(REAL_DISK, here))
    (newest / "tensors-00001.safetensors").unlink()
    assert value(here) == 2


def test_a_stage_never_counts_however_complete(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    (tmp_path / "here").rename(leftover_path(str(tmp_path / "here"), "staging", make_nonce()))
    with pytest.raises(NoCheckpointError, match=r"only an unfinished save of it is there.*\.here\.staging-"):
        resolve(REAL_DISK, tmp_path / "here")
    assert find_checkpoints(tmp_path) == ()


# --- finding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "here is no checkpoint of accelfn: there is no such directory"),
        ([], "the directory is empty"),
        (["random_states_0.pkl", "optimizer.bin"], "a checkpoint of Accelerate.*accelfn checkpoint convert"),
        ([".metadata", "__0_0.distcp"], r"a checkpoint of torch\.distributed\.checkpoint"),
        (["model.safetensors", "config.json"], "the weights of a model"),
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
    begin_stage(REAL_DISK, tmp_path / "two", make_nonce())
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
        calls.append(checkpoint.manifest.generation)
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
    """Give a disk whose times tell nothing, as those that count whole seconds tell little."""

    def status(path: str) -> Status:
        return REAL_DISK.status(path)._replace(modified_s=0.0)

    def status_of(descriptor: int) -> Status:
        return REAL_DISK.status_of(descriptor)._replace(modified_s=0.0)

    return replace(REAL_DISK, status=status, status_of=status_of)


def test_a_replaced_one_that_is_being_removed_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    save(tmp_path / "new", 2)
    old = Path(leftover_path(str(tmp_path / "here"), "replaced", make_nonce()))
    (tmp_path / "here").rename(old)
    seen: list[str] = []

    def read(checkpoint: OpenCheckpoint) -> int:
        seen.append(checkpoint.path)
        if len(seen) == 1:
            (tmp_path / "new").rename(tmp_path / "here")
            (old / "tensors-00000.safetensors").unlink()
        box = Box("x", "int64", checkpoint.manifest.tensors["x"].pieces[0])
        return int(read_boxes(disk, checkpoint.folder, checkpoint.manifest, [box])[0])

    disk = coarse_disk()
    assert read_checkpoint(disk, tmp_path / "here", read) == 2
    assert seen == [str(old), str(tmp_path / "here")]


def test_a_replaced_one_that_is_damaged_is_read_once(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    (tmp_path / "here").rename(leftover_path(str(tmp_path / "here"), "replaced", make_nonce()))
    calls: list[int] = []

    def read(checkpoint: OpenCheckpoint) -> None:
        calls.append(1)
        raise DamagedCheckpointError("a checksum is wrong", "x")

    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(REAL_DISK, tmp_path / "here", read)
    assert calls == [1]


def test_a_checkpoint_behind_a_link_is_read_once_if_it_is_damaged(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    (tmp_path / "link").symlink_to("here")
    calls: list[int] = []

    def read(checkpoint: OpenCheckpoint) -> None:
        calls.append(1)
        raise DamagedCheckpointError("a checksum is wrong", "x")

    with pytest.raises(DamagedCheckpointError):
        read_checkpoint(REAL_DISK, tmp_path / "link", read)
    assert calls == [1]


def test_a_directory_without_a_name_for_an_instant_is_opened_again(tmp_path: Path) -> None:
    save(tmp_path / "here", 1)
    opens: list[str] = []

    def open_folder(path: str) -> Folder:
        opens.append(path)
        if len(opens) > 1:
            return REAL_DISK.open_folder(path)
        (tmp_path / "here").rename(tmp_path / "away")
        try:
            return REAL_DISK.open_folder(path)
        finally:
            (tmp_path / "away").rename(tmp_path / "here")

    assert read_checkpoint(replace(REAL_DISK, open_folder=open_folder), tmp_path / "here", lambda one: 7) == 7
    assert opens == [str(tmp_path / "here")] * 2


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
    assert (broken, [one.generation for one in found]) == ([], [1])


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
            generation=3,
            created_by=text,
        )
        content = format_manifest(whole)
        assert parse_manifest(content) == whole
        assert parse_head(content) == replace(whole, tree=None, tensors={})
        with pytest.raises(DamagedCheckpointError):
            parse_head(content.replace(b"int8", b"int4"))
