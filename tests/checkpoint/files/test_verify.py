"""Whatever changes in a checkpoint is found, and named."""

import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.checkpoint import verify_checkpoint
from accelfn.checkpoint.commit import begin_save, commit, end_save, write_manifest
from accelfn.checkpoint.disk import REAL_DISK
from accelfn.checkpoint.manifest import StoredFile
from accelfn.errors import CheckpointError, DamagedCheckpointError, NoCheckpointError, NotAvailableError
from tests.checkpoint.small import load_small, save_small, write_parts

FILES = ("tensors-00000.safetensors", "tensors-00001.safetensors")
TENSORS = (
    {"a": torch.arange(50), "b": torch.tensor(True)},
    {"c": torch.randn(7, 3, generator=torch.Generator().manual_seed(0)), "empty": torch.empty(0)},
)


def made(directory: Path) -> Path:
    save_small(directory, *TENSORS, step=3, metric=0.5, created_by="test")
    return directory


def test_a_sound_one_is_described(tmp_path: Path) -> None:
    report = verify_checkpoint(made(tmp_path / "here"))
    assert report.path == tmp_path / "here"
    assert report.files == FILES
    assert report.num_bytes == sum((tmp_path / "here" / name).stat().st_size for name in FILES)
    assert (report.step, report.metric, report.created_by) == (3, 0.5, "test")
    assert (report.num_tensors, report.world_size, report.num_nodes) == (4, 2, 1)
    assert verify_checkpoint(tmp_path) == report


def check_refused(directory: Path, file: str) -> None:
    for act in (verify_checkpoint, load_small):
        with pytest.raises(DamagedCheckpointError, match=file) as caught:
            act(directory)
        assert caught.value.file == file


@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_each_changed_byte_is_found(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "here") / name
    content = path.read_bytes()
    draw = random.Random(name)
    places = {0, 3, 7, 8, 9, len(content) - 1, len(content) - 60, len(content) - 66}
    places |= {draw.randrange(len(content)) for _ in range(60)}
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        check_refused(tmp_path / "here", name)
    path.write_bytes(content)
    verify_checkpoint(tmp_path / "here")


