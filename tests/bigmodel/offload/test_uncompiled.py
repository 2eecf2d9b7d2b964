"""torch.compile leaves the hooks of the stream alone, and compiles what is between them."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from accelfn.bigmodel.block_hooks import attach_prefetcher, uncompiled
from accelfn.bigmodel.dispatch import cpu_offload, disk_offload, undispatch
from tests.bigmodel.offload.trees import WIDTH, doubling, gradients, inputs, stream_of

# The compiler takes seconds to load, and a test of it longer than others.
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


def compiled(one: Any, backend: str, **options: Any) -> Any:
    return cast("Any", torch).compile(one, backend=backend, **options)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["model", "in place", "blocks", "blocks in place", "before", "whole graphs"])
def test_compiled_models_compute_and_train_unchanged(how: str, backend: str) -> None:
    plain, model = layers(), layers()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    if how == "before":
        for number in range(3):
            model[number] = compiled(model[number], backend)
    stream = stream_of(model, doubling())
    attach_prefetcher(model, stream)
    run = model
    if how == "model":
        run = compiled(model, backend)
    elif how == "in place":
        model.compile(backend=backend)
    elif how == "blocks":
        for number in range(3):
            model[number] = compiled(model[number], backend)
    elif how == "blocks in place":
        for number in range(3):
            model[number].compile(backend=backend)
    elif how == "whole graphs":
        for number in range(3):
            model[number].forward = compiled(model[number].forward, backend, fullgraph=True)
    for seed in range(2):
        with torch.no_grad():
            assert torch.equal(plain(inputs(seed)), run(inputs(seed)))
        for one in (plain, model):
            one.zero_grad()
        expected, out = plain(inputs(seed)), run(inputs(seed))
        assert torch.equal(expected, out)
        expected.sum().backward()
        out.sum().backward()
        for left, right in zip(gradients(plain).values(), gradients(model).values(), strict=True):
            torch.testing.assert_close(left, right)
        assert stream.resident == ()
    assert stream.facts().peak_blocks == 2
    # One graph for each block, with gradients and without: nothing cuts a block into pieces.
    assert dynamo.utils.counters["stats"]["unique_graphs"] <= 2 * len(model)


@pytest.mark.parametrize("where", ["host to cpu:0", "disk to cpu", "disk to cpu:0"])
@pytest.mark.parametrize("how", ["blocks", "blocks in place", "forwards"])
def test_equal_blocks_are_one_graph(how: str, where: str, tmp_path: Path) -> None:
    """The compiler gives up after eight graphs of one function, and with fullgraph=True that is an error."""
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    cast("Any", torch).random.manual_seed(0)
    plain: Any = nn.Sequential(*(Layer() for _ in range(12)))
    model: Any = nn.Sequential(*(Layer() for _ in range(12)))
    model.load_state_dict(plain.state_dict())
    at, _, used = where.partition(" to ")
    if at == "host":
        cpu_offload(model, used)
    else:
        disk_offload(model, tmp_path, used)
    for number, block in enumerate(model):
        if how == "blocks":
            model[number] = cast("Any", torch).compile(block, backend=count, fullgraph=True)
        elif how == "blocks in place":
            block.compile(backend=count, fullgraph=True)
        else:
            block.forward = cast("Any", torch).compile(block.forward, backend=count, fullgraph=True)
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
    assert all(not vars(one)["_forward_hooks"] for one in cast("list[nn.Module]", list(model.modules())))


def test_a_hook_is_not_traced() -> None:
    seen: list[bool] = []

    @uncompiled
    def look() -> None:
        seen.append(torch.compiler.is_compiling())

    def run(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    assert torch.equal(compiled(run, "eager")(torch.zeros(1)), torch.ones(1))
    assert seen == [False]
