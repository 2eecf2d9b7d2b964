"""Small models that the tests of training share, and what they look at in them."""

from typing import TypeVar, cast

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def filled(model: M) -> M:
    """Give a model the same weights in every test and on every rank."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return model


def one_weight(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def weight_of(model: nn.Linear) -> float:
    return float(model.weight.detach())


def grad_of(model: nn.Linear) -> float:
    assert model.weight.grad is not None
    return float(model.weight.grad)


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.named_parameters(), lr=lr)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [cast("torch.Tensor", parameter.grad).clone() for parameter in model.parameters()]
