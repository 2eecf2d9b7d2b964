"""What the pages on big models show is what their commands and programs print."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.launch.main import main

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "pages" / "guide"
EXAMPLES = ROOT / "docs" / "examples"
SHOWN = re.compile(r"^```text\n\$ (\S+) ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ESTIMATES = SHOWN.findall((GUIDE / "estimate.md").read_text())


@pytest.mark.parametrize(("program", "arguments", "output"), ESTIMATES)
def test_estimates_are_what_the_command_says(
    program: str,
    arguments: str,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = shlex.split(arguments)
    pictures = [word for word in argv if word.endswith(".svg")]
    argv = [str(tmp_path / word) if word in pictures else word for word in argv]
    monkeypatch.chdir(EXAMPLES)
    assert program == "accelfn"
    assert main(argv) == 0
    assert capsys.readouterr().out == output
    for name in pictures:
        assert (tmp_path / name).read_text() == (GUIDE / name).read_text(), f"{name} is out of date"
        assert f"]({name})" in (GUIDE / "estimate.md").read_text()


def test_the_page_on_estimates_shows_commands_and_a_picture() -> None:
    assert len(ESTIMATES) == 3
    assert [path.name for path in GUIDE.glob("estimate_*.svg")] == ["estimate_seven_billion.svg"]


def test_the_three_ways_end_as_the_page_says(tmp_path: Path) -> None:
    ((program, script, output),) = SHOWN.findall((GUIDE / "big-models.md").read_text())
    assert program == "python"
    done = subprocess.run(
        [sys.executable, str(ROOT / script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
