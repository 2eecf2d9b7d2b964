"""Shells complete what the parsers and the table of fields know."""

import shutil
import subprocess

import pytest

from accelfn.launch.main import main
from accelfn.launch.options import OPTIONS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_flag_is_in_every_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for name in (*OPTIONS, "only", "max_memory", "overwrite", "unsafe_serialization", "use_alpha"):
        assert f"-l {name} " in script or f"--{name}" in script
    scripts = {"bash": "_launch_pos_0_COMPGEN=_shtab_compgen_files", "zsh": "script and its arguments:_files"}
    assert scripts.get(shell, "") in script  # paths
    program = shutil.which(shell)
    if program is not None:
        check = "--no-execute" if shell == "fish" else "-n"
        assert subprocess.run([program, check], input=script.encode(), check=False).returncode == 0
