"""Windows, optimizer steps and schedules of a loop by the functions."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

import accelfn as af
from accelfn import Context, GradientAccumulationPlugin, Guard
from accelfn.config import GradScalerKwargs
from accelfn.errors import (
    ConfigurationError,
    MismatchError,
    NonFiniteGradientError,
    NotAvailableError,
    ReplicaDriftError,
)
from accelfn.testing import run_ranks
from tests.training.models import filled, grad_of, one_weight, sgd, values, weight_of

schedules = cast("Any", lr_scheduler)


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


def test_torch_s_own_step_is_refused_inside_of_an_open_window_alone() -> None:
    """Not beside it: another model's, with windows of one batch, or where the program averages itself."""

    def run(ctx: Context) -> list[bool]:
        model, other = one_weight(), one_weight()
        model, optimizer, other, beside = af.prepare(ctx, model, sgd(model), other, sgd(other))
        alone = ctx.replace(gradient_accumulation_steps=1)
        scaler, refused = af.init_scaler(ctx), list[bool]()
        for batch, micro in af.microbatches(ctx, [torch.ones(1, 1)] * 4):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model(batch).sum(), scaler, micro)
            af.backward(alone, other(batch).sum(), af.init_scaler(alone))
            beside.step()
            before = weight_of(model)
            try:
                optimizer.step()
            except ConfigurationError as error:
                assert "accumulation window is still open" in str(error)  # noqa: PT017
                assert weight_of(model) == before
                refused.append(True)
            else:
                refused.append(False)
        for step_inside in (True, False):
            with af.no_sync(ctx, model):
                model(torch.ones(1, 1)).sum().backward()
                if step_inside:
                    optimizer.step()
            if not step_inside:
                optimizer.step()
        return refused

    assert run_ranks(run, 2, gradient_accumulation_steps=2) == [[True, False] * 2] * 2


def test_one_optimizer_step_is_one_scheduler_step_at_any_world_size() -> None:
    def run(ctx: Context) -> float:
        model = one_weight()
        optimizer = sgd(model)
        model, optimizer, scheduler = af.prepare(ctx, model, optimizer, schedules.StepLR(optimizer, 1, 0.5))
        scaler = af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, [torch.ones(1, 1)] * 5):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model(batch).sum(), scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                af.scheduler_step(ctx, scheduler, scaler)
        return scheduler.get_last_lr()[0]

    for world in (1, 2, 3):
        assert run_ranks(run, world, gradient_accumulation_steps=2) == [0.125] * world


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    ctx = Context().replace(mixed_precision="fp16")
    model = one_weight()
    optimizer, scaler = sgd(model), af.init_scaler(ctx)
    scheduler = schedules.StepLR(optimizer, 1, 0.5)
    rates: list[float] = []
    for value in (float("inf"), 1.0, float("nan"), 1.0):
        scaler = af.backward(ctx, model(torch.ones(1, 1)).sum() * value, scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        af.scheduler_step(ctx, scheduler, scaler)
        rates += scheduler.get_last_lr()
    assert rates == [1.0, 0.5, 0.5, 0.25]
    with pytest.raises(ValueError, match="a step may be skipped"):
        af.scheduler_step(ctx, scheduler)


@st.composite
def weighted_windows(draw: st.DrawFn) -> tuple[int, list[list[list[float]]]]:
    """Ranks, and what each has in each batch of a window: numbers that are summed up, often none."""
    ranks, batches = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    numbers = st.lists(st.integers(-8, 8).map(float), max_size=3)
    rows = st.lists(numbers, min_size=batches, max_size=batches)
    return ranks, draw(st.lists(rows, min_size=ranks, max_size=ranks))


@pytest.mark.parametrize("mode", ["no", "fp16"])
@given(weighted_windows(), st.booleans())
def test_sums_with_weights_are_divided_once_over_all_ranks_and_the_window(
    mode: Any, drawn: tuple[int, list[list[list[float]]]], clip: bool
) -> None:
    ranks, numbers = drawn
    all_numbers = [number for rank in numbers for batch in rank for number in batch]
    # As one rank with all of it in one batch: the mean over every number there is.
    expected = sum(all_numbers) / len(all_numbers) if all_numbers else 0.0
    if clip:
        expected = max(-1.0, min(1.0, expected))

    def run(ctx: Context) -> float:
        model = af.prepare(ctx, one_weight())
        optimizer = sgd(model)
        state = af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, numbers[ctx.rank]):
            with af.accumulate(ctx, micro, model):
                loss = model(torch.tensor(batch).view(-1, 1)).sum()
                weight = float(len(batch)) if ctx.rank % 2 else torch.tensor(len(batch))
                state = af.backward(ctx, loss, state, micro, weight=weight)
        state = af.optimizer_step(ctx, optimizer, state, max_norm=1.0 if clip else None)
        assert state.weight is None
        assert not state.is_unscaled
        return -weight_of(model)

    found = run_ranks(
        run,
        ranks,
        mixed_precision=mode,
        gradient_accumulation_steps=len(numbers[0]),
        # A scale that doesn't overflow: a skipped step would tell nothing.
        kwargs_handlers=[GradScalerKwargs(init_scale=8.0)],
    )
    assert found == [pytest.approx(expected, rel=1e-5, abs=1e-6)] * ranks


