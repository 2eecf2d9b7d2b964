from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import (
    PlanOptions,
    check_device_map,
    clean_device_map,
    compute_module_sizes,
    get_balanced_memory,
    infer_auto_device_map,
    plan_device_map,
    read_shape,
    resolve_device_map,
)
from accelfn.weights.places import Place
from tests.bigmodel.plan.trees import M3, Tree, build, trees


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m3 = M3()
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.bias = nn.Parameter(torch.zeros(1))


class Model(nn.Module):
    """Blocks of 244 bytes that aren't split."""

    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))


# --- inferred ------------------------------------------------------------------------------------


def test_the_map_is_that_of_the_plan() -> None:
    model = Model()
    budgets: dict[Place, int | str] = {0: "0.9KB", "cpu": "1GB"}
    before = dict(budgets)
    found = infer_auto_device_map(model, budgets, offload_buffers=True)
    assert found == plan_device_map(read_shape(model), budgets).device_map
    assert found["blocks.3.m3.linear1"] == 0
    assert found["blocks.3.m3.linear2"] == "cpu"
    assert budgets == before
    for classes in ("Block", ["Block"], ("Block",), {"Block"}):
        whole = infer_auto_device_map(model, budgets, classes, offload_buffers=True)
        assert whole == {"blocks.0": 0, "blocks.1": 0, "blocks.2": "cpu", "blocks.3": "cpu"}
    raw = infer_auto_device_map(model, {"cpu": "1GB"}, clean_result=False)
    assert raw == {"blocks": "cpu"}
    with torch.device("meta"):
        assert infer_auto_device_map(Model(), budgets, offload_buffers=True) == found
    half = infer_auto_device_map(model, {0: 600}, dtype="float16", special_dtypes={"blocks.0.bias": "int4"})
    assert half == {"blocks": 0}


def test_decisions_are_printed_if_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(M3(), {0: 250})
    assert capsys.readouterr().out == ""
    infer_auto_device_map(M3(), {0: 236}, verbose=True)
    assert capsys.readouterr().out.splitlines() == [
        "linear1 (64 B) on 0",
        "batchnorm (72 B) on 0",
        "linear2 (100 B) on 0",
    ]


