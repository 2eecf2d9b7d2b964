from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelfn.bigmodel import BnbQuantizationConfig
from accelfn.bigmodel.quantize import default_skip_modules, plan_quantization
from tests.bigmodel.quantize.models import QUANTIZED, Net


class Derived(nn.Linear):
    """A subclass of a layer."""


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.own = Derived(8, 8)
        self.shared = nn.Linear(8, 8)
        self.again = self.shared
        self.head = nn.Linear(8, 8)


class Base(nn.Module):
    """As a base model of transformers: of its kind, and with no output layer."""

    base_model_prefix = "model"

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        if tied:
            self.two.weight = self.one.weight


def config(**fields: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(load_in_8bit=True, **fields)


def test_all_linear_layers_but_the_last_are_quantised() -> None:
    with torch.device("meta"):
        assert plan_quantization(Net(), config()) == QUANTIZED
    assert default_skip_modules(Net()) == ("head",)


def test_a_base_model_is_quantised_whole_unless_it_shares_weights() -> None:
    assert default_skip_modules(Base(tied=False)) == ()
    assert plan_quantization(Base(tied=False), config()) == ("one", "two", "last")
    assert default_skip_modules(Base(tied=True)) == ("one", "two", "last")
    with pytest.raises(ValueError, match=r"no layer to quantise\. The model has 3 nn\.Linear"):
        plan_quantization(Base(tied=True), config())
    with pytest.raises(ValueError, match=r"1 is skipped, and 0 are on places where .* Pass a device_map"):
        plan_quantization(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), config(), ["0"])


def test_subclasses_of_linear_are_not_quantised() -> None:
    # The output layer of attention is used without being called.
    assert plan_quantization(Attending(), config()) == ("shared",)
    # A layer with two names is skipped under either.
    assert plan_quantization(Attending(), config(skip_modules=["again"])) == ("head",)


def test_names_are_compared_by_their_parts() -> None:
    skipped = config(skip_modules=["blocks.1", "up"])
    assert plan_quantization(Net(), skipped) == ("blocks.0.down", "head")
    assert plan_quantization(Net(), config(skip_modules=[])) == (*QUANTIZED, "head")
    for wrong in ("block", "blocks.2", "lm_head"):
        with pytest.raises(ValueError, match=f"skip_modules has {wrong}, but"):
            plan_quantization(Net(), config(skip_modules=[wrong]))
