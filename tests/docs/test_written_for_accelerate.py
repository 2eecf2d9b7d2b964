"""The page on programs written for Accelerate shows what its program prints."""

import re
from pathlib import Path

import pytest

from tests.launch.forked import Job, run_jobs
from tests.launch.plan.plans import plan_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "written-for-accelerate.md").read_text()
(SHOWN,) = re.findall(r"^```text\n(.*?)^```$", PAGE, re.M | re.S)
MODULE = ROOT / "accelfn" / "compat" / "__main__.py"


@pytest.mark.slow
def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (alone, first), (launch, second) = re.findall(r"^\$ (.*)\n(.*\n)", SHOWN, re.M)
    module = "python -m accelfn.compat "
    assert alone.startswith(module)
    script = alone.removeprefix(module)
    plan = plan_of(launch.removeprefix("accelfn launch "))
    assert plan.argv[-3:] == ("-m", "accelfn.compat", script)
    argv = (str(ROOT / script),)
    jobs = [Job(str(MODULE), argv), Job(str(MODULE), argv, plan.local_size, dict(plan.env_changes))]
    assert run_jobs(jobs, tmp_path, 100, ()) == [first, second]
