"""One function for both passes: the gradients of a loop's two lines, by whatever engine runs them."""

from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils import checkpoint

import accelfn as af
from accelfn import Accelerator, Context
from accelfn.errors import ConfigurationError, DistributedError
from accelfn.testing import Where, run_ranks
from tests.training.models import filled


def make_model() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))


def mean(model: Any, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def test_several_models_have_one_loss() -> None:
    ((_, micro),) = af.microbatches(Context(), [0])
    models = {"a": make_model(), "b": make_model()}

    def loss_fn(models: dict[str, nn.Module], rows: torch.Tensor) -> torch.Tensor:
        return (models["a"](rows) + models["b"](rows)).sum()

    af.forward_backward(Context(), models, loss_fn, torch.ones(1, 2), af.init_scaler(Context()), micro)
    assert all(one.grad is not None for model in models.values() for one in model.parameters())


def test_what_it_cannot_take_is_refused() -> None:
    ctx, model, rows = Context(), make_model(), torch.ones(1, 2)
    ((_, micro),) = af.microbatches(ctx, [rows])
    both_passes: Any = af.forward_backward
    for given_model, given_micro, text in (
        ((model, 3), micro, r"model\[1\] is of type int. Pass a module or a"),
        ((), micro, "got no model"),
        (model, 1, "micro must be a MicroBatch, got int"),
    ):
        with pytest.raises(TypeError, match=f"forward_backward: {text}"):
            both_passes(ctx, given_model, mean, rows, af.init_scaler(ctx), given_micro)
    assert all(one.grad is None for one in model.parameters())
    used = af.init_scaler(ctx)
    af.forward_backward(ctx, model, mean, rows, used, micro)
    with pytest.raises(ValueError, match="forward_backward: this StepState was superseded"):
        af.forward_backward(ctx, model, mean, rows, used, micro)


@pytest.mark.parametrize("kind", ["functions", "shim"])
def test_a_loss_of_a_window_of_several_batches_needs_its_place(kind: str) -> None:
    ctx, model = Context().replace(gradient_accumulation_steps=4), make_model()
    loss = mean(model, torch.ones(1, 2))
    accelerator = Accelerator(context=ctx)
    state = af.init_scaler(ctx)
    backward: Any = accelerator.backward if kind == "shim" else partial(af.backward, ctx, scaler_state=state)
    with pytest.raises(ConfigurationError, match=r"backward: got no micro, so .* by the 4 batches"):
        backward(loss=loss)
    assert all(one.grad is None for one in model.parameters())
    af.backward(ctx.replace(gradient_accumulation_steps=1), loss, af.init_scaler(ctx))


class _Unhappy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the peer's connection has a timeout")


@pytest.mark.parametrize("on", ["memory", "processes"])
@pytest.mark.parametrize("fails", ["backward", "forward_backward"])
def test_what_a_rank_handles_before_it_ends_reaches_the_ranks_that_wait(on: Where, fails: str) -> None:
    def loss_fn(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        if fails == "forward_backward":
            raise KeyError("row")
        return cast("Any", _Unhappy).apply(mean(model, rows))

    def run(ctx: Context) -> tuple[str, str]:
        model, scaler = af.prepare_model(ctx, make_model()), af.init_scaler(ctx)
        ((rows, micro),) = af.microbatches(ctx, [torch.ones(1, 2)])
        try:
            af.forward_backward(ctx, model, mean if ctx.rank else loss_fn, rows, scaler, micro)
        except (RuntimeError, KeyError, DistributedError) as error:
            return type(error).__name__, str(error)
        return "", ""

    (own, text), (other, said) = run_ranks(run, 2, on)
    assert (own, text) == (
        ("KeyError", "'row'")
        if fails == "forward_backward"
        else ("RuntimeError", "the peer's connection has a timeout")
    )
    assert other == "RemoteRankError"
    assert f"rank 0 failed in forward_backward: {own}: {text}" in said


def test_a_loss_of_gathered_outputs_says_what_has_gradients() -> None:
    ctx = Context()
    loss = af.gather(ctx, make_model()(torch.ones(1, 2))).mean()
    with pytest.raises(
        ValueError, match=r"from what gather, .* returned \(all_gather and reduce_scatter have"
    ):
        af.backward(ctx, loss, af.init_scaler(ctx))


class _Repeated(nn.Module):
    """Calls a layer twice, and checkpoints it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.layer, self.reentrant = nn.Linear(2, 2), nn.Linear(2, 2), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = cast("Any", checkpoint).checkpoint(self.layer, x, use_reentrant=self.reentrant)
        return x


def test_what_an_engine_cant_reduce_is_named_with_what_to_do() -> None:
    def said(ctx: Context, model: nn.Module, inputs: torch.Tensor) -> str:
        model = af.prepare_model(ctx, model)
        try:
            af.backward(ctx, model(inputs).sum(), af.init_scaler(ctx))
        except ConfigurationError as error:
            return str(error)
        return ""

    def replicated(ctx: Context) -> list[str]:
        return [said(ctx, _Repeated(reentrant), torch.ones(1, 2)) for reentrant in (False, True)]

    def sharded(ctx: Context) -> str:
        return said(ctx, nn.Embedding(4, 2, sparse=True), torch.tensor([1]))

    (well, twice), _ = run_ranks(replicated, 2, "processes")
    assert not well
    assert "got its gradient twice in one backward pass" in twice
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2)
    sparse, _ = run_ranks(sharded, 2, "processes", fsdp_plugin=plugin)
    assert "FSDP reduces dense ones alone. Make the embedding with sparse=False" in sparse


def test_an_optimizer_with_a_closure_is_refused_before_it_steps() -> None:
    ctx, model = Context(), make_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    state = af.backward(ctx, mean(model, torch.ones(1, 2)), af.init_scaler(ctx))
    with pytest.raises(ConfigurationError, match=r"optimizer_step: LBFGS needs a closure"):
        af.optimizer_step(ctx, optimizer, state)