def test_unexpected_consequences_are_warnings() -> None:
    with pytest.warns(UserWarning, match="buffers of 40 B") as caught:
        infer_auto_device_map(M3(), {0: 200})
    with pytest.warns(UserWarning, match="buffers of 40 B") as other:
        resolve_device_map(M3(), "sequential", {0: 200})
    assert caught[0].filename == other[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(M3(), {0: 200}, offload_buffers=True)


def test_unknown_classes_are_warned_of_once() -> None:
    model: Any = Model()
    with pytest.warns(UserWarning, match="the model has no modules of class") as caught:
        infer_auto_device_map(model, {"cpu": "1MB"}, ["Block", "Blocks", "Qwen"])
    (said,) = caught
    assert "of class 'Blocks' (did you mean 'Block'?), 'Qwen'." in str(said.message)
    model._no_split_modules = ("Block", "DecoderBlock")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Classes that the model itself specifies are for its whole family.
        for classes in (None, ["Block", "DecoderBlock"], ["Block", "M3"]):
            infer_auto_device_map(model, {"cpu": "1MB"}, classes)


def test_dtypes_of_unknown_tensors_are_refused() -> None:
    wrong: dict[str, Any] = {"linear1.wieght": "float16"}
    for find in (
        lambda: infer_auto_device_map(M3(), {"cpu": "1MB"}, special_dtypes=wrong),
        lambda: resolve_device_map(M3(), "balanced", {"cpu": "1MB"}, PlanOptions(special_dtypes=wrong)),
        lambda: get_balanced_memory(M3(), {"cpu": "1MB"}, special_dtypes=wrong),
        lambda: compute_module_sizes(M3(), special_dtypes=wrong),
    ):
        with pytest.raises(ValueError, match=r"model doesn't have: 'linear1\.wieght' \(did you mean"):
            find()


def test_arguments_of_other_types_are_refused() -> None:
    shape: Any = read_shape(M3())
    model: Any = M3()
    checks: tuple[tuple[str, Callable[[Any], object]], ...] = (
        ("infer_auto_device_map", infer_auto_device_map),
        ("get_balanced_memory", get_balanced_memory),
        ("compute_module_sizes", compute_module_sizes),
        ("read_shape", read_shape),
    )
    for name, find in checks:
        with pytest.raises(TypeError, match=f"{name}: model must be a module, got int"):
            find(cast("Any", 5))
        with pytest.raises(TypeError, match=f"{name}: .* got ModelShape. plan_device_map takes a shape"):
            find(shape)
    for map_ in ("auto", 5, ["cpu"]):
        with pytest.raises(TypeError, match="device_map must map module names to places"):
            check_device_map(model, cast("Any", map_))


# --- resolved ------------------------------------------------------------------------------------


def test_names_of_maps() -> None:
    model = Model()
    budgets = {0: 900, 1: 900, 2: 900}
    spread = {"blocks.0": 0, "blocks.1": 1, "blocks.2": 1, "blocks.3": 2}
    even = resolve_device_map(model, "balanced", budgets)
    assert even == resolve_device_map(model, "auto", budgets) == spread
    filled = resolve_device_map(model, "sequential", budgets)
    assert filled == {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1, "blocks.3": 1}
    low = resolve_device_map(model, "balanced_low_0", budgets)
    assert 0 not in low.values()
    # None means the classes of the model, and no classes mean none.
    split = resolve_device_map(model, "sequential", {0: 600, 1: 1000}, PlanOptions())
    assert "blocks.2.bias" in split
    half = PlanOptions(no_split_module_classes=None, dtype=torch.float16)
    assert resolve_device_map(model, "auto", {0: 300, "cpu:0": 300, "cpu": 1000}, half)
    with pytest.raises(ValueError, match=r"one of 'auto', 'balanced', 'balanced_low_0', 'sequential', or"):
        resolve_device_map(model, "Auto", budgets)
    three = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    assert resolve_device_map(three, "sequential", {0: 256}) == {"": "disk"}
    fallback = PlanOptions(fallback_allocation=True)
    found = {"1": 0, "0": "disk", "2": "disk"}
    assert resolve_device_map(three, "sequential", {0: 256}, fallback) == found


def test_a_map_is_checked_and_normalised() -> None:
    given_ = {"blocks.0": "cuda:1", "blocks": torch.device("cpu"), "blocks.1.bias": "disk"}
    before = dict(given_)
    found = resolve_device_map(Model(), given_)
    assert found == {"blocks.0": 1, "blocks": "cpu", "blocks.1.bias": "disk"}
    assert given_ == before
    with pytest.raises(ValueError, match="that the model doesn't have: 'block'"):
        resolve_device_map(Model(), {"": 0, "block": 1})


# --- checked -------------------------------------------------------------------------------------


@given(trees(), st.data())
def test_the_map_of_a_plan_is_sound_and_without_an_entry_it_is_not(tree: Tree, data: st.DataObject) -> None:
    model = build(tree)
    shape = read_shape(model)
    budgets = {0: data.draw(st.integers(0, shape.num_bytes + 2)), "cpu": shape.num_bytes // 2}
    plan = plan_device_map(shape, budgets, PlanOptions(clean_result=data.draw(st.booleans())))
    found = plan.device_map
    check_device_map(model, found)
    needed = {leaf.name for leaf in shape.root.leaves() if leaf.kind != "non_persistent"}
    holding = [
        name for name in found if any(f"{one}.".startswith(f"{name}." if name else "") for one in needed)
    ]
    for name in holding:
        rest = {other: place for other, place in found.items() if other != name}
        with pytest.raises(ValueError, match="has no place for"):
            check_device_map(model, rest)


def test_unknown_names_are_refused_with_suggestions() -> None:
    with pytest.raises(ValueError, match=r"'linear3' \(did you mean 'linear2' or 'linear1'") as caught:
        check_device_map(M3(), {"": 0, "linear3": 1, "xyz": 2})
    assert "'xyz'" in str(caught.value)
    many = {f"linear{number}": 0 for number in range(10, 20)}
    with pytest.raises(ValueError, match="and 5 more"):
        check_device_map(M3(), {"": 0, **many})


def test_places_of_tensors_are_checked() -> None:
    block = Block()
    # A tensor may have a place of its own; a buffer that isn't saved needs none.
    check_device_map(block, {"m3": 0, "bias": "cpu"})
    check_device_map(block, {"m3": 0, "bias": "cpu", "scale": "disk"})
    check_device_map(nn.Module(), {})
    with pytest.raises(ValueError, match=r"device_map\['bias'\]: unknown place 'gpu'"):
        check_device_map(block, {"": 0, "bias": "gpu"})
    with pytest.raises(ValueError, match=r"no place for linear2\.weight, linear2\.bias\. Add an"):
        check_device_map(M3(), {"linear1": 0, "batchnorm": 0})
    with pytest.raises(ValueError, match=r"no place for linear1\.weight.* and 4 more"):
        check_device_map(M3(), {})


# --- cleaned -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, {}),
        ({"a.b.c": 0}, {"a.b.c": 0}),
        ({"a.b.c": 0, "a.b.d": 0}, {"": 0}),
        ({"a.x": "cpu", "a.y": "cpu", "b": 0}, {"a": "cpu", "b": 0}),
        ({"a": 0, "a.x": 1}, {"a": 0, "a.x": 1}),
    ],
)
def test_equal_places_become_one(value: dict[str, Any], expected: dict[str, Any]) -> None:
    assert clean_device_map(value) == expected
