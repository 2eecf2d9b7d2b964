"""Tests of accelfn.training.unstepped: optimizers of one model that step at different times."""

# torch leaves manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.config import GradScalerKwargs
from accelfn.testing import run_ranks

# A scale that doubles after each step.
GROWING: Any = {
    "mixed_precision": "fp16",
    "kwargs_handlers": [GradScalerKwargs(init_scale=4.0, growth_factor=2.0, growth_interval=1)],
}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rarely(self.often(x))


class Training:
    """A model with two optimizers, in windows of one batch."""

    def __init__(self, ctx: af.Context) -> None:
        torch.manual_seed(0)
        self.ctx, model = ctx, Two()
        often = torch.optim.SGD(model.often.parameters(), lr=0.0)
        rarely = torch.optim.SGD(model.rarely.parameters(), lr=0.0)
        self.model, self.often, self.rarely = af.prepare(ctx, model, often, rarely)
        self.state = af.init_scaler(ctx)

    def add_loss(self, number: int, weight: float | None) -> None:
        total = self.model(torch.full((3, 2), float(number))).square().sum()
        loss = total / 3 if weight is None else total
        self.state = af.backward(self.ctx, loss, self.state, weight=weight)

    def step(self, *optimizers: torch.optim.Optimizer, clear: bool = True) -> None:
        self.state = af.optimizer_step(self.ctx, optimizers, self.state, clear_gradients=clear)

    def gradient(self) -> torch.Tensor:
        (gradient,) = [one.grad for name, one in self.model.named_parameters() if "rarely.weight" in name]
        assert gradient is not None
        return gradient.clone()


LAYOUTS = pytest.mark.parametrize(
    ("size", "world"), [(1, "memory"), (2, "memory"), pytest.param(2, "processes", marks=pytest.mark.slow)]
)


@LAYOUTS
@pytest.mark.parametrize("clears", [True, False])
def test_sums_whose_weights_are_gone_are_not_stepped_with(size: int, world: Any, clears: bool) -> None:
    def train(ctx: af.Context) -> str:
        training = Training(ctx)
        training.add_loss(1, 3.0)
        training.step(training.often)
        if clears:
            training.model.zero_grad()
        training.add_loss(2, 3.0)
        try:
            training.step(training.often, training.rarely)
        except ValueError as error:
            return str(error)
        return ""

    texts = run_ranks(train, size, world)
    assert all(("those weights are gone" in text) != clears for text in texts)


def test_a_mean_after_sums_and_divided_gradients_are_no_exception() -> None:
    training = Training(af.Context())
    training.add_loss(1, 3.0)
    training.state = af.unscale_gradients(training.ctx, [training.often, training.rarely], training.state)
    training.step(training.often)
    training.add_loss(2, None)
    training.step(training.often)  # what others hold doesn't concern it
    training.add_loss(3, None)
    with pytest.raises(ValueError, match="those weights are gone"):
        training.step(training.rarely)
    training.rarely.zero_grad()
    training.add_loss(4, None)
    training.step(training.rarely)


@LAYOUTS
def test_gradients_of_means_are_brought_to_the_next_loss_scale(size: int, world: Any) -> None:
    def train(ctx: af.Context) -> tuple[torch.Tensor, list[float]]:
        training, scales = Training(ctx), list[float]()
        for number in (1, 2):
            training.add_loss(number, None)
            scales.append(training.state.scale.item())
            if number == 1:
                training.step(training.often)
        training.state = af.unscale_gradients(ctx, training.rarely, training.state)
        return training.gradient(), scales

    plain = Training(af.Context())
    for number in (1, 2):
        plain.add_loss(number, None)
    for gradient, scales in run_ranks(train, size, world, **GROWING):
        assert scales == [4.0, 8.0]
        torch.testing.assert_close(gradient, plain.gradient(), rtol=5e-3, atol=0)


def test_copies_and_pickles_of_models_and_states_train_on_their_own() -> None:
    training = Training(af.Context())
    training.add_loss(1, 3.0)
    training.step(training.often)
    for twin in (copy.deepcopy(training.state), pickle.loads(pickle.dumps(training.state))):
        assert twin.unstepped is None
    loaded = pickle.loads(pickle.dumps(training.model))
    assert torch.equal(loaded.rarely.weight, training.model.rarely.weight)
