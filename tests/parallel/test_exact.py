"""Exact mode: the same bits at any number of ranks."""

# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn import CanonicalReduction, Context
from accelfn.testing import Where, run_ranks

SHARDS = 12
ROWS = 4  # of a shard


class Run(NamedTuple):
    """What a part of a training has come to."""

    losses: list[torch.Tensor]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    loader: Any


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(SHARDS * ROWS * 25, 5, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def mlp() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(5, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 1)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def train(ctx: Context, steps: int, before: Run | None = None) -> Run:
    """Train for ``steps`` optimizer steps, from where another world has left off."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(dataset(), ROWS, shuffle=True, drop_last=True)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)
    losses: list[torch.Tensor] = []
    if before is not None:
        model.load_state_dict(before.model)
        optimizer.load_state_dict(copy.deepcopy(before.optimizer))
        af.restore_loader(loader, before.loader)
    while True:
        window: list[torch.Tensor] = []
        for (x, y), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.mse_loss(model(x), y)
                af.backward(ctx, loss, scaler, micro)
            window.append(af.gather(ctx, loss.detach()))
            if micro.sync:
                af.clip_grad_norm_(ctx, model.parameters(), 0.5)
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                losses.append(torch.cat(window).mean())
                window = []
                if len(losses) == steps:
                    state = {name: value.clone() for name, value in model.state_dict().items()}
                    return Run(losses, state, copy.deepcopy(optimizer.state_dict()), af.loader_state(loader))


def started(world: int, on: Where, steps: int, before: Run | None = None) -> Run:
    options = af.DataLoaderConfiguration(data_seed=7)
    found = run_ranks(
        lambda ctx: train(ctx, steps, before),
        world,
        on,
        reduction=CanonicalReduction(num_shards=SHARDS),
        dataloader_config=options,
    )
    for other in found[1:]:
        assert_equal(found[0], other)
    return found[0]


def assert_equal(one: Run, other: Run) -> None:
    assert [loss.item() for loss in one.losses] == [loss.item() for loss in other.losses]
    for name, value in one.model.items():
        assert torch.equal(value, other.model[name]), name
    for index, state in one.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(value, other.optimizer["state"][index][name])


@pytest.fixture(scope="module")
def alone() -> Run:
    return started(1, "memory", 60)


@pytest.mark.parametrize("world", [2, 3, 4, 6, 12])
def test_training_is_bit_equal_at_any_number_of_ranks(alone: Run, world: int) -> None:
    assert_equal(alone, started(world, "memory", 60 if world < 6 else 10)) if world < 6 else None
