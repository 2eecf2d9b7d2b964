"""Errors of a folder that weights are written to say what to do; those of other files are left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from accelfn.bigmodel.offload_folder import check_folder, writing_to


def test_a_folder_is_made_and_given(tmp_path: Path) -> None:
    check_folder(tmp_path / "a", "there")
    with writing_to(tmp_path / "a" / "b", "there") as folder:
        assert folder.is_dir()
    check_folder(tmp_path, "there")


@pytest.mark.parametrize("named", ["nothing", "a file in it"])
@pytest.mark.parametrize(
    ("number", "kind", "todo"),
    [
        (errno.ENOSPC, OSError, "Make room there, or pass a folder on another disk"),
        (errno.EACCES, PermissionError, "Pass a folder that you may write to"),
        (errno.EIO, OSError, "Pass another folder"),
    ],
)
def test_errors_say_what_to_do(
    number: int, kind: type[OSError], todo: str, named: str, tmp_path: Path
) -> None:
    filename = None if named == "nothing" else str(tmp_path / "x")
    with pytest.raises(kind, match=rf"folder='.*' can't take weights: .*\. {todo}") as caught:
        with writing_to(tmp_path, "folder"):
            raise OSError(number, os.strerror(number), filename)
    assert (caught.value.errno, caught.value.filename) == (number, filename or str(tmp_path))


def test_errors_of_other_files_are_left_alone(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught, writing_to(tmp_path / "folder", "folder"):
        missing.read_bytes()
    assert caught.value.strerror == os.strerror(errno.ENOENT)
    plain = OSError("no number")
    with pytest.raises(OSError, match="no number") as caught, writing_to(tmp_path, "folder"):
        raise plain
    assert caught.value is plain
