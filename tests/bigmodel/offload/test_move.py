"""Inputs and outputs are moved to a device; those that are there already stay the same objects."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import optree
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode

from accelfn.bigmodel import block_hooks
from accelfn.bigmodel.block_hooks import attach_moves, attach_return, input_device, moved

META, CPU = torch.device("meta"), torch.device("cpu")


class Cache:
    """What holds state, as transformers' caches of keys and values."""

    def __init__(self) -> None:
        self.state = torch.zeros(1)


def test_trees_are_moved() -> None:
    found = moved({"a": torch.zeros(1), "b": [torch.zeros(2), 3, "text", None]}, META)
    assert found["a"].is_meta
    assert found["b"][0].is_meta
    assert found["b"][1:] == [3, "text", None]


def test_values_on_the_device_are_returned_unchanged() -> None:
    value: Any = {"a": torch.zeros(1), "b": (torch.zeros(2), 3, Cache())}
    assert moved(value, CPU) is value
    assert moved(value["a"], CPU) is value["a"]
    packed = pack_sequence([torch.zeros(2)])
    assert moved(packed, CPU) is not None


def test_keys_are_skipped_at_any_depth() -> None:
    found = moved({"a": torch.zeros(1), "deep": {"b": torch.zeros(1)}}, META, ("b",))
    assert found["a"].is_meta
    assert not found["deep"]["b"].is_meta


class Seeing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.device] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.device)
        return {"x": x}


def test_outputs_go_back_to_where_the_inputs_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(value: Any, device: torch.device, skip_keys: tuple[str, ...]) -> Any:
        """Move as to a real device, since meta tensors can't be moved."""

        def move(leaf: torch.Tensor) -> torch.Tensor:
            return torch.zeros_like(leaf, device=device)

        return optree.tree_map(move, value)

    monkeypatch.setattr(block_hooks, "moved", place)
    module = Seeing()
    handles = [attach_moves(module, CPU, ()), *attach_return(module, ())]
    assert module(torch.zeros(1, device="meta"))["x"].device == META
    with pytest.raises(TypeError):
        module(torch.zeros(1, device="meta"), 1, 2)
    assert pickle.loads(pickle.dumps(copy.deepcopy(module))) is not None
    assert module(torch.zeros(1))["x"].device == CPU
    assert {device.type for device in module.seen} == {"cpu"}
    for handle in handles:
        handle.remove()
    assert module(torch.zeros(1, device="meta"))["x"].is_meta
    assert module.seen[-1] == META


class Copies(TorchFunctionMode):
    """Stands in for copies between devices: notes which of them the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords: dict[str, Any] = kwargs or {}
        if func is torch.Tensor.to:
            self.waited.append(not keywords.get("non_blocking", False))
            return torch.empty(args[0].shape, device=args[1])
        return func(*args, **keywords)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize(("source", "target", "waits"), [(META, CPU, True), (CPU, META, False)])
def test_moves_to_the_host_are_synchronous(
    source: torch.device, target: torch.device, waits: bool, tree: bool
) -> None:
    tensor = torch.zeros(2, device=source)
    with Copies() as copies:
        moved({"a": tensor} if tree else tensor, target)
    assert copies.waited == [waits]


def test_the_device_of_the_first_input() -> None:
    assert input_device((1, torch.zeros(1, device="meta")), {}) == META
    assert input_device(("x",), {"x": torch.zeros(1)}) == CPU
    assert input_device((), {}) is None
