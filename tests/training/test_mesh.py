"""What all ranks of a mesh agree on: whether a gradient overflowed, and what they draw."""

import math
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import accelfn as af
from accelfn import Context, ParallelismConfig
from accelfn.testing import run_ranks


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
