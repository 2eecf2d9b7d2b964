"""The states of an optimizer are those that torch makes in its first step."""

# torch leaves its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.planning.optimizer_states import OPTIMIZERS
from tests.parallel.traffic import held


def make_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


KINDS: dict[str, Any] = {
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "Adafactor": torch.optim.Adafactor,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Rprop": torch.optim.Rprop,
    "centered": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "function": make_sgd,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*KINDS, *OPTIMIZERS])
def test_states_are_those_of_a_real_step(name: str, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 7, bias=False)).to(dtype)
    optimizer = {**KINDS, **OPTIMIZERS}[name]([*model.parameters()])
    model(torch.ones(2, 30, dtype=dtype)).sum().backward()
    optimizer.step()
    found: list[Any] = [one for state in optimizer.state.values() for one in state.values()]
    real = held([one for one in found if isinstance(one, torch.Tensor)])
    assert af.plan_memory(Context(), model, optimizer=KINDS.get(name, name)).optimizer == real


def test_muon_takes_matrices_alone() -> None:
    model = nn.Linear(30, 50, bias=False)
    assert af.plan_memory(Context(), model, optimizer=torch.optim.Muon).optimizer == 4 * 30 * 50
    with pytest.raises(ConfigurationError, match=r"optimizer=Muon: it can't step .* shape \(50,\) without"):
        af.plan_memory(Context(), nn.Linear(30, 50), optimizer=torch.optim.Muon)


def test_bytes_of_states_may_be_a_number() -> None:
    model = nn.Linear(30, 50)
    budget = af.plan_memory(Context(), model, optimizer=2.5)
    assert budget.optimizer == 2.5 * (30 * 50 + 50)
    assert budget.optimizer_name == "2.5 bytes per parameter"
    with pytest.raises(ConfigurationError, match="bytes per parameter can't be negative, got -1"):
        af.plan_memory(Context(), model, optimizer=-1)
