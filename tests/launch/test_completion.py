"""Shells complete what the parsers and the table of fields know."""

import contextlib
import io
import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from accelfn.launch.arguments import CommandWords
from accelfn.launch.completion import write_completion
from accelfn.launch.config import FIELDS
from accelfn.launch.main import main

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture(scope="module")
def script() -> str:
    return _printed("bash")


def _printed(shell: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["completion", shell]) == 0
    return out.getvalue()


def complete(script: str, *words: str) -> list[str]:
    """Ask bash as readline does: with its words, of which the last one is completed."""
    asked = "\n".join(
        (
            "compopt() { :; }",  # there is no completion going on that it could speak to
            script,
            'COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _accelfn',
            "if [ ${#COMPREPLY[@]} -gt 0 ]; then printf '%s\\n' \"${COMPREPLY[@]}\"; fi",
        )
    )
    done = subprocess.run(
        ["bash", "-c", asked, "bash", "accelfn", *words], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@needs_bash
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("la",), ["launch"]),
        (("--v",), ["--version"]),
        (("launch", "--num_p"), ["--num_processes"]),
        (("launch", "--num-p"), ["--num-processes"]),
        (("launch", "--no_use_f"), ["--no_use_fsdp"]),
        (("launch", "--mixed_precision", "b"), ["bf16"]),
        (("launch", "--mixed_precision", "=", "b"), ["bf16"]),
        (("launch", "--mixed-precision", "="), ["no", "fp16", "bf16", "fp8"]),
        (
            (
                "launch",
                "--mixed_precision=b",
            ),
            ["--mixed_precision=bf16"],
        ),
        (("launch", "--use_fsdp", "=", "t"), ["true"]),
        (("launch", "--use_fsdp", "t"), []),
        (("launch", "--num_processes", "2", "--use_fsd"), ["--use_fsdp"]),
        (("launch", "--mixed_precision", "=", "bf16", "--use_fsd"), ["--use_fsdp"]),
        (("launch", "train.py", "--use_fsd"), []),
        (("launch", "tr"), []),
        (("config", ""), ["default", "update", "show", "import"]),
        (("config", "--con"), ["--config_file"]),
        (("config", "--config_file", "a.yaml", "sh"), ["show"]),
        (("config", "default", "--ov"), ["--overwrite"]),
        (("config", "default", "--mixed_precision", "f"), ["fp16"]),
        (("config", "import", ""), []),
        (("checkpoint", "pr"), ["prune"]),
        (("checkpoint", "prune", "folder", "--mo"), ["--mode"]),
        (("checkpoint", "convert", "a", "b", "--to", "s"), ["safetensors"]),
        (("runs", ""), ["list", "show", "plot"]),
        (("env", "--j"), ["--json"]),
        (("test", "--onl"), ["--only"]),
        (("test", "--only", "loader,\\ r"), ["loader,\\ resumed"]),
        (("test", "--use_fsd"), ["--use_fsdp"]),
        (("completion", "f"), ["fish"]),
        (("completion", "fish", ""), []),
        (("nosuch", "--x"), []),
    ],
    ids=" ".join,
)
def test_bash_completes(script: str, words: tuple[str, ...], found: list[str]) -> None:
    assert complete(script, *words) == found


@needs_bash
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("accelfn launch my\\ \t", "accelfn launch my\\ train\\ ü.py"),
        ('accelfn launch "my \t', 'accelfn launch "my train ü.py"'),
        ("accelfn launch --mixed_precision=b\t", "--mixed_precision=bf16"),
        ("accelfn te\t", "accelfn test "),
        ("accelfn config de\t", "accelfn config default "),
        ("accelfn merge-weights de\t", "accelfn merge-weights default.d/"),
    ],
)
def test_the_tab_key_in_a_real_bash(script: str, typed: str, shown: str, tmp_path: Path) -> None:
    (tmp_path / "my train ü.py").touch()
    (tmp_path / "test").mkdir()  # a folder of a command's name
    (tmp_path / "default.d").mkdir()
    (tmp_path / "completion").write_text(script)
    quiet = {"TERM": "dumb", "LC_ALL": "C.UTF-8"}
    control, terminal = pty.openpty()
    process = subprocess.Popen(
        ["bash", "--norc", "--noprofile", "-i"],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=tmp_path,
        env={**quiet, "PATH": os.environ["PATH"], "PS1": "ready ", "HISTFILE": ""},
        start_new_session=True,
    )
    os.close(terminal)
    try:
        seen = _read_until(control, "ready ")
        os.write(control, b"bind 'set enable-bracketed-paste off'; . ./completion; echo l'oad'ed\n")
        seen = _read_until(control, "loaded\r\n")
        os.write(control, typed.encode())
        seen = _read_until(control, shown)
        assert shown in seen
    finally:
        process.kill()
        process.wait()
        os.close(control)


def _read_until(control: int, wanted: str) -> str:
    seen = b""
    while wanted not in seen.decode(errors="replace"):
        if not select.select([control], [], [], 10)[0]:
            break
        seen += os.read(control, 4096)
    return seen.decode(errors="replace")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_is_in_every_script(shell: str) -> None:
    script = _printed(shell)
    assert all(f"-l {field.name} " in script or f"--{field.name}" in script for field in FIELDS)
    for name in ("only", "max_memory", "overwrite", "log_scale", "unsafe_serialization", "use_alpha"):
        assert f"-l {name} " in script or f"--{name}" in script
    program = shutil.which(shell)
    if program is not None:
        check = [program, "-n", "-c", script] if shell != "fish" else [program, "--no-execute", "-c", script]
        assert subprocess.run(check, check=False).returncode == 0


def test_no_words_make_a_script_too() -> None:
    assert "_accelfn()" in write_completion("bash", CommandWords(flags=()))
