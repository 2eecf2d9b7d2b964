"""Errors of a folder that weights are written to say what to do; those of other files are left alone."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from accelfn.bigmodel.offload_folder import writing_to


def test_errors_of_other_files_are_left_alone(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError) as caught, writing_to(tmp_path / "folder", "folder"):
        missing.read_bytes()
    assert caught.value.strerror == os.strerror(errno.ENOENT)
    plain = OSError("no number")
    with pytest.raises(OSError, match="no number") as caught, writing_to(tmp_path, "folder"):
        raise plain
    assert caught.value is plain
