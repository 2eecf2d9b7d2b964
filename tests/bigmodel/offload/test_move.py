"""Inputs and outputs come to a device; what is there already stays the same object."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence

from accelfn.bigmodel.offload.move import input_device, moved

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


def test_the_device_of_the_first_input() -> None:
    assert input_device((1, torch.zeros(1, device="meta")), {}) == META
    assert input_device(("x",), {"x": torch.zeros(1)}) == CPU
    assert input_device((), {}) is None
