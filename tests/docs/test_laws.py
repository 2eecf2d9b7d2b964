"""The laws on the page hold, as they stand there."""

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "pages" / "guide" / "laws.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
LAWS = re.findall(r"^def (test_\w+)\(", "\n".join(BLOCKS), re.MULTILINE)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the blocks define, together, as in one file of tests."""
    names: dict[str, Any] = {"__name__": "laws"}
    exec(compile("\n".join(BLOCKS), str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("law", LAWS)
def test_a_law_of_the_page_holds(page: dict[str, Any], law: str) -> None:
    page[law]()


def test_each_block_but_the_first_has_a_law() -> None:
    assert len(LAWS) == len(BLOCKS) - 1 == 7
