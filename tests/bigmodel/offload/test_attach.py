"""Hooks that bring blocks and move inputs, and go without a trace."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable
from typing import Any

import optree
import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel import block_hooks as module_of_hooks
from accelfn.bigmodel.block_hooks import attach_moves, attach_prefetcher, attach_return
from tests.bigmodel.offload.trees import WIDTH, Tree, build, doubling, inputs, stream_of

META = torch.device("meta")


class Passing(nn.Module):
    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": x, **others}


class Seeing(Passing):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.device] = []

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.device)
        return super().forward(x, **others)


def remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def num_hooks(model: nn.Module) -> int:
    return sum(
        len(vars(module)["_forward_hooks"])
        + len(vars(module)["_forward_pre_hooks"])
        + len(vars(module)["_forward_hooks_always_called"])
        + len(vars(module)["_forward_hooks_with_kwargs"])
        + len(vars(module)["_forward_pre_hooks_with_kwargs"])
        for module in model.modules()
    )


def test_outputs_go_back_to_where_the_inputs_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(value: Any, device: torch.device, skip_keys: tuple[str, ...]) -> Any:
        """Move like a real device does; nothing can come back from meta."""

        def move(leaf: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(leaf, device=device)

        return optree.tree_map(move, value)

    monkeypatch.setattr(module_of_hooks, "moved", place)
    module = Seeing()
    handles = [attach_moves(module, torch.device("cpu"), ()), *attach_return(module, ())]
    assert module(torch.zeros(1, device="meta"))["x"].device == META
    assert module(torch.zeros(1))["x"].device.type == "cpu"
    with pytest.raises(TypeError):
        module(torch.zeros(1, device="meta"), 1, 2)
    assert pickle.loads(pickle.dumps(copy.deepcopy(module))) is not None
    assert module(torch.zeros(1))["x"].device.type == "cpu"
    assert {device.type for device in module.seen} == {"cpu"}
    remove(handles)
    assert num_hooks(module) == 0


def test_what_was_attached_goes_without_a_trace() -> None:
    plain: Any = build(Tree("list", (Tree("direct"), Tree("shared", (Tree("linear"),)))))
    model: Any = build(Tree("list", (Tree("direct"), Tree("shared", (Tree("linear"),)))))
    attached = attach_prefetcher(model, stream_of(model, doubling()))
    assert num_hooks(model) > 0
    assert not torch.equal(plain(inputs()), model(inputs()))
    remove(attached)
    assert num_hooks(model) == 0
    assert torch.equal(plain(inputs()), model(inputs()))


def test_hooks_of_the_user_see_the_weights_that_compute() -> None:
    """Those that were there before; others come around ours."""
    model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    weight = model[0].weight.detach().clone()
    seen: list[torch.Tensor] = []

    def look(module: Any, *_: object) -> None:
        seen.append(module.weight.detach().clone())

    model[0].register_forward_pre_hook(look)
    model[0].register_forward_hook(look)
    attach_prefetcher(model, stream_of(model, doubling()))
    model(inputs())
    assert all(torch.equal(one, 2 * weight) for one in seen)
    assert len(seen) == 2
    model[0].register_forward_hook(look)
    model(inputs())
    assert torch.equal(seen[-1], weight)
