"""A copy of a model whose layers ranks share is a model of its own."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn

import accelfn as af
from accelfn.testing import run_ranks


class Net(nn.Module):
    """Has layers of each kind that something is put on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)
        self.head = nn.Linear(4, 4)
        self.head.weight = self.tied = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.up(self.norm(x)).relu()))


def train(ctx: af.Context, model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make a step, and return the parameters afterwards."""
    optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = af.backward(ctx, model(x).square().sum(), af.init_scaler(ctx))
    af.optimizer_step(ctx, optimizer, scaler)
    return whole(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    values: dict[str, Any] = dict(model.named_parameters())
    return {name: one.detach().full_tensor().clone() for name, one in values.items()}


def test_a_copy_answers_with_its_own_weights_and_is_trained_by_itself() -> None:
    def run(ctx: af.Context) -> None:
        model = af.prepare(ctx, Net())
        x = torch.arange(8.0).view(2, 4)
        before = model(x).detach()
        twin = copy.deepcopy(model)
        expected = train(ctx, copy.deepcopy(model), x)

        del model
        gc.collect()
        trained = train(ctx, twin, x)
        assert all(torch.equal(one, expected[name]) for name, one in trained.items())
        assert not torch.equal(twin(x), before)
        assert len(list(twin.parameters())) == 8  # ties too

    plan = {"up": "colwise", "down": "rowwise", "norm": "whole"}
    handler = af.config.TorchTensorParallelConfig(plan=plan)
    config = af.ParallelismConfig(tp_size=2, tp_handler=handler)
    run_ranks(run, 2, "processes", parallelism_config=config, mixed_precision="bf16")
