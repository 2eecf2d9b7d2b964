"""Files that commands write, with ``--output`` and others: whole, or as they were."""

import os
import stat
import sys
from pathlib import Path

import pytest

from accelfn.launch.output import write_text


def test_a_file_is_replaced_and_a_link_still_leads_to_it(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    link.symlink_to(file)
    write_text(link, "new")
    assert link.is_symlink()
    assert file.read_text() == "new"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "link"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no named pipes in folders")
def test_what_is_no_file_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # as /dev/stdout may be, or /dev/null
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    try:
        write_text(pipe, "new")
        assert stat.S_ISFIFO(pipe.stat().st_mode)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)


def test_after_an_error_the_old_file_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    file = tmp_path / "file"
    file.write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="can't be written: No space left on device") as caught:
        write_text(file, "new")
    assert caught.value.filename == str(file)
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("file", "old")]
