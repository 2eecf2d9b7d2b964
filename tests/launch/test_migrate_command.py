"""``accelfn migrate``: what it prints, and its exit status."""

import shutil
import subprocess
from pathlib import Path

import pytest

from accelfn.launch.main import main
from tests.launch.migrate.programs import BY_HAND, QUICK_TOUR


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main(["migrate", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_diffs_of_all_programs_are_printed_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(QUICK_TOUR)
    Path("b.py").write_text(BY_HAND)
    Path("c.py").write_text("x = 1\n")
    status, out, err = run(capsys, "a.py", "b.py", "c.py")
    assert status == 0
    assert [line for line in out.splitlines() if line.startswith("--- ")] == ["--- a.py", "--- b.py"]
    assert "c.py: nothing to change\n" in err
    assert "with shuffle=True" not in err, "no loader shuffles"
    assert "note: one step of the optimizer is one step of its scheduler" in err
    assert Path("a.py").read_text() == QUICK_TOUR
    if shutil.which("patch"):
        subprocess.run(["patch", "-p0", "-s"], input=out, text=True, check=True)
        assert "af.microbatches(ctx, training_dataloader)" in Path("a.py").read_text()
        assert run(capsys, "a.py")[1:] == ("", "a.py: nothing to change\n")


def test_what_is_not_understood_is_named_and_there_is_no_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.py").write_text(QUICK_TOUR)
    Path("b.py").write_text(QUICK_TOUR + "accelerator.set_trigger()\nf(accelerator)\n")
    status, out, err = run(capsys, "a.py", "b.py")
    assert (status, out) == (2, "")
    first = QUICK_TOUR.count("\n") + 1
    lines = err.splitlines()
    trigger = "The trigger is a value: `state = accelfn.set_trigger(state)`."
    assert lines[0] == f"b.py:{first}: accelerator.set_trigger: {trigger}"
    assert lines[1].startswith(
        f"b.py:{first + 1}: f(accelerator): The Accelerator is used as a value. Pass it to"
    )
    number = "2 constructs are not understood, so there is no diff. Change them first."
    shim = "With --to shim the program keeps its Accelerator."
    assert lines[2:] == [f"accelfn migrate: error: {number} {shim}"]
    status, out, err = run(capsys, "--to", "shim", "b.py")
    assert status == 0
    assert "+from accelfn import Accelerator\n" in out


def test_line_breaks_and_encodings_are_those_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_bytes(
        "# coding: latin-1\r\nfrom accelerate import notebook_launcher  # ä\r\n".encode("latin-1")
    )
    assert "+from accelfn import notebook_launcher  # ä\r\n" in run(capsys, str(file))[1]
    file.write_bytes(b"# coding: nonsense\n")
    assert "isn't a Python program: unknown encoding" in run(capsys, str(file))[2]
    file.write_bytes(b"x = \xff\n")
    assert "isn't a Python program" in run(capsys, str(file))[2]
    file.write_text("x = = 1")
    assert f"{file}:1: this Python can't parse it" in run(capsys, str(file))[2]
    assert run(capsys, str(tmp_path / "absent.py"))[0] == 2
