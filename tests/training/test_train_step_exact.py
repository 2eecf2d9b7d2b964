# torch leaves tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""The train step in exact mode: the same bits at any number of ranks, over modules and over pytrees."""

from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import CanonicalReduction, Context
from accelfn.testing import run_ranks
from tests.training.optimizers import Adam

ROWS, STEPS = 24, 4


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """How torch shares out a sum between threads changes its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def batches(ctx: Context) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.last(self.drop(self.first(x)).tanh())
        return result + self.sometimes(x) if x[0, 0] > 0.5 else result


def module_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weighted_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> af.Loss:
    counted = batch[0][:, 0] > 0
    total = nn.functional.mse_loss(model(batch[0])[counted], batch[1][counted], reduction="sum")
    return af.Loss(total, weight=counted.sum(), aux={"counted": counted.float().sum()})


def over_modules(ctx: Context, loss_fn: Any) -> list[Any]:
    model = af.prepare(ctx, Net())
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    step = af.make_train_step(ctx, loss_fn, optimizer, model=model, max_norm=0.5)
    state = af.init_train_state(ctx, optimizer)
    losses: list[float] = []
    for batch in batches(ctx):
        state, metrics = step(state, batch)
        losses.append(metrics.loss.item())
    unused = optimizer.state.get(model.never.weight)
    return [losses, unused, *(one.tolist() for one in model.parameters()), state.scaler.num_skipped.item()]


def over_trees(ctx: Context) -> list[Any]:
    params = {"w": torch.linspace(-1, 1, 3).unsqueeze(1), "b": torch.zeros(1), "unused": torch.ones(1)}

    def loss_fn(params: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> af.Loss:
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


@pytest.mark.parametrize("loss_fn", [module_loss, weighted_loss])
@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_over_modules_the_bits_are_the_same_at_any_number_of_ranks(
    loss_fn: Any, mixed_precision: str
) -> None:
    options: Any = {"reduction": CanonicalReduction(num_microbatches=12), "mixed_precision": mixed_precision}
    expected = run_ranks(lambda ctx: over_modules(ctx, loss_fn), 1, **options)
    assert expected[0][1] is None  # what no microbatch needs is not stepped either
    for world in (2, 3, 4):
        assert run_ranks(lambda ctx: over_modules(ctx, loss_fn), world, **options) == expected * world


def test_over_processes_too() -> None:
    reduction = CanonicalReduction(num_microbatches=4)
    expected = run_ranks(lambda ctx: over_modules(ctx, module_loss), 1, reduction=reduction)
    found = run_ranks(lambda ctx: over_modules(ctx, module_loss), 2, on="processes", reduction=reduction)
    assert found == expected * 2


def test_over_pytrees_as_well() -> None:
    reduction = CanonicalReduction(num_microbatches=12)
    expected = run_ranks(over_trees, 1, reduction=reduction)
    for world in (2, 3, 4):
        assert run_ranks(over_trees, world, reduction=reduction) == expected * world


def test_without_it_the_result_is_the_same_but_for_the_last_bits() -> None:
    exact = run_ranks(over_trees, 3, reduction=CanonicalReduction(num_microbatches=12))[0]
    plain = run_ranks(over_trees, 3, gradient_accumulation_steps=4)[0]
    assert torch.allclose(torch.tensor(exact[1]["w"]), torch.tensor(plain[1]["w"]), atol=1e-6)
    assert torch.allclose(torch.tensor(exact[0]), torch.tensor(plain[0]), atol=1e-6)


def test_rows_that_cannot_be_cut_equally_are_refused_on_every_rank() -> None:
    def run(ctx: Context) -> str:
        model = af.prepare(ctx, Net())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = af.make_train_step(ctx, module_loss, optimizer, model=model)
        rows = 3 if ctx.rank == 1 else 4
        with pytest.raises((ValueError, af.errors.RemoteRankError)) as caught:
            step(af.init_train_state(ctx, optimizer), (torch.ones(rows, 3), torch.ones(rows, 1)))
        return str(caught.value)

    for message in run_ranks(run, 2, reduction=CanonicalReduction(num_microbatches=4)):
        assert "2 equal microbatches on each rank" in message


def test_a_model_that_only_some_microbatches_need_and_weights_that_are_no_whole_numbers() -> None:
    def loss_fn(models: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> af.Loss:
        first, second = models
        result = first(batch[0])
        if batch[0][0, 0] < 0:  # also where the window closes, on some ranks and not on others
            result = result + second(batch[0])
        return af.Loss((result - batch[1]).square().sum(), weight=batch[0][:, 1].abs().sum())

    def run(ctx: Context) -> list[Any]:
        models = tuple(af.prepare(ctx, Net(), Net()))
        optimizers = [torch.optim.SGD(model.parameters(), 0.05) for model in models]
        step = af.make_train_step(ctx, loss_fn, optimizers, model=models)
        state = af.init_train_state(ctx, optimizers)
        losses: list[float] = []
        for batch in batches(ctx):
            state, metrics = step(state, batch)
            losses.append(metrics.loss.item())
        return [losses, *(one.tolist() for model in models for one in model.parameters())]

    reduction = CanonicalReduction(num_microbatches=12)
    expected = run_ranks(run, 1, reduction=reduction)
    for world in (2, 3, 4):
        assert run_ranks(run, world, reduction=reduction) == expected * world
