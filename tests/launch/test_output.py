"""What commands print: tables on a terminal and in a pipe, and what if nobody takes it."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.launch.output import format_table, print_table, write_text

ROOT = Path(__file__).parents[2]
COMMANDS = (("launch", "--help"), ("config", "show", "--all"))


def environment() -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("ACCELFN_", "SLURM_"))
    }
    return {**inherited, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": "/nonexistent"}


def into(target: int, argv: tuple[str, ...]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "accelfn", *argv],
        cwd=ROOT,
        env=environment(),
        stdout=target,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_reader_that_has_read_enough_is_no_error(argv: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = into(writing, argv)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_sentence(argv: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = into(full, argv)
    finally:
        os.close(full)
    message = "accelfn: error: can't write the output: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, message)


def test_a_table_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "step"), [("[red]a[/red]", "7")], right=(1,), title="two")
    assert capsys.readouterr().out == "two\nname          step\n[red]a[/red]     7\n"
    assert format_table((), [("a", "bb"), ("ccc", "")]) == "a    bb\nccc"
    assert format_table((), []) == ""


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
    assert file.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
