"""Shells complete what the parsers and the table of fields know."""

import os
import pty
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from accelfn.launch.config import OPTIONS
from accelfn.launch.main import main

pytest.importorskip("shtab")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    names = list(OPTIONS)
    for name in (*names, "only", "max_memory", "overwrite", "log_scale", "unsafe_serialization", "use_alpha"):
        assert f"-l {name} " in script or f"--{name}" in script
    program = shutil.which(shell)
    if program is not None:
        check = "--no-execute" if shell == "fish" else "-n"
        assert subprocess.run([program, check], input=script.encode(), check=False).returncode == 0


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("accelfn launch tra\t", "accelfn launch train.py"),
        ("accelfn launch --mixed_precision b\t", "--mixed_precision bf16"),
        ("accelfn launch --num_proc\t", "--num_processes "),
        ("accelfn te\t", "accelfn test "),
        ("accelfn config de\t", "accelfn config default "),
        ("accelfn checkpoint pr\t", "accelfn checkpoint prune "),
    ],
)
def test_the_tab_key_in_a_real_bash(
    typed: str, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["completion", "bash"])
    (tmp_path / "train.py").touch()
    (tmp_path / "completion").write_text(capsys.readouterr().out)
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
