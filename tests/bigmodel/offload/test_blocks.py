"""What travels together: all of it, each once, in pieces that fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.offload.blocks import (
    BlockNames,
    Slot,
    has_forward,
    plan_blocks,
    read_block,
    slots_of,
)
from tests.bigmodel.offload.trees import WIDTH, Namespace, Tree, build, trees


def plan(model: nn.Module, *whole: str) -> dict[str, list[str]]:
    """Names of the blocks, and what each has below its module's name."""
    found: dict[str, list[str]] = {}
    for name, leaves in plan_blocks(model, [name for name, _ in slots_of(model)], whole):
        found[name] = [leaf[len(name) + 1 :] if name else leaf for leaf in leaves]
    return found


@given(tree=trees(), data=st.data())
def test_each_tensor_travels_in_one_block_that_is_above_it(tree: Tree, data: st.DataObject) -> None:
    model = build(tree)
    names = [name for name, _ in slots_of(model)]
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    blocks = plan_blocks(model, wanted)
    assert sorted(leaf for block in blocks for leaf in block.leaves) == sorted(wanted)
    for block in blocks:
        assert block.leaves
        assert has_forward(model.get_submodule(block.name))
        assert all(not block.name or leaf.startswith(f"{block.name}.") for leaf in block.leaves)
        read = read_block(model, block)
        assert read.module is model.get_submodule(block.name)
        slots = dict(slots_of(model))
        assert all(slot == slots[leaf] for slot, leaf in zip(read.slots, block.leaves, strict=True))


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def layered(count: int, head: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(count)), Layer(head))


def test_layers_travel_as_wholes() -> None:
    names = list(plan(layered(3)))
    assert names == ["0", "1.0", "1.1", "1.2", "2.up", "2.down"]


def test_small_modules_travel_as_wholes() -> None:
    assert list(plan(layered(9))) == ["0", *(f"1.{number}" for number in range(9)), "2"]


def test_named_classes_travel_as_wholes() -> None:
    assert list(plan(layered(3), "Layer"))[-1] == "2"
    assert list(plan(layered(3), "Sequential")) == [""]


def test_tensors_of_modules_around_layers_are_a_block_of_their_own() -> None:
    model: Any = build(Tree("list", (Tree("direct"), Tree("direct"))))
    found = plan(model)
    assert found[""] == ["own"]
    assert set(found) == {"", "layers.0", "layers.1"}


def test_tensors_of_what_cannot_be_called_go_with_what_can() -> None:
    assert plan(nn.Sequential(Namespace())) == {
        "0": ["some.0", "some.1", "named.a", "space.weight"],
        "0.space.inner": ["weight", "bias"],
    } or plan(nn.Sequential(Namespace())) == {
        "0": ["space.weight", "some.0", "some.1", "named.a"],
        "0.space.inner": ["weight", "bias"],
    }


@pytest.mark.parametrize("module", [nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2)])
def test_modules_that_read_the_weights_of_others_travel_with_them(module: nn.Module) -> None:
    assert list(plan(module)) == [""]


def test_what_is_shared_travels_under_its_first_name() -> None:
    model: Any = build(Tree("shared", (Tree("linear"),)))
    names = [leaf for block, leaves in plan(model).items() for leaf in (f"{block}.{one}" for one in leaves)]
    assert "0.0.weight" in names
    assert "3.0.weight" not in names


def test_no_leaves_no_blocks() -> None:
    assert plan_blocks(layered(2), ()) == ()
    assert plan_blocks(nn.Identity(), ()) == ()


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.Linear(1, 1), True),
        (nn.Sequential(), True),
        (nn.ModuleList(), False),
        (nn.ModuleDict(), False),
        (nn.ParameterList(), False),
        (nn.Module(), False),
    ],
)
def test_what_can_be_called(module: nn.Module, expected: bool) -> None:
    assert has_forward(module) == expected


def test_a_module_that_is_given_a_forward_can_be_called() -> None:
    module: Any = nn.Module()
    module.forward = torch.relu
    assert has_forward(module)


def test_slots_read_and_write_what_hangs_there() -> None:
    model: Any = build(Tree("bare"))
    slots = dict(slots_of(model))
    assert set(slots) == {"scale", "shift", "mask"}
    assert {name for name, slot in slots.items() if slot.is_parameter} == {"scale"}
    assert {name for name, slot in slots.items() if not slot.is_saved} == {"mask"}
    other = torch.zeros(WIDTH)
    slots["scale"].write(other)
    assert model.scale is other
    assert slots["scale"].read() is other
    model.shift = None
    assert slots["shift"].peek() is None
    del model.shift
    assert slots["shift"].peek() is None


def test_recurrent_modules_use_what_was_written() -> None:
    module: Any = nn.LSTM(2, 2)
    other = torch.zeros(8, 2)
    Slot(module, "weight_ih_l0", True).write(other)
    assert module._flat_weights[0] is other


def test_a_block_of_names() -> None:
    model = layered(1)
    block = read_block(model, BlockNames("1.0", ("1.0.up.weight",)))
    assert (block.name, len(block.slots), block.slots[0].key) == ("1.0", 1, "weight")
