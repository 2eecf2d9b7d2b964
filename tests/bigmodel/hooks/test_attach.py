# pyright: reportUnknownMemberType=false

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.align_hooks import (
    AlignDevicesHook,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    has_offloaded_params,
    offload_hook_of,
)
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.hooks import (
    ModelHook,
    add_hook_to_module,
    hook_of,
    remove_hook_from_submodules,
)
from accelfn.weights.assign import named_modules
from tests.bigmodel.load.layouts import on_meta
from tests.bigmodel.offload.trees import assert_same_gradients, same

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


class Small(nn.Module):
    """Has tensors of its own, blocks, and a weight that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.first = nn.Linear(3, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()) for _ in range(3)
        )
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * self.scale
        return self.last(x)


def small(seed: int = 0) -> Small:
    torch.manual_seed(seed)
    return Small().eval()


def hooked(model: nn.Module) -> list[str]:
    return [name for name, module in named_modules(model) if hasattr(module, "_hf_hook")]


def streams(model: nn.Module) -> list[BlockPrefetcher]:
    found = [offload_hook_of(module) for module in model.modules()]
    return [*dict.fromkeys(hook.stream for hook in found if hook is not None and hook.stream is not None)]


# --- on all modules ------------------------------------------------------------------------------


def test_execution_device_hooks_are_attached_to_modules_with_tensors() -> None:
    model = small()
    add_hook_to_module(model.blocks[0], ModelHook())
    attach_execution_device_hook(model, "cpu:0", preload_module_classes=["Sequential"])
    # What has a hook keeps it, and below a block of the class there are none.
    assert hooked(model) == ["", "first", "blocks", "blocks.0", "blocks.1", "blocks.2", "last"]
    assert type(hook_of(model.blocks[0])) is ModelHook
    assert torch.equal(model(X), small()(X))
    remove_hook_from_submodules(model)
    assert hooked(model) == []


@pytest.mark.parametrize(("place", "given"), [("cpu", True), ("cpu:0", True), ("cpu:0", False)])
def test_each_module_with_tensors_is_offloaded(place: str, given: bool) -> None:
    plain, model = small(), on_meta(small()) if given else small()
    weights = small().state_dict()
    del weights["last.weight"]  # tied to another, as safetensors files have it
    attach_align_device_hook(
        model, place, offload=True, weights_map=weights if given else None, offload_buffers=given
    )
    inside = [f"blocks.{i}.{j}" for i in range(3) for j in (0, 1)]
    assert hooked(model) == ["", "first", *inside, "last"]
    assert all(has_offloaded_params(model.get_submodule(name)) for name in hooked(model))
    assert model.first.weight is model.last.weight
    assert same(model.state_dict(), plain.state_dict())
    for again in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(X), plain(X))
        assert again.first.weight is again.last.weight
    for one in (model, plain):
        one(X).sum().backward()
    assert_same_gradients(model, plain)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), plain(X))


def test_a_missing_value_changes_nothing() -> None:
    weights = small().state_dict()
    del weights["last.bias"]
    model = on_meta(small())
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"'last\.bias' are on the meta device"):
        attach_align_device_hook(model, "cpu:0", offload=True, weights_map=weights)
    with pytest.raises(ValueError, match=r"'last\.bias' are on the meta device"):
        attach_align_device_hook_on_blocks(model, "cpu:0", {"blocks": True, "last": True}, weights)
    assert hooked(model) == []
    assert all(one is before[name] for name, one in model.named_parameters())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_restores_the_tensors(error: type[BaseException]) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        raise error

    model = small()
    expected = model(X)
    attach_align_device_hook(model, "cpu:0", offload=True)
    block: Any = model.blocks[1]
    for failing in (block, block, block[0]):
        vars(failing)["forward"] = fail
        with pytest.raises(error):
            model(X)
        del vars(failing)["forward"]
    assert torch.equal(block(X), small().blocks[1](X))  # by itself, before the whole
    assert torch.equal(model(X), expected)
    assert not any(stream.resident for stream in streams(model))
    assert all(isinstance(one, nn.Parameter) for one in model.parameters())


# --- on blocks -----------------------------------------------------------------------------------


def test_one_answer_for_the_whole_model() -> None:
    model = small()
    attach_align_device_hook_on_blocks(model, "cpu:0")
    hook = hook_of(model)
    assert hooked(model) == [""]
    assert isinstance(hook, AlignDevicesHook)
    assert (hook.io_same_device, hook.offload, hook.place_submodules) == (True, False, True)
    assert torch.equal(model(X), small()(X))
    model = small()
    attach_align_device_hook_on_blocks(model, "cpu:0", offload=True)
    assert has_offloaded_params(model.first)
    assert torch.equal(model(X), small()(X))


def test_mappings_of_different_blocks_are_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match="execution_device lacks the block 'last'"):
        attach_align_device_hook_on_blocks(model, {"first": "cpu"}, {"first": True, "last": True})
    with pytest.raises(ValueError, match="offload lacks the block 'last'"):
        attach_align_device_hook_on_blocks(model, {"first": "cpu", "last": "cpu"}, {"first": True})
    assert hooked(model) == []


# --- laws ----------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    torch.manual_seed(draw(st.integers(0, 99)))

    def layer(depth: int) -> nn.Module:
        kinds = ["linear", "norm", "tanh"] + ["nest"] * (depth > 0)
        kind = draw(st.sampled_from(kinds))
        if kind == "nest":
            return nn.Sequential(*(layer(depth - 1) for _ in range(draw(st.integers(0, 3)))))
        return {"linear": nn.Linear(3, 3), "norm": nn.BatchNorm1d(3), "tanh": nn.Tanh()}[kind]

    model = nn.Sequential(*(layer(2) for _ in range(draw(st.integers(1, 4)))))
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if len(linear) > 1 and draw(st.booleans()):
        linear[-1].weight = linear[0].weight
    return model


@given(model=models(), data=st.data())
def test_any_model_computes_and_trains_unchanged(model: nn.Module, data: st.DataObject) -> None:
    plain = copy.deepcopy(model)
    names = [name for name, _ in named_modules(model) if name]
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=4)) if names else []
    places = {name: data.draw(st.sampled_from(["cpu", "cpu:0", "cpu:1"])) for name in chosen}
    offload = {name: data.draw(st.booleans()) for name in chosen}
    weights = copy.deepcopy(model.state_dict()) if data.draw(st.booleans()) else None
    buffers = data.draw(st.booleans())
    attach_align_device_hook_on_blocks(model, places, offload, weights, offload_buffers=buffers)
    for one in (model, plain):
        one.requires_grad_(True)
    for _ in range(2):
        outs = [one(X) for one in (model, plain)]
        assert torch.equal(outs[0], outs[1])
        for out in outs:
            if out.requires_grad:
                out.square().sum().backward()
    assert_same_gradients(model, plain)
    assert same(dict(model.named_buffers()), dict(plain.named_buffers()))
