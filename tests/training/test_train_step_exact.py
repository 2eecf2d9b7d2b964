# torch leaves tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The train step in exact mode: the same bits at any number of ranks, over modules."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import CanonicalReduction
from accelfn.testing import run_ranks
from tests.training.models import filled

ROWS, STEPS = 24, 4
Batch = tuple[torch.Tensor, torch.Tensor]


def batches(ctx: Context) -> list[Batch]:
    """Give this rank's part of global batches, in rank order."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, ROWS, 3, generator=generator)
    y = x.sum(2, keepdim=True).sin()
    part = slice(ctx.rank * ROWS // ctx.num_processes, (ctx.rank + 1) * ROWS // ctx.num_processes)
    return [(one[part], other[part]) for one, other in zip(x, y, strict=True)]


class Net(nn.Module):
    """Has a part that only some microbatches need, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.sometimes, self.never = nn.Linear(3, 1), nn.Linear(3, 1)
        self.drop = nn.Dropout(0.2)
        filled(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.last(self.drop(self.first(x)).tanh())
        return result + self.sometimes(x) if x[0, 0] > 0.5 else result


def counted_sum(models: list[nn.Module], batch: Batch) -> af.Loss:
    counted = batch[0][:, 0] > 0
    total = nn.functional.mse_loss(models[0](batch[0])[counted], batch[1][counted], reduction="sum")
    return af.Loss(total, weight=counted.sum(), aux={"counted": counted.float().sum()})


def of_two_models(models: list[nn.Module], batch: Batch) -> af.Loss:
    result = models[0](batch[0])
    if batch[0][0, 0] < 0:  # also where the window closes, on some ranks and not on others
        result = result + models[1](batch[0])
    # Weights that are no whole numbers.
    return af.Loss((result - batch[1]).square().sum(), weight=batch[0][:, 1].abs().sum())


def over_modules(ctx: Context, loss_fn: Callable[..., Any]) -> list[Any]:
    models = [af.prepare(ctx, Net()) for _ in range(2 if loss_fn is of_two_models else 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), 0.05) for model in models]
    step = af.make_train_step(ctx, loss_fn, optimizers, model=models, max_norm=0.5)
    state = af.init_train_state(ctx, optimizers)
    losses: list[float] = []
    for batch in batches(ctx):
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
    assert models[0].never.weight not in optimizers[0].state  # what no microbatch needs isn't stepped either
    parameters = [one.tolist() for model in models for one in model.parameters()]
    return [losses, parameters, state.scaler.num_skipped.item()]


@pytest.mark.parametrize(("loss_fn", "mode"), [(counted_sum, "fp16"), (of_two_models, "no")])
def test_the_bits_are_the_same_at_any_number_of_ranks(loss_fn: Callable[..., Any], mode: Any) -> None:
    def run(ctx: Context) -> list[Any]:
        return over_modules(ctx, loss_fn)

    options: Any = {"reduction": CanonicalReduction(num_microbatches=12), "mixed_precision": mode}
    expected = run_ranks(run, 1, **options)
    for world in (2, 3):
        assert run_ranks(run, world, **options) == expected * world
