"""The norm of gradients is that of one process, however parameters are laid out."""

# torch leaves its distributed tensors partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from accelfn import Context, ParallelismConfig
from accelfn.parallel.norm import clip_norm_, clip_value_
from accelfn.parallel.pointers import follow
from accelfn.testing import run_ranks

KINDS = (2.0, 1.0, 3.0, 0.0, math.inf, -math.inf)
MESHES = {
    "fsdp3": (3, ParallelismConfig(dp_shard_size=3)),
    "tp x fsdp": (4, ParallelismConfig(dp_shard_size=2, tp_size=2)),
}


def plain() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(5, 3), (4,), (2, 2), (1,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


def laid_out(ctx: Context, name: str) -> list[Any]:
    """Share parameters out: some sharded along one axis, some along all, some replicated, some plain."""
    assert ctx.mesh is not None
    axes = [axis for axis in ("dp_replicate", "dp_shard", "tp") if ctx.axis_size(axis) > 1]
    mesh = ctx.mesh.device_mesh(*axes)
    inner = [Replicate()] * (mesh.ndim - 1)
    layouts: list[Any] = [[*inner, Shard(0)], [Shard(0), *inner], [Replicate()] * mesh.ndim, None]
    if name == "tp x fsdp":
        layouts[0] = [Shard(0), Shard(1)]
    result: list[Any] = []
    for parameter, layout in zip(plain(), layouts, strict=True):
        if layout is None:
            result.append(parameter)
            continue
        new = nn.Parameter(distribute_tensor(parameter.detach(), mesh, layout))
        assert parameter.grad is not None
        new.grad = distribute_tensor(parameter.grad, mesh, layout)
        result.append(new)
    return follow([*result, result[0]])  # a tie counts once


def norm_of(ctx: Context, parameters: list[torch.Tensor], kind: float = 2.0) -> torch.Tensor:
    """Return the norm of gradients, which stay as they are."""
    return clip_norm_(ctx, parameters, math.inf, kind)


@pytest.mark.parametrize("name", MESHES)
def test_the_norm_is_that_of_one_process(name: str) -> None:
    def work(ctx: Context) -> list[float]:
        parameters = laid_out(ctx, name)
        norms = [norm_of(ctx, parameters, kind) for kind in KINDS]
        assert all(type(norm) is torch.Tensor and norm.shape == () for norm in norms)
        before = clip_norm_(ctx, parameters, 0.5)
        assert torch.equal(before, norms[0])
        after = float(norm_of(ctx, parameters))
        clip_value_(ctx, parameters, 0.01)
        return [float(norm) for norm in norms] + [after, float(norm_of(ctx, parameters, math.inf))]

    size, mesh = MESHES[name]
    gradients = [one.grad for one in plain() if one.grad is not None]
    wanted = [float(torch.nn.utils.get_total_norm(gradients, kind)) for kind in (*KINDS[:3], math.inf)]
    for found in run_ranks(work, size, "processes", parallelism_config=mesh):
        assert [found[0], found[1], found[2], found[4]] == pytest.approx(wanted, rel=1e-6)
        assert found[3] == sum(one.numel() for one in gradients)
        assert found[5] == pytest.approx(float(min(one.abs().min() for one in gradients)))
        assert found[6] == pytest.approx(0.5, rel=1e-4)
        assert found[7] == pytest.approx(0.01)


def test_a_gradient_in_another_layout_is_brought_to_its_parameters() -> None:
    def work(ctx: Context) -> None:
        assert ctx.mesh is not None
        mesh = ctx.mesh.device_mesh("tp")
        for placement in (Partial(), Replicate(), Shard(1)):
            parameter = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)]))
            if placement.is_partial():
                gradient = DTensor.from_local(torch.ones(4, 4), mesh, [placement])
            else:
                gradient = distribute_tensor(torch.full((4, 4), 2.0), mesh, [placement])
            parameter.grad = gradient
            assert float(clip_norm_(ctx, [parameter], 4.0)) == pytest.approx(8.0)
            assert parameter.grad.placements == (Shard(0),)
            torch.testing.assert_close(parameter.grad.to_local(), torch.ones(2, 4))

    run_ranks(work, 2, "processes", parallelism_config=ParallelismConfig(tp_size=2))
