"""What the commands that are given a model say of it, the same in both."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
