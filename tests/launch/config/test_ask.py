"""``accelfn config`` on a real pseudo-terminal, one session for each branch of the questionnaire."""

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
from importlib.util import find_spec

import pytest

from accelfn.launch.config import LaunchConfig, format_config, read_config
from accelfn.launch.config.ask import ask_questions
from accelfn.launch.config.options import FILE
from accelfn.launch.config.questions import Question, first_answers, values_of
from accelfn.launch.config.record import replace
from accelfn.launch.main import main

ROOT = pathlib.Path(__file__).parents[3]
PATIENCE_S = 60  # until the terminal is taken to hang; no figure of speed
DOWN = "\x1b[B"


@dataclass(frozen=True)
class Terminal:
    """A program with the other end of its terminal."""

    program: subprocess.Popen[bytes]
    handle: int
    screen: bytearray

    def wait_for(self, words: str, start: int) -> int:
        """Read until the words stand there after ``start``; give the place behind them."""
        while (found := self.screen.find(words.encode(), start)) < 0:
            assert self.read(), f"{words!r} never came:\n{plain(self.screen)}"
        return found + len(words.encode())

    def read(self) -> bool:
        ready, _, _ = select.select([self.handle], [], [], PATIENCE_S)
        assert ready, f"nothing came any more:\n{plain(self.screen)}"
        try:
            piece = os.read(self.handle, 65536)
        except OSError:  # Linux says so when the program has ended
            return False
        self.screen.extend(piece)
        return bool(piece)

    def end(self) -> tuple[int, str]:
        while self.read():
            pass
        return self.program.wait(PATIENCE_S), plain(self.screen)


def plain(screen: bytes | bytearray) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.decode(errors="replace")).replace("\r", "")


@contextlib.contextmanager
def on_terminal(arguments: Sequence[str], home: pathlib.Path) -> Generator[Terminal]:
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


@dataclass(frozen=True)
class Step:
    question: Question
    keys: str


def plan_session(
    texts: Mapping[str, Sequence[str] | str], saved: Mapping[str, object], home: pathlib.Path
) -> tuple[tuple[Step, ...], LaunchConfig]:
    """Say which questions will come and which keys answer them; those without a text get Enter."""
    left = {name: [text] if isinstance(text, str) else list(text) for name, text in texts.items()}
    steps: list[Step] = []

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        text = left[question.name].pop(0) if left.get(question.name) else None
        if question.kind.is_bool:
            steps.append(Step(question, "\r" if text is None else text[0]))
            return question.kind.write(default if text is None else text == "yes")
        if few:
            chosen = str(default) if text is None else text
            downs = few.index(chosen) - few.index(str(default))
            # Menus of up to nine take digits, and a choice that is one its own; the others arrows.
            digit = chosen if all(one.isdecimal() for one in few) else str(few.index(chosen) + 1)
            keys = "" if not downs else digit if len(few) < 10 else DOWN * downs
            steps.append(Step(question, f"{keys}\r"))
            return chosen
        if question.kind is FILE and text and not text.startswith(("none", "absent", "/")):
            (home / text.removeprefix("~/")).touch()
        steps.append(Step(question, f"{text or ''}\r"))
        return text or ""

    here = os.getcwd()
    os.chdir(home)  # as the program's, for answers that are relative paths
    try:
        first = first_answers(saved, has_deepspeed=find_spec("deepspeed") is not None)
        answers = ask_questions(first, saved, put, lambda _: None)
    finally:
        os.chdir(here)
    assert not any(left.values()), left
    return tuple(steps), LaunchConfig(**values_of(answers))


def hold_session(
    texts: Mapping[str, Sequence[str] | str], home: pathlib.Path, name: str = "made.yaml"
) -> tuple[LaunchConfig, str]:
    """Answer on a terminal, and give what was written and what the screen showed."""
    path = home / name
    saved: Mapping[str, object] = read_config(str(path)).values if path.exists() else {}
    steps, expected = plan_session(texts, saved, home)
    with on_terminal(["--config_file", str(path)], home) as terminal:
        place = 0
        before = None
        for step in steps:
            if before is step.question:  # what stands there once more is the old one
                place = terminal.wait_for("Invalid answer", place)
            before = step.question
            place = terminal.wait_for(step.question.text, place)
            os.write(terminal.handle, step.keys.encode())
        status, screen = terminal.end()
    assert status == 0, screen
    assert f"saved {path}" in screen
    assert f"launch with: accelfn launch --config_file {path} your_script.py" in screen
    written = LaunchConfig(**read_config(str(path)).values)
    assert written == expected
    return written, screen


def test_one_process_that_compiles(tmp_path: pathlib.Path) -> None:
    config, _ = hold_session(
        {
            "dynamo_backend": "torchxla_trace_once",
            "mixed_precision": "bf16",
            "gradient_accumulation_steps": "4",
        },
        tmp_path,
        "made.json",
    )
    assert config.num_processes == 1
    assert config.dynamo_backend == "torchxla_trace_once"
    assert (config.mixed_precision, config.gradient_accumulation_steps) == ("bf16", 4)


