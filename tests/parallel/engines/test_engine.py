"""What a step of an engine reads on the host: nothing that is on a device."""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import DeepSpeedPlugin
from accelfn.errors import ConfigurationError, RemoteRankError
from accelfn.parallel.engines.deepspeed import DeepSpeedHandle, DeepSpeedOptimizer
from accelfn.testing import run_ranks
from accelfn.training.metrics import Terms
from tests.parallel.traffic import traffic_of


class Zero:
    """A stand-in of DeepSpeed's optimizer at stages above 0, in a world whose ranks have equal gradients."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.clip_grad, self.loss_scale = 0.0, 1.0
        self.norm: torch.Tensor | None = None

    def step(self) -> None:
        parameters = self.optimizer.param_groups[0]["params"]
        self.norm = nn.utils.get_total_norm([one.grad for one in parameters])
        if self.clip_grad:
            nn.utils.clip_grads_with_norm_(parameters, self.clip_grad, self.norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def prepared(ctx: Context, stage: int) -> tuple[Context, nn.Linear, DeepSpeedOptimizer]:
    """Return a model whose steps a stand-in of DeepSpeed takes."""
    ctx = ctx.replace(deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    zero = Zero(sgd)
    engine: Any = SimpleNamespace(
        optimizer=zero if stage else sgd,
        buffered_allreduce_fallback=lambda: None,
        step=zero.step if stage else sgd.step,
        get_global_grad_norm=lambda: zero.norm,
    )
    plan: Any = SimpleNamespace(stage=stage, max_norm=None)
    handle = DeepSpeedHandle(model, plan, [[*model.parameters()]], cast("Mapping[str, torch.dtype]", {}))
    return ctx, model, DeepSpeedOptimizer(engine, model.parameters(), handle)


def mean_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


@pytest.mark.parametrize("stage", [0, 2])
def test_a_step_with_a_clipped_norm_reads_no_value(stage: int) -> None:
    ctx, model, optimizer = prepared(Context(), stage)
    norms: list[torch.Tensor] = []

    def step() -> None:
        scaler = af.backward(ctx, mean_of(model, torch.tensor([[3.0, 4.0]])), af.init_scaler(ctx))
        norms.append(af.clip_grad_norm_(ctx, model.parameters(), 1.0, scaler_state=scaler))
        af.optimizer_step(ctx, optimizer, scaler)

    assert traffic_of(step).syncs == 0
    assert norms[0].item() == 5
    torch.testing.assert_close(model.weight.detach(), torch.tensor([[1 - 0.6, 1 - 0.8]]))


def test_a_train_step_sees_other_numbers_of_rows_without_reading_a_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def work(ctx: Context) -> tuple[int, str, torch.Tensor]:
        ctx, model, optimizer = prepared(ctx, 2)
        step = af.make_train_step(ctx, mean_of, optimizer, model=model, max_norm=1.0)
        state = af.init_train_state(ctx, optimizer)
        state, _ = step(state, torch.ones(2, 2))  # where the ranks count their rows once
        syncs = traffic_of(lambda: step(state._replace(scaler=af.init_scaler(ctx)), torch.ones(2, 2))).syncs
        before = model.weight.detach().clone()
        with pytest.raises((ConfigurationError, RemoteRankError), match="numbers of rows") as caught:
            step(state._replace(scaler=af.init_scaler(ctx)), torch.ones(2 - ctx.rank, 2))
        assert torch.equal(model.weight, before)
        return syncs, type(caught.value).__name__, before

    as_on_a_device = property(lambda terms: terms.rows if terms.weight is None else terms.weight)
    monkeypatch.setattr(Terms, "divisor", as_on_a_device)  # of tensors on the CPU it is read
    found: Sequence[Any] = run_ranks(work, 2)
    assert [one[:2] for one in found] == [(0, "RemoteRankError"), (0, "ConfigurationError")]
