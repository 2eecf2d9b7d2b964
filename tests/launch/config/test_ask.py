"""``accelfn config``, some sessions of it on a real pseudo-terminal."""

import contextlib
import os
import pathlib
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from types import ModuleType

import pytest

from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import read_config
from accelfn.launch.main import main
from accelfn.launch.questions import QUESTIONS
from tests.launch.processes import ROOT

PATIENCE_S = 60  # until the terminal is taken to hang; no figure of speed
TEXTS = {question.name: question.text for question in QUESTIONS}


@dataclass(frozen=True)
class Terminal:
    """A program with the other end of its terminal."""

    program: subprocess.Popen[bytes]
    handle: int
    screen: bytearray

    def wait_for(self, texts: Sequence[str], start: int = 0) -> tuple[str, int]:
        """Read until one of the texts stands there after ``start``; return it, and the place behind it."""
        while not (
            found := [(at, text) for text in texts if (at := self.screen.find(text.encode(), start)) >= 0]
        ):
            assert self.read(), f"none of {texts} came:\n{plain(self.screen)}"
        at, text = min(found)
        return text, at + len(text.encode())

    def read(self) -> bool:
        ready, _, _ = select.select([self.handle], [], [], PATIENCE_S)
        assert ready, f"nothing came any more:\n{plain(self.screen)}"
        try:
            piece = os.read(self.handle, 65536)
        except OSError:  # Linux says so when the program has ended
            return False
        self.screen.extend(piece)
        return bool(piece)

    def press(self, keys: str) -> None:
        os.write(self.handle, keys.encode())

    def end(self) -> tuple[int, str]:
        while self.read():
            pass
        return self.program.wait(PATIENCE_S), plain(self.screen)


def plain(screen: bytes | bytearray) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode(errors="replace")).replace("\r", "")


@contextlib.contextmanager
def on_terminal(arguments: Sequence[str], home: pathlib.Path) -> Generator[Terminal]:
    pytest.importorskip("questionary")
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 240, 0, 0))
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody here answers where the cursor is
        "CUDA_VISIBLE_DEVICES": "",  # the defaults shall not hang on the machine
    }
    program = subprocess.Popen(
        [sys.executable, "-m", "accelfn", "config", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=home,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        yield Terminal(program, ours, bytearray())
    finally:
        program.kill()
        program.wait()
        os.close(ours)


def hold_session(
    answers: Mapping[str, Sequence[str]], home: pathlib.Path, name: str
) -> tuple[LaunchConfig, str]:
    """Press these keys, the last of which is taken, and Enter at other questions."""
    path = home / name
    left = dict(TEXTS)
    with on_terminal(["--config_file", str(path)], home) as terminal:
        place = 0
        while True:
            text, place = terminal.wait_for(["saved ", *left.values()], place)
            if text == "saved ":
                break
            question = next(name for name, one in left.items() if one == text)
            *refused, taken = answers.get(question, ("",))
            for keys in refused:
                terminal.press(f"{keys}\r")
                _, place = terminal.wait_for(["Invalid answer"], place)
                _, place = terminal.wait_for([text], place)
            terminal.press(taken if taken == "y" else f"{taken}\r")
            left = {name: one for name, one in left.items() if one != text}  # it is shown again, answered
        status, screen = terminal.end()
    assert status == 0, screen
    assert f"launch with: accelfn launch --config_file {path} your_script.py" in screen
    assert not answers.keys() & left.keys()
    return LaunchConfig(**read_config(str(path)).values), screen


@pytest.mark.slow
def test_several_processes_on_cpus(tmp_path: pathlib.Path) -> None:
    (tmp_path / "made.json").write_text('{"max_restarts": 2, "gradient_accumulation_steps": 3}')
    answers = {
        "machine_type": ["2"],
        "num_machines": ["1"],
        "debug": ["y"],
        "dynamo_backend": ["\x1b[B"],  # a menu of more than nine takes arrows
        "num_processes": ["x", "8"],
        "mixed_precision": ["3"],
    }
    config, screen = hold_session(answers, tmp_path, "made.json")
    assert (config.cpu, config.debug, config.num_processes) == (True, True, 8)
    assert (config.dynamo_backend, config.mixed_precision) == ("eager", "bf16")
    assert (config.max_restarts, config.gradient_accumulation_steps) == (2, 3), "the file's"
    assert "Invalid answer: it must be an integer, 1 or more, got 'x'" in screen


@pytest.mark.slow
def test_cancelling_writes_nothing(tmp_path: pathlib.Path) -> None:
    with on_terminal([], tmp_path) as terminal:
        _, place = terminal.wait_for([TEXTS["machine_type"]])
        terminal.press("2\r")
        terminal.wait_for([TEXTS["num_machines"]], place)
        terminal.press("\x03")  # Ctrl-C
        status, screen = terminal.end()
    assert status == 130
    assert "cancelled; nothing was written" in screen
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_not_replaced_unasked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "accelfn" / "config.yaml"
    path.parent.mkdir()
    path.write_text("config_version: 99\n")
    with on_terminal([], tmp_path) as terminal:
        terminal.wait_for(["Replace the file?"])
        terminal.press("\r")
        status, screen = terminal.end()
    assert status == 1
    assert "config_version must be 1 in this accelfn, got '99'" in screen
    assert path.read_text() == "config_version: 99\n"


@pytest.mark.parametrize(
    ("place", "package", "message"),
    [
        ("folder", ModuleType("questionary"), "is a directory"),
        ("file/config.yaml", ModuleType("questionary"), "can't write"),
        ("a.yaml", None, "pip install 'accelfn[cli]'"),
    ],
)
def test_what_cannot_be_asked_or_written_is_refused_before_the_first_question(
    place: str,
    package: ModuleType | None,
    message: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    argv = ["config", "--config_file", str(tmp_path / place)]
    if package is None:
        assert main(argv) == 2
        assert "needs a terminal. Use accelfn config default, or pass flags" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "questionary", package)
    assert main(argv) == 2
    assert message in capsys.readouterr().err
