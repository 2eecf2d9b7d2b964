import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.data import EpochPlan, draw_plan, draw_plan_svg, plan_epoch

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def planned(draw: st.DrawFn) -> EpochPlan:
    num = draw(st.integers(0, 40))
    return plan_epoch(
        num,
        draw(st.integers(1, 4)),  # no more in a row than are written out
        draw(st.integers(1, 5)),
        even_batches=draw(st.booleans()),
        drop_last=draw(st.booleans()),
        start=num * draw(st.integers(0, 4)) // 4,
    )


def expected_cells(plan: EpochPlan) -> list[list[tuple[list[int], list[int]]]]:
    """New positions and padding of each cell, told by what has come before."""
    seen = set[int]()
    cells: list[list[tuple[list[int], list[int]]]] = [[] for _ in range(plan.size)]
    for step in range(plan.num_steps):
        left = plan.num_valid(step)
        for rank in range(plan.size):
            positions = plan.positions(step, rank)
            new = positions[: max(0, left)]
            assert not seen & set(new)
            seen |= set(new)
            left -= len(positions)
            cells[rank].append((new, positions[len(new) :]))
    return cells


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


@given(planned())
def test_the_table_shows_what_each_rank_reads_and_which_of_it_is_padding(plan: EpochPlan) -> None:
    heads, *lines = draw_plan(plan, max_steps=100).splitlines()
    expected = expected_cells(plan)
    rows = lines[: plan.size]
    if not plan.num_steps:
        assert heads.split("  ")[-1] == "no step"
        assert all(row.endswith("  -") for row in rows)
    else:
        starts = [match.start() for match in re.finditer("step", heads)]
        for rank, row in enumerate(rows):
            assert row.startswith(f"rank {rank} ")
            for left, right, (new, padding) in zip(starts, [*starts[1:], None], expected[rank], strict=True):
                plain, _, marked = row[left:right].partition("(")
                assert (numbers(plain), numbers(marked)) == (new, padding)
                assert (plain.strip() == "-") == (not new and not padding)
    notes = "\n".join(lines[plan.size :])
    assert ("read before" in notes) == (plan.start > 0)
    read = sum(plan.num_valid(step) for step in range(plan.num_steps))
    assert ("left out" in notes) == (plan.start + read < plan.num_samples)


@given(planned())
def test_the_image_says_the_same_inside_of_its_borders(plan: EpochPlan) -> None:
    root = ElementTree.fromstring(draw_plan_svg(plan, max_steps=100))
    places = [*("x", "y", "width", "height")]
    width, height = (int(root.attrib[name]) for name in places[2:])
    boxes = [tuple(int(box.attrib[name]) for name in places) for box in root.iter(SVG + "rect")]
    assert all(0 <= x < x + w <= width and 0 <= y < y + h <= height for x, y, w, h in boxes)
    texts = list(root.iter(SVG + "text"))
    assert all(int(text.attrib["x"]) + int(text.attrib["textLength"]) <= width for text in texts)
    shown = [
        number
        for text in texts
        if re.fullmatch(r"[\d ]+", text.text or "")
        for number in numbers(text.text or "")
    ]
    cells = [cell for row in expected_cells(plan) for cell in row]
    assert sorted(shown) == sorted(position for new, padding in cells for position in new + padding)
    colors = [box.attrib["fill"] for box in root.iter(SVG + "rect")][1:]
    assert len(colors) == sum(bool(new) + bool(padding) for new, padding in cells)
    assert len(set(colors)) == any(new for new, _ in cells) + any(padding for _, padding in cells)


def test_what_is_long_is_shown_by_its_ends() -> None:
    plan = plan_epoch(10**10, 32, 10_000)
    lines = draw_plan(plan, max_steps=3, max_ranks=2).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["rank", "...", "rank"]
    assert lines[0].split("  ")[-1] == "step 31249"
    assert lines[1].split()[:3] == ["rank", "0", "0..31"]
    assert lines[-1].startswith("rank 9999 ")
    assert lines[-1].endswith("9999999968..9999999999")
    dropping = plan_epoch(10**10, 33, 10_000, drop_last=True)
    end = dropping.num_steps * 330_000
    assert draw_plan(dropping, max_steps=2).endswith(f"left out: {end}..9999999999")


def test_a_picture_of_less_than_both_ends_is_refused() -> None:
    plan = plan_epoch(4, 1)
    for draw in (draw_plan, draw_plan_svg):
        with pytest.raises(ValueError, match="max_steps=1"):
            draw(plan, max_steps=1)
        with pytest.raises(ValueError, match="max_ranks=0"):
            draw(plan, max_ranks=0)