def test_weights_on_some_ranks_or_in_some_batches_only_are_refused() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare_model(ctx, one_weight())
        weight = 1.0 if ctx.rank else None
        state = af.backward(ctx, model.weight.sum(), af.init_scaler(ctx), weight=weight)
        with pytest.raises(ValueError, match="earlier losses in this window have"):
            af.backward(ctx, model.weight.sum(), state, weight=None if ctx.rank else 1.0)
        af.optimizer_step(ctx, sgd(model), state)
        af.wait_for_everyone(ctx)

    with pytest.raises(MismatchError):
        run_ranks(run, 2)


def test_gradients_that_are_not_finite_are_named_on_every_rank_and_change_nothing() -> None:
    def run(ctx: Context) -> tuple[tuple[str, ...], ...]:
        model = af.prepare_model(ctx, nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        before = values(model)
        model(torch.ones(1, 1)).backward()
        if ctx.rank == 1:
            model[1].bias.grad = torch.full((1,), float("nan"))
        with pytest.raises(NonFiniteGradientError, match=r"parameters\['1.bias'\]  on rank 1") as caught:
            af.optimizer_step(ctx, sgd(model), af.init_scaler(ctx))
        assert all(map(torch.equal, before, model.parameters()))
        return caught.value.by_rank

    found = run_ranks(run, 2, guard=Guard(check_gradients=True), mixed_precision="bf16")
    assert found == [((), ("parameters['1.bias']",))] * 2


@pytest.mark.parametrize("is_fused", [False, True])
def test_steps_of_gradients_that_are_not_finite_can_be_skipped(is_fused: bool) -> None:
    guard = Guard(check_gradients="skip")
    accelerator = af.Accelerator(cpu=True, guard=guard, mixed_precision="bf16")
    made = one_weight(1.0)
    optimizer = torch.optim.SGD(made.parameters(), 1.0, fused=is_fused)
    model, stepped, moved = accelerator.prepare(made, optimizer, schedules.StepLR(optimizer, 1))
    for factor, left in ((float("nan"), 1.0), (1.0, 0.0)):
        accelerator.backward(model.weight.sum() * factor)
        stepped.step()
        moved.step()
        stepped.zero_grad()
        assert stepped.step_was_skipped is (left == 1.0)
        assert (weight_of(made), moved.last_epoch) == (left, 1 - left)
    with pytest.raises(NotAvailableError, match="can't be skipped"):
        stepped.step(lambda: 0.0)
    with pytest.raises(ValueError, match="pass the scaler state"):
        af.scheduler_step(Context().replace(guard=guard), schedules.StepLR(optimizer, 1))


@pytest.mark.parametrize("unscaled", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_several_optimizers_step_together_or_none_does(unscaled: tuple[int, ...], bad: int | None) -> None:
    ctx = Context().replace(mixed_precision="fp16")
    models = [one_weight(1.0), one_weight(1.0)]
    optimizers = [sgd(one) for one in models]
    factors = [float("inf") if index == bad else 1.0 for index in range(2)]
    loss = sum((one.weight.sum() * by for one, by in zip(models, factors, strict=True)), torch.zeros(()))
    state = af.backward(ctx, loss, af.init_scaler(ctx))
    for index in unscaled:  # the others are by the step
        state = af.unscale_gradients(ctx, optimizers[index], state)
    state = af.optimizer_step(ctx, optimizers, state)
    assert [weight_of(one) for one in models] == ([0.0, 0.0] if bad is None else [1.0, 1.0])
    assert [one.weight.grad for one in models] == [None, None]
    assert int(state.num_skipped) == (bad is not None)


def test_a_metric_is_the_mean_of_all_ranks_so_that_their_rates_stay_equal() -> None:
    def run(ctx: Context) -> list[float]:
        optimizer = sgd(one_weight())
        optimizer, scheduler = af.prepare(
            ctx, optimizer, schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        )
        rates: list[float] = []
        for metric in ((4.0, 2.0), (1.0, 3.0), (5.0, 5.0)):  # means 3, 2 and 5
            af.scheduler_step(ctx, scheduler, metric=torch.tensor(metric[ctx.rank]))
            rates += map(float, scheduler.get_last_lr())
        return rates

    assert run_ranks(run, 2) == [[1.0, 1.0, 0.5]] * 2
    with pytest.raises(TypeError, match="ReduceLROnPlateau needs metric="):
        af.scheduler_step(Context(), schedules.ReduceLROnPlateau(sgd(one_weight())))
    with pytest.raises(TypeError, match="StepLR takes no metric"):
        af.scheduler_step(Context(), schedules.StepLR(sgd(one_weight()), 1), metric=1.0)


def test_parameters_that_drift_apart_are_found_at_the_asked_step() -> None:
    def train(ctx: Context) -> tuple[Any, ...]:
        model = af.prepare_model(ctx, filled(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))))
        optimizer = sgd(model, 0.1)
        for step in range(1, 5):
            model(torch.ones(1, 1)).backward()
            bias = cast("nn.Linear", model[1]).bias
            if ctx.rank == 1 and step == 3:
                cast("torch.Tensor", bias.grad).add_(1e-5)
            try:
                af.optimizer_step(ctx, optimizer, af.init_scaler(ctx))
            except ReplicaDriftError as error:
                return step, [(row.rank, row.path) for row in error.rows]
        return ()

    assert (
        run_ranks(train, 2, guard=Guard(check_replicas_every=2)) == [(4, [(1, "parameters['1.bias']")])] * 2
    )
    assert run_ranks(train, 2) == [()] * 2


