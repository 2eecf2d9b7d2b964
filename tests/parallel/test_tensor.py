"""Ranks that share each layer train one model, as one process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from accelfn import Context
from accelfn.context.config import TorchTensorParallelConfig
from accelfn.parallel.facts import read_facts
from accelfn.parallel.pointers import named, retie
from accelfn.parallel.tensor import apply_tensor
from accelfn.parallel.tensor_plans import plan_tensor
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, PLAN, SEQUENCE, make_batch, summed_loss


def mesh_of(ctx: Context) -> DeviceMesh:
    return init_device_mesh("cpu", (ctx.num_processes,), mesh_dim_names=("tp",))


def spread(
    ctx: Context, model: nn.Module, plan: Mapping[str, str] | None, *, loss_parallel: bool = False
) -> nn.Module:
    """Lay out a model over all ranks, with its ties."""
    record = TorchTensorParallelConfig(plan=plan, loss_parallel=loss_parallel)
    before = named(model)
    apply_tensor(model, plan_tensor(record, read_facts(model), ctx.num_processes), mesh_of(ctx))
    retie(before, model)
    return model


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(one.grad) for name, one in model.named_parameters()}


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def against_plain(
    ctx: Context, make: Callable[[], nn.Module], plan: Mapping[str, str] | None
) -> tuple[float, float, list[str]]:
    """Differences of the loss and of the gradients, and what isn't laid out as its parameter is."""
    plain, model = make(), spread(ctx, make(), plan)
    losses = [summed_loss(one, make_batch(1))[0] for one in (plain, model)]
    for loss in losses:
        loss.backward()
    astray = [
        name
        for name, one in model.named_parameters()
        if not hasattr(one, "placements") or cast("Any", one).placements != cast("Any", one.grad).placements
    ]
    return (
        float((losses[0] / losses[1] - 1).detach().abs()),
        difference(gradients_of(plain), gradients_of(model)),
        astray,
    )


@pytest.mark.parametrize(
    ("options", "plan"),
    [
        ({}, PLAN),
        ({"tied": False}, PLAN),
        ({"views_by_count": True}, PLAN),
        ({"norms_heads": True}, {**PLAN, "blocks.*.attn.head_norm": "heads"}),
        ({}, SEQUENCE),
        ({"tied": False, "norms_heads": True}, {**SEQUENCE, "blocks.*.attn.head_norm": "heads"}),
    ],
    ids=["tied", "untied", "by-count", "head-norm", "sequence", "sequence-untied-head-norm"],
)
def test_loss_and_gradients_are_those_of_one_process(options: dict[str, bool], plan: dict[str, str]) -> None:
    for loss, gradients, astray in run_ranks(
        lambda ctx: against_plain(ctx, lambda: GPT(**cast("Any", options)), plan), 2, "processes"
    ):
        assert astray == []
        assert loss < 1e-6
        assert gradients < 2e-5  # of sums over 20 tokens, up to 50
