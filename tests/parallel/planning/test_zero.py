"""The plan of DeepSpeed's stages: what ranks hold, and what they send."""

# torch and DeepSpeed leave much untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import DeepSpeedPlugin
from accelfn.errors import NotAvailableError
from accelfn.parallel import Budget
from tests.parallel.engines import deepspeed_models as dm
from tests.parallel.traffic import Traffic

WIDTH, BUCKET = 512, 100_000


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def context(stage: int, dtype: str, size: int = 2, **zero: Any) -> Context:
    config = {
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, **zero},
        "train_micro_batch_size_per_gpu": "auto",
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return af.plan_context(size, mixed_precision=dtype, deepspeed_plugin=plugin)


def plan(stage: int, dtype: str, size: int = 2, **zero: Any) -> Budget:
    return af.plan_memory(context(stage, dtype, size, **zero), Model())


NUMEL = 6 * (WIDTH * WIDTH + WIDTH)


def test_each_stage_shards_more() -> None:
    budgets = [plan(stage, "bf16", 4) for stage in range(4)]
    assert [one.parameters for one in budgets[:3]] == [4 * NUMEL, 2 * NUMEL, 2 * NUMEL]
    biases = 2 * 6 * WIDTH  # which stage 3 doesn't shard
    assert budgets[3].parameters == 2 * NUMEL // 4 + biases
    assert [one.gradients for one in budgets] == [4 * NUMEL, 2 * NUMEL, 2 * NUMEL // 4, 2 * NUMEL // 4]
    # A copy in float32, two states and a count.
    assert [one.optimizer for one in budgets[1:]] == [12 * NUMEL // 4 + 4] * 3
    assert [one.gathered for one in budgets] == [0, 0, 0, 2 * NUMEL - biases]
    assert plan(3, "bf16", stage3_max_live_parameters=1000).gathered == 2 * 1000


def test_stage_three_gathers_twice_if_parameters_are_freed_between() -> None:
    found = [
        af.parallel.plan_traffic(context(3, "bf16", 4, stage3_max_live_parameters=live), Model())
        for live in (1000, 10**9)
    ]
    gathers = [[one for one in each.exchanges if one.kind == "all_gather"] for each in found]
    assert [[one.during for one in each] for each in gathers] == [["forward", "backward"], ["forward"]]
    assert {one.received for each in gathers for one in each} == {3 * 2 * 6 * WIDTH * WIDTH // 4}


def test_activations_are_in_the_dtype_of_the_engine() -> None:
    x = torch.empty(8, WIDTH)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Sigmoid())
    half = af.plan_memory(context(2, "bf16"), model, batch=x.bfloat16()).activations
    whole = af.plan_memory(context(2, "no"), model, batch=x).activations
    assert half is not None
    assert whole is not None
    assert half < 0.6 * whole


def test_what_is_offloaded_is_not_planned() -> None:
    with pytest.raises(NotAvailableError, match="isn't planned for DeepSpeed with offload_optimizer"):
        plan(2, "bf16", offload_optimizer={"device": "cpu"})


def received(ctx: Context, stage: int, dtype: str) -> dict[str, int]:
    """Return the bytes that a rank receives in the second step."""
    planned = context(stage, dtype)
    ctx = ctx.replace(mixed_precision=dtype, deepspeed_plugin=planned.strategy.deepspeed)
    made = Model()
    model, optimizer = af.prepare(ctx, made, torch.optim.AdamW(made.parameters()))
    scaler, found = af.init_scaler(ctx), dict[str, int]()
    for _ in range(2):
        x = torch.ones(2, WIDTH, dtype=torch.bfloat16 if dtype == "bf16" and stage else torch.float32)
        with Traffic() as traffic:
            scaler = af.backward(ctx, model(x).float().square().mean(), scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        found = dict(traffic.received)
    return found


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.usefixtures("deepspeed_ops")
@pytest.mark.parametrize(("stage", "dtype"), [(0, "no"), (1, "bf16"), (2, "bf16"), (3, "no")])
def test_ranks_receive_what_was_planned(stage: int, dtype: str) -> None:
    traffic = af.parallel.plan_traffic(context(stage, dtype), Model())
    planned = {one.kind: one.received for one in traffic.exchanges}
    for found in dm.on_processes(lambda ctx: received(ctx, stage, dtype)):
        for name, kind in (("allgather", "all_gather"), ("reduce_scatter", "reduce_scatter")):
            assert found.get(name, 0) == pytest.approx(planned.get(kind, 0), rel=0.01)
        if stage in (1, 2):
            assert found["allreduce"] == pytest.approx(planned["all_reduce"], rel=0.01)
