"""Tensors of modules: found, moved, replaced."""

# torch and Accelerate leave some of their functions untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelfn.weights.assign import id_tensor_storage, named_module_tensors, set_module_tensor_to_device


class Sample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)
        self.bare = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("weight", torch.ones(1), persistent=False)


def test_tensors_are_listed_parameters_first() -> None:
    listed = [name for name, _ in named_module_tensors(Sample())]
    assert listed == ["bare", "kept", "weight"]
    deep = [name for name, _ in named_module_tensors(Sample(), False, True)]
    assert deep == ["bare", "layer.weight", "layer.bias", "norm.weight", "norm.bias"]


def test_only_buffers_that_are_not_saved_are_left_out() -> None:
    model = Sample()
    short = {name for name, _ in named_module_tensors(model, remove_non_persistent=True)}
    assert short == {"bare", "kept"}
    deep = {name for name, _ in named_module_tensors(model, recurse=True, remove_non_persistent=True)}
    assert deep == {*model.state_dict()}  # layer.weight, too, though the buffer has its short name


def test_memory_is_identified() -> None:
    one = torch.zeros(4)
    assert id_tensor_storage(one) == id_tensor_storage(nn.Parameter(one)) == id_tensor_storage(one[1:])
    assert id_tensor_storage(one) != id_tensor_storage(one.clone())
    assert id_tensor_storage(torch.zeros(2, 2).to_sparse())[0] == torch.device("cpu")


def test_a_value_is_put_in_place() -> None:
    model = Sample()
    value = torch.ones(3, 2)
    set_module_tensor_to_device(model, "layer.weight", "cpu", value=value)
    assert model.layer.weight.data_ptr() == value.data_ptr()  # as it is
    value = torch.full((3, 2), 7.0, dtype=torch.float64)
    set_module_tensor_to_device(model, "layer.weight", "cpu", value=value)
    assert model.layer.weight.dtype == torch.float32
    assert model.layer.weight.eq(7).all()
    assert isinstance(model.layer.weight, nn.Parameter)
    assert model.layer.weight.requires_grad
    set_module_tensor_to_device(model, "layer.weight", "cpu", value=value, dtype=torch.bfloat16)
    assert model.layer.weight.dtype == torch.bfloat16
    set_module_tensor_to_device(model, "bare", "cpu:1", value=torch.zeros(2))
    assert not model.bare.requires_grad
    set_module_tensor_to_device(model, "kept", "cpu", value=torch.zeros(1))
    assert "kept" in dict(model.named_buffers())
    counts = torch.tensor(9, dtype=torch.int32)
    set_module_tensor_to_device(model, "norm.num_batches_tracked", "cpu", value=counts, dtype="float16")
    assert model.norm.num_batches_tracked is not None
    assert model.norm.num_batches_tracked.dtype == torch.int32
    set_module_tensor_to_device(model, "norm.num_batches_tracked", "cpu", value=counts)
    assert model.norm.num_batches_tracked.dtype == torch.int32


def test_moved_tensors_keep_class_and_attributes() -> None:
    class Marked(nn.Parameter):
        why: str

    model: Any = nn.Module()
    model.w = Marked(torch.ones(2), requires_grad=False)
    model.w.why = "mark"
    set_module_tensor_to_device(model, "w", "cpu")
    first = model.w
    set_module_tensor_to_device(model, "w", "meta")
    assert model.w is not first
    assert model.w.is_meta
    with pytest.raises(ValueError, match=r"w is on the meta device.*Pass value"):
        set_module_tensor_to_device(model, "w", "cpu")
    set_module_tensor_to_device(model, "w", "cpu", value=torch.zeros(2), dtype="torch.float16")
    assert type(model.w) is Marked
    assert (model.w.why, model.w.dtype, model.w.requires_grad) == ("mark", torch.float16, False)
    set_module_tensor_to_device(model, "w", "cpu", dtype=torch.float64)
    assert model.w.dtype == torch.float64


def test_a_tied_tensor_is_moved_once() -> None:
    model: Any = nn.Module()
    model.a = nn.Parameter(torch.ones(2))
    model.b = model.a
    known: dict[int, dict[Any, torch.Tensor]] = {model.a.data_ptr(): {}}
    for name in "ab":
        set_module_tensor_to_device(model, name, "meta", tied_params_map=known)
    assert model.a is model.b
    assert list(known.values()) == [{torch.device("meta"): model.a}]
    other: Any = nn.Linear(1, 1)
    before = other.weight.data_ptr()
    set_module_tensor_to_device(other, "weight", "meta", tied_params_map=known)
    assert before not in known


def test_scales_become_an_attribute() -> None:
    model: Any = nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    value = torch.ones(2, 2, dtype=torch.int8)
    scales = torch.ones(2)
    set_module_tensor_to_device(model, "weight", "cpu", value=value, dtype=torch.int8, fp16_statistics=scales)
    assert torch.equal(model.weight.SCB, scales)


def test_a_recurrent_layer_notices() -> None:
    model = nn.LSTM(2, 3)
    for name, one in [*model.named_parameters()]:
        set_module_tensor_to_device(model, name, "cpu", value=torch.zeros_like(one))
    assert model(torch.ones(1, 1, 2))[0].eq(0).all()


@pytest.mark.parametrize(
    ("name", "device", "options", "message"),
    [
        ("layer.wait", "cpu", {}, "no parameter or buffer 'layer.wait'"),
        ("lair.weight", "cpu", {}, "no parameter or buffer"),
        ("layer", "cpu", {}, "no parameter or buffer"),
        ("bare", "cuda:77", {}, "no accelerator|unknown place"),
        ("bare", "disk", {}, "the disk can't compute"),
        ("bare", "cpu", {"value": torch.ones(3)}, r"has shape \(2,\), but the value has shape \(3,\)"),
        ("bare", "cpu", {"dtype": "float99"}, "no dtype 'float99'"),
    ],
)
def test_invalid_arguments_are_refused(name: str, device: str, options: dict[str, Any], message: str) -> None:
    model = Sample()
    with pytest.raises(ValueError, match=message):
        set_module_tensor_to_device(model, name, device, **options)
    assert all(not one.is_meta for one in model.parameters())
