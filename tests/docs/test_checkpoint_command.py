"""What the page on ``accelfn checkpoint`` shows is what the command prints."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.launch.main import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "checkpoint-command.md").read_text()


def plain(text: str) -> str:
    """Take out what another day or machine changes: times, and sizes, where numpy has a part."""
    text = text.replace("torch, numpy", "torch")
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "now", text)
    text = re.sub(r"\d+(\.\d+)? kB", "some kB", text)
    return "\n".join(re.sub(r"(?<=\S) +", " ", line) for line in text.splitlines())


@pytest.mark.slow
def test_the_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"^```python\n# train\.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=100,
    )
    monkeypatch.chdir(tmp_path)
    shown = re.findall(r"^```text\n\$ accelfn ([^\n]*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert {shlex.split(command)[1] for command, _ in shown} == {"list", "show", "verify", "prune", "convert"}
    for command, output in shown:
        assert main(shlex.split(command)) == 0, command
        assert plain(capsys.readouterr().out) == plain(output), command
