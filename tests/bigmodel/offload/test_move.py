"""Inputs and outputs come to a device; what is there already stays the same object."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.overrides import TorchFunctionMode

from accelfn.bigmodel.block_hooks import input_device, moved

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


def test_what_is_there_is_given_back_itself() -> None:
    value: Any = {"a": torch.zeros(1), "b": (torch.zeros(2), 3, Cache())}
    assert moved(value, CPU) is value
    assert moved(value["a"], CPU) is value["a"]
    packed = pack_sequence([torch.zeros(2)])
    assert moved(packed, CPU) is not None


def test_keys_are_skipped_at_any_depth() -> None:
    found = moved({"a": torch.zeros(1), "deep": {"b": torch.zeros(1)}}, META, ("b",))
    assert found["a"].is_meta
    assert not found["deep"]["b"].is_meta


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
def test_what_comes_to_the_host_has_arrived(
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
