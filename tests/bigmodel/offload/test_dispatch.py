"""Models spread over devices, memory and disk compute, train, copy and fail as they do in memory."""

from __future__ import annotations

import copy
import io
import pickle
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.offload.blocks import named_modules
from accelfn.bigmodel.offload.dispatch import (
    dispatch_model,
    read_offload,
    undispatch,
)
from accelfn.bigmodel.offload.stream import Stream
from tests.bigmodel.offload.trees import (
    Tree,
    build,
    gradients,
    inputs,
    kinds,
    same,
    trees,
    values,
)

PLACES = ("cpu", "disk", "cpu:0", "cpu:1")
posix_only = pytest.mark.skipif(sys.platform == "win32", reason="limits of processes are of POSIX")


def streams_of(model: nn.Module) -> list[Stream]:
    return list(getattr(vars(model).get("_accelfn_dispatched"), "streams", []))


def is_at_rest(model: nn.Module) -> bool:
    return all(stream.resident == () for stream in streams_of(model))


def within_bounds(model: nn.Module) -> bool:
    return all(facts.peak_bytes <= facts.bound_bytes for facts in read_offload(model))


@st.composite
def maps(draw: st.DrawFn, model: nn.Module) -> dict[str, str]:
    """A place for the whole model, and others for some of its modules."""
    names = [name for name, _ in named_modules(model) if name]
    some = draw(st.lists(st.sampled_from(names), unique=True, max_size=5)) if names else []
    return {name: draw(st.sampled_from(PLACES)) for name in ["", *some]}


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    if out.requires_grad:
        (out * out).sum().backward()
    return out.detach()


@given(
    tree=trees(),
    data=st.data(),
    main=st.sampled_from([None, "cpu", "cpu:0"]),
    offload_buffers=st.booleans(),
    num_ahead=st.integers(0, 3),
    is_training=st.booleans(),
)
def test_every_placement_computes_what_the_plain_model_does(
    tree: Tree,
    data: st.DataObject,
    main: str | None,
    offload_buffers: bool,
    num_ahead: int,
    is_training: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    plain, model = build(tree), build(tree)
    device_map = data.draw(maps(model))
    folder = tmp_path_factory.mktemp("offload")
    found = dispatch_model(
        model,
        device_map,
        main,
        offload_dir=folder,
        offload_buffers=offload_buffers,
        num_ahead=num_ahead,
        cache_bytes=data.draw(st.sampled_from([None, 0, 100])),
    )
    assert found is model
    assert same(values(plain), values(model))
    for one in (plain, model):
        one.train(is_training)
    exact = not {"tied", "shared", "twice", "direct"} & set(kinds(tree))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            expected, out = plain(inputs()), model(inputs())
        assert torch.equal(expected, out)
        assert same(values(plain), values(model))
        assert is_at_rest(model)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (plain, model)]
    for number in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Each starts from the same weights, so that one step is compared, and not what chaos makes of several.
        expected, out = (step(one, inputs(number)) for one in (plain, model))
        assert torch.equal(expected, out)
        if exact:
            assert same(gradients(plain), gradients(model))
        else:  # a weight's gradient is a sum of several, in another order
            for left, right in zip(gradients(plain).values(), gradients(model).values(), strict=True):
                torch.testing.assert_close(left, right)
            for left, right in zip(plain.parameters(), model.parameters(), strict=True):
                right.grad = None if left.grad is None else left.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
        assert same(values(plain), values(model))
        assert is_at_rest(model)
    assert within_bounds(model)


@given(tree=trees(), data=st.data(), how=st.sampled_from(["deepcopy", "pickle", "save"]))
def test_copies_are_models_of_their_own(
    tree: Tree, data: st.DataObject, how: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, model = build(tree), build(tree)
    dispatch_model(model, data.draw(maps(model)), "cpu:0", offload_dir=tmp_path_factory.mktemp("offload"))
    if how == "deepcopy" or "parametrized" in kinds(tree):  # which torch doesn't pickle
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert same(values(twin), values(plain))
    before = values(model)
    assert torch.equal(step(twin, inputs()), step(plain, inputs()))
    for left, right in zip(gradients(twin).values(), gradients(plain).values(), strict=True):
        torch.testing.assert_close(left, right)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert same(values(model), before)
    assert len(streams_of(twin)) == len(streams_of(model))
    assert is_at_rest(twin)
    undispatch(twin)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in twin.modules())
    assert sum(len(module._forward_hooks) for module in model.modules()) > 0 or not streams_of(model)
