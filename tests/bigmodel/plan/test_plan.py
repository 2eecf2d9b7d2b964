from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import (
    CustomDtype,
    DevicePlan,
    ModelShape,
    PlanOptions,
    TensorCopy,
    plan_device_map,
    read_shape,
)
from accelfn.weights.places import Place
from tests.bigmodel.plan.trees import M3, build, three_blocks, trees

FP16, FP32 = torch.float16, torch.float32


def one_inside() -> nn.Module:
    model = nn.Module()
    model.module = nn.Module()
    model.module.linear1 = nn.Linear(10, 4)
    model.module.linear2 = nn.Linear(4, 4)
    model.module.linear3 = nn.Linear(4, 8)
    return model


def tied_blocks() -> nn.Module:
    model: Any = three_blocks()
    model.layer3.linear2.weight = model.layer1.linear2.weight
    return model


def blocks() -> nn.Module:
    return nn.Sequential(M3(), M3(), M3())


# The documented examples, but for one: see test_a_budget_of_the_disk_holds.
WORKED: dict[str, tuple[Callable[[], nn.Module], dict[Place, int], dict[str, Any], dict[str, Place]]] = {
    "two": (M3, {0: 200, 1: 172, 2: 200}, {}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
    "a byte less": (M3, {0: 200, 1: 171, 2: 200}, {}, {"linear1": 0, "batchnorm": 1, "linear2": 2}),
    "all on one": (M3, {0: 236}, {}, {"": 0}),
    "rest on cpu": (M3, {0: 235, "cpu": 240}, {}, {"linear1": 0, "batchnorm": "cpu", "linear2": "cpu"}),
    "cpu reserves": (M3, {"cpu": 235}, {}, {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}),
    "none on cpu": (M3, {0: 200, "cpu": 171}, {}, {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}),
    "half": (M3, {0: 120, 1: 200}, {"dtype": FP16}, {"linear1": 0, "batchnorm": 1, "linear2": 1}),
    "special": (M3, {0: 150}, {"dtype": FP16, "special_dtypes": {"linear1.weight": FP32}}, {"": 0}),
    "split block": (
        blocks,
        {0: 500, 1: 500},
        {},
        {"0": 0, "1.linear1": 0, "1.batchnorm": 0, "1.linear2": 1, "2": 1},
    ),
    "whole": (blocks, {0: 500, 1: 500}, {"no_split_module_classes": "M3"}, {"0": 0, "1": 1, "2": 1}),
    "one on each": (
        blocks,
        {0: 336, "cpu": 336},
        {"offload_buffers": True},
        {"0": 0, "1": "cpu", "2": "disk"},
    ),
    "too large first": (one_inside, {0: 256}, {}, {"": "disk"}),
    "something smaller": (
        one_inside,
        {0: 256},
        {"fallback_allocation": True},
        {"module.linear2": 0, "module.linear1": "disk", "module.linear3": "disk"},
    ),
    "tied blocks": (
        tied_blocks,
        {0: 400, 1: 500},
        {},
        {"layer1": 0, "layer3.linear2": 0, "layer2": 1, "layer3.linear1": 1, "layer3.batchnorm": 1},
    ),
    "nothing": (nn.Module, {0: 10}, {}, {}),
}


@pytest.mark.parametrize(
    ("make", "budgets", "options", "expected"),
    WORKED.values(),
    ids=WORKED.keys(),
)
def test_the_documented_examples(
    make: Callable[[], nn.Module],
    budgets: dict[Place, int],
    options: dict[str, Any],
    expected: dict[str, Place],
) -> None:
    before = dict(budgets)
    plan = plan_device_map(read_shape(make()), budgets, PlanOptions(**options))
    assert plan.device_map == expected
    assert budgets == before
    with torch.device("meta"):
        assert plan_device_map(read_shape(make()), budgets, PlanOptions(**options)) == plan


# --- properties of every plan -------------------------------------------------------------------

CLASSES = st.sampled_from([(), ("A",), ("B",), ("A", "B")])
PLACES = st.sampled_from([(), (0,), (0, 1), (0, 1, "cpu"), ("cpu",), ("cpu:0", "cpu"), ("mps", "cpu")])


@st.composite
def problems(draw: st.DrawFn, *, ties: bool = True) -> tuple[ModelShape, dict[Place, int]]:
    shape = read_shape(build(draw(trees(ties=ties))))
    top = shape.num_bytes + 2
    sizes = st.integers(0, top) | st.integers(top // 2, top)
    budgets: dict[Place, int] = {place: draw(sizes) for place in draw(PLACES)}
    disk = draw(st.none() | st.integers(0, 2 * top))
    return shape, budgets if disk is None else {**budgets, "disk": disk}


def plan_or_none(shape: ModelShape, budgets: Mapping[Place, int], **options: Any) -> DevicePlan | None:
    try:
        return plan_device_map(shape, budgets, PlanOptions(**options))
    except ValueError as error:
        assert "doesn't fit" in str(error)  # noqa: PT017 -- every other is a fault
        return None


def lookup(found: Mapping[str, Place], name: str) -> Place:
    while name not in found:
        assert name, "no entry"
        name = name.rpartition(".")[0]
    return found[name]


@given(problems(), CLASSES, st.booleans())
@settings(max_examples=100)
def test_every_tensor_is_in_one_place_and_every_budget_holds(
    problem: tuple[ModelShape, dict[Place, int]], no_split: tuple[str, ...], fallback: bool
) -> None:
    shape, budgets = problem
    plan = plan_or_none(shape, budgets, no_split_module_classes=no_split, fallback_allocation=fallback)
    if plan is None:
        assert "disk" in budgets
        return
    placed = {leaf.name: one.place for one in plan.places for leaf in one.leaves}
    names = [leaf.name for leaf in shape.root.leaves()]
    assert sorted(placed) == sorted(names)
    assert sum(len(one.leaves) for one in plan.places) == len(names)
    for found in (plan.entries, plan.device_map):
        assert {name: lookup(found, name) for name in names} == placed
    for one in plan.places:
        assert one.used == sum(leaf.num_bytes for leaf in one.leaves)
        assert one.budget == budgets.get(one.place)
        if one.budget is not None:
            assert one.used + one.reserved <= one.budget
    copied = sum(copy.num_bytes * (len(set(copy.places)) - 1) for copy in plan.copies)
    assert sum(one.used for one in plan.places) == shape.num_bytes + copied
    assert sorted([*plan.ties, *(copy.names for copy in plan.copies)]) == sorted(shape.ties)
    assert all(len({placed[name] for name in names}) == 1 for names in plan.ties)
    assert all(tuple(placed[name] for name in copy.names) == copy.places for copy in plan.copies)
    # Only what fits no other way is copied.
    assert not plan.copies or "disk" in budgets
    for module in shape.root.modules():
        if module.name and module.class_name in no_split:
            assert len({placed[leaf.name] for leaf in module.leaves()}) <= 1


@given(problems(ties=False), CLASSES, st.data())
@settings(max_examples=100)
def test_each_place_holds_a_run_of_the_model_and_more_memory_is_never_worse(
    problem: tuple[ModelShape, dict[Place, int]], no_split: tuple[str, ...], data: st.DataObject
) -> None:
    shape, budgets = problem
    assume(budgets)
    place = data.draw(st.sampled_from(sorted(budgets, key=str)))
    more = {**budgets, place: budgets[place] + data.draw(st.integers(1, 40))}
    before, after = (plan_or_none(shape, one, no_split_module_classes=no_split) for one in (budgets, more))
    if before is None:
        return
    assert after is not None
    assert [leaf.name for one in before.places for leaf in one.leaves] == [
        leaf.name for leaf in shape.root.leaves()
    ]
    for up_to in range(len(before.places)):
        assert held(after, up_to) >= held(before, up_to)


def held(plan: DevicePlan, up_to: int) -> int:
    """Bytes on the fastest places."""
    return sum(one.used for one in plan.places[: up_to + 1])


# --- budgets that are too small -------------------------------------------------------------------


def test_a_budget_of_the_disk_holds() -> None:
    with pytest.raises(ValueError, match="doesn't fit") as caught:
        plan_device_map(read_shape(M3()), {0: 200, "disk": 10})
    message = str(caught.value)
    assert "batchnorm needs 72 B (72 bytes) on one place" in message
    assert "0 has 200 B (64 B used, 100 B reserved for the largest later layer)" in message
    assert "'disk' has 10 B" in message
    found = plan_device_map(read_shape(M3()), {0: 200, "disk": 172}).device_map
    assert found == {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}


# --- ties ----------------------------------------------------------------------------------------


class Bare(nn.Module):
    """A parameter beside modules."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        self.weight = weight
        self.linear = nn.Linear(3, 4)


def test_a_tied_bare_parameter_is_allocated_with_its_module() -> None:
    words = nn.Embedding(10, 4)
    model = nn.ModuleDict({"words": words, "block": nn.Sequential(M3(), Bare(words.weight))})
    plan = plan_device_map(read_shape(model), {0: 300, 1: 1000})
    assert plan.device_map == {"words": 0, "block.1.weight": 0, "block.0": 1, "block.1.linear": 1}
    assert plan.ties == (("words.weight", "block.1.weight"),)


def test_tied_modules_that_fit_nowhere_together_are_copied() -> None:
    model: Any = nn.ModuleDict(
        {"words": nn.Embedding(10, 4), "one": nn.Linear(4, 10), "other": nn.Linear(4, 10)}
    )
    model["one"].weight = model["other"].weight = model["words"].weight  # 160 bytes; the biases have 40
    shape = read_shape(model)
    budgets: dict[Place, int] = {0: 0, 1: 200, "disk": 239}
    plan = plan_device_map(shape, budgets)
    assert plan.device_map == {"words": 1, "one": 1, "other": "disk"}
    names = ("words.weight", "one.weight", "other.weight")
    assert plan.copies == (TensorCopy(names, (1, 1, "disk"), 160),)
    assert [one.used for one in plan.places] == [0, 200, 200]
    assert plan.ties == ()
    (warning,) = plan.warnings
    assert "words.weight on 1, one.weight on 1, other.weight on 'disk'" in warning
    # Nothing is copied if all fit; if copies don't help, the error is about the tied modules.
    assert plan_device_map(shape, {**budgets, "disk": 240}).device_map == {"": "disk"}
    with pytest.raises(ValueError, match=r"words with one, other, which share tensors with it, needs 240 B"):
        plan_device_map(shape, {**budgets, "disk": 199})


# --- the rest ------------------------------------------------------------------------------------


def test_options_are_frozen_and_checked() -> None:
    options = PlanOptions(no_split_module_classes={"M3"}, dtype="float16", special_dtypes={"a": "int4"})
    assert options.no_split_module_classes == ("M3",)
    assert options.dtype is torch.float16
    assert options.special_dtypes == {"a": CustomDtype.INT4}
    with pytest.raises(ValueError, match="dtype must be"):
        PlanOptions(dtype="float17")
    with pytest.raises(ValueError, match="weight must be"):
        PlanOptions(special_dtypes={"weight": "float17"})
