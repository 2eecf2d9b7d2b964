"""A plan of a step's traffic says what real ranks send, by kind and to the byte; and how long it takes."""

# torch leaves its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Cluster, Context, FullyShardedDataParallelPlugin, Link, ParallelismConfig
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel import Exchange, Traffic, plan_traffic
from accelfn.testing import run_ranks
from tests.parallel import traffic as counted
from tests.parallel.tensor_models import GPT, LENGTH, PLAN, VOCABULARY
from tests.parallel.test_dry_run import loss_of

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
    # The plan is that of the slowest stage: one that has the norm, or gathers logits, is larger.
    assert plan in ranks
    for sent in ranks:
        assert sent.received.total() == pytest.approx(plan.received.total(), rel=0.06)


def test_operations_are_those_of_matrix_products() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    x = torch.empty(32, 64, device="meta", requires_grad=True)
    traffic = plan_traffic(Context(), model, batch=x, cluster=Cluster(flops=1e9))
    assert traffic.forward_flops == 2 * 32 * 2 * 64 * 256
    assert traffic.backward_flops == 2 * traffic.forward_flops
    assert traffic.compute_s == traffic.step_s == 3 * traffic.forward_flops / 1e9
    # A stage of a pipeline has its share, and all microbatches together are one batch.
    whole = plan_traffic(Context(), make(), batch=make_batch(), loss_fn=loss_of)
    ctx = af.plan_context(2, **OPTIONS["pp2"])
    stage = plan_traffic(ctx, make(), batch=make_batch(), loss_fn=loss_of)
    assert 0.5 < stage.forward_flops / whole.forward_flops < 0.6  # the slowest one has the logits
    assert stage.bubble == 1 / 5
    assert stage.idle_s == pytest.approx((stage.compute_s + stage.exposed_s) / 4)


def step(*exchanges: Exchange, size: int = 16, seconds: float = 1.0) -> Traffic:
    """Return a step on nodes of 8 ranks, each pass of which computes for some seconds."""
    plan = af.plan_mesh(ParallelismConfig(dp_shard_size=size), size)
    cluster = Cluster(
        inside=Link(bandwidth=100, latency_s=0), between=Link(bandwidth=10, latency_s=0), flops=1.0
    )
    return Traffic(plan, cluster, exchanges, round(seconds), round(seconds), 0.0)


def test_what_takes_longer_than_computing_can_not_be_hidden() -> None:
    # 8 members in each of two nodes: 80 bytes a second.
    gather = Exchange("dp_shard", "all_gather", "parameters", 1, 800, "forward", 80, 1)
    reduce = Exchange("dp_shard", "reduce_scatter", "gradients", 1, 400, "backward", 160, 1)
    traffic = step(gather, reduce, seconds=5)
    assert traffic.seconds(gather) == 10
    assert traffic.exposed(gather) == 1 + (9 - 5)
    assert traffic.exposed(reduce) == 2  # the rest takes 3 of 5 s
    assert traffic.exposed_s == 7
    assert traffic.step_s == 10 + 7
    waited = gather._replace(overlap="none")
    assert step(waited, seconds=100).exposed_s == 10
    # Two that share the pass are both late.
    both = step(gather, gather._replace(axis="dp_shard x cp"), seconds=9)
    assert both.exposed_s == pytest.approx(2 + 9)


def test_links_are_those_of_the_nodes() -> None:
    mesh = af.plan_mesh(ParallelismConfig(pp_size=2, dp_shard_size=64, tp_size=4), 512)
    cluster = Cluster()
    assert cluster.link(mesh, ["tp"]) == cluster.inside
    assert cluster.link(mesh, ["dp_shard"]).bandwidth == 2 * 50e9  # two members in a node
    assert cluster.link(mesh, ["pp"], "send") == cluster.between
    assert cluster.link(mesh, ["dp_shard"], "all_to_all") == cluster.between
    assert cluster.link(mesh, ["dp_shard", "tp"]).bandwidth == 8 * 50e9
    large = Cluster(ranks_per_node=72, inside=Link(bandwidth=900e9, latency_s=0))
    assert large.link(mesh, ["dp_shard"]).bandwidth == 900e9  # at most as fast as inside
    slow = Exchange("dp_shard", "all_gather", "parameters", 10, 0)
    traffic = Traffic(mesh, Cluster(between=Link(bandwidth=1, latency_s=2)), (slow,), 0, 0, 0.0)
    assert traffic.seconds(slow) == 10 * 2 * 6  # a tree over 64


def test_traffic_prints_as_a_table_with_its_assumptions() -> None:
    ctx = af.plan_context(16, parallelism_config=ParallelismConfig(dp_shard_size=16))
    text = str(plan_traffic(ctx, nn.Linear(1000, 1600), batch=torch.empty(8, 1000)))
    assert text == (
        "along      what                         received  calls        link     time  not hidden\n"
        "dp_shard   all_gather of parameters       6.0 MB      1  400.0 GB/s  75.0 us     75.0 us\n"
        "           reduce_scatter of gradients    6.0 MB      1  400.0 GB/s  75.0 us     75.0 us\n"
        "computing  0.13 us  0.0 TFLOP on each rank\n"
        "waiting    150.0 us  for what can't be hidden\n"
        "step       150.2 us  of which 0 % computing\n"
        "assumed    8 ranks a node, 450.0 GB/s inside and 50.0 GB/s a rank between; 400 TFLOP/s a rank\n"
        "           parameters and gradients travel beside the computation of their pass, except the first "
        "and last ones;\n"
        "           ranks wait for activations; matrix products alone take time"
    )


def test_what_can_not_be_planned_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="bandwidth must be positive"):
        Link(bandwidth=0, latency_s=0)
    with pytest.raises(ConfigurationError, match="ranks_per_node must be at least 1 and flops positive"):
        Cluster(flops=-1)
    megatron = af.plan_context(2, megatron_lm_plugin=af.MegatronLMPlugin(tp_degree=2))
    with pytest.raises(NotAvailableError, match="here Megatron-LM trains"):
        plan_traffic(megatron, nn.Linear(2, 2))
