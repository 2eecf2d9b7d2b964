"""What commands print: tables on a terminal and in a pipe, and what if nobody takes it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.launch.output import format_table, print_table

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
    said = "accelfn: error: what it prints can't be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_table_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "step"), [("[red]a[/red]", "7")], right=(1,), title="two")
    assert capsys.readouterr().out == "two\nname          step\n[red]a[/red]     7\n"
    assert format_table((), [("a", "bb"), ("ccc", "")]) == "a    bb\nccc"
    assert format_table((), []) == ""
