"""A plan of a step's traffic says what real ranks send, by kind and to the byte."""

# torch leaves its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.errors import NotAvailableError
from accelfn.parallel import Traffic, plan_traffic
from accelfn.testing import run_ranks
from tests.parallel import traffic as counted
from tests.parallel.planning.test_dry_run import loss_of
from tests.parallel.tensor_models import GPT, LENGTH, PLAN, VOCABULARY

ROWS = 8
SPLIT = af.config.TorchTensorParallelConfig(plan=PLAN)
STAGES = af.config.PipelineParallelConfig(num_microbatches=4)
RECOMPUTED = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2, fp8": {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2), "mixed_precision": "fp8"},
    "hsdp2x2": {"parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)},
    "tp2xfsdp2, recomputed": {
        "parallelism_config": ParallelismConfig(dp_shard_size=2, tp_size=2, tp_handler=SPLIT),
        "fsdp_plugin": RECOMPUTED,
    },
    "pp2": {"parallelism_config": ParallelismConfig(pp_size=2, pp_handler=STAGES)},
    "pp2xfsdp2": {"parallelism_config": ParallelismConfig(dp_shard_size=2, pp_size=2, pp_handler=STAGES)},
    "pp2xtp2": {
        "parallelism_config": ParallelismConfig(pp_size=2, tp_size=2, pp_handler=STAGES, tp_handler=SPLIT)
    },
}
OFTEN = ("pp2",)
KINDS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "send": "send",
}


class Sent(NamedTuple):
    """Collectives of a step by kind: how many, and the bytes that they bring."""

    calls: Counter[str]
    received: Counter[str]


def size_of(name: str) -> int:
    config = OPTIONS[name].get("parallelism_config")
    return 2 if config is None else config.total_size


def make_batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    return ids, ids, torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()


def make() -> nn.Module:
    return GPT(num_blocks=6)  # so that four of the blocks are planned by the others


def planned(traffic: Traffic) -> Sent:
    sent = Sent(Counter(), Counter())
    for one in traffic.exchanges:
        sent.calls[one.kind] += one.calls
        sent.received[one.kind] += one.received
    return sent


def train(ctx: Context) -> Sent:
    """Count what the second step sends."""
    prepared = make()
    model, optimizer = af.prepare(ctx, prepared, torch.optim.AdamW(prepared.parameters()))
    scaler, sent = af.init_scaler(ctx), Sent(Counter(), Counter())
    for _ in range(2):
        with counted.Traffic() as traffic:
            for batch, micro in af.microbatches(ctx, [make_batch()]):
                with af.accumulate(ctx, micro, model):
                    scaler, _ = af.forward_backward(ctx, model, loss_of, batch, scaler, micro)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        sent = Sent(Counter(), Counter())
        for name, kind in KINDS.items():
            sent.calls[kind] += traffic.calls[name]
            sent.received[kind] += traffic.received[name]
    return sent


@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_a_step_sends_what_was_planned(name: str) -> None:
    ctx = af.plan_context(size_of(name), **OPTIONS[name])
    plan = planned(plan_traffic(ctx, make(), batch=make_batch(), loss_fn=loss_of))
    ranks = run_ranks(train, size_of(name), on="processes", **OPTIONS[name])
    # The plan is that of the stage that receives most: one that has the norm, or gathers logits, is larger.
    assert plan in ranks
    for sent in ranks:
        assert sent.received.total() == pytest.approx(plan.received.total(), rel=0.06)


def test_traffic_prints_as_a_table() -> None:
    ctx = af.plan_context(16, parallelism_config=ParallelismConfig(dp_shard_size=16))
    traffic = plan_traffic(ctx, nn.Sequential(nn.ModuleList(nn.Linear(1000, 1600) for _ in range(2))))
    assert str(traffic) == (
        "along     what                         pass      received  calls\n"
        "dp_shard  all_gather of parameters     forward    12.0 MB      2\n"
        "          all_gather of parameters     backward   12.0 MB      2\n"
        "          reduce_scatter of gradients  backward   12.0 MB      2"
    )
    assert traffic.received == sum(traffic.moved.values())
    assert str(plan_traffic(Context(), nn.Linear(2, 2))) == "nothing is sent between ranks"


def test_an_engine_that_plans_itself_is_refused() -> None:
    megatron = af.plan_context(2, megatron_lm_plugin=af.config.MegatronLMPlugin(tp_degree=2))
    with pytest.raises(NotAvailableError, match="here Megatron-LM trains"):
        plan_traffic(megatron, nn.Linear(2, 2))
