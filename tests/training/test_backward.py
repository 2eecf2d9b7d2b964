"""One function for both passes: the gradients of a loop's two lines, by whatever engine runs them."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context, Loss
from accelfn.testing import run_ranks
from tests.training.models import filled, sgd, values


def make_model() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)))


def mean(model: Any, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def weighted(model: Any, rows: torch.Tensor) -> Loss:
    return Loss(model(rows).square().sum(), len(rows), aux={"rows": len(rows)})


def in_two_lines(ctx: Context, model: Any, loss_fn: Any, rows: Any, scaler: Any, micro: Any) -> Any:
    """Do by hand what the function does."""
    with af.accumulate(ctx, micro, model):
        loss = loss_fn(model, rows)
        value, weight = loss[:2] if isinstance(loss, Loss) else (loss, None)
        scaler = af.backward(ctx, value, scaler, micro, weight)
    return scaler, value.detach()


@given(
    st.sampled_from([mean, weighted]),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from(["no", "fp16"]),
)
def test_it_is_accumulate_and_backward_bit_by_bit(
    loss_fn: Any, world: int, window: int, num_batches: int, precision: str
) -> None:
    def train(ctx: Context, both_passes: Any) -> list[torch.Tensor]:
        model = af.prepare(ctx, make_model())
        optimizer = sgd(model, 0.1)
        scaler = af.init_scaler(ctx)
        random = torch.Generator().manual_seed(ctx.rank)
        batches = [torch.randn(1 + index % 2, 2, generator=random) for index in range(num_batches)]
        seen: list[torch.Tensor] = []
        for rows, micro in af.microbatches(ctx, batches):
            scaler, loss = both_passes(ctx, model, loss_fn, rows, scaler, micro)
            assert not loss.requires_grad
            seen.append(loss)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
        return [*seen, *scaler[:2], *values(model)]

    def run(ctx: Context) -> bool:
        pairs = zip(train(ctx, af.forward_backward), train(ctx, in_two_lines), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    options = {"gradient_accumulation_steps": window, "mixed_precision": precision}
    assert run_ranks(run, world, **cast("Any", options)) == [True] * world


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
    with pytest.raises(ValueError, match="forward_backward: this ScalerState was superseded"):
        af.forward_backward(ctx, model, mean, rows, used, micro)
