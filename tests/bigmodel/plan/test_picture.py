from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import (
    DevicePlan,
    LeafShape,
    PlanOptions,
    draw_device_plan,
    draw_device_plan_html,
    draw_device_plan_svg,
    plan_device_map,
    read_shape,
    shape_from_leaves,
)
from accelfn.tree.structure import size_text
from tests.bigmodel.plan.trees import M3, build, trees

SVG = "{http://www.w3.org/2000/svg}"


@st.composite
def plans(draw: st.DrawFn) -> DevicePlan:
    shape = read_shape(build(draw(trees())))
    sizes = st.integers(0, shape.num_bytes + 5)
    return plan_device_map(shape, {0: draw(sizes), "cpu:1": draw(sizes), "cpu": draw(sizes)})


@given(plans())
def test_text_image_and_page_show_each_place(plan: DevicePlan) -> None:
    text = draw_device_plan(plan)
    assert text == str(plan)
    rows = text.splitlines()[1:]
    image = draw_device_plan_svg(plan, "a < b")
    shown = [one.text for one in ElementTree.fromstring(image).iter(f"{SVG}text")]
    page = draw_device_plan_html(plan, "a < b")
    assert "<title>a &lt; b</title>" in page
    assert image.rstrip() in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    for row, one in zip(rows, plan.places, strict=False):
        budget = "none" if one.budget is None else size_text(one.budget)
        sizes = [size_text(one.used), size_text(one.reserved), budget]
        assert re.split(r" {2,}", row)[:4] == [str(one.place), *sizes]
        assert ("#" in row) == (one.budget is not None and one.used > 0)
        assert str(one.place) in shown
        assert f"{size_text(one.used)} of {'no limit' if one.budget is None else budget}" in shown
    cells = [
        text for one in plan.places for leaf in one.leaves for text in (leaf.name, size_text(leaf.num_bytes))
    ]
    assert re.findall(r"<td[^>]*>([^<]*)", page) == cells


def test_ranges_parts_and_ties() -> None:
    sizes = {
        **{f"layers.{number}.w": 10 for number in range(12)},
        "layers.12.a": 5,
        "layers.12.b": 5,
        "end<&>": 1,
    }
    shape = shape_from_leaves(
        [LeafShape(name, size, size, torch.uint8) for name, size in sizes.items()],
        [("layers.0.w", "layers.1.w")],
    )
    plan = plan_device_map(shape, {0: 0, 1: 1 + 10 * 10, "disk": 100})
    lines = draw_device_plan(plan).splitlines()
    assert "1      end<&>, layers.0..10" in lines
    assert "disk   layers.11..12" in lines
    assert "tied: layers.0.w = layers.1.w" in lines
    assert "end&lt;&amp;&gt;" in draw_device_plan_html(plan)
    split = nn.ModuleDict({"block": nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))])})
    plan = plan_device_map(read_shape(split), {0: 0, 1: 64})
    assert "1      block.0 (part)" in draw_device_plan(plan)
    assert "disk   block.0 (part)" in draw_device_plan(plan)


def test_warnings_and_copies() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 10), "b": nn.Linear(1, 20), "c": nn.Linear(1, 20)})
    for name in "bc":
        model.get_submodule(name).weight = model.get_submodule("a").weight
    plan = plan_device_map(read_shape(model), {0: 0, 1: 160, "disk": 160})
    text = draw_device_plan(plan)
    assert "copies (40 B each): a.weight on 1, b.weight on 1, c.weight on disk" in text
    assert "warning: the model only fits with independent copies" in text


def test_empty_places_and_models() -> None:
    for plan in (
        plan_device_map(read_shape(nn.Module()), {}),
        plan_device_map(read_shape(nn.Module()), {0: 0}),
        plan_device_map(read_shape(M3()), {0: 0, "cpu": 0}, PlanOptions(offload_buffers=True)),
    ):
        assert draw_device_plan(plan).splitlines()[1].split()[1:3] == ["0", "B"]
        ElementTree.fromstring(draw_device_plan_svg(plan))
        assert draw_device_plan_html(plan)
