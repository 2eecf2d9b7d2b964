"""Blocks contain each tensor once, and are small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.assign import TensorRef, has_forward, refs_of
from accelfn.bigmodel.blocks import plan_blocks
from tests.bigmodel.offload.trees import WIDTH, Namespace, Tree, build, trees


def plan(model: nn.Module, *whole: str) -> dict[str, list[str]]:
    """Names of the blocks, and what each has below its module's name."""
    names = {ref: name for name, ref in refs_of(model)}
    found: dict[str, list[str]] = {}
    for block in plan_blocks(model, [*names.values()], whole):
        dot = f"{block.name}." if block.name else ""
        found[block.name] = [names[ref].removeprefix(dot) for ref in block.refs]
    return found


@given(tree=trees(), data=st.data())
def test_each_tensor_is_in_one_block_above_it(tree: Tree, data: st.DataObject) -> None:
    model = build(tree)
    names = [name for name, _ in refs_of(model)]
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    blocks = plan_blocks(model, wanted)
    refs = dict(refs_of(model))
    travel = {name: block for block in blocks for name in wanted if refs[name] in block.refs}
    assert sorted(travel) == sorted(wanted)
    assert sum(len(block.refs) for block in blocks) == len(wanted)
    for name, block in travel.items():
        assert block.module is model.get_submodule(block.name)
        assert has_forward(block.module)
        assert not block.name or name.startswith(f"{block.name}.")


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def layered(count: int, head: int = WIDTH) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(Layer() for _ in range(count)), Layer(head))


def test_layers_are_blocks() -> None:
    names = list(plan(layered(3)))
    assert names == ["0", "1.0", "1.1", "1.2", "2.up", "2.down"]


def test_small_modules_are_blocks() -> None:
    assert list(plan(layered(9))) == ["0", *(f"1.{number}" for number in range(9)), "2"]


def test_named_classes_are_blocks() -> None:
    assert list(plan(layered(3), "Layer"))[-1] == "2"
    assert list(plan(layered(3), "Sequential")) == [""]


def test_tensors_of_modules_around_layers_are_a_block_of_their_own() -> None:
    model: Any = build(Tree("list", (Tree("direct"), Tree("direct"))))
    found = plan(model)
    assert found[""] == ["own"]
    assert set(found) == {"", "layers.0", "layers.1"}


def test_tensors_of_uncallable_modules_are_in_the_block_of_their_parent() -> None:
    assert plan(nn.Sequential(Namespace())) == {
        "0": ["some.0", "some.1", "named.a", "space.weight"],
        "0.space.inner": ["weight", "bias"],
    } or plan(nn.Sequential(Namespace())) == {
        "0": ["space.weight", "some.0", "some.1", "named.a"],
        "0.space.inner": ["weight", "bias"],
    }


@pytest.mark.parametrize("module", [nn.MultiheadAttention(8, 2), nn.TransformerEncoderLayer(8, 2)])
def test_modules_that_read_weights_below_are_blocks(module: nn.Module) -> None:
    assert list(plan(module)) == [""]


def test_shared_tensors_are_in_the_block_of_their_first_name() -> None:
    model: Any = build(Tree("shared", (Tree("linear"),)))
    names = [leaf for block, leaves in plan(model).items() for leaf in (f"{block}.{one}" for one in leaves)]
    assert "0.0.weight" in names
    assert "3.0.weight" not in names


def test_recurrent_modules_use_assigned_weights() -> None:
    module: Any = nn.LSTM(2, 2)
    other = torch.zeros(8, 2)
    TensorRef(module, "weight_ih_l0", True).write(other)
    assert module._flat_weights[0] is other
