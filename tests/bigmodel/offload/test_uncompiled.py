"""torch.compile leaves the hooks of the stream alone, and compiles what is between them."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from accelfn.bigmodel import disk_offload, read_offload, undispatch
from tests.bigmodel.offload.trees import (
    WIDTH,
    assert_same_gradients,
    double,
    doubled,
    inputs,
    is_at_rest,
    num_hooks,
    offloaded,
)

# The compiler takes seconds to load, and a test of it longer than others.
pytestmark = pytest.mark.slow
dynamo = cast("Any", torch)._dynamo


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def layers() -> Any:
    cast("Any", torch).random.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(3)), nn.LayerNorm(WIDTH))


@pytest.fixture(autouse=True)
def fresh() -> Generator[None]:
    dynamo.reset()
    dynamo.utils.counters.clear()
    with warnings.catch_warnings():
        # The compiler looks at inputs in a way that it silences itself, but not under "error".
        warnings.filterwarnings("ignore", message="The .grad attribute")
        yield
    dynamo.reset()


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("model", "aot_eager"),
        ("in place", "eager"),
        ("blocks", "aot_eager"),
        ("blocks in place", "eager"),
        ("before", "aot_eager"),
        ("whole graphs", "eager"),
    ],
)
def test_compiled_models_compute_and_train_unchanged(how: str, backend: str) -> None:
    plain, model = doubled(layers()), layers()
    compile_: Any = functools.partial(cast("Any", torch).compile, backend=backend)
    if how == "before":
        for number in range(3):
            model[number] = compile_(model[number])
    offloaded(model, double)
    run = compile_(model) if how == "model" else model
    if how == "in place":
        model.compile(backend=backend)
    for number in range(3):
        if how == "blocks":
            model[number] = compile_(model[number])
        elif how == "blocks in place":
            model[number].compile(backend=backend)
        elif how == "whole graphs":
            model[number].forward = compile_(model[number].forward, fullgraph=True)
    for seed in range(2):
        with torch.no_grad():
            assert torch.equal(plain(inputs(seed)), run(inputs(seed)))
        for one in (plain, model):
            one.zero_grad()
        expected, out = plain(inputs(seed)), run(inputs(seed))
        assert torch.equal(expected, out)
        expected.sum().backward()
        out.sum().backward()
        assert_same_gradients(plain, model, exact=False)
        assert is_at_rest(model)
    assert read_offload(model)[0].peak_blocks == 2
    # One graph for each block, with gradients and without: nothing cuts a block into pieces.
    assert dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * len(model)


@pytest.mark.parametrize(
    ("how", "place"), [("blocks", "cpu"), ("blocks in place", "cpu:0"), ("forwards", "cpu:0")]
)
def test_equal_blocks_are_one_graph(how: str, place: str, tmp_path: Path) -> None:
    """The compiler gives up after eight graphs of one function, and with fullgraph=True that is an error."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compile_: Any = functools.partial(cast("Any", torch).compile, backend=count, fullgraph=True)
    plain: Any = nn.Sequential(*(Layer() for _ in range(12)))
    model = disk_offload(copy.deepcopy(plain), tmp_path, place)
    for number, block in enumerate(model):
        if how == "blocks":
            model[number] = compile_(block)
        elif how == "blocks in place":
            block.compile(backend=count, fullgraph=True)
        else:
            block.forward = compile_(block.forward)
    with torch.no_grad():
        for seed in range(2):
            assert torch.equal(model(inputs(seed)), plain(inputs(seed)))
    assert len(graphs) == 1
    # A module within a block that is called by itself still finds its weights, and fails cleanly.
    inner = (model[3]._orig_mod if how == "blocks" else model[3]).up
    assert torch.equal(inner(inputs()), plain[3].up(inputs()))
    with pytest.raises(RuntimeError):
        inner(torch.zeros(WIDTH + 1))
    undispatch(model)
    assert not num_hooks(model)
