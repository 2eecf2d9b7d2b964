"""The example of lost ranks ends with the weights that its page shows the command for, whatever is lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = "docs/examples/elastic/digits.py"
PAGE = (ROOT / "docs" / "pages" / "guide" / "elastic.md").read_text()


def run(*arguments: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=100, check=True
    )
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)  # two programs of up to 100 s each
def test_the_example_loses_a_process_and_no_bit() -> None:
    plain, _ = run(EXAMPLE, "--steps", "20")
    flags = ("-m", "accelfn", "launch", "--elastic", "--num_processes", "2", "--max_restarts", "0")
    killed, text = run(*flags, EXAMPLE, "--steps", "20", "--kill", "1:8")
    assert re.fullmatch(r"20 steps, weights [0-9a-f]{16}\n", plain)
    assert killed == plain
    assert re.search(r"accelfn: 1 rank goes on from step 5 in memory after \d\.\d s; ", text), text


def test_the_page_shows_the_same_weights_twice() -> None:
    shown = re.findall(r"^600 steps, weights (\w+)$", PAGE, re.MULTILINE)
    assert len(shown) == 2
    assert len(set(shown)) == 1
    assert EXAMPLE in PAGE
