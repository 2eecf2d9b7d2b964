# torch leaves tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The train step in exact mode: the same bits at any number of ranks, over modules and over pytrees."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import CanonicalReduction, Context
from accelfn.testing import run_ranks
from tests.training.models import filled, sgd
from tests.training.optimizers import Adam

ROWS, STEPS = 24, 4
Batch = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """How torch shares out a sum between threads changes its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def mean(models: list[nn.Module], batch: Batch) -> torch.Tensor:
    return nn.functional.mse_loss(models[0](batch[0]), batch[1])


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


def over_trees(ctx: Context) -> list[Any]:
    params = {"w": torch.linspace(-1, 1, 3).unsqueeze(1), "b": torch.zeros(1), "unused": torch.ones(1)}

    def loss_fn(params: Any, batch: Batch) -> af.Loss:
        error = (batch[0] @ params["w"] + params["b"] - batch[1]).square()
        return af.Loss(error.mean(), aux={"largest": error.max().detach()})

    optimizer = Adam(0.1)
    step = af.make_train_step(ctx, loss_fn, optimizer, max_norm=0.5)
    state = af.init_train_state(ctx, optimizer, params)
    found: list[Any] = []
    for batch in batches(ctx):
        state, metrics = step(state, batch)
        found.append((metrics.loss.item(), metrics.aux["largest"].item()))
    return [found, {name: value.tolist() for name, value in state.params.items()}]


PROGRAMS: dict[str, Callable[[Context], list[Any]]] = {
    "means": lambda ctx: over_modules(ctx, mean),
    "sums": lambda ctx: over_modules(ctx, counted_sum),
    "two models": lambda ctx: over_modules(ctx, of_two_models),
    "trees": over_trees,
}


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "no") for name in PROGRAMS), ("means", "fp16"), ("sums", "fp16")]
)
def test_the_bits_are_the_same_at_any_number_of_ranks(name: str, mode: Any) -> None:
    options: Any = {"reduction": CanonicalReduction(num_microbatches=12), "mixed_precision": mode}
    expected = run_ranks(PROGRAMS[name], 1, **options)
    for world in (2, 3, 4):
        assert run_ranks(PROGRAMS[name], world, **options) == expected * world
    if (name, mode) == ("means", "no"):
        assert run_ranks(PROGRAMS[name], 2, on="processes", **options) == expected * 2


def test_rows_that_cannot_be_cut_equally_are_refused_on_every_rank() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare(ctx, Net())
        optimizer = sgd(model, 0.1)
        step = af.make_train_step(ctx, mean, optimizer, model=[model])
        rows = 3 if ctx.rank == 1 else 4
        with pytest.raises((ValueError, af.errors.RemoteRankError), match="divisible by 2"):
            step(af.init_train_state(ctx, optimizer), (torch.ones(rows, 3), torch.ones(rows, 1)))

    run_ranks(run, 2, reduction=CanonicalReduction(num_microbatches=4))
