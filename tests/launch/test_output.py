"""What commands print: tables on a terminal and in a pipe, and what if nobody takes it."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from accelfn.launch import output
from accelfn.launch.main import main
from accelfn.launch.output import CLOSED_PIPE, format_table, print_drawn, print_table, refuse_unknown_dtype

ROOT = Path(__file__).parents[2]
COMMANDS = (
    ("--help",),
    ("launch", "--help"),
    ("launch", "--print_config"),
    ("launch", "--dry_run", "README.md"),
    ("config", "show", "--all"),
    ("completion", "bash"),
    ("tpu-config", "--tpu_name", "t", "--command", "ls", "--debug"),
    ("env", "--help"),
)


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
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no disk that is always full")
@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_a_full_disk_is_one_sentence(argv: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = into(full, argv)
    finally:
        os.close(full)
    name = "accelfn" if argv[0].startswith("-") else f"accelfn {argv[0]}"
    said = f"{name}: error: what it prints can't be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "dumb")


@pytest.mark.usefixtures("terminal")
def test_a_table_is_drawn_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "step"), [("[red]a[/red]", "7"), ("b", "12" * 40)], right=(1,), title="[two]")
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "[two]"
    assert ["name", "step"] in [line.split() for line in lines]
    assert any(set(line) == {"─"} for line in lines)
    assert any(line.startswith("[red]a[/red]") for line in lines)
    assert sum(line.count("12") for line in lines) >= 38  # folded, not cut off


DRAWN = """two models: 3

place   used  budget
0       64 B   210 B  ###...
disk     0 B    none
in all 64 B of 210 B are used, and nothing is elsewhere

0      a, b
disk   c
"""


@pytest.mark.usefixtures("terminal")
def test_a_drawing_keeps_its_cells_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_drawn(DRAWN)
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    rows = [line for line in shown if set("".join(line)) != {"─"}]
    assert rows == [line.split() for line in DRAWN.splitlines() if line.strip()]
    assert len(shown) == len(rows) + 1  # one rule, under the names of the first table


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("argv", [["config", "show", "--all"], ["launch", "--print_config"]])
def test_origins_are_a_table_on_a_terminal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    shown = capsys.readouterr().out
    assert ["field", "value", "from"] in [line.split() for line in shown.splitlines()]
    assert "mixed_precision" in shown


def test_a_drawing_is_as_it_is_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_drawn(DRAWN)
    assert capsys.readouterr().out == DRAWN


def test_a_table_is_plain_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("name", "step"), [("[red]a[/red]", "7")], right=(1,), title="two")
    assert capsys.readouterr().out == "two\nname          step\n[red]a[/red]     7\n"
    assert format_table((), [("a", "bb"), ("ccc", "")]) == "a    bb\nccc"
    assert format_table((), []) == ""


@pytest.mark.skipif(os.name != "posix", reason="closes descriptors in a shell")
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_the_null_device(closed: str, tmp_path: Path) -> None:
    # What the script opens first must not become its standard output.
    (tmp_path / "t.py").write_text("open('out', 'w').write('own')\nprint('printed')\n")
    for argv in ("--version", "config show", "launch --dry_run t.py", "launch t.py"):
        command = f'"{sys.executable}" -m accelfn {argv} {closed}'
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), argv
        assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", "")), argv
    assert (tmp_path / "out").read_text() == "own"


def test_every_dtype_of_torch_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    known = [name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    for name in (*known, *(f"torch.{one}" for one in known), "bf16", "fp16", "fp8", "float8", "int4", "int2"):
        refuse_unknown_dtype(parser, "--dtype", name)
    for name in ("float99", "float15", "int9", "torch.", "", "Tensor", "float32 ", "bf32"):
        with pytest.raises(SystemExit):
            refuse_unknown_dtype(parser, "--dtype", name)
        assert f"--dtype: {name!r} is no dtype. Use such as float32" in capsys.readouterr().err
