# torch leaves backward, tolist and schedulers partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR

import accelfn as af
from accelfn import Context, GradScalerKwargs, Guard, Loss, TrainState
from accelfn.errors import ConfigurationError, MismatchError, NonFiniteGradientError, RemoteRankError
from accelfn.testing import Where, run_ranks
from tests.training.optimizers import Sgd

Rows = dict[str, torch.Tensor]


def make_model(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def make_rows(count: int, seed: int) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    # Of each row, how much it counts; often nothing.
    weight = torch.randint(-2, 3, (count,), generator=generator).clamp(min=0).float()
    return {"x": torch.randn(count, 3, generator=generator), "weight": weight}


def mean_loss(model: nn.Module, rows: Rows) -> torch.Tensor:
    return model(rows["x"]).square().mean()


def mean_with_aux(model: nn.Module, rows: Rows) -> Loss:
    loss = mean_loss(model, rows)
    return Loss(loss, aux={"twice": 2 * loss, "x": rows["x"].mean(dim=0)})


def sum_loss(model: nn.Module, rows: Rows) -> Loss:
    total = (model(rows["x"]).square().squeeze(1) * rows["weight"]).sum()
    return Loss(total, rows["weight"].sum(), {"twice": 2 * total})


def values(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(
    ctx: Context, loss_fn: Callable[..., Any], rows: Rows, seed: int, max_norm: float | None, steps: int = 2
) -> tuple[Any, Any, Any]:
    model = af.prepare_model(ctx, make_model(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = af.make_train_step(ctx, loss_fn, optimizer, model=model, max_norm=max_norm)
    state = af.init_train_state(ctx, optimizer)
    count = len(rows["x"]) // ctx.num_processes
    own = af.slice_tensors(rows, slice(ctx.rank * count, (ctx.rank + 1) * count))
    told: list[Any] = []
    for _ in range(steps):
        state, metrics = step(state, own)
        told.append((metrics.loss, metrics.grad_norm, metrics.aux))
    assert state.num_steps == steps
    return values(model), told, state


@pytest.mark.parametrize("loss_fn", [mean_loss, mean_with_aux, sum_loss])
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.integers(0, 999))
def test_ranks_and_windows_are_one_rank_with_one_batch(
    loss_fn: Callable[..., Any], ranks: int, window: int, count: int, clip: bool, seed: int
) -> None:
    rows, max_norm = make_rows(ranks * count, seed), 0.5 if clip else None
    expected = train(Context(), loss_fn, rows, seed, max_norm)
    found = run_ranks(
        lambda ctx: train(ctx, loss_fn, rows, seed, max_norm), ranks, gradient_accumulation_steps=window
    )
    for one in found:
        torch.testing.assert_close(one[0], expected[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one[1], expected[1], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(one[1], found[0][1], rtol=0, atol=0)  # metrics are equal on all ranks


@pytest.mark.parametrize("on", ["gloo", "processes"])
def test_the_same_on_real_groups(on: Where) -> None:
    rows = make_rows(12, 3)
    expected = train(Context(), sum_loss, rows, 3, 0.5)
    for one in run_ranks(
        lambda ctx: train(ctx, sum_loss, rows, 3, 0.5), 2, on, gradient_accumulation_steps=3
    ):
        torch.testing.assert_close(one[:2], expected[:2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("loss_fn", [mean_loss, sum_loss])
def test_it_has_the_bits_of_a_loop_written_by_hand(loss_fn: Callable[..., Any], mode: str) -> None:
    rows = make_rows(6, 5)

    def by_hand(ctx: Context) -> list[torch.Tensor]:
        model = af.prepare_model(ctx, make_model(5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = StepLR(optimizer, 1, 0.5)
        scaler = af.init_scaler(ctx)
        batches = [af.slice_tensors(rows, slice(start, start + 2)) for start in (0, 2, 4)] * 3
        for batch, micro in af.microbatches(ctx, batches):
            with af.accumulate(ctx, micro, model):
                loss = loss_fn(model, batch)
                weight = loss.weight if isinstance(loss, Loss) else None
                scaler = af.backward(
                    ctx, loss.value if isinstance(loss, Loss) else loss, scaler, micro, weight
                )
            if micro.sync:
                scaler = af.unscale_gradients(ctx, optimizer, scaler)
                af.clip_grad_norm_(ctx, model.parameters(), 0.5, scaler_state=scaler)
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                af.scheduler_step(ctx, scheduler, scaler)
        return values(model)

    def by_step(ctx: Context) -> list[torch.Tensor]:
        model = af.prepare_model(ctx, make_model(5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = af.make_train_step(
            ctx, loss_fn, optimizer, model=model, scheduler=StepLR(optimizer, 1, 0.5), max_norm=0.5
        )
        state = af.init_train_state(ctx, optimizer)
        for _ in range(3):
            state, _ = step(state, rows)
        return values(model)

    handlers = [GradScalerKwargs(init_scale=8.0)]
    options: dict[str, Any] = {"mixed_precision": mode, "gradient_accumulation_steps": 3}
    if mode == "fp16":
        options["kwargs_handlers"] = handlers
    hand, step = run_ranks(by_hand, 2, **options), run_ranks(by_step, 2, **options)
    torch.testing.assert_close(step, hand, rtol=0, atol=0)


def test_a_step_that_overflows_on_one_rank_changes_nothing_on_any() -> None:
    def run(ctx: Context) -> list[Any]:
        model = af.prepare_model(ctx, make_model(1))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 1, 0.5)
        step = af.make_train_step(
            ctx, lambda model, x: model(x).mean(), optimizer, model=model, scheduler=scheduler, max_norm=1.0
        )
        state = af.init_train_state(ctx, optimizer)
        seen: list[Any] = []
        for bad in (False, True, False):
            before = values(model), [dict(one) for one in optimizer.state.values()], scheduler.last_epoch
            state, metrics = step(state, torch.full((2, 3), float("inf") if bad and ctx.rank else 1.0))
            after = values(model), [dict(one) for one in optimizer.state.values()], scheduler.last_epoch
            assert bool(metrics.skipped) == bad
            if bad:
                torch.testing.assert_close(after, before, rtol=0, atol=0)
            else:
                assert after[2] == before[2] + 1
            seen.append((float(state.scaler.scale), int(state.scaler.num_skipped), int(state.num_steps)))
        return seen

    handlers = [GradScalerKwargs(init_scale=8.0)]
    expected = [(8.0, 0, 1), (4.0, 1, 2), (4.0, 1, 3)]
    assert run_ranks(run, 2, mixed_precision="fp16", kwargs_handlers=handlers) == [expected] * 2


def test_several_models_and_optimizers_step_together_and_foreign_gradients_are_dropped() -> None:
    ctx = Context()
    models = {"one": nn.Linear(1, 1, bias=False), "two": nn.Linear(1, 1, bias=False)}
    for model in models.values():
        nn.init.constant_(model.weight, 1.0)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models.values()]
    schedulers: list[LRScheduler] = [StepLR(one, 1, 0.5) for one in optimizers]
    step = af.make_train_step(
        ctx,
        lambda m, x: (m["one"](x) * 2 + m["two"](x)).mean(),
        optimizers,
        model=models,
        scheduler=schedulers,
    )
    models["one"](torch.full((1, 1), 100.0)).sum().backward()  # of another loss
    state, metrics = step(af.init_train_state(ctx, optimizers), torch.ones(2, 1))
    assert [float(model.weight.detach()) for model in models.values()] == [-1.0, 0.0]
    assert [one.get_last_lr() for one in schedulers] == [[0.5], [0.5]]
    assert metrics.loss == 3.0
    assert metrics.grad_norm is None
    assert state.num_steps == 1


def test_a_failed_step_leaves_nothing_to_the_next() -> None:
    def run(ctx: Context) -> tuple[str, list[torch.Tensor]]:
        model = af.prepare_model(ctx, make_model(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = af.make_train_step(ctx, mean_loss, optimizer, model=model)
        state = af.init_train_state(ctx, optimizer)
        rows, error = make_rows(4, 2), ""
        try:
            bad = {"x": torch.ones(4, 3), "y": torch.ones(3)} if ctx.rank else rows
            step(state, bad)
        except (ValueError, RemoteRankError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        step(state, rows)
        return error, values(model)

    (first, weights), (second, _) = run_ranks(run, 2, gradient_accumulation_steps=2)
    assert first.startswith("RemoteRankError: rank 1 failed in forward: ValueError: make_train_step")
    assert "batch['y'] has 3 rows" in second
    torch.testing.assert_close(weights, train(Context(), mean_loss, make_rows(4, 2), 2, None, steps=1)[0])


def test_a_model_whose_gradients_nobody_averages_is_refused() -> None:
    def run(ctx: Context) -> None:
        model = make_model(0)
        optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
        evaluated = af.prepare_model(ctx, make_model(0), evaluation_mode=True)
        other = torch.optim.SGD(evaluated.parameters(), lr=0.1)
        for one, by in ((model, optimizer), (evaluated, other)):
            with pytest.raises(ConfigurationError, match=r"nobody averages the gradient of param.* 2 ranks"):
                af.make_train_step(ctx, mean_loss, by, model=one)
        af.prepare_model(ctx, model)
        if ctx.world.group is not None:  # the module inside of DistributedDataParallel
            with pytest.raises(ConfigurationError, match=r"what prepare_model\(ctx, model\) gave back"):
                af.make_train_step(ctx, mean_loss, optimizer, model=model)

    run_ranks(run, 2)
    run_ranks(run, 2, "processes")


def test_what_doesnt_fit_together_is_refused() -> None:
    ctx, model = Context(), make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    def make(**changed: Any) -> None:
        arguments = {"loss_fn": mean_loss, "optimizer": optimizer, "model": model, **changed}
        cast("Any", af.make_train_step)(ctx, **arguments)

    for wrong in ("sgd", [], [optimizer, "sgd"], None):
        with pytest.raises(TypeError, match=r"must be one of torch\.optim, a sequence of them, or have init"):
            make(optimizer=wrong)
        with pytest.raises(TypeError, match=r"must be one of torch\.optim"):
            af.init_train_state(ctx, cast("Any", wrong))
    with pytest.raises(ConfigurationError, match="no parameter of model"):
        make(optimizer=other)
    with pytest.raises(TypeError, match=r"model\['a'\] is of type int"):
        make(model={"a": 3})
    with pytest.raises(TypeError, match="Pass model="):
        make(model=None)
    with pytest.raises(TypeError, match="loss_fn must be callable, got int"):
        make(loss_fn=3)
    with pytest.raises(TypeError, match="ReduceLROnPlateau moves by what you measure"):
        make(scheduler=ReduceLROnPlateau(optimizer))
    with pytest.raises(TypeError, match="takes torch's schedulers, got str"):
        make(scheduler=["linear"])
    with pytest.raises(ConfigurationError, match="an optimizer that doesn't step here"):
        make(scheduler=StepLR(other, 1))
    for norm in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="max_norm must be positive"):
            make(max_norm=norm)
    with pytest.raises(TypeError, match="got model= for an optimizer with init and update"):
        make(optimizer=Sgd(0.1))
    with pytest.raises(TypeError, match=r"got scheduler= .* follow a schedule"):
        make(optimizer=Sgd(0.1), model=None, scheduler=StepLR(optimizer, 1))
    with pytest.raises(TypeError, match="got params for a torch optimizer"):
        cast("Any", af.init_train_state)(ctx, optimizer, {"w": torch.ones(1)})
    with pytest.raises(TypeError, match="Pass params="):
        cast("Any", af.init_train_state)(ctx, Sgd(0.1))


def test_what_a_step_cant_take_is_refused_and_changes_nothing() -> None:
    ctx, model = Context(), make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, before = af.init_train_state(ctx, optimizer), values(model)

    def step_with(loss_fn: Callable[..., Any], given: Any = state) -> None:
        af.make_train_step(ctx, loss_fn, optimizer, model=model)(given, make_rows(2, 0))

    with pytest.raises(ValueError, match=r"one number, got a tensor of shape \(2, 1\)"):
        step_with(lambda model, rows: model(rows["x"]))
    with pytest.raises(ValueError, match="depends on no parameter"):
        step_with(lambda model, rows: mean_loss(model, rows).detach())
    with pytest.raises(TypeError, match="got tuple"):
        step_with(lambda model, rows: (mean_loss(model, rows), 1.0))
    pure = af.init_train_state(ctx, Sgd(0.1), {"w": torch.ones(1)})
    for other in (pure, state.scaler, None):
        with pytest.raises(TypeError, match=f"takes a TrainState, got {type(other).__name__}"):
            step_with(mean_loss, other)
    torch.testing.assert_close(values(model), before, rtol=0, atol=0)


def test_losses_with_weights_on_some_ranks_only_are_one_error() -> None:
    def run(ctx: Context) -> list[torch.Tensor]:
        model = af.prepare_model(ctx, make_model(0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = af.make_train_step(ctx, sum_loss if ctx.rank else mean_loss, optimizer, model=model)
        before = values(model)
        with pytest.raises(MismatchError):
            step(af.init_train_state(ctx, optimizer), make_rows(2, 0))
        torch.testing.assert_close(values(model), before, rtol=0, atol=0)
        return before

    run_ranks(run, 2)


def test_gradients_that_are_not_finite_are_named_where_that_is_asked() -> None:
    ctx = Context().replace(guard=Guard(check_gradients=True))
    model = make_model(0)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    step = af.make_train_step(ctx, lambda model, x: model(x).mean(), optimizer, model=model)
    with pytest.raises(NonFiniteGradientError, match=r"2\.weight"):
        step(af.init_train_state(ctx, optimizer), torch.full((1, 3), float("nan")))


def test_the_state_is_a_tree_of_tensors() -> None:
    state = af.init_train_state(Context(), torch.optim.SGD([torch.ones(1)], lr=0.1))
    assert isinstance(state, TrainState)
    assert state.num_steps.dtype == torch.int64
    torch.testing.assert_close(state.scaler, af.init_scaler(Context()))


@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_what_is_no_weight_shows_in_loss_and_parameters_of_both_kinds_of_step(weight: float) -> None:
    def loss_fn(w: torch.Tensor) -> Loss:
        return Loss(8 * w.sum(), torch.tensor(weight), {"twice": 16 * w.sum()})

    ctx, model = Context(), nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = af.make_train_step(ctx, lambda model, _: loss_fn(model.weight), optimizer, model=model)
    _, of_modules = step(af.init_train_state(ctx, optimizer), None)
    pure = af.make_train_step(ctx, lambda w, _: loss_fn(cast("torch.Tensor", w)), Sgd(1.0))
    state, of_trees = pure(af.init_train_state(ctx, Sgd(1.0), torch.ones(1, 1)), None)

    # Without any weight there is nothing to learn from.
    expected = torch.full((1, 1), float("nan") if weight else 1.0)
    torch.testing.assert_close([model.weight.detach(), state.params], [expected] * 2, equal_nan=True)
    loss = torch.tensor(float("nan") if weight else 0.0)
    for metrics in (of_modules, of_trees):
        torch.testing.assert_close([metrics.loss, metrics.aux["twice"]], [loss] * 2, equal_nan=True)


def test_a_step_whose_state_is_used_again_goes_on_from_it() -> None:
    ctx, model = Context(), make_model(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = af.make_train_step(ctx, mean_loss, optimizer, model=model, max_norm=1.0)
    first = af.init_train_state(ctx, optimizer)
    assert [int(step(first, make_rows(2, 0))[0].num_steps) for _ in range(2)] == [1, 1]
