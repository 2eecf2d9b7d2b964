from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context, GradientAccumulationPlugin, GradScalerKwargs, Guard, init_scaler, optimizer_step
from accelfn.errors import ConfigurationError, MismatchError, NonFiniteGradientError, ReplicaDriftError
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
            scaler = af.backward(ctx, model(batch).sum(), scaler, micro)
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
                scaler = af.backward(ctx, model(batch).sum(), scaler, micro)
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
        scaler = af.backward(ctx, model(torch.ones(1, 1)).sum() * value, scaler)
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
    ctx, state = Context(), af.init_scaler(Context())
    loss = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match="got float"):
        af.backward(ctx, cast("Any", 1.0), state)
    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(2,\)"):
        af.backward(ctx, loss, state)
    with pytest.raises(ValueError, match="depends on no parameter"):
        af.backward(ctx, loss.sum().detach(), state)
    with pytest.raises(ValueError, match="weight must be at least 0, got -1"):
        af.backward(ctx, loss.sum(), state, weight=-1)
    with pytest.raises(ValueError, match=r"weight must be one number, got a tensor of shape \(3,\)"):
        af.backward(ctx, loss.sum(), state, weight=torch.ones(3))
    assert loss.grad is None
    state = af.backward(ctx, loss.sum(), state, weight=2)
    with pytest.raises(ValueError, match="losses before in this window have a weight"):
        af.backward(ctx, loss.sum(), state)


def test_options_of_torchs_backward_are_passed_on() -> None:
    weight = torch.ones((), requires_grad=True)
    loss = weight * 2
    state = af.backward(Context(), loss, af.init_scaler(Context()), retain_graph=True)
    af.backward(Context(), loss, state)
    assert weight.grad == 4


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
    mode: str, drawn: tuple[int, list[list[list[float]]]], clip: bool
) -> None:
    ranks, numbers = drawn
    all_numbers = [number for rank in numbers for batch in rank for number in batch]
    # As one rank with all of it in one batch: the mean over every number there is.
    expected = sum(all_numbers) / len(all_numbers) if all_numbers else 0.0
    if clip:
        expected = max(-1.0, min(1.0, expected))

    def run(ctx: Context) -> float:
        model = af.prepare(ctx, one_weight())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        state = af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, numbers[ctx.rank]):
            with af.accumulate(ctx, micro, model):
                loss = model(torch.tensor(batch).view(-1, 1)).sum()
                weight = float(len(batch)) if ctx.rank % 2 else torch.tensor(len(batch))
                state = af.backward(ctx, loss, state, micro, weight=weight)
        if clip:
            state = af.unscale_gradients(ctx, optimizer, state)
            af.clip_grad_norm_(ctx, model.parameters(), 1.0, scaler_state=state)
        state = af.optimizer_step(ctx, optimizer, state)
        assert state.weight is None
        assert not state.is_unscaled
        return -float(model.weight.detach())

    steps = len(numbers[0])
    # A scale that doesn't overflow: a skipped step would tell nothing.
    handlers = [GradScalerKwargs(init_scale=8.0)]
    found = run_ranks(
        run, ranks, mixed_precision=mode, gradient_accumulation_steps=steps, kwargs_handlers=handlers
    )
    assert found == [pytest.approx(expected, rel=1e-5, abs=1e-6)] * ranks


def test_weights_on_some_ranks_only_are_a_mismatch() -> None:
    def run(ctx: Context) -> None:
        parameter = nn.Parameter(torch.ones(1))
        af.prepare_model(ctx, nn.ParameterList([parameter]))
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        weight = 1.0 if ctx.rank else None
        state = af.backward(ctx, parameter.sum(), af.init_scaler(ctx), weight=weight)
        af.optimizer_step(ctx, optimizer, state)
        af.wait_for_everyone(ctx)

    with pytest.raises(MismatchError):
        run_ranks(run, 2)


