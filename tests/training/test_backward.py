"""One function for both passes: the gradients of a loop's two lines, by whatever engine runs them."""

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context, Loss
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import BatchRun, LocalHandle
from accelfn.testing import run_ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))


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


@settings(max_examples=25)  # of whole trainings
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
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
        return [*seen, *scaler[:2], *(one.detach() for one in model.parameters())]

    def run(ctx: Context) -> bool:
        pairs = zip(train(ctx, af.forward_backward), train(ctx, in_two_lines), strict=True)
        return all(torch.equal(one, other) for one, other in pairs)

    options = {"gradient_accumulation_steps": window, "mixed_precision": precision}
    assert run_ranks(run, world, **cast("Any", options)) == [True] * world


class Halves(LocalHandle):
    """Runs a batch as an engine might: in two halves, of which each adds gradients of its own."""

    def run(self, batch: BatchRun[Any]) -> Any:
        losses: list[Loss] = []
        for rows in batch.batch.chunk(2):
            losses.append(batch.loss_fn(batch.model, rows))
            batch.differentiate(batch.to_differentiate(losses[-1], 2))
        return batch.join(losses)


def test_the_engine_of_a_model_runs_its_batches() -> None:
    ctx, rows = Context(), torch.randn(4, 2, generator=torch.Generator().manual_seed(1))
    ((_, micro),) = af.microbatches(ctx, [rows])
    plain, model = make_model(), make_model()
    handle = Halves(model)
    calls: list[int] = []

    def counted(model: Any, rows: torch.Tensor) -> torch.Tensor:
        calls.append(len(rows))
        return mean(model, rows)

    _, expected = af.forward_backward(ctx, plain, counted, rows, af.init_scaler(ctx), micro)
    _, loss = af.forward_backward(ctx, model, counted, rows, af.init_scaler(ctx), micro)
    assert calls == [4, 2, 2]
    torch.testing.assert_close(loss, expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = af.make_train_step(ctx, counted, optimizer, model=model)
    _, metrics = step(af.init_train_state(ctx, optimizer), rows)
    assert calls[3:] == [2, 2]
    torch.testing.assert_close(metrics.loss, expected)
    assert handle.is_alive


def test_several_models_have_one_loss() -> None:
    ctx, rows = Context(), torch.ones(1, 2)
    ((_, micro),) = af.microbatches(ctx, [rows])
    models = {"a": make_model(), "b": make_model()}

    def loss_fn(models: dict[str, nn.Module], rows: torch.Tensor) -> torch.Tensor:
        return (models["a"](rows) + models["b"](rows)).sum()

    af.forward_backward(ctx, models, loss_fn, rows, af.init_scaler(ctx), micro)
    assert all(one.grad is not None for model in models.values() for one in model.parameters())


def test_what_it_cannot_take_is_refused() -> None:
    ctx, model, rows = Context(), make_model(), torch.ones(1, 2)
    ((_, micro),) = af.microbatches(ctx, [rows])

    def give(what: Any, model: Any = model, micro: Any = micro) -> Any:
        return af.forward_backward(ctx, model, lambda model, rows: what, rows, af.init_scaler(ctx), micro)

    for pair in ((mean(model, rows), 2.0), 1.0, None):
        with pytest.raises(TypeError, match="forward_backward: the loss must be a tensor, got"):
            give(pair)
    with pytest.raises(ValueError, match="forward_backward: the loss depends on no parameter"):
        give(torch.zeros(()))
    with pytest.raises(TypeError, match=r"forward_backward: model\[1\] is of type int. Pass a module or a"):
        give(None, (model, 3))
    with pytest.raises(TypeError, match="forward_backward: got no model"):
        give(None, ())
    with pytest.raises(TypeError, match="micro must be a MicroBatch, got int"):
        give(None, micro=1)
    with pytest.raises(TypeError, match="the first argument is the Context, got Sequential"):
        af.forward_backward(cast("Any", model), *cast("Any", (0,) * 5))
    assert all(one.grad is None for one in model.parameters())
    used = af.init_scaler(ctx)
    af.forward_backward(ctx, model, mean, rows, used, micro)
    with pytest.raises(ValueError, match="forward_backward: this ScalerState was superseded"):
        af.forward_backward(ctx, model, mean, rows, used, micro)


def test_a_model_that_was_not_prepared_is_refused() -> None:
    def run(ctx: Context) -> None:
        ((_, micro),) = af.microbatches(ctx, [0])
        with pytest.raises(ConfigurationError, match="model 0, a Sequential, was not prepared"):
            af.forward_backward(ctx, make_model(), mean, torch.ones(1, 2), af.init_scaler(ctx), micro)

    run_ranks(run, 2)
