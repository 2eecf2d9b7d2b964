"""Optimizers go on with what their models have become, in any order of preparation, with their state."""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.parameters import follow, leave_pointers, named, newest, repoint, retie
from accelfn.testing import run_ranks
from tests.parallel import shard_models as lm

PLUGIN = FullyShardedDataParallelPlugin(fsdp_version=2)


def warm(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make two steps on one process, so that there is state."""
    for (batch,) in lm.windows(2, 1, seed=7):
        lm.loss_of(model, batch, False)[0].backward()
        optimizer.step()
        optimizer.zero_grad()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [one for one in model.parameters() if one.dim() > 1]
    return [
        {"params": decayed},
        {"params": [one for one in model.parameters() if one.dim() == 1], "lr": 3e-3},
    ]


@pytest.mark.parametrize("has_state", [False, True], ids=["fresh", "state"])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "together", "neither prepared"])
def test_any_order_trains_as_if_the_optimizer_was_made_afterwards(order: str, has_state: bool) -> None:
    def made() -> tuple[lm.Model, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        model = lm.make()
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2, eps=1e-3)
        if has_state:
            warm(model, optimizer)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def steps(ctx: Context, model: Any, optimizer: Any, schedule: Any) -> lm.Trained:
        scaler, parts = af.init_scaler(ctx), ctx.num_processes
        losses: list[float] = []
        for (batch,) in lm.windows(3, 1):
            rows = {name: one.chunk(parts)[ctx.rank] for name, one in batch.items()}
            loss, weight = lm.loss_of(model, rows, True)
            scaler = af.backward(ctx, loss, scaler, None, weight)
            scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=schedule)
            losses.append(schedule.get_last_lr()[1])
        return lm.Trained(lm.whole(model), losses, [])

    def on_rank(ctx: Context) -> tuple[lm.Trained, bool, int, bool, bool]:
        model, optimizer, schedule = made()
        before = weakref.ref(next(iter(model.parameters())))
        if order == "model first":
            af.prepare_model(ctx, model)
            af.prepare_optimizer(ctx, optimizer)
        elif order == "together":
            af.prepare(ctx, schedule, optimizer, model)
        else:
            if order == "optimizer first":
                af.prepare_optimizer(ctx, optimizer)
            af.prepare_model(ctx, model)
        found = steps(ctx, model, optimizer, schedule)
        gc.collect()
        held = [one for group in optimizer.param_groups for one in group["params"]]
        is_own = {id(one) for one in held} == {id(one) for one in model.parameters()}
        is_tied = model.head.weight is model.embed.weight
        moments = all(isinstance(optimizer.state[one]["exp_avg"], DTensor) for one in held)
        return found, is_own and is_tied, len(optimizer.param_groups), before() is None, moments

    expected = steps(Context(), *made())
    for found, is_own, num_groups, is_freed, are_sharded in run_ranks(
        on_rank, 2, on="processes", fsdp_plugin=PLUGIN
    ):
        assert found.distance(expected) < 1e-6
        assert is_own
        assert num_groups == 2
        assert is_freed
        assert are_sharded


def test_a_list_of_old_parameters_leads_the_clip_to_the_shards() -> None:
    def on_rank(ctx: Context) -> float:
        model = lm.make()
        old = list(model.parameters())
        af.prepare_model(ctx, model)
        ids = lm.windows(1, 1)[0][0]["ids"]
        scaler = af.backward(ctx, model(ids).square().mean(), af.init_scaler(ctx))
        return af.clip_grad_norm_(ctx, old, 1e9, scaler_state=scaler).item()

    plain = lm.make()
    plain(lm.windows(1, 1)[0][0]["ids"]).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    found = run_ranks(on_rank, 2, on="processes", fsdp_plugin=PLUGIN)
    assert found == [pytest.approx(expected)] * 2


def test_a_group_of_both_kinds_steps_without_foreach() -> None:
    def on_rank(ctx: Context) -> tuple[Any, list[bool]]:
        plain, model = nn.Linear(2, 2), lm.make()
        both = [*model.parameters(), *plain.parameters()]
        optimizer = torch.optim.AdamW(
            [{"params": both}, {"params": [nn.Parameter(torch.ones(2))]}], foreach=True
        )
        af.prepare(ctx, model, optimizer)
        second = af.prepare_model(ctx, plain, plan=af.plan_model(ctx, plain, engine="ddp"))
        loss = model(lm.windows(1, 1)[0][0]["ids"]).square().mean() + second(torch.ones(1, 2)).sum()
        scaler = af.backward(ctx, loss, af.init_scaler(ctx))
        af.optimizer_step(ctx, optimizer, scaler)
        return [group["foreach"] for group in optimizer.param_groups], [
            bool(optimizer.state[one]) for one in plain.parameters()
        ]

    assert run_ranks(on_rank, 2, on="processes", fsdp_plugin=PLUGIN) == [([False, True], [True, True])] * 2


# --- without ranks ----------------------------------------------------------------------------------


def replace(model: nn.Module, name: str, value: torch.Tensor) -> nn.Parameter:
    module, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(value)
    setattr(model.get_submodule(module), leaf, parameter)
    return parameter


def test_pointers_lead_over_several_replacements_to_the_newest() -> None:
    model = nn.Sequential()
    layer = nn.Linear(2, 2)
    model.append(layer)
    first = layer.weight
    for value in (1.0, 2.0):
        before = named(model)
        replace(model, "0.weight", torch.full((2, 2), value))
        leave_pointers(before, model)
    assert newest(first) is layer.weight
    assert newest(layer.bias) is layer.bias
    assert [id(one) for one in follow([first, layer.weight, layer.bias])] == [
        id(layer.weight),
        id(layer.bias),
    ]


def test_a_parameter_that_is_gone_leaves_the_optimizer_and_its_names() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0)
    before = named(model)
    model.register_parameter("bias", None)
    leave_pointers(before, model)
    group = optimizer.param_groups[0]
    assert repoint(optimizer) == 1
    assert group is optimizer.param_groups[0]
    assert (group["param_names"], len(group["params"])) == (["weight"], 1)


def test_ties_are_tied_again_and_unequal_layouts_are_refused() -> None:
    model = lm.make()
    before = named(model)
    tied = replace(model, "embed.weight", torch.zeros(lm.VOCABULARY, lm.WIDTH))
    replace(model, "head.weight", torch.zeros(lm.VOCABULARY, lm.WIDTH))
    retie(before, model)
    assert model.head.weight is model.embed.weight is tied

    def on_rank(ctx: Context) -> None:
        assert ctx.mesh is not None
        mesh, model = ctx.mesh.device_mesh("shard"), lm.make()
        before = named(model)
        for name, placement in (("embed.weight", Shard(0)), ("head.weight", Replicate())):
            replace(model, name, distribute_tensor(before[name].detach(), mesh, [placement]))
        with pytest.raises(
            ConfigurationError, match=r"embed\.weight and head\.weight are one tied parameter"
        ):
            retie(before, model)

    run_ranks(on_rank, 2, on="processes", fsdp_plugin=PLUGIN)