def test_gradients_that_are_not_finite_are_named_on_every_rank_and_change_nothing() -> None:
    def run(ctx: Context) -> tuple[tuple[str, ...], ...]:
        model = af.prepare_model(ctx, nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        optimizer = torch.optim.SGD(model.named_parameters(), lr=1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model(torch.ones(1, 1)).backward()
        if ctx.rank == 1:
            model[1].bias.grad = torch.full((1,), float("nan"))
        with pytest.raises(NonFiniteGradientError, match=r"parameters\['1.bias'\]  on rank 1") as caught:
            af.optimizer_step(ctx, optimizer, af.init_scaler(ctx))
        assert all(map(torch.equal, before, model.parameters()))
        return caught.value.by_rank

    found = run_ranks(run, 2, guard=Guard(check_gradients=True), mixed_precision="bf16")
    assert found == [((), ("parameters['1.bias']",))] * 2


def test_several_optimizers_step_together_or_none_does() -> None:
    for bad in (False, True):
        ctx = Context().replace(mixed_precision="fp16")
        first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        optimizers = [torch.optim.SGD([one], lr=1.0) for one in (first, second)]
        state = af.init_scaler(ctx)
        state = af.backward(ctx, first.sum() + second.sum() * (float("inf") if bad else 1.0), state)
        state = af.optimizer_step(ctx, optimizers, state)
        assert (float(first.detach()), float(second.detach())) == ((1.0, 1.0) if bad else (0.0, 0.0))
        assert first.grad is second.grad is None
        assert int(state.num_skipped) == bad


def test_a_metric_is_the_mean_of_all_ranks_so_that_their_rates_stay_equal() -> None:
    def run(ctx: Context) -> list[float]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        optimizer, scheduler = af.prepare(ctx, optimizer, scheduler)
        rates: list[float] = []
        for metric in ((4.0, 2.0), (1.0, 3.0), (5.0, 5.0)):  # means 3, 2 and 5
            af.scheduler_step(ctx, scheduler, metric=torch.tensor(metric[ctx.rank]))
            rates += map(float, scheduler.get_last_lr())
        return rates

    assert run_ranks(run, 2) == [[1.0, 1.0, 0.5]] * 2


def test_a_metric_is_for_schedules_that_watch_one() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(TypeError, match="ReduceLROnPlateau needs metric="):
        af.scheduler_step(Context(), torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(TypeError, match="StepLR takes no metric"):
        af.scheduler_step(Context(), torch.optim.lr_scheduler.StepLR(optimizer, 1), metric=1.0)


def falling(step: int) -> float:
    return 1 / (1 + step)


@pytest.mark.parametrize("kind", ["LambdaLR", "SequentialLR", "OneCycleLR"])
def test_every_kind_of_schedule_moves_as_it_does_without_us(kind: str) -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        schedules: Any = torch.optim.lr_scheduler
        if kind == "LambdaLR":
            return schedules.LambdaLR(optimizer, falling)
        if kind == "OneCycleLR":
            return schedules.OneCycleLR(optimizer, 1.0, total_steps=6)
        parts = [schedules.ConstantLR(optimizer, 0.5, 2), schedules.ExponentialLR(optimizer, 0.5)]
        return schedules.SequentialLR(optimizer, parts, [3])

    def rates(ctx: Context | None) -> list[float]:
        optimizer: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
        scheduler = make(optimizer)
        if ctx is not None:
            optimizer, scheduler = af.prepare(ctx, optimizer, scheduler)
        found: list[float] = []
        for _ in range(5):
            optimizer.step()
            if ctx is None:
                scheduler.step()
            else:
                af.scheduler_step(ctx, scheduler)
            found += scheduler.get_last_lr()
        return found

    assert run_ranks(rates, 2) == [rates(None)] * 2


def test_parameters_that_drift_apart_are_found_at_the_asked_step() -> None:
    def train(ctx: Context) -> list[int]:
        parameter = nn.Parameter(torch.ones(3))
        af.prepare_model(ctx, nn.ParameterList([parameter]))
        optimizer = torch.optim.SGD([parameter], 0.1)
        for step in range(1, 5):
            cast("Any", parameter.sum()).backward()
            assert parameter.grad is not None
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
        model = af.prepare_model(ctx, nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        model(torch.ones(1, 1)).backward()
        if ctx.rank == 1:
            nn.init.zeros_(cast("nn.Linear", model[1]).bias)
        optimizer_step(ctx, torch.optim.SGD(taken(model), 0.1), init_scaler(ctx))

    with pytest.raises(ReplicaDriftError) as caught:
        run_ranks(train, 2, guard=Guard(check_replicas_every=1))
    assert [row.path for row in caught.value.rows] == [path]


def test_a_model_that_nobody_averages_is_refused_where_there_are_several_ranks() -> None:
    def run(ctx: Context) -> None:
        ((_, micro),) = af.microbatches(ctx, [0])
        with (
            pytest.raises(ConfigurationError, match="model 1, a Linear, was not prepared"),
            af.accumulate(ctx, micro, af.prepare(ctx, one_weight()), one_weight()),
        ):
            raise AssertionError("went in")
        frozen = one_weight().requires_grad_(False)
        with af.accumulate(ctx, micro, af.prepare_model(ctx, frozen)):
            pass

    run_ranks(run, 2)
    alone = Context()
    ((_, micro),) = af.microbatches(alone, [0])
    with af.accumulate(alone, micro, one_weight()):
        pass


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("prepared", [False, True])
def test_a_step_inside_an_open_window_is_refused_on_every_world(world: int, prepared: bool) -> None:
    def run(ctx: Context) -> float:
        model = one_weight()
        if prepared or world > 1:
            model = af.prepare(ctx, model)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, [torch.full((1, 1), ctx.rank + 1.0)] * 2):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model(batch).sum(), scaler, micro)
            for use in (af.optimizer_step, af.unscale_gradients):
                if not micro.sync:
                    with pytest.raises(ValueError, match=r"window is still open.*if micro\.sync:`"):
                        use(ctx, optimizer, scaler)
        af.optimizer_step(ctx, optimizer, scaler)
        return float(model.weight.detach())

    expected = -sum(range(1, world + 1)) / world
    assert run_ranks(run, world, gradient_accumulation_steps=2) == [expected] * world


@pytest.mark.parametrize("mode", ["no", "fp16"])
@pytest.mark.parametrize("world", [1, 2])
def test_one_call_unscales_clips_steps_and_moves_the_schedule(mode: str, world: int) -> None:
    def run(ctx: Context, in_one: bool) -> tuple[list[float], int, float]:
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizers: list[Any] = [torch.optim.SGD([one], lr=1.0) for one in model.parameters()]
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in optimizers]
        model = af.prepare(ctx, model)
        scaler = af.init_scaler(ctx)
        for factor in (3.0, float("inf") if mode == "fp16" else 2.0, 5.0):
            loss = model(torch.ones(1, 2)).sum() * factor
            scaler = af.backward(ctx, loss, scaler, weight=2)
            if in_one:
                scaler = af.optimizer_step(ctx, optimizers, scaler, max_norm=0.5, scheduler=schedulers)
                continue
            scaler = af.unscale_gradients(ctx, optimizers, scaler)
            af.clip_grad_norm_(ctx, model.parameters(), 0.5, scaler_state=scaler)
            scaler = af.optimizer_step(ctx, optimizers, scaler)
            for one in schedulers:
                af.scheduler_step(ctx, one, scaler)
        rates = [one.last_epoch for one in schedulers]
        return [float(one.sum().detach()) for one in model.parameters()], rates[0], float(scaler.scale)

    handlers = [GradScalerKwargs(init_scale=8.0)]
    options: dict[str, Any] = {"mixed_precision": mode, "kwargs_handlers": handlers}
    found = run_ranks(lambda ctx: run(ctx, True), world, **options)
    assert found == run_ranks(lambda ctx: run(ctx, False), world, **options)
    assert found[0][1] == (2 if mode == "fp16" else 3)


def test_what_the_one_call_cannot_take_is_refused_before_anything_is_changed() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    state = af.backward(Context(), parameter.sum(), af.init_scaler(Context()))
    with pytest.raises(ValueError, match=r"optimizer_step: max_norm must be positive, got 0\.0"):
        af.optimizer_step(Context(), optimizer, state, max_norm=0.0)
    plateau: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(TypeError, match="ReduceLROnPlateau moves by what you measure"):
        af.optimizer_step(Context(), optimizer, state, scheduler=plateau)
    assert parameter.item() == 1
    af.optimizer_step(Context(), optimizer, state)


def test_sparse_gradients_are_looked_at_too() -> None:
    ctx = Context().replace(guard=Guard(check_gradients=True))
    table = nn.Embedding(3, 1, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    state = af.backward(ctx, table(torch.tensor([1])).sum() / 0, af.init_scaler(ctx))
    with pytest.raises(NonFiniteGradientError, match="param_groups"):
        af.optimizer_step(ctx, optimizer, state)
