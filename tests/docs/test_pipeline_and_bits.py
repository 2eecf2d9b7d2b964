"""What the pages on pipelines and on 8 and 4 bits show is what their programs print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.forked import launched, run_jobs
from tests.launch.processes import environment

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "pages" / "guide"
SHOWN = re.compile(r"^```text\n\$ (\S+) ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_pipeline_runs_as_the_page_says(tmp_path: Path) -> None:
    ((program, arguments, output),) = SHOWN.findall((GUIDE / "pipeline.md").read_text())
    *options, script = arguments.split()
    assert (program, options[0]) == ("accelfn", "launch")
    one = launched(" ".join(options[1:]), ROOT / script)
    assert run_jobs([one], tmp_path, 100, ("torch._dynamo",)) == [output]


@pytest.mark.slow
def test_models_of_few_bits_are_as_small_and_as_near_as_the_page_says(tmp_path: Path) -> None:
    ((program, script, output),) = SHOWN.findall((GUIDE / "quantization.md").read_text())
    assert program == "python"
    done = subprocess.run(
        [sys.executable, str(ROOT / script)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, shown = done.stdout.splitlines(), output.splitlines()
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
