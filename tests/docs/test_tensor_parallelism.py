"""What the page on tensor parallelism shows is what its program prints."""

import re
from pathlib import Path

import pytest

from tests.launch.forked import launched, run_jobs

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "pages" / "guide" / "tensor-parallelism.md"
SHOWN = re.compile(r"^```text\n\$ accelfn ([^\n]*) (docs/\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ACCURACY = re.compile(r"(\d+\.\d+)%$")


@pytest.mark.slow
def test_two_ranks_that_share_layers_learn_as_the_page_says(tmp_path: Path) -> None:
    ((launcher, program, shown),) = SHOWN.findall(PAGE.read_text())
    assert launcher.startswith("launch ")
    one = launched(launcher.removeprefix("launch "), ROOT / program)
    (output,) = run_jobs([one], tmp_path, 300, ("torch._dynamo", "sklearn.datasets"))
    *found, last = output.splitlines()
    *expected, end = shown.splitlines()
    assert found == expected
    # Kernels of another machine may round otherwise.
    then, now = (ACCURACY.search(line) for line in (end, last))
    assert then is not None
    assert now is not None
    assert abs(float(then[1]) - float(now[1])) <= 3
    assert last.partition(":")[0] == end.partition(":")[0]