def test_a_model_that_nobody_averages_is_refused_where_there_are_several_ranks() -> None:
    def run(ctx: Context) -> None:
        ((_, micro),) = af.microbatches(ctx, [0])
        with (
            pytest.raises(ConfigurationError, match="model 1, a Linear, was not prepared"),
            af.accumulate(ctx, micro, af.prepare(ctx, one_weight()), one_weight()),
        ):
            raise AssertionError("went in")
        with pytest.raises(ConfigurationError, match="model 0, a Linear, was not prepared"):
            af.forward_backward(ctx, one_weight(), lambda *_: torch.ones(()), 0, af.init_scaler(ctx), micro)
        frozen = one_weight().requires_grad_(False)
        with af.accumulate(ctx, micro, af.prepare_model(ctx, frozen)):
            pass

    run_ranks(run, 2)
    alone = Context()
    ((_, micro),) = af.microbatches(alone, [0])
    with af.accumulate(alone, micro, one_weight()):
        pass


@pytest.mark.parametrize("world", [1, 2])
def test_a_batch_that_closes_a_window_may_be_left_out(world: int) -> None:
    def run(ctx: Context, is_zero: bool) -> list[float]:
        model = af.prepare(ctx, one_weight())
        optimizer, scaler, found = sgd(model), af.init_scaler(ctx), list[float]()
        batches = [torch.full((1, 1), ctx.rank + float(index)) for index in range(4)]
        for batch, micro in af.microbatches(ctx, batches):
            if micro.index == 1 and not is_zero:
                continue
            with af.accumulate(ctx, micro, model):
                loss = model(batch).sum()
                scaler = af.backward(ctx, 0 * loss if micro.index == 1 else loss, scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                found.append(weight_of(model))
        return found

    mean = (world - 1) / 2  # over the ranks; of batches 0, and 2 and 3
    both = run_ranks(lambda ctx: (run(ctx, False), run(ctx, True)), world, gradient_accumulation_steps=2)
    assert both == [([-(3 * mean + 5) / 2], [-mean / 2, -(3 * mean + 5) / 2])] * world


@pytest.mark.parametrize(("world", "prepared"), [(1, False), (1, True), (2, True)])
def test_a_step_inside_an_open_window_is_refused_on_every_world(world: int, prepared: bool) -> None:
    def run(ctx: Context) -> float:
        model = af.prepare(ctx, one_weight()) if prepared else one_weight()
        optimizer, scaler = sgd(model), af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, [torch.full((1, 1), ctx.rank + 1.0)] * 2):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model(batch).sum(), scaler, micro)
            for use in (af.optimizer_step, af.unscale_gradients):
                if not micro.sync:
                    with pytest.raises(ValueError, match=r"window is still open.*if micro\.sync:`.*left out"):
                        use(ctx, optimizer, scaler)
        af.optimizer_step(ctx, optimizer, scaler)
        return weight_of(model)

    expected = -sum(range(1, world + 1)) / world
    assert run_ranks(run, world, gradient_accumulation_steps=2) == [expected] * world


def test_what_the_one_call_cannot_take_is_refused_before_anything_is_changed() -> None:
    model = one_weight(1.0)
    optimizer = sgd(model)
    state = af.backward(Context(), model.weight.sum(), af.init_scaler(Context()))
    with pytest.raises(ValueError, match=r"optimizer_step: max_norm must be positive, got 0\.0"):
        af.optimizer_step(Context(), optimizer, state, max_norm=0.0)
    with pytest.raises(TypeError, match="ReduceLROnPlateau needs a metric"):
        af.optimizer_step(Context(), optimizer, state, scheduler=schedules.ReduceLROnPlateau(optimizer))
    assert weight_of(model) == 1
    af.optimizer_step(Context(), optimizer, state)
