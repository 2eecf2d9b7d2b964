"""What the commands that are given a model say of it, and where they write, the same in both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("name", ["estimate-memory", "plan-memory"])
def test_functions_that_give_no_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    text = "def needs(width): ...\ndef raises():\n    return 1 / 0\ndef gives():\n    return 3\n"
    (tmp_path / "no_model.py").write_text(text)
    (tmp_path / "broken.py").write_text("raise LookupError('no licence')\n")
    monkeypatch.delitem(sys.modules, "no_model", raising=False)
    for line, message in (
        ("no_model:gives", "error: no_model:gives must return a module, but returned int.\n"),
        ("no_model:needs", "needs() missing 1 required positional argument: 'width'"),
        ("no_model:absent", "has no attribute 'absent'"),
        ("absent_module:build", "No module named 'absent_module'"),
    ):
        status, _, stderr = command(f"{name} {line}")
        assert (status, message in stderr) == (2, True), stderr
    # What the user's own code raises passes, with its traceback.
    with pytest.raises(ZeroDivisionError):
        command(f"{name} no_model:raises")
    with pytest.raises(LookupError, match="no licence"):
        command(f"{name} broken:build")


def test_the_ending_of_the_output_says_its_form(tmp_path: Path, command: Command) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    line = "estimate-memory model.safetensors"
    for ending, begin in (("txt", ""), ("json", "{"), ("SVG", "<svg"), ("html", "<!"), ("plain", "")):
        target = Path("plain" if ending == "plain" else f"a.{ending}")
        assert command(f"{line} --output {target}")[:2] == (0, "")
        assert target.read_text().lower().startswith(begin)
    printed = command(line)[1]
    assert printed == Path("a.txt").read_text() == Path("plain").read_text()
    status, _, stderr = command(f"{line} --output a.foo")
    assert status == 2
    assert "a.foo'. Use one of .txt, .json, .svg, .html, .htm, or pass --format." in stderr
    assert not Path("a.foo").exists()
    assert command(f"{line} --output a.foo --format json")[0] == 0
    assert Path("a.foo").read_text().startswith("{")
