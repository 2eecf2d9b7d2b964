# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.errors import ConfigurationError, MismatchError
from accelfn.testing import run_ranks
from accelfn.training import LocalSGDState
from tests.training.models import filled, values

Values = list[torch.Tensor]


def model_of() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))).double()


def batch(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(4, 2, dtype=torch.float64, generator=generator)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def by_hand(world: int, every: int, steps: int, momentum: float = 0.0) -> Values:
    """Train one model for each rank, one after another, and average them by hand."""
    models = [model_of() for _ in range(world)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=momentum) for one in models]
    for number in range(1, steps + 1):
        for rank in range(world):
            step(models[rank], optimizers[rank], batch(rank, number))
        if number % every == 0 or number == steps:
            with torch.no_grad():
                for same in zip(*(one.parameters() for one in models), strict=True):
                    mean = torch.stack(list(same)).mean(0)
                    for parameter in same:
                        parameter.copy_(mean)
    return values(models[0])


def locally(ctx: Context, every: int, steps: int, momentum: float = 0.0) -> Values:
    model = af.prepare(ctx, model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    state = LocalSGDState()
    with af.no_sync(ctx, model):
        for number in range(1, steps + 1):
            step(model, optimizer, batch(ctx.rank, number))
            state = af.training.local_sgd_step(ctx, model, state, every=every)
    assert state.num_steps == steps % every
    af.training.average_parameters(ctx, model)
    return values(model)


@settings(max_examples=10)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.sampled_from([0.0, 0.9]))
def test_parameters_are_what_averaging_by_hand_gives(
    world: int, every: int, steps: int, momentum: float
) -> None:
    expected = by_hand(world, every, steps, momentum)
    for found in run_ranks(lambda ctx: locally(ctx, every, steps, momentum), world):
        torch.testing.assert_close(found, expected)


def test_only_what_is_trained_is_averaged() -> None:
    def run(ctx: Context) -> list[float]:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
        model[0].requires_grad_(False)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(ctx.rank)
        af.training.average_parameters(ctx, model)
        return [float(one.detach().sum()) for one in (*model.parameters(), *model.buffers())]

    assert run_ranks(run, 2) == [[0, 0.5, 0.5, 0.5, 0, 0, 0], [1, 0.5, 0.5, 0.5, 1, 1, 1]]


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="the number of steps must be at least 1, got 0"):
        af.training.local_sgd_step(Context(), nn.Linear(1, 1), LocalSGDState(), every=0)

    def run(ctx: Context) -> None:
        with pytest.raises(MismatchError, match="weight"):
            af.training.average_parameters(ctx, nn.Linear(1 + ctx.rank, 1))

    run_ranks(run, 2)


def test_in_exact_mode_ranks_do_not_train_by_themselves() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare(ctx, model_of())
        with pytest.raises(ConfigurationError, match="sums the gradients of all ranks"):
            af.training.local_sgd_step(ctx, model, LocalSGDState())
        with pytest.raises(ConfigurationError, match=r"LocalSGD: .* lets ranks train independently"):
            af.accelerator.LocalSGD(af.Accelerator(context=ctx), model)

    run_ranks(run, 2, reduction="canonical")
