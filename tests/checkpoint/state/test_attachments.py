"""Files of the caller's own in a checkpoint: whole with it, checked with it, gone with it."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.checkpoint import find_checkpoint, find_files, folder_for_files
from accelfn.context import Context
from accelfn.errors import CheckpointError, DamagedCheckpointError, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.small import flip, names, rewrite

FILES = {"notes.txt": b"best so far", "unet/config.json": b"{}", "unet/deep/empty": b"", "text/vocab": b"abc"}
TOP = "files-0a1b2c3d"


def write_files(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    for name, content in (FILES if files is None else files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tree_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Save a small checkpoint with files in it."""
    source = write_files(folder / "source", files)
    return af.save_state(Context(), folder / "at", {"w": torch.arange(3)}, files=source)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_files_become_part_of_the_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    source = write_files(tmp_path / "source")
    saved = af.save_state(Context(), tmp_path / "at", {"step": 3}, asynchronous, files=source)
    if isinstance(saved, af.checkpoint.SaveHandle):
        assert not source.exists()  # the caller may use the name again at once
        saved = saved.result()
    found = find_files(Context(), saved)
    assert found.parent == saved
    assert tree_of(found) == FILES
    assert os.listdir(tmp_path) == ["at"]
    report = af.verify_checkpoint(saved)
    assert report.attachments == tuple(f"{found.name}/{name}" for name in sorted(FILES))
    assert report.num_bytes >= sum(map(len, FILES.values()))
    assert af.load_state(Context(), saved, {"step": 0}) == {"step": 3}
    assert find_checkpoint(Context(), tmp_path) == saved


def test_all_ranks_may_write_and_all_find_it(tmp_path: Path) -> None:
    def run(ctx: Context) -> dict[str, bytes]:
        with folder_for_files(ctx, tmp_path / "at") as folder:
            write_files(folder, {f"rank{ctx.rank}": b"1"})
            af.save_state(ctx, tmp_path / "at", {"rank": ctx.rank}, files=folder)
        return tree_of(find_files(ctx, tmp_path / "at"))

    assert run_ranks(run, 3) == [{f"rank{rank}": b"1" for rank in range(3)}] * 3
    assert os.listdir(tmp_path) == ["at"]


def test_a_checkpoint_is_replaced_and_removed_with_its_files(tmp_path: Path) -> None:
    save(tmp_path)
    at = save(tmp_path, {"unet": b"a file now"})
    assert tree_of(find_files(Context(), at)) == {"unet": b"a file now"}
    (at / "link").symlink_to(tmp_path)
    save(tmp_path)
    assert (at / "link").is_symlink()
    assert len(os.listdir(at)) == 4
    af.save_tree(at, {})
    assert names(at) == ["link", "manifest.json"]
    assert not find_files(Context(), at).exists()
    for step in range(3):
        source, one = write_files(tmp_path / "source"), af.Keep(last=1)
        af.save_state(Context(), tmp_path / "all" / f"{step}", {}, step=step, keep=one, files=source)
    assert os.listdir(tmp_path / "all") == ["2"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_links_and_pipes_are_refused_and_stay(tmp_path: Path, asynchronous: bool) -> None:
    source = write_files(tmp_path / "source")
    (source / "text" / "odd").symlink_to("vocab")
    with pytest.raises(CheckpointError, match=r"text/odd can't .*: it is a link"):
        af.save_state(Context(), tmp_path / "at", {}, asynchronous, files=source)
    (source / "text" / "odd").unlink()
    os.mkfifo(source / "text" / "odd")
    with pytest.raises(CheckpointError, match="it is no plain file"):
        af.save_state(Context(), tmp_path / "at", {}, asynchronous, files=source)
    assert os.listdir(tmp_path) == ["source"]
    with pytest.raises(OSError, match="absent"):
        af.save_state(Context(), tmp_path / "at", {}, asynchronous, files=tmp_path / "absent")


@given(name=st.sampled_from(["notes.txt", "unet/config.json", "text/vocab"]), kind=st.integers(0, 3))
def test_damage_is_found_by_all_that_read(name: str, kind: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        path = find_files(Context(), save(Path(place))) / name
        content = path.read_bytes()
        if kind == 0:
            flip(path)
        elif kind == 1:
            path.write_bytes(content + b"x")
        elif kind == 2:
            path.rename(Path(place) / "elsewhere")
            path.symlink_to(Path(place) / "elsewhere")
        else:
            path.unlink()
        for read in (
            lambda: af.verify_checkpoint(f"{place}/at"),
            lambda: find_files(Context(), f"{place}/at"),
            lambda: af.load_state(Context(), f"{place}/at", {"w": torch.zeros(3, dtype=torch.int64)}),
        ):
            with pytest.raises(DamagedCheckpointError) as caught:
                read()
            assert caught.value.file == f"{path.parent.relative_to(f'{place}/at')}/{path.name}"
        assert af.find_checkpoints(place) == () or kind == 0  # which looks at sizes, and reads nothing


def test_damage_is_an_error_on_all_ranks_that_load(tmp_path: Path) -> None:
    (find_files(Context(), save(tmp_path)) / "notes.txt").write_bytes(b"best so fat")

    def run(ctx: Context) -> None:
        kind = DamagedCheckpointError if ctx.is_main_process else RemoteRankError
        with pytest.raises(kind, match=r"notes\.txt is damaged"):
            af.load_state(ctx, tmp_path / "at", {"w": torch.zeros(3, dtype=torch.int64)})

    run_ranks(run, 2)


# --- the manifest --------------------------------------------------------------------------------


NAMES = ("", "/etc/passwd", "../up", TOP, f"{TOP}/", f"{TOP}/../b", f"{TOP}//b", f"./{TOP}/a", f"{TOP}/a\\b")
SAID: list[Any] = [[1, []], [-1, []], [1, [-1]], [0, [1]], [True, [1]], [(1 << 26) + 1, [1]], 7]
UNSOUND: list[dict[str, Any]] = [
    *({name: [0, []]} for name in (*NAMES, f"{TOP}/a\0", "C:a/b", "manifest.json/a", "files/a")),
    {f"{TOP}/a": [0, []], f"{TOP}/a/b": [0, []]},
    *({f"{TOP}/a": file} for file in SAID),
]


@pytest.mark.parametrize("attachments", UNSOUND, ids=str)
def test_paths_that_lead_elsewhere_and_what_says_nothing_sound_are_refused(
    attachments: Any, tmp_path: Path
) -> None:
    at = af.save_tree(tmp_path / "at", {})
    rewrite(at, lambda manifest: manifest.update(attachments=attachments))
    for read in (af.verify_checkpoint, af.load_tree):
        with pytest.raises(DamagedCheckpointError, match="is no sound manifest"):
            read(at)
