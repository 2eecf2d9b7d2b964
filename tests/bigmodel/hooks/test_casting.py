# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportIncompatibleMethodOverride=false

import copy
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from accelfn.bigmodel.dispatch import cpu_offload, disk_offload, dispatch_model
from accelfn.bigmodel.hooks import (
    add_hook_to_module,
    hook_of,
    remove_hook_from_submodules,
)

F8, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32
DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Net(nn.Module):
    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.conv = nn.Conv1d(2, 3, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6, bias=False)))
        self.head = nn.Linear(6, 2)
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.norm(self.conv(x))))


def net(dtype: torch.dtype = F32, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def data(dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(1)).to(dtype)


def rounded(model: Net, storage: torch.dtype, compute: torch.dtype) -> Net:
    """Round what is cast, by hand."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv1d)):
            module.to(storage).to(compute)
    return model


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


@given(st.sampled_from(DTYPES), st.sampled_from((F32, BF16, torch.float64)), st.integers(0, 5))
def test_outputs_are_those_of_rounded_weights(storage: Any, compute: Any, seed: int) -> None:
    model = net(compute, seed)
    expected = rounded(model, storage, compute)(data(compute))
    parameters = list(model.parameters())
    attach_layerwise_casting_hooks(model, storage, compute)
    stored = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model(data(compute)[:, :, :5])  # after an error, too, the weights are stored again
            assert torch.equal(model(data(compute)), expected)
    assert all(map(torch.equal, model.state_dict().values(), stored.values()))
    assert {dtype for name, dtype in dtypes(model).items() if "norm" not in name} == {storage}
    assert model.norm.weight.dtype == compute
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    remove_hook_from_submodules(model)
    assert set(dtypes(model).values()) == {compute}
    assert torch.equal(model(data(compute)), expected)


@pytest.mark.parametrize(
    ("pattern", "classes", "cast"),
    [
        (None, None, {"conv", "body.0", "body.2.0", "head"}),
        ("body", None, {"conv", "head"}),
        ("^body.2$", None, {"conv", "body.0", "head"}),
        (("head", r"body\.0"), None, {"conv", "body.2.0"}),
        (re.compile("HEAD", re.IGNORECASE), None, {"conv", "body.0", "body.2.0"}),
        (None, nn.Linear, {"conv"}),
        (None, [nn.Conv1d, nn.Sequential], {"head"}),
        ("head", nn.Sequential, {"conv"}),
    ],
)
def test_modules_are_skipped_with_all_inside_of_them(pattern: Any, classes: Any, cast: set[str]) -> None:
    model = net()
    attach_layerwise_casting_hooks(model, F8, F32, pattern, classes)
    assert {name for name, one in model.named_modules() if hook_of(one) is not None} == cast
    assert {name.rpartition(".")[0] for name, dtype in dtypes(model).items() if dtype == F8} == cast


def test_a_layer_that_shares_its_weight_with_one_that_is_not_cast_is_left_alone() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    attach_layerwise_casting_hooks(model, F8, F32)
    assert dtypes(model) == {"0.weight": F32, "1.weight": F8, "1.bias": F8, "2.weight": F32}
    with torch.no_grad():
        assert model(torch.tensor([1, 2])).shape == (2, 5)


def test_gradients_have_the_storage_dtype() -> None:
    model = net()
    model.head.requires_grad_(False)  # it passes them on
    plain = rounded(model, BF16, F32)
    attach_layerwise_casting_hooks(model, BF16, F32)
    for _ in range(2):
        model(data()).sum().backward()
        plain(data()).sum().backward()
    assert model.head.weight.grad is None
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        if "head" in name:
            continue
        assert one.grad is not None
        assert other.grad is not None
        assert one.grad.dtype == one.dtype == (F32 if "norm" in name else BF16)
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=1e-2, atol=1e-2)


def test_float8_weights_refuse_gradients() -> None:
    model = net()
    attach_layerwise_casting_hooks(model, F8, F32)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'weight' is stored as torch\.float8_e4m3fn"):
            model(data())
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert model(data()).dtype == F32
    assert dtypes(model)["head.weight"] == F8
    # Frozen ones pass gradients on.
    model.requires_grad_(False)
    x = data().requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None


class Waiting(nn.Linear):
    """Runs in two threads at once."""

    barrier: Any = None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        if self.barrier is not None:
            self.barrier.wait(10)
        return super().forward(given)


def test_a_gradient_that_another_thread_would_lose_is_an_error() -> None:
    model = Waiting(3, 3)
    attach_layerwise_casting_hooks(model, BF16, F32)
    model.barrier = threading.Barrier(2)

    def run() -> None:
        with torch.no_grad():
            model(torch.ones(3))

    thread = threading.Thread(target=run)
    thread.start()
    while model.weight.dtype != F32:  # until it is within its forward
        pass
    with pytest.raises(RuntimeError, match="another thread is running this module without gradients"):
        model(torch.ones(3))
    model.barrier.wait(10)
    thread.join(10)
    model.barrier = None
    model(torch.ones(3)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.dtype == BF16


def test_writes_of_a_forward_are_stored() -> None:
    norm, plain = add_hook_to_module(nn.BatchNorm1d(2), LayerwiseCastingHook(BF16, F32)), nn.BatchNorm1d(2)
    for one in (norm, plain):
        one(torch.tensor([[0.0, 1.0], [2.0, 5.0]]))
    assert plain.running_mean is not None
    assert torch.equal(norm.get_buffer("running_mean"), plain.running_mean.to(BF16))


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_a_model_that_is_cast_may_be_offloaded(way: str, tmp_path: Path) -> None:
    model, plain = net(), net()
    for one in (model, plain):
        attach_layerwise_casting_hooks(one, F8, F32)
    if way == "cpu":
        cpu_offload(model, "cpu:0")
    elif way == "disk":
        disk_offload(model, tmp_path, "cpu:0")
    else:
        places = {"conv": "cpu:0", "norm": "cpu", "body.0": "cpu", "body.2": "cpu:1", "head": "cpu"}
        dispatch_model(model, places, main_device="cpu:0")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(data()), plain(data()))
    assert dtypes(model) == dtypes(plain)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"storage_dtype": "float8"}, TypeError, "storage_dtype must be a torch dtype.*got 'float8'"),
        ({"storage_dtype": torch.int8}, ValueError, "storage_dtype must be a floating dtype"),
        ({"compute_dtype": None}, TypeError, "compute_dtype must be a torch dtype.*got None"),
    ],
)
def test_bad_input_is_refused_before_anything_is_changed(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model = net()
    given: dict[str, Any] = {"storage_dtype": F8, "compute_dtype": F32, **arguments}
    with pytest.raises(kind, match=message):
        attach_layerwise_casting_hooks(model, **given)
    assert set(dtypes(model).values()) == {F32}


def test_layers_are_not_cast_twice() -> None:
    model = net()
    attach_layerwise_casting_hooks(model.body, F8, F32)
    before = dtypes(model)
    with pytest.raises(ValueError, match=r"body\.0 casts its weights already.*remove_hook_from_submodules"):
        attach_layerwise_casting_hooks(model, BF16, F32)
    assert dtypes(model) == before
    remove_hook_from_submodules(model)
    attach_layerwise_casting_hooks(model, BF16, F32)
    assert dtypes(model)["body.0.weight"] == BF16
