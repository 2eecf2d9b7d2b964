"""The page on hooks shows what its program prints, and names what there is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import accelfn.bigmodel

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "hooks.md").read_text()


@pytest.mark.slow
def test_the_program_prints_what_the_page_shows(tmp_path: Path) -> None:
    (shown,) = re.findall(r"^```text\n\$ python docs/examples/take_turns.py\n(.*?)^```$", PAGE, re.M | re.S)
    done = subprocess.run(
        [sys.executable, str(ROOT / "docs" / "examples" / "take_turns.py")],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == shown, done.stderr


def test_the_table_names_every_hook_and_function_of_hooks() -> None:
    names = {
        name
        for name in vars(accelfn.bigmodel)
        if re.search(
            r"\.(align_)?hooks$|\.casting$", str(getattr(getattr(accelfn.bigmodel, name), "__module__", ""))
        )
    }
    assert "ModelHook" in names
    assert [name for name in sorted(names) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", PAGE)] == []
