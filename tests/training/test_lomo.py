# pyright: reportUnknownMemberType=false

from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import accelfn as af
from accelfn import Accelerator, Context, FullyShardedDataParallelPlugin
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


def lomo(name: str, model: nn.Module, **options: Any) -> Any:
    """Make one of the package; AdaLomo asks for CUDA, and computes with any tensors."""
    with patch.object(torch.Tensor, "cuda", torch.Tensor.cpu):
        return getattr(pytest.importorskip("lomo_optim"), name)(model, **options)


def real(model: nn.Module) -> Optimizer:
    return lomo("Lomo", model, lr=1e-3)


KINDS = pytest.mark.parametrize(
    "kind", [StandIn, pytest.param(real, marks=pytest.mark.slow)], ids=["stand-in", "lomo-optim"]
)


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
        af.training.lomo_backward(ctx, loss_of(model), 0.1, optimizer)
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
    af.training.lomo_backward(Context(), loss_of(model), 0.2, StandIn(model), plan_microbatch(0, 0, 2, 4))
    torch.testing.assert_close(values(model), by_sgd(1, 0.1))


def test_what_lomo_cannot_do_is_refused() -> None:
    model, ctx = model_of(), Context()
    optimizer, loss = StandIn(model), loss_of(model)
    lomo_backward: Any = af.training.lomo_backward
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

    with pytest.raises(ConfigurationError, match="StandIn steps inside of lomo_backward"):
        af.optimizer_step(ctx, optimizer, af.init_scaler(ctx))
    accelerator = Accelerator(context=Context())
    with pytest.raises(ValueError, match="needs one prepared Lomo or AdaLomo optimizer, got 0"):
        accelerator.lomo_backward(loss, 0.1)
    kept = accelerator.prepare(optimizer, StandIn(model))
    with pytest.raises(ValueError, match="got 2"):
        accelerator.backward(loss, learning_rate=0.1)
    assert len(kept) == 2


# --- several ranks ---------------------------------------------------------------------------------


class Deep(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def train(ctx: Context, model: nn.Module, optimizer: Optimizer, batches: range) -> list[torch.Tensor]:
    """Train on this rank's half of each batch, in windows of two; return the parameters after each."""
    found: list[torch.Tensor] = []
    for number in batches:
        x = torch.randn(4, 2, generator=torch.Generator().manual_seed(number)).chunk(ctx.num_processes)[
            ctx.rank
        ]
        micro = plan_microbatch(number, 0, 100, 2)
        with af.accumulate(ctx, micro, model):
            af.training.lomo_backward(
                ctx, (model(x) - x.sum(1, keepdim=True)).square().mean(), 0.1, optimizer, micro
            )
        assert all(one.grad is None for one in model.parameters())
        found += values(model)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [("Lomo", {"clip_grad_norm": 0.5}), ("AdaLomo", {})])
def test_two_ranks_step_as_one(name: str, options: dict[str, Any]) -> None:
    def run(ctx: Context) -> list[torch.Tensor]:
        model = filled(Deep())
        if ctx.rank > 0:  # all ranks begin with rank 0's
            nn.init.zeros_(cast("nn.Linear", model[0]).weight)
        return train(ctx, *af.prepare(ctx, model, lomo(name, model, **options)), range(4))

    alone = run(Context())
    for on in ("memory", "processes"):
        first, second = run_ranks(run, 2, on=on)
        assert all(map(torch.equal, first, second))
        torch.testing.assert_close(first, alone)


@pytest.mark.slow
def test_models_that_no_rank_averages_at_once_are_refused_before_they_change() -> None:
    def run(ctx: Context) -> None:
        model = filled(Deep())
        optimizer = lomo("Lomo", model)
        for prepared in (
            model,
            af.prepare_model(ctx, model, evaluation_mode=True),
            af.prepare_model(ctx, model),
        ):
            before = values(model)
            with pytest.raises(ConfigurationError, match="is not averaged over the 2 ranks before"):
                af.training.lomo_backward(ctx, prepared(torch.ones(1, 2)).sum(), 0.1, optimizer)
            assert all(map(torch.equal, values(model), before))

    run_ranks(run, 2, on="processes")


@pytest.mark.slow
def test_a_model_that_lomo_steps_is_not_spread_over_ranks() -> None:
    def run(ctx: Context) -> None:
        model = filled(Deep())
        with pytest.raises(NotAvailableError, match=r"Lomo can't step .* complete gradients in backward"):
            af.prepare(ctx, model, lomo("Lomo", model))

    run_ranks(run, 2, on="processes", fsdp_plugin=FullyShardedDataParallelPlugin())
