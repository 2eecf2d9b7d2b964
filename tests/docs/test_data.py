"""The pictures of the page on data are those of the plans above them."""

import re
from pathlib import Path
from typing import Any

import pytest

from accelfn.data import draw_plan_svg, plan_epoch

GUIDE = Path(__file__).parents[2] / "docs" / "pages" / "guide"
PAGE = (GUIDE / "data.md").read_text()
DRAWN = re.findall(r"^```python\n(plan_epoch\(.*\))\n```\n\n!\[.*\]\((.*\.svg)\)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("call", "picture"), DRAWN)
def test_a_picture_is_what_its_plan_draws(call: str, picture: str) -> None:
    plan: Any = eval(call, {"plan_epoch": plan_epoch})
    assert (GUIDE / picture).read_text() == draw_plan_svg(plan)


def test_every_picture_has_its_plan() -> None:
    assert {name for _, name in DRAWN} == {file.name for file in GUIDE.glob("data_*.svg")}
