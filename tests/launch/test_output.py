"""Files that commands write, whole, or as they were."""

import os
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


def test_what_is_no_file_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"  # or /dev/null
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="can't be written: it isn't a file"):
        write_text(pipe, "new")
    assert [*tmp_path.iterdir()] == [pipe]
