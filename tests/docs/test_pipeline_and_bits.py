"""What the pages on pipelines and on 8 and 4 bits show is what their programs print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "pages" / "guide"
SHOWN = re.compile(r"^```text\n\$ (\S+) ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_pipeline_runs_as_the_page_says(tmp_path: Path) -> None:
    ((program, arguments, output),) = SHOWN.findall((GUIDE / "pipeline.md").read_text())
    *options, script = arguments.split()
    assert (program, options[0]) == ("accelfn", "launch")
    launcher = ("-m", "accelfn", *options, "--cpu")
    assert run(tmp_path, *launcher, str(ROOT / script)) == output


@pytest.mark.slow
def test_models_of_few_bits_are_as_small_and_as_near_as_the_page_says(tmp_path: Path) -> None:
    ((program, script, output),) = SHOWN.findall((GUIDE / "quantization.md").read_text())
    assert program == "python"
    found, shown = run(tmp_path, str(ROOT / script)).splitlines(), output.splitlines()
    assert len(found) == len(shown)
    for now, then in zip(found, shown, strict=True):
        # Kernels of another machine may round otherwise.
        assert now.partition(" off")[0].rsplit(" ", 1)[0] == then.partition(" off")[0].rsplit(" ", 1)[0]
        if "off" in then:
            assert abs(_percent(now) - _percent(then)) <= 2


def _percent(line: str) -> int:
    match = re.search(r"(\d+)% off$", line)
    assert match is not None
    return int(match[1])
