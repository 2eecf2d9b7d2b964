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
from torch.distributed.tensor import DTensor

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.parallel import shard_models as lm

PLUGIN = FullyShardedDataParallelPlugin(fsdp_version=2)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    decayed = [one for one in model.parameters() if one.dim() > 1]
    return [
        {"params": decayed},
        {"params": [one for one in model.parameters() if one.dim() == 1], "lr": 3e-3},
    ]


@pytest.mark.parametrize("order", ["model first", "optimizer first", "together", "neither prepared"])
def test_any_order_trains_as_if_the_optimizer_was_made_afterwards(order: str) -> None:
    def made(has_state: bool) -> tuple[lm.Model, torch.optim.Optimizer]:
        model = lm.make()
        optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2, eps=1e-3)
        if has_state:
            lm.train(Context(), model, optimizer)
        return model, optimizer

    def on_rank(ctx: Context, has_state: bool) -> tuple[dict[str, torch.Tensor], list[bool]]:
        model, optimizer = made(has_state)
        before = weakref.ref(next(iter(model.parameters())))
        if order == "model first":
            af.prepare_model(ctx, model)
            af.training.prepare_optimizer(ctx, optimizer)
        elif order == "together":
            af.prepare(ctx, optimizer, model)
        else:
            if order == "optimizer first":
                af.training.prepare_optimizer(ctx, optimizer)
            af.prepare_model(ctx, model)

        def holds_shards() -> bool:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            return {id(one) for one in held} == {id(one) for one in model.parameters()}

        clears_shards = holds_shards() or order == "neither prepared"
        found = lm.train(ctx, model, optimizer)
        gc.collect()
        return found, [
            clears_shards,
            holds_shards(),
            model.head.weight is model.embed.weight,
            len(optimizer.param_groups) == 2,
            before() is None,  # freed
            all(isinstance(optimizer.state[one]["exp_avg"], DTensor) for one in model.parameters()),
        ]

    def both(ctx: Context) -> list[tuple[dict[str, torch.Tensor], list[bool]]]:
        return [on_rank(ctx, has_state) for has_state in (False, True)]

    expected = [lm.train(Context(), *made(has_state)) for has_state in (False, True)]
    for rank in run_ranks(both, 2, on="processes", fsdp_plugin=PLUGIN):
        for (found, facts), parameters in zip(rank, expected, strict=True):
            assert lm.is_close(found, parameters)
            assert facts == [True] * 6


def test_a_list_of_old_parameters_leads_the_clip_to_the_shards() -> None:
    def on_rank(ctx: Context) -> float:
        model = lm.make()
        old = list(model.parameters())
        af.prepare_model(ctx, model)
        ids = lm.ids_of(Context())
        scaler = af.backward(ctx, model(ids).square().mean(), af.init_scaler(ctx))
        return af.clip_grad_norm_(ctx, old, 1e9, scaler_state=scaler).item()

    plain = lm.make()
    plain(lm.ids_of(Context())).square().mean().backward()
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
        loss = model(lm.ids_of(Context())).square().mean() + second(torch.ones(1, 2)).sum()
        scaler = af.backward(ctx, loss, af.init_scaler(ctx))
        af.optimizer_step(ctx, optimizer, scaler)
        return [group["foreach"] for group in optimizer.param_groups], [
            bool(optimizer.state[one]) for one in plain.parameters()
        ]

    assert run_ranks(on_rank, 2, on="processes", fsdp_plugin=PLUGIN) == [([False, True], [True, True])] * 2


def doubled(gradient: torch.Tensor) -> torch.Tensor:
    return 2 * gradient


def raised(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad += 1


def test_a_meta_model_keeps_its_hooks_and_its_optimizer_from_before() -> None:
    ctx = Context()
    with torch.device("meta"):
        model = nn.Linear(2, 1)
    model.weight.register_hook(doubled)
    removed = model.weight.register_hook(doubled)
    model.weight.register_post_accumulate_grad_hook(raised)
    optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.1))
    model = af.prepare(ctx, model)
    removed.remove()
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(1)
    ((_, micro),) = af.microbatches(ctx, [0])
    scaler = af.backward(ctx, model(torch.ones(1, 2)).sum(), af.init_scaler(ctx), micro)
    af.optimizer_step(ctx, optimizer, scaler)
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 2), 1 - 0.1 * 3))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_that_ranks_share_are_refused(kind: str) -> None:
    def run(ctx: Context) -> None:
        model = lm.make()
        before = dict(model.named_parameters())
        getattr(model.embed.weight, kind)(raised)
        with pytest.raises(
            ConfigurationError, match=r"prepare_model: embed\.weight has a hook on its gradient"
        ):
            af.prepare(ctx, model)
        assert dict(model.named_parameters()) == before
        model = af.prepare(ctx, lm.make())
        if kind == "register_hook":  # after prepare FSDP runs the other kind, and on averages
            model.embed.weight.register_hook(raised)
            with pytest.raises(ConfigurationError, match=r"backward: embed\.weight has a hook on its"):
                af.backward(ctx, model(lm.ids_of(ctx)).sum(), af.init_scaler(ctx))

    run_ranks(run, 2, "processes", fsdp_plugin=PLUGIN)
