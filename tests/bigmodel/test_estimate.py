# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.drawing import draw_estimate, draw_estimate_html, draw_estimate_svg
from accelfn.bigmodel.estimate import ESTIMATED_DTYPES, estimate_json, estimate_memory
from accelfn.bigmodel.model_info import CustomDtype, LeafShape, shape_from_leaves


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("table", torch.ones(30 * width))
        self.register_buffer("positions", torch.arange(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x * self.scale))


class Net(nn.Module):
    def __init__(self, width: int, blocks: int, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.last = nn.Linear(width, width)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


nets = st.builds(Net, st.integers(1, 6), st.integers(0, 3), st.booleans())


def num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@given(nets, st.sampled_from((torch.float32, torch.bfloat16)))
def test_training_memory_is_that_after_a_step_of_adam(net: Net, dtype: torch.dtype) -> None:
    (row,) = estimate_memory(net, [dtype]).dtypes
    net.to(dtype)
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    net(torch.ones(2, net.first.in_features, dtype=dtype)).sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    training = row.training
    assert training is not None
    assert training.model == row.total == num_bytes(net.parameters()) + num_bytes(net.buffers())
    assert estimate_memory(net).num_parameters == sum(one.numel() for one in net.parameters())
    assert training.gradients == sum(one.grad.nbytes for one in net.parameters() if one.grad is not None)
    assert training.optimizer == num_bytes(states)
    assert training.step == training.model + training.gradients + training.optimizer == training.peak


@given(nets)
def test_the_largest_layer_is_a_module_without_modules_or_a_tensor_beside_modules(net: Net) -> None:
    (row,) = estimate_memory(net, ["float32"]).dtypes
    tied = net.last.weight is net.first.weight
    sizes = {"first": num_bytes(net.first.parameters()), "last": num_bytes([net.last.bias])}
    if not tied:
        sizes["last"] += net.last.weight.nbytes
    for number, block in enumerate(net.blocks):
        for name in ("up", "down"):
            sizes[f"blocks.{number}.{name}"] = num_bytes(getattr(block, name).parameters())
        for name in ("scale", "table", "positions"):
            sizes[f"blocks.{number}.{name}"] = getattr(block, name).nbytes
    assert row.largest_layer == max(sizes.values())
    assert set(row.largest_names) == {name for name, size in sizes.items() if size == row.largest_layer}


@given(nets)
def test_only_floating_tensors_are_scaled_by_the_dtype(net: Net) -> None:
    dtypes = ("float64", "float32", "float16", "int8", "int4", CustomDtype.INT2)
    totals = [row.total for row in estimate_memory(net, dtypes).dtypes]
    integers = sum(buffer.nbytes for buffer in net.buffers() if not buffer.is_floating_point())
    assert totals == sorted(totals, reverse=True)
    floats = [total - integers for total in totals[:4]]
    assert floats == [8 * floats[3], 4 * floats[3], 2 * floats[3], floats[3]]
    assert all(total >= integers for total in totals)


def test_usual_dtypes_and_which_are_trained_in() -> None:
    rows = estimate_memory(nn.Linear(3, 4)).dtypes
    assert tuple(row.dtype for row in rows) == ESTIMATED_DTYPES
    assert [row.dtype for row in rows if row.training is not None] == ["float32", "float16", "bfloat16"]
    assert [row.total for row in rows] == [64, 32, 32, 16, 16, 8]


def test_the_shape_of_a_file_is_enough() -> None:
    leaves = [LeafShape(f"layers.{number}.weight", 40, 20, torch.float16) for number in range(12)]
    leaves.append(LeafShape("quantised.weight", 7, 20, torch.float32, is_plain=False))
    leaves.append(LeafShape("ids", 80, 10, torch.int64))
    estimate = estimate_memory(shape_from_leaves(leaves), ["float32"])
    (row,) = estimate.dtypes
    assert estimate.num_parameters == 12 * 20 + 20 + 10
    assert row.total == 12 * 80 + 7 + 80
    assert row.largest_layer == 80
    assert row.largest_names == ("ids", *(f"layers.{number}" for number in range(12)))
    assert row.training is not None
    assert row.training.gradients == 12 * 80


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (["float31"], "dtypes must be a torch dtype.*got 'float31'"),
        (["complex64"], "dtypes: weights can't be complex64"),
        (["float32", "torch.float32"], "dtypes: torch.float32 is repeated"),
        ([], "dtypes is empty"),
    ],
)
def test_invalid_dtypes_are_refused(dtypes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_memory(nn.Linear(2, 2), dtypes)


def test_the_table() -> None:
    table = draw_estimate(estimate_memory(Net(100, 2, tied=False), ["float32", "int8"]), "net")
    assert table.splitlines() == [
        "net: 101000 parameters",
        "largest layer: blocks.0.up and 1 more of its size",
        "",
        "dtype    largest layer  all weights  training with Adam",
        "float32        80.8 kB     429.6 kB              1.6 MB",
        "int8           20.2 kB     108.6 kB                   -",
    ]


@given(nets | st.just(nn.Sequential()))
def test_the_picture_is_sound_and_shows_each_size(net: nn.Module) -> None:
    estimate = estimate_memory(net)
    root = ElementTree.fromstring(draw_estimate_svg(estimate, "a < b"))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {row.dtype for row in estimate.dtypes} <= {*texts}
    assert texts.count("training") == 3
    page = draw_estimate_html(estimate, "a < b")
    assert page.count("<tr>") == 1 + len(estimate.dtypes)
    assert page.count("<svg") == 1


def test_json_has_each_number() -> None:
    estimate = estimate_memory(nn.Linear(3, 4), ["float32", "int4"])
    assert json.loads(json.dumps(estimate_json(estimate))) == {
        "num_parameters": 16,
        "dtypes": {
            "float32": {
                "total": 64,
                "largest_layer": 64,
                "largest_names": [""],
                "training": {"model": 64, "gradients": 64, "optimizer": 128, "step": 256, "peak": 256},
            },
            "int4": {"total": 8, "largest_layer": 8, "largest_names": [""], "training": None},
        },
    }
