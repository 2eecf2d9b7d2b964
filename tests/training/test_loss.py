"""What a loss function may return."""

import math
from typing import Any, cast

import pytest
import torch

import accelfn as af
from accelfn import Context, Loss
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from accelfn.training.backward import read_loss
from tests.training.optimizers import Sgd


def test_a_loss_function_may_return_a_tensor_or_a_loss_and_nothing_to_be_guessed_at() -> None:
    loss = Loss(torch.tensor(1.0, requires_grad=True), weight=2.0)
    assert read_loss(Context(), "f", loss) is loss
    assert read_loss(Context(), "f", loss.value) == Loss(loss.value)
    assert read_loss(Context(), "f", Loss(loss.value.reshape(1, 1), 2.0)).value.shape == ()
    with pytest.raises(TypeError, match=r"f: .* got tuple\. .* in a pair would be a guess"):
        read_loss(Context(), "f", (loss.value, 2.0))
    with pytest.raises(TypeError, match="got float"):
        read_loss(Context(), "f", Loss(cast("Any", 1.0)))
    with pytest.raises(ValueError, match=r"f: the loss must be one number, .*shape \(2,\)"):
        read_loss(Context(), "f", loss.value.expand(2))
    with pytest.raises(ValueError, match=r"f: the weight must be one number, .*shape \(2,\)"):
        read_loss(Context(), "f", Loss(loss.value, torch.ones(2)))
    with pytest.raises(ValueError, match="must be at least 0, got -1"):
        read_loss(Context(), "f", Loss(loss.value, -1))
    with pytest.raises(ValueError, match="must be at least 0, got nan"):
        read_loss(Context(), "f", Loss(loss.value, math.nan))
    with pytest.raises(ValueError, match="depends on no parameter that is trained"):
        read_loss(Context(), "f", loss.value.detach())


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
            af.value_and_grad(ctx, mean)
        with pytest.raises(ConfigurationError, match=f"make_train_step: {said}"):
            af.make_train_step(ctx, mean, optimizer)(state, rows)
        state, _ = af.make_train_step(ctx, total, optimizer)(state, rows)  # nothing has been hurt
        return state.params["w"].item()

    config = af.ParallelismConfig(cp_size=2) if axis == "cp" else af.ParallelismConfig(sp_size=2)
    assert run_ranks(work, 2, parallelism_config=config) == [0.5, 0.5]
