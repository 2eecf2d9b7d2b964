"""What the commands that are given a model say of it, and where they write, the same in both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accelfn.launch.main import main

pytestmark = pytest.mark.parametrize("command", ["estimate-memory", "plan-memory"])


def test_functions_that_give_no_model(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = f"no_model_of_{command.replace('-', '_')}"
    text = "def needs(width): ...\ndef raises():\n    return 1 / 0\ndef gives():\n    return 3\n"
    (tmp_path / f"{module}.py").write_text(text)
    (tmp_path / f"broken_{module}.py").write_text("raise LookupError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    try:
        assert main([command, f"{module}:gives"]) == 2
        said = f"accelfn {command}: error: {module}:gives must return a module, but returned int.\n"
        assert capsys.readouterr().err == said
        assert main([command, f"{module}:needs"]) == 2
        assert "needs() missing 1 required positional argument: 'width'" in capsys.readouterr().err
        # What the user's own code raises passes, with its traceback.
        with pytest.raises(ZeroDivisionError):
            main([command, f"{module}:raises"])
        with pytest.raises(LookupError, match="no licence"):
            main([command, f"broken_{module}:build"])
    finally:
        sys.modules.pop(module, None)


def test_the_ending_of_the_output_says_its_form(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    given = [command, str(tmp_path / "model.safetensors")]
    if (
        command == "plan-memory"
    ):  # otherwise the plan shows how much memory is free, which changes between runs
        given += ["--max_memory", "cpu=1GB"]
    for ending, begin in (("txt", None), ("json", "{"), ("SVG", "<svg"), ("html", "<!")):
        assert main([*given, "--output", str(tmp_path / f"a.{ending}")]) == 0
        assert begin is None or (tmp_path / f"a.{ending}").read_text().lower().startswith(begin)
    assert main([*given]) == 0
    assert capsys.readouterr().out == (tmp_path / "a.txt").read_text()
    assert main([*given, "--output", str(tmp_path / "plain")]) == 0
    assert (tmp_path / "plain").read_text() == (tmp_path / "a.txt").read_text()
    assert main([*given, "--output", str(tmp_path / "a.foo")]) == 2
    said = "a.foo'. Use one of .txt, .json, .svg, .html, .htm, or pass --format."
    assert said in capsys.readouterr().err
    assert not (tmp_path / "a.foo").exists()
    assert main([*given, "--output", str(tmp_path / "a.foo"), "--format", "json"]) == 0
    assert (tmp_path / "a.foo").read_text().startswith("{")
