"""Shells complete what the table of fields knows."""

import shutil
import subprocess

import pytest

from accelfn.launch.completion import write_completion
from accelfn.launch.config import FIELDS

COMMANDS = ("launch", "config")


def complete(*words: str) -> list[str]:
    script = "\n".join(
        (
            write_completion("bash", COMMANDS),
            f"COMP_WORDS=({' '.join(words)} {chr(34) * 2 if words[-1] == 'accelfn' else ''})",
            "COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _accelfn; printf '%s\\n' \"${COMPREPLY[@]}\"",
        )
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes() -> None:
    assert complete("accelfn", "la") == ["launch"]
    assert complete("accelfn", "launch", "--num_p") == ["--num_processes"]
    assert complete("accelfn", "launch", "--no_use_f") == ["--no_use_fsdp"]
    assert complete("accelfn", "launch", "--mixed_precision", "b") == ["bf16"]
    assert "/etc/passwd" in complete("accelfn", "launch", "/etc/passw")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_is_in_every_script(shell: str) -> None:
    script = write_completion(shell, COMMANDS)
    assert all(f"-l {field.name} " in script or f"--{field.name}" in script for field in FIELDS)
    program = shutil.which(shell)
    if program is not None:
        check = [program, "-n", "-c", script] if shell != "fish" else [program, "--no-execute", "-c", script]
        assert subprocess.run(check, check=False).returncode == 0
