from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from accelfn.launch.main import main
from tests.launch import processes


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., "Popen[str]"]]:
    """Start launches in the test's folder, and leave none behind."""
    started: list[Popen[str]] = []

    def begin(*argv: str, **options: Any) -> "Popen[str]":
        started.append(processes.start(tmp_path, "launch", *argv, **options))
        return started[-1]

    yield begin
    for one in started:
        one.kill()
        one.communicate()


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process and the test's folder; its status, stdout and stderr come back."""
    monkeypatch.chdir(tmp_path)

    def run(line: str, *more: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([*line.split(), *map(str, more)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