@pytest.mark.parametrize("name", ["manifest.json", *FILES])
def test_each_cut_is_found(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "here") / name
    content = path.read_bytes()
    for end in {0, 1, 7, 8, 9, len(content) // 2, len(content) - 66, len(content) - 65, len(content) - 1}:
        path.write_bytes(content[:end])
        check_refused(tmp_path / "here", name)
    for more in (b"\0", b"\n", content):
        path.write_bytes(content + more)
        check_refused(tmp_path / "here", name)
    for zeroed in (bytes(len(content)), content[:-16] + bytes(16), bytes(16) + content[16:]):
        path.write_bytes(zeroed)
        check_refused(tmp_path / "here", name)


@given(st.data())
def test_any_change_of_some_bytes_is_found(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = made(tmp_path_factory.mktemp("made") / "here")
    path = directory / data.draw(st.sampled_from(["manifest.json", *FILES]))
    content = path.read_bytes()
    start = data.draw(st.integers(0, len(content) - 1))
    new = data.draw(st.binary(max_size=40))
    changed = content[:start] + new + content[start + data.draw(st.integers(0, 40)) :]
    path.write_bytes(changed)
    if changed == content:
        verify_checkpoint(directory)
    else:
        check_refused(directory, path.name)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_no_file_is_named(tmp_path: Path, name: str) -> None:
    path = made(tmp_path / "here") / name
    elsewhere = path.rename(tmp_path / "elsewhere")
    check_refused(tmp_path / "here", name)
    path.symlink_to(elsewhere)
    check_refused(tmp_path / "here", name)
    path.unlink()
    path.mkdir()
    check_refused(tmp_path / "here", name)
    path.rmdir()
    os.mkfifo(path)
    check_refused(tmp_path / "here", name)


def test_a_manifest_that_is_no_file_is_named(tmp_path: Path) -> None:
    path = made(tmp_path / "here") / "manifest.json"
    elsewhere = path.rename(tmp_path / "elsewhere")
    with pytest.raises(NoCheckpointError, match=r"has no manifest\.json"):
        verify_checkpoint(tmp_path / "here")
    path.symlink_to(elsewhere)
    check_refused(tmp_path / "here", "manifest.json")
    path.unlink()
    os.mkfifo(path)
    check_refused(tmp_path / "here", "manifest.json")


def test_files_that_changed_places_are_found(tmp_path: Path) -> None:
    here = made(tmp_path / "here")
    (here / FILES[0]).rename(here / "x")
    (here / FILES[1]).rename(here / FILES[0])
    (here / "x").rename(here / FILES[1])
    check_refused(here, FILES[0])


def test_a_file_of_another_checkpoint_of_the_same_form_is_found(tmp_path: Path) -> None:
    here = made(tmp_path / "here")
    save_small(tmp_path / "other", {"a": torch.arange(50) + 1, "b": torch.tensor(True)})
    (tmp_path / "other" / FILES[0]).replace(here / FILES[0])
    with pytest.raises(DamagedCheckpointError, match=r"tensors-00000.*bytes 0 to 400 of tensor 'a'"):
        verify_checkpoint(here)


@pytest.mark.parametrize("name", ["notes.txt", "tensors-2.safetensors", ".hidden"])
def test_a_file_more_is_named_and_stops_nobody(tmp_path: Path, name: str) -> None:
    here = made(tmp_path / "here")
    report = verify_checkpoint(here)
    (here / name).write_bytes(b"")
    with pytest.warns(UserWarning, match=f"here contains files that are not part of the checkpoint: {name}"):
        assert verify_checkpoint(here) == report


def test_errors_name_leaves_as_the_tree_does(tmp_path: Path) -> None:
    save_small(tmp_path / "here", {"optimizer/state/model~1p.weight/a~0b": torch.arange(50)})
    content = bytearray((tmp_path / "here" / FILES[0]).read_bytes())
    content[-1] ^= 1
    (tmp_path / "here" / FILES[0]).write_bytes(content)
    with pytest.raises(DamagedCheckpointError, match=r"tensor 'optimizer/state/model/p\.weight/a~b' aren't"):
        verify_checkpoint(tmp_path / "here")


def test_a_newer_version_is_told_apart_from_damage(tmp_path: Path) -> None:
    import hashlib

    here = made(tmp_path / "here")
    line = (here / "manifest.json").read_bytes().partition(b"\n")[0].replace(b'"version":1', b'"version":2')
    (here / "manifest.json").write_bytes(line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n")
    with pytest.raises(NotAvailableError, match="is of version 2"):
        verify_checkpoint(here)


def test_files_of_another_node_may_be_missing_and_are_checked_where_they_are(tmp_path: Path) -> None:
    save = begin_save(REAL_DISK, tmp_path / "here")
    manifest = write_parts(REAL_DISK, save.path, TENSORS, num_nodes=2, node=0)
    nodes = {name: StoredFile(*file[:2], node) for node, (name, file) in enumerate(manifest.files.items())}
    from dataclasses import replace

    write_manifest(REAL_DISK, save, replace(manifest, files=nodes))
    commit(REAL_DISK, save)
    end_save(REAL_DISK, save)
    assert verify_checkpoint(tmp_path / "here").files == FILES
    content = (tmp_path / "here" / FILES[1]).read_bytes()
    (tmp_path / "here" / FILES[1]).unlink()
    assert verify_checkpoint(tmp_path / "here").files == FILES[:1]
    (tmp_path / "here" / FILES[1]).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=FILES[1]):
        verify_checkpoint(tmp_path / "here")
    (tmp_path / "here" / FILES[1]).unlink()
    (tmp_path / "here" / FILES[0]).unlink()
    with pytest.raises(DamagedCheckpointError, match=f"{FILES[0]} is missing"):
        verify_checkpoint(tmp_path / "here")
