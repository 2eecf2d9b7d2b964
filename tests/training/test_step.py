from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, GradientAccumulationPlugin, Guard, init_scaler, optimizer_step
from accelfn.errors import NotAvailableError, ReplicaDriftError
from accelfn.testing import run_ranks


def one_weight(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def grad_of(model: nn.Linear) -> float:
    assert model.weight.grad is not None
    return float(model.weight.grad)


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_a_window_is_the_mean_of_what_it_held(mode: str) -> None:
    ctx = Context().replace(mixed_precision=mode, gradient_accumulation_steps=2)
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = af.init_scaler(ctx)
    steps: list[float] = []
    for batch, micro in af.microbatches(ctx, [torch.tensor([[x]]) for x in (1.0, 3.0, 5.0)]):
        with af.accumulate(ctx, micro, model):
            af.backward(ctx, model(batch).sum(), scaler, micro)
        if micro.sync:
            before = float(model.weight.detach())
            scaler = af.optimizer_step(ctx, optimizer, scaler)
            steps.append(before - float(model.weight.detach()))
    assert steps == [2.0, 5.0]


def test_each_batch_is_averaged_where_that_is_asked() -> None:
    def run(ctx: Context, each: bool) -> list[float]:
        plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=each)
        ctx = ctx.replace(gradient_accumulation_plugin=plugin)
        model = af.prepare(ctx, one_weight())
        found: list[float] = []
        for batch, micro in af.microbatches(ctx, [torch.full((1, 1), ctx.rank * 2.0)] * 2):
            with af.accumulate(ctx, micro, model):
                af.backward(ctx, model(batch).sum(), af.init_scaler(ctx), micro)
            found.append(grad_of(model))
        return found

    assert run_ranks(lambda ctx: run(ctx, True), 2) == [[0.5, 1.0]] * 2
    assert run_ranks(lambda ctx: run(ctx, False), 2) == [[0.0, 1.0], [1.0, 1.0]]


def test_no_sync_keeps_gradients_local() -> None:
    def run(ctx: Context) -> float:
        model = af.prepare(ctx, one_weight())
        with af.no_sync(ctx, model):
            af.backward(ctx, model(torch.full((1, 1), float(ctx.rank))).sum(), af.init_scaler(ctx))
        return grad_of(model)

    assert run_ranks(run, 2) == [0.0, 1.0]


def test_one_optimizer_step_is_one_scheduler_step_at_any_world_size() -> None:
    def run(ctx: Context) -> float:
        model = one_weight()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        model, optimizer, scheduler = af.prepare(ctx, model, optimizer, scheduler)
        scaler = af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, [torch.ones(1, 1)] * 5):
            with af.accumulate(ctx, micro, model):
                af.backward(ctx, model(batch).sum(), scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                af.scheduler_step(ctx, scheduler, scaler)
        return scheduler.get_last_lr()[0]  # pyright: ignore[reportReturnType]

    for world in (1, 2, 3):
        assert run_ranks(run, world, gradient_accumulation_steps=2) == [0.125] * world


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    ctx = Context().replace(mixed_precision="fp16")
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler = af.init_scaler(ctx)
    rates: list[float] = []
    for value in (float("inf"), 1.0, float("nan"), 1.0):
        af.backward(ctx, model(torch.ones(1, 1)).sum() * value, scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        af.scheduler_step(ctx, scheduler, scaler)
        rates.append(scheduler.get_last_lr()[0])  # pyright: ignore[reportArgumentType]
    assert rates == [1.0, 0.5, 0.5, 0.25]
    with pytest.raises(ValueError, match="a step may be skipped"):
        af.scheduler_step(ctx, scheduler)


def test_gradients_are_kept_on_request() -> None:
    ctx = Context()
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(1, 1)).sum().backward()
    af.optimizer_step(ctx, optimizer, af.init_scaler(ctx), clear_gradients=False)
    assert grad_of(model) == 1.0


def test_what_backward_cannot_take_is_refused() -> None:
    with pytest.raises(TypeError, match="got float"):
        af.backward(Context(), cast("Any", 1.0), af.init_scaler(Context()))
    with pytest.raises(NotAvailableError, match="weight"):
        af.backward(Context(), torch.ones(()), af.init_scaler(Context()), weight=1.0)


def test_parameters_that_drift_apart_are_found_at_the_asked_step() -> None:
    def train(ctx: Context) -> list[int]:
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([parameter], 0.1)
        for step in range(1, 5):
            parameter.grad = torch.ones(3)
            if ctx.rank == 1 and step == 3:
                parameter.grad[0] += 1e-6
            try:
                optimizer_step(ctx, optimizer, init_scaler(ctx))
            except ReplicaDriftError as error:
                return [step, *(row.rank for row in error.rows)]
        return []

    assert run_ranks(train, 2, guard=Guard(check_replicas_every=2)) == [[4, 1]] * 2
    assert run_ranks(train, 2) == [[]] * 2


def all_named(model: nn.Sequential) -> Any:
    return model.named_parameters()


def named_by_group(model: nn.Sequential) -> Any:  # each has a "bias", which names none
    return [{"params": list(one.named_parameters())} for one in model.children()]


def unnamed(model: nn.Sequential) -> Any:
    return model.parameters()


def unnamed_by_group(model: nn.Sequential) -> Any:
    return [{"params": one.parameters()} for one in model.children()]


@pytest.mark.parametrize(
    ("taken", "path"),
    [
        (all_named, "parameters['1.bias']"),
        (named_by_group, "param_groups[1]['params'][1]"),
        (unnamed, "param_groups[0]['params'][3]"),
        (unnamed_by_group, "param_groups[1]['params'][1]"),
    ],
)
def test_a_parameter_that_drifts_is_named_as_well_as_its_optimizer_can(
    taken: Callable[[nn.Sequential], Any], path: str
) -> None:
    def train(ctx: Context) -> None:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
            parameter.grad = torch.ones_like(parameter)
        if ctx.rank == 1:
            nn.init.zeros_(cast("nn.Linear", model[1]).bias)
        optimizer_step(ctx, torch.optim.SGD(taken(model), 0.1), init_scaler(ctx))

    with pytest.raises(ReplicaDriftError) as caught:
        run_ranks(train, 2, guard=Guard(check_replicas_every=1))
    assert [row.path for row in caught.value.rows] == [path]
