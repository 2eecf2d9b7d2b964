"""The pictures of the page on data are those that the command draws."""

import re
import shlex
from pathlib import Path

import pytest

from accelfn.launch.main import main

PAGES = Path(__file__).parents[2] / "docs" / "pages"
GUIDE = PAGES / "guide"
PAGE = (GUIDE / "data.md").read_text()
DRAWN = re.findall(r"^```text\naccelfn (data-plan .*)\n((?:.*\n)*?)```$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), DRAWN, ids=lambda value: value[10:60])
def test_a_picture_is_what_its_command_draws(
    command: str,
    shown: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)) == 0
    printed = capsys.readouterr().out
    files = list(tmp_path.iterdir())
    assert shown in ("", printed)
    assert shown or files
    for file in files:
        assert file.read_text() == (GUIDE / file.name).read_text(), (
            f"{file.name} is out of date: run accelfn {command} in {GUIDE}"
        )
        assert f"]({file.name})" in PAGE


def test_every_picture_has_its_command() -> None:
    named = {word for command, _ in DRAWN for word in shlex.split(command) if word.endswith(".svg")}
    assert named == set(re.findall(r"\]\((\S+\.svg)\)", PAGE))
    assert named == {file.name for file in GUIDE.glob("data_*.svg")}
    assert any(shown for _, shown in DRAWN)
