"""A train step takes the windows of a loader, and trains as the loop over their batches."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.testing import run_ranks

Params = dict[str, torch.Tensor]


MICROBATCHES = 4  # of a step, on all ranks together


def exactly(size: int) -> dict[str, Any]:
    return {"gradient_accumulation_steps": MICROBATCHES // size, "reduction": "canonical"}


def build(ctx: af.Context, rows: int = 24) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    x = torch.randn(rows, 3)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.25), nn.Tanh(), nn.Linear(8, 1))
    return af.prepare(ctx, model, torch.optim.AdamW(model.parameters(), 0.05), loader)


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def weights(model: Any) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in af.unwrap_model(model).parameters()])


def by_windows(ctx: af.Context, folder: Path | None = None, stop_after: int | None = None) -> torch.Tensor:
    model, optimizer, loader = build(ctx)
    step = af.make_train_step(ctx, loss_of, optimizer, model=model, max_norm=1.0)
    state = af.init_train_state(ctx, optimizer)
    run = {"model": model, "optimizer": optimizer, "loader": loader}
    if folder is not None:
        state = (af.load_latest(ctx, folder, {**run, "state": state}) or {"state": state})["state"]
    for window in af.windows(ctx, loader, epochs=3):
        state, _ = step(state, window)
        if folder is not None:
            af.save_state(ctx, folder / f"step_{int(state.num_steps)}", {**run, "state": state})
        if int(state.num_steps) == stop_after:
            break
    return weights(model)


def by_batches(ctx: af.Context) -> torch.Tensor:
    model, optimizer, loader = build(ctx)
    scaler = af.init_scaler(ctx)
    for _ in range(3):
        for batch, micro in af.microbatches(ctx, loader):
            scaler, _ = af.forward_backward(ctx, model, loss_of, batch, scaler, micro)
            scaler = af.optimizer_step(ctx, optimizer, scaler, micro=micro, max_norm=1.0)
    return weights(model)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_step_on_windows_is_the_loop_over_their_batches(size: int) -> None:
    loops = run_ranks(by_batches, size, **exactly(size))
    assert all(torch.equal(one, loops[0]) for one in run_ranks(by_windows, size, **exactly(size)))
    assert torch.equal(loops[0], run_ranks(by_windows, 1, **exactly(1))[0]), "at any number of ranks"


@pytest.mark.parametrize(("size", "other"), [(1, 2), (4, 1)])
@pytest.mark.parametrize("stop_after", [1, 3, 6])
def test_a_run_that_stopped_goes_on_on_other_ranks(
    size: int, other: int, stop_after: int, tmp_path: Path
) -> None:
    whole = run_ranks(by_windows, 1, **exactly(1))[0]
    run_ranks(lambda ctx: by_windows(ctx, tmp_path, stop_after), size, **exactly(size))
    for more in (other, 2):  # the second time it is over
        found = run_ranks(lambda ctx: by_windows(ctx, tmp_path), more, **exactly(more))
        assert torch.equal(found[0], whole)


def mean_output(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def test_batches_of_a_window_count_by_their_rows() -> None:
    def train(ctx: af.Context) -> tuple[float, float]:
        model: Any = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), 1.0))
        step: Any = af.make_train_step(ctx, mean_output, optimizer, model=model)
        window = af.Window(
            (torch.ones(3, 1), torch.full((1, 1), 5.0)),
            tuple(micro for _, micro in af.microbatches(ctx, [0, 1])),
        )
        _, metrics = step(af.init_train_state(ctx, optimizer), window)
        return float(metrics.loss), float(weights(model))

    for size in (1, 2):
        assert run_ranks(train, size, gradient_accumulation_steps=2) == [(2.0, -1.0)] * size


@pytest.mark.parametrize("exact", [False, True])
def test_a_pure_step_takes_windows_too(exact: bool) -> None:
    class Descent:
        def init(self, params: Any) -> tuple[()]:
            return ()

        def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
            return {name: grad * -0.1 for name, grad in grads.items()}, state

    def train(ctx: af.Context) -> tuple[torch.Tensor, torch.Tensor]:
        _, _, loader = build(ctx)

        def loss_fn(params: Params, batch: Any) -> torch.Tensor:
            return (batch[0] @ params["w"] - batch[1]).square().mean()

        step = af.make_train_step(ctx, loss_fn, Descent())
        state = af.init_train_state(ctx, Descent(), {"w": torch.ones(3, 1)})
        losses: list[torch.Tensor] = []
        for window in af.windows(ctx, loader, epochs=2):
            state, metrics = step(state, window)
            losses.append(metrics.loss)
        return state.params["w"], torch.stack(losses)

    expected: Any = None
    for size in (1, 2, 4):
        options: dict[str, Any] = (
            exactly(size) if exact else {"gradient_accumulation_steps": MICROBATCHES // size}
        )
        found = run_ranks(train, size, **options)
        expected = expected or found[0]
        for one in found:
            for left, right in zip(one, expected, strict=True):
                torch.testing.assert_close(left, right, rtol=0 if exact else None, atol=0 if exact else None)
