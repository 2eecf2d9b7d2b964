"""What a loss function may return."""

# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

import accelfn as af
from accelfn import Context, Loss
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.training.models import one_weight
from tests.training.optimizers import Sgd

LossFn = Callable[[torch.Tensor], Any]


def by_backward(loss_fn: LossFn) -> object:
    model = one_weight(1.0)
    loss = loss_fn(model.weight)
    value, weight = loss[:2] if isinstance(loss, Loss) else (loss, None)
    try:
        af.backward(Context(), value, af.init_scaler(Context()), weight=weight)
    except Exception:
        assert model.weight.grad is None
        raise


def by_forward_backward(loss_fn: LossFn) -> object:
    model = one_weight(1.0)
    ((_, micro),) = af.microbatches(Context(), [0])
    try:
        state = af.init_scaler(Context())
        af.forward_backward(Context(), model, lambda model, _: loss_fn(model.weight), 0, state, micro)
    except Exception:
        assert model.weight.grad is None
        raise


def by_a_step_over_a_tree(loss_fn: LossFn) -> object:
    step = cast("Any", af.make_train_step)(Context(), lambda w, _: loss_fn(w), Sgd(1.0))
    return step(af.init_train_state(Context(), Sgd(1.0), torch.ones(1, 1)), None)


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (by_backward, "backward"),
        (by_forward_backward, "forward_backward"),
        (by_a_step_over_a_tree, "make_train_step"),
    ],
)
@pytest.mark.parametrize(
    ("loss_fn", "error", "text"),
    [
        (lambda w: (w.sum(), 2.0), TypeError, "the loss must be a tensor, got tuple"),
        (lambda w: 1.0, TypeError, "the loss must be a tensor, got float"),
        (lambda w: None, TypeError, "the loss must be a tensor, got NoneType"),
        (lambda w: Loss(cast("Any", 1.0)), TypeError, "the loss must be a tensor, got float"),
        (lambda w: w.expand(2, 1), ValueError, r"the loss must be one number, .*shape \(2, 1\)"),
        (lambda w: Loss(w.sum(), torch.ones(2)), ValueError, r"the weight must be one number, .*\(2,\)"),
        (lambda w: Loss(w.sum(), -1), ValueError, "the weight must be at least 0, got -1"),
        (lambda w: Loss(w.sum(), cast("Any", "3")), ValueError, "the weight must be at least 0, got '3'"),
        (lambda w: Loss(w.sum(), math.nan), ValueError, "the weight must be at least 0, got nan"),
        (lambda w: w.sum().detach(), ValueError, "the loss has no gradient"),
        (lambda w: torch.zeros(()), ValueError, "the loss has no gradient"),
    ],
)
def test_what_is_no_loss_is_refused_and_nothing_is_guessed(
    way: Callable[[LossFn], object], name: str, loss_fn: LossFn, error: type[Exception], text: str
) -> None:
    way(lambda w: Loss(w, 2.0))  # one number in any shape
    with pytest.raises(error, match=f"^{name}: {text}"):
        way(loss_fn)


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_a_mean_is_refused_wherever_ranks_share_sequences(axis: str) -> None:
    def mean(params: Any, rows: torch.Tensor) -> torch.Tensor:
        return (params["w"] * rows).mean()

    def total(params: Any, rows: torch.Tensor) -> Loss:
        return Loss((params["w"] * rows).sum(), weight=len(rows))

    def work(ctx: Context) -> float:
        params, rows, optimizer = {"w": torch.ones(())}, torch.ones(1 + ctx.rank), Sgd(0.5)
        state = af.init_train_state(ctx, optimizer, params)
        said = f"ranks along {axis} share sequences"
        loss = mean({"w": torch.ones((), requires_grad=True)}, rows)
        with pytest.raises(ConfigurationError, match=f"backward: {said}"):
            af.backward(ctx, loss, af.init_scaler(ctx))
        with pytest.raises(ConfigurationError, match=f"value_and_grad: {said}"):
            af.value_and_grad(ctx, mean)(params, rows)
        _, grads = af.value_and_grad(ctx, total)(params, rows)
        assert grads["w"].item() == 1.0
        with pytest.raises(ConfigurationError, match=f"make_train_step: {said}"):
            af.make_train_step(ctx, mean, optimizer)(state, rows)
        state, _ = af.make_train_step(ctx, total, optimizer)(state, rows)  # nothing has been hurt
        return state.params["w"].item()

    config = af.ParallelismConfig(cp_size=2) if axis == "cp" else af.ParallelismConfig(sp_size=2)
    assert run_ranks(work, 2, parallelism_config=config) == [0.5, 0.5]
