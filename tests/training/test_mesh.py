"""What all ranks of a mesh agree on in a step: weights of the losses, and whether a gradient overflowed."""

import math
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import accelfn as af
from accelfn import Context, ParallelismConfig
from accelfn.parallel.handle import LocalHandle
from accelfn.testing import run_ranks


def test_a_weight_counts_once_where_ranks_share_a_batch() -> None:
    """Ranks that share data pass the same weight, so it cancels out against the number of ranks."""
    weights = [3.0, 5.0]

    def work(ctx: Context) -> float:
        model = nn.Linear(1, 1, bias=False)
        handle = LocalHandle(model)
        assert handle.is_alive
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        # The mean over the data-parallel ranks of gradients of sums.
        model.weight.grad = torch.tensor([[sum(weights) / 2]])
        weight = torch.tensor(weights[ctx.coordinate("dp")], dtype=torch.float64)
        af.unscale_gradients(ctx, optimizer, af.init_scaler(ctx)._replace(weight=weight))
        return float(model.weight.grad)

    for tp_size in (1, 2):
        mesh = ParallelismConfig(dp_replicate_size=2, tp_size=tp_size)
        assert run_ranks(work, 2 * tp_size, parallelism_config=mesh) == pytest.approx([1.0] * 2 * tp_size)


def test_an_overflow_in_one_shard_skips_the_step_on_all_ranks() -> None:
    def work(ctx: Context) -> tuple[bool, float, bool]:
        assert ctx.mesh is not None
        mesh = ctx.mesh.device_mesh("tp")
        parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [Shard(0)]))
        gradient = torch.ones(4)
        gradient[3] = math.inf  # on the last rank
        parameter.grad = distribute_tensor(gradient, mesh, [Shard(0)])
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        scaler = af.unscale_gradients(ctx, optimizer, af.init_scaler(ctx))
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        left = bool((cast("Any", parameter.detach()).full_tensor() == 0).all())
        return af.step_was_skipped(ctx, scaler), float(scaler.scale), left

    options = ParallelismConfig(tp_size=2)
    found = run_ranks(work, 2, "processes", parallelism_config=options, mixed_precision="fp16")
    assert found == [(True, 32768.0, True)] * 2


def test_seeds_are_those_of_the_place_along_loss() -> None:
    def work(ctx: Context) -> float:
        af.set_seed(1, ctx=ctx, device_specific=True)
        return float(torch.rand(()))

    first, second, third, fourth = run_ranks(
        work, 4, parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2)
    )
    assert first == second
    assert third == fourth
    assert first != third
