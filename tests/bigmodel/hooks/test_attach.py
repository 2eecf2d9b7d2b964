# pyright: reportUnknownMemberType=false

import copy
import pickle
from collections.abc import Mapping
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
from accelfn.bigmodel.assign import named_modules
from accelfn.bigmodel.block_stream import BlockPrefetcher
from accelfn.bigmodel.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hook_of,
    remove_hook_from_submodules,
)

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
PLACES = pytest.mark.parametrize("place", ["cpu", "cpu:0"])


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


def on_meta(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, one in [*module.named_parameters(recurse=False)]:
            made.setdefault(id(one), nn.Parameter(one.detach().to("meta")))
            setattr(module, key, made[id(one)])
    return model


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


@PLACES
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("empty", [False, True])
def test_each_module_with_tensors_is_offloaded(place: str, given: bool, empty: bool) -> None:
    expected = small()(X)
    model = on_meta(small()) if empty else small()
    weights = small().state_dict() if given else None
    if empty and not given:
        with pytest.raises(ValueError, match="have no values"):
            attach_align_device_hook(model, place, offload=True, weights_map=weights)
        return
    attach_align_device_hook(model, place, offload=True, weights_map=weights)
    inside = [f"blocks.{i}.{j}" for i in range(3) for j in (0, 1)]
    assert hooked(model) == ["", "first", *inside, "last"]
    assert all(has_offloaded_params(model.get_submodule(name)) for name in hooked(model))
    for _ in range(2):
        assert torch.equal(model(X), expected)
    assert model.get_parameter("first.weight") is model.get_parameter("last.weight")
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(X), expected)
        assert again.get_parameter("first.weight") is again.get_parameter("last.weight")
    assert all(
        torch.equal(one, other)
        for one, other in zip(model.state_dict().values(), small().state_dict().values(), strict=True)
    )
    model(X).sum().backward()
    plain = small()
    plain(X).sum().backward()
    for (name, one), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert one.grad is not None, name
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected)


def test_tied_weights_need_one_value() -> None:
    weights = small().state_dict()
    del weights["last.weight"]  # as safetensors files have it
    model = on_meta(small())
    attach_align_device_hook(model, "cpu:0", offload=True, weights_map=weights)
    assert model.get_parameter("first.weight") is model.get_parameter("last.weight")
    assert torch.equal(model(X), small()(X))


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


def test_modules_that_read_weights_below_are_transferred_as_a_whole() -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.inner.weight

    torch.manual_seed(0)
    model = nn.Sequential(Careless(), nn.TransformerEncoderLayer(3, 1, 4), nn.MultiheadAttention(3, 1)).eval()
    attach_align_device_hook(model, "cpu:0", offload=True, preload_module_classes=["Careless"])
    assert hooked(model) == ["0", "1", "2"]
    assert [len(block.refs) for stream in streams(model) for block in stream.blocks] == [2, 12, 4]


def test_an_interrupt_restores_the_tensors() -> None:
    def interrupt(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    model = small()
    expected = model(X)
    attach_align_device_hook(model, "cpu:0", offload=True)
    block: Any = model.blocks[1]
    vars(block)["forward"] = interrupt
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(X)
    del vars(block)["forward"]
    assert torch.equal(model(X), expected)
    assert not any(stream.resident for stream in streams(model))
    assert all(isinstance(one, nn.Parameter) for one in model.parameters())
    vars(block[0])["forward"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(X)
    del vars(block[0])["forward"]
    assert torch.equal(block(X), small().blocks[1](X))  # by itself, before the whole
    assert torch.equal(model(X), expected)
    assert not any(stream.resident for stream in streams(model))


# --- on blocks -----------------------------------------------------------------------------------


@PLACES
def test_one_answer_for_the_whole_model(place: str) -> None:
    model = small()
    attach_align_device_hook_on_blocks(model, place)
    hook = hook_of(model)
    assert hooked(model) == [""]
    assert isinstance(hook, AlignDevicesHook)
    assert (hook.io_same_device, hook.offload, hook.place_submodules) == (True, False, True)
    assert torch.equal(model(X), small()(X))
    model = small()
    attach_align_device_hook_on_blocks(model, place, offload=True)
    assert has_offloaded_params(model.first)
    assert torch.equal(model(X), small()(X))


def test_blocks_that_are_only_placed_lose_the_hook_that_they_had() -> None:
    model = small()
    add_hook_to_module(model.first, ModelHook())
    add_hook_to_module(model.last, ModelHook())
    attach_align_device_hook_on_blocks(model, {"first": "cpu", "last": "cpu"}, {"first": False, "last": True})
    assert isinstance(hook_of(model.first), AlignDevicesHook)
    assert isinstance(hook_of(model.last), SequentialHook)


@pytest.mark.parametrize(
    ("devices", "offload", "missing"),
    [
        (
            {"first": "cpu"},
            {"first": True, "last": True},
            "execution_device lacks the block 'last'",
        ),
        ({"first": "cpu", "last": "cpu"}, {"first": True}, "offload lacks the block 'last'"),
    ],
)
def test_mappings_of_different_blocks_are_refused(
    devices: Mapping[str, str], offload: Mapping[str, bool], missing: str
) -> None:
    model = small()
    with pytest.raises(ValueError, match=missing):
        attach_align_device_hook_on_blocks(model, devices, offload)
    assert hooked(model) == []


# --- beside Accelerate's -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"execution_device": "cpu"},
        {"execution_device": "cpu", "offload": True},
        {"execution_device": "cpu", "offload": True, "offload_buffers": True},
        {"execution_device": {"first": "cpu", "blocks": "cpu", "last": "cpu"}},
        {
            "execution_device": {"first": "cpu", "blocks": "cpu", "last": "cpu"},
            "offload": {"first": False, "blocks": True, "last": False},
        },
        {"execution_device": {"": "cpu"}, "offload": {"": False}},
    ],
)
def test_hooks_of_blocks_are_where_accelerates_are(arguments: dict[str, Any]) -> None:
    peer: Any = pytest.importorskip("accelerate.hooks")
    ours, theirs = small(), small()
    attach_align_device_hook_on_blocks(ours, **arguments)
    peer.attach_align_device_hook_on_blocks(theirs, **arguments)
    with torch.no_grad():
        assert torch.equal(ours(X), theirs(X))
    assert hooked(ours) == hooked(theirs)


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
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or other.grad is None or torch.equal(one.grad, other.grad)
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(one, other)
