"""The page on programs written for Accelerate shows what its program prints."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "written-for-accelerate.md").read_text()
(SHOWN,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^\$ (\S+) (.*)\n(.*\n)", SHOWN, re.M)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "arguments", "said"), COMMANDS, ids=["alone", "launched"])
def test_the_program_prints_what_the_page_shows(program: str, arguments: str, said: str) -> None:
    run = [sys.executable, *(["-m", "accelfn"] if program == "accelfn" else []), *arguments.split()]
    done = subprocess.run(
        run,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == said, done.stderr
