"""The real operations on files, and what is built from them."""

import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from accelfn.checkpoint.disk import (
    REAL_DISK,
    is_there,
    make_folders,
    naming,
    open_regular,
    opened,
    read_file,
    remove_tree,
    walk,
    write_file,
)
from accelfn.errors import DamagedCheckpointError


def test_a_file_is_made_once_and_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "x")
    write_file(REAL_DISK, path, b"content")
    with opened(REAL_DISK, str(tmp_path)) as folder:
        assert read_file(REAL_DISK, folder, "x", 7) == b"content"
        with pytest.raises(DamagedCheckpointError, match="x has 7 bytes, more than the allowed 6"):
            read_file(REAL_DISK, folder, "x", 6)
    with pytest.raises(FileExistsError):
        write_file(REAL_DISK, path, b"other")
    assert Path(path).read_bytes() == b"content"


def test_a_system_that_takes_no_bytes_is_an_error(tmp_path: Path) -> None:
    def write(descriptor: int, content: memoryview, place: int) -> int:
        return 0

    with pytest.raises(OSError, match=r"nothing could be written.*/x'"):
        write_file(replace(REAL_DISK, write=write), str(tmp_path / "x"), b"content")


def test_no_file_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="link"):
        write_file(REAL_DISK, str(tmp_path / "link"), b"content")
    assert not (tmp_path / "elsewhere").exists()


def test_only_plain_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)  # the name of a socket may not be long
    with socket.socket(socket.AF_UNIX) as server, opened(REAL_DISK, str(tmp_path)) as folder:
        server.bind("socket")
        for name in ("link", "directory", "pipe", "socket"):
            with pytest.raises(DamagedCheckpointError, match=f"{name} must be a plain file") as caught:
                open_regular(REAL_DISK, folder, name)
            assert caught.value.file == name
        with pytest.raises(FileNotFoundError):
            open_regular(REAL_DISK, folder, "absent")


def test_an_open_directory_stays_readable_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").write_bytes(b"old")
    with opened(REAL_DISK, str(tmp_path / "old")) as folder:
        (tmp_path / "old").rename(tmp_path / "moved")
        (tmp_path / "old").mkdir()
        (tmp_path / "old" / "x").write_bytes(b"new")
        assert read_file(REAL_DISK, folder, "x", 10) == b"old"


def test_missing_directories_are_made_and_each_is_synced(tmp_path: Path) -> None:
    synced: list[str] = []
    disk = replace(REAL_DISK, sync_folder=synced.append)
    make_folders(disk, str(tmp_path / "a" / "b"))
    make_folders(disk, str(tmp_path / "a" / "b"))
    assert (tmp_path / "a" / "b").is_dir()
    assert synced == [str(tmp_path), str(tmp_path / "a")]


def test_a_directory_is_removed_with_all_in_it_but_not_what_links_lead_to(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "mine").write_bytes(b"")
    (tmp_path / "x" / "inner").mkdir(parents=True)
    (tmp_path / "x" / "inner" / "file").write_bytes(b"")
    (tmp_path / "x" / "inner" / "link").symlink_to(tmp_path / "kept")
    assert [name for name, _ in walk(REAL_DISK, str(tmp_path / "x"))] == ["inner", "inner/file", "inner/link"]
    remove_tree(REAL_DISK, str(tmp_path / "x"))
    remove_tree(REAL_DISK, str(tmp_path / "x"))
    assert os.listdir(tmp_path) == ["kept"]
    assert (tmp_path / "kept" / "mine").exists()


def test_what_stands_at_a_path_is_told_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"123")
    (tmp_path / "link").symlink_to("file")
    assert REAL_DISK.status(str(tmp_path / "file"))[:2] == ("file", 3)
    assert REAL_DISK.status(str(tmp_path / "link")).kind == "link"
    assert REAL_DISK.status(str(tmp_path)).kind == "directory"
    assert not is_there(REAL_DISK, str(tmp_path / "file" / "below"))
    assert not is_there(REAL_DISK, str(tmp_path / "absent"))


def test_an_error_without_a_name_gets_that_of_the_file() -> None:
    with pytest.raises(OSError, match=r"full: 'x'$") as caught, naming("x"):
        raise OSError(errno.ENOSPC, "full")
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match=r"full: 'mine'$"), naming("x"):
        raise OSError(errno.ENOSPC, "full", "mine")


def test_a_directory_that_cannot_be_synced_is_an_error_unless_its_system_knows_no_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        def sync(descriptor: int) -> None:
            raise OSError(number, "")

        monkeypatch.setattr(os, "fsync", sync)

    fail(errno.EINVAL)
    REAL_DISK.sync_folder(str(tmp_path))
    fail(errno.EIO)
    with pytest.raises(OSError, match=str(errno.EIO)):
        REAL_DISK.sync_folder(str(tmp_path))
