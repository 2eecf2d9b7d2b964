# pyright: reportUnknownMemberType=false

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.data import plan_microbatch
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks
from tests.training.models import filled, sgd, values


class StandIn(Optimizer):
    """Has the interface of lomo-optim: it steps in backward, and has no step of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})

    def fused_backward(self, loss: torch.Tensor, lr: float) -> None:
        loss.backward()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(lr * parameter.grad)
                    parameter.grad = None


def real(model: nn.Module) -> Optimizer:
    package = pytest.importorskip("lomo_optim")
    return cast("Optimizer", package.Lomo(model, lr=1e-3))


KINDS = pytest.mark.parametrize("kind", [StandIn, real], ids=["stand-in", "lomo-optim"])


def model_of() -> nn.Linear:
    return filled(nn.Linear(2, 1))


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.tensor([[1.0, 2.0], [3.0, -1.0]])).square().mean()


def by_sgd(steps: int, rate: float) -> list[torch.Tensor]:
    model = model_of()
    optimizer = sgd(model, rate)
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@KINDS
def test_lomo_is_sgd_without_gradients_left_over(kind: Any) -> None:
    ctx = Context()
    model = model_of()
    model, optimizer = af.prepare(ctx, model, kind(model))
    for _ in range(3):
        af.lomo_backward(ctx, loss_of(model), 0.1, optimizer)
        assert all(one.grad is None for one in model.parameters())
    torch.testing.assert_close(values(model), by_sgd(3, 0.1))


@KINDS
@pytest.mark.parametrize("way", ["lomo_backward", "backward"])
def test_the_shim_steps_in_backward_and_not_again(kind: Any, way: str) -> None:
    accelerator = Accelerator(context=Context())
    assert not accelerator.has_lomo_optimizer
    model = model_of()
    model, optimizer = accelerator.prepare(model, kind(model))
    assert accelerator.has_lomo_optimizer
    for _ in range(3):
        with accelerator.accumulate(model):
            getattr(accelerator, way)(loss_of(model), learning_rate=0.1)
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(values(model), by_sgd(3, 0.1))


def test_a_loss_in_a_window_is_divided_by_its_length() -> None:
    model = model_of()
    af.lomo_backward(Context(), loss_of(model), 0.2, StandIn(model), plan_microbatch(0, 0, 2, 4))
    torch.testing.assert_close(values(model), by_sgd(1, 0.1))


def test_what_lomo_cannot_do_is_refused() -> None:
    model, ctx = model_of(), Context()
    optimizer, loss = StandIn(model), loss_of(model)
    lomo_backward: Any = af.lomo_backward
    for given, error, text in (
        ((ctx, loss, None, optimizer), ValueError, "got no learning rate"),
        ((ctx, loss, 0.1, sgd(model)), TypeError, "SGD has no fused_backward"),
        ((ctx, 1.0, 0.1, optimizer), TypeError, "must be a tensor, got float"),
        ((ctx.replace(mixed_precision="fp16"), loss, 0.1, optimizer), ConfigurationError, "scales losses"),
        (
            (ctx.replace(reduction="canonical"), loss, 0.1, optimizer),
            ConfigurationError,
            "sums the gradients",
        ),
    ):
        with pytest.raises(error, match=text):
            lomo_backward(*given)

    def run(ctx: Context) -> None:
        mine = model_of()
        with pytest.raises(NotAvailableError, match="before the 2 ranks can average"):
            af.lomo_backward(ctx, loss_of(mine), 0.1, StandIn(mine))

    run_ranks(run, 2)
    accelerator = Accelerator(context=Context())
    with pytest.raises(ValueError, match="needs one prepared Lomo or AdaLomo optimizer, got 0"):
        accelerator.lomo_backward(loss, 0.1)
    kept = accelerator.prepare(optimizer, StandIn(model))
    with pytest.raises(ValueError, match="got 2"):
        accelerator.backward(loss, learning_rate=0.1)
    assert len(kept) == 2