def test_several_processes_on_cpus_through_mpirun(tmp_path: pathlib.Path) -> None:
    config, screen = hold_session(
        {
            "machine_type": "several processes on CPUs",
            "num_machines": "2",
            "mpirun_hostfile": ["absent", "hosts"],
            "debug": "yes",
            "num_processes": ["x", "3", "8"],
        },
        tmp_path,
    )
    assert config.cpu
    assert config.debug
    assert config.mpirun_hostfile == str(tmp_path / "hosts")
    assert (config.num_machines, config.num_processes) == (2, 8)
    assert "Invalid answer: it must be an integer, 1 or more, got 'x'" in screen
    assert "got 3 processes on 2 machines" in screen
    assert f"no file '{tmp_path / 'absent'}'" in screen


@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_machines_that_meet(backend: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "made.yaml").write_text("multi_gpu: true\n")  # on a machine without accelerators
    config, screen = hold_session(
        {
            "machine_type": "several accelerators",
            "num_machines": "3",
            "rdzv_backend": backend,
            **({"machine_rank": "1"} if backend == "static" else {}),
            "main_process_ip": ["", "bad host", "10.0.0.7"],
            "main_process_port": ["0", "29600"],
            "num_processes": "12",
            "gpu_ids": ["0,1,2", "0,1,2,3"],
        },
        tmp_path,
    )
    assert (config.main_process_ip, config.main_process_port) == ("10.0.0.7", 29600)
    assert config.machine_rank == (1 if backend == "static" else None)
    assert ("on the other machines" in screen) is (backend == "static")
    assert "0,1,2 lists 3" in screen


def test_a_cluster_of_tpus(tmp_path: pathlib.Path) -> None:
    (tmp_path / "made.yaml").write_text("tpu: true\n")  # on a machine without torch_xla
    config, _ = hold_session(
        {
            "machine_type": "TPU",
            "num_processes": "8",
            "main_training_function": "train",
            "tpu_cluster": "yes",
            "tpu_name": "pod",
            "tpu_zone": "us-central1-a",
            "mixed_precision": "bf16",
            "downcast_bf16": "yes",
        },
        tmp_path,
    )
    assert (config.tpu_cluster, config.tpu_name) == (True, "pod")
    assert (config.mixed_precision, config.downcast_bf16) == ("bf16", True)


def test_an_existing_file_provides_the_defaults(tmp_path: pathlib.Path) -> None:
    saved = LaunchConfig(cpu=True, num_processes=6, max_restarts=2, mixed_precision="bf16")
    (tmp_path / "made.yaml").write_text(format_config(saved, "made.yaml"))
    config, screen = hold_session({"gradient_accumulation_steps": "2"}, tmp_path)
    assert config == replace(saved, gradient_accumulation_steps=2, dynamo_backend="no")
    assert "on all machines together? [6]:" in screen


@pytest.mark.parametrize("key", ["\x03", "\x04"], ids=["ctrl-c", "ctrl-d"])
def test_cancelling_writes_nothing(key: str, tmp_path: pathlib.Path) -> None:
    with on_terminal([], tmp_path) as terminal:
        place = terminal.wait_for("What hardware does the script run on?", 0)
        os.write(terminal.handle, b"2\r")
        terminal.wait_for("How many machines?", place)
        os.write(terminal.handle, key.encode())
        status, screen = terminal.end()
    assert status == 130
    assert "cancelled; nothing was written" in screen
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_read_is_not_replaced_unasked(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "accelfn" / "config.yaml"
    path.parent.mkdir()
    path.write_text("config_version: 99\n")
    with on_terminal([], tmp_path) as terminal:
        terminal.wait_for("Replace the file?", 0)
        os.write(terminal.handle, b"\r")
        status, screen = terminal.end()
    assert status == 1
    assert "config_version 99 is newer" in screen
    assert path.read_text() == "config_version: 99\n"


def test_without_a_terminal_the_error_names_the_other_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 2
    error = capsys.readouterr().err
    assert "accelfn config default" in error
    assert "flags" in error


@pytest.mark.parametrize(
    ("place", "reason"), [("folder", "is a directory"), ("file/config.yaml", "can't write")]
)
def test_an_unwritable_path_is_refused_before_the_first_question(
    place: str,
    reason: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["config", "--config_file", str(tmp_path / place)]) == 2
    assert reason in capsys.readouterr().err


def test_the_file_may_be_named_before_or_behind_a_command(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.json")
    assert main(["config", "--config_file", path, "default"]) == 0
    assert main(["config", "show", "--config_file", path]) == 0
    assert f"file: {path}\n" in capsys.readouterr().out


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "questionary", None)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["config"]) == 2
    assert "pip install 'accelfn[cli]'" in capsys.readouterr().err
