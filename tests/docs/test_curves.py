"""The picture of curves beside each other is what its script draws."""

import runpy
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
POLYLINE = "{http://www.w3.org/2000/svg}polyline"


def test_each_panel_has_two_curves_with_a_point_for_each_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.csv").write_text("step,loss\n0,4.0\n1,2.0\n2,1.0\n")
    Path("other.csv").write_text("step,loss\n0,4.0\n1,2.5\n2,1.0\n")
    files = ["--names", "a", "b", "to.svg", "first", "one.csv", "one.csv", "second", "one.csv", "other.csv"]
    monkeypatch.setattr(sys, "argv", ["curves.py", *files])
    runpy.run_path(str(DOCS / "curves.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "first: 3 steps, largest difference 0.0e+00",
        "second: 3 steps, largest difference 2.5e-01",
    ]
    points = [str(line.get("points")) for line in ElementTree.parse("to.svg").iter(POLYLINE)]
    assert [len(line.split()) for line in points] == [3] * 4
    assert points[0] == points[1]
    assert points[2] != points[3]
    assert ">a</text>" in Path("to.svg").read_text()


@pytest.mark.parametrize(
    ("name", "page"), [("text_curves.svg", "accelerator.md"), ("fp8_curves.svg", "fp8.md")]
)
def test_the_pictures_in_the_guides_have_two_panels(name: str, page: str) -> None:
    picture = ElementTree.parse(DOCS / "pages" / "guide" / name)
    assert len(list(picture.iter(POLYLINE))) == 4
    assert f"]({name})" in (DOCS / "pages" / "guide" / page).read_text()
