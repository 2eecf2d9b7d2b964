"""The page on ranks that disagree shows what the ranks do and what they say."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "disagree.md").read_text()
# Not typed: the program is on the path only while pytest runs.
EXAMPLE: Any = importlib.import_module("disagree")


def plain(text: str) -> str:
    """Leave out where the repository lies, which line of accelfn a traceback goes through, and what depends
    on how ranks exchange.
    """
    text = re.sub(r'(File "accelfn/.*?", line) \d+', r"\1 N", text.replace(f"{ROOT}/", ""))
    return re.sub(r"(Look at its output first\.).*", r"\1", text)


@pytest.mark.parametrize("case", EXAMPLE.IN_MEMORY + EXAMPLE.ON_PROCESSES, ids=lambda case: case.__name__)
def test_the_page_shows_the_function_and_its_error(case: Any, capfd: pytest.CaptureFixture[str]) -> None:
    EXAMPLE.show(case)
    error = capfd.readouterr().out.removeprefix(f"\n{case.__name__}:\n").strip()
    assert "Error: " in error
    shown = f"```python\n{inspect.getsource(case)}```"
    assert shown in PAGE
    assert plain(f"```text\n{error}\n```") in plain(PAGE.partition(shown)[2])
