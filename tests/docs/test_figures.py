"""The README and the pages show the figures that were measured last, and no others."""

import re

from tests.bench.__main__ import PARTS, filled, pages, read_blocks

BLOCKS = read_blocks()
TEXTS = {str(page): page.read_text(encoding="utf-8") for page in pages()}


def test_pages_show_what_was_measured() -> None:
    # If not: `python -m tests.bench PART` measures a part, and fills all pages.
    assert [name for name, text in TEXTS.items() if filled(text, BLOCKS) != text] == []


def test_all_that_was_measured_is_shown() -> None:
    shown = {name for text in TEXTS.values() for name in re.findall(r"<!-- ([\w-]+) -->", text)}
    assert {name for name in BLOCKS if not name.endswith("-measured-on")} <= shown
    assert {f"{part}-measured-on" for part in PARTS if part != "gpu"} <= set(BLOCKS)


def test_a_figure_that_was_typed_is_found() -> None:
    page = filled("<!-- figures -->\n<!-- end -->\n", BLOCKS)
    assert "| Accelerate " in page
    assert filled(page.replace("| Accelerate ", "| Accelerate 9"), BLOCKS) == page
