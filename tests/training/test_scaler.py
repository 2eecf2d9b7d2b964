# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context
from accelfn.config import GradScalerKwargs
from accelfn.testing import run_ranks
from accelfn.training import StepState, init_scaler, step_was_skipped
from tests.training.models import one_weight, sgd


def fp16(**options: float) -> Context:
    handler = GradScalerKwargs(**options)  # pyright: ignore[reportArgumentType]
    return Context().replace(mixed_precision="fp16", kwargs_handlers=[handler])


def parameter_with(grad: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), grad)
    return parameter


def optimizer_over(parameter: torch.nn.Parameter, kind: str = "sgd") -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD([parameter], lr=0.5)
    return torch.optim.AdamW([parameter], lr=0.5, fused=kind == "fused")


@given(
    st.lists(st.sampled_from([0.25, 0.25, math.inf, math.nan]), min_size=1, max_size=25),
    st.integers(0, 16),
    st.sampled_from([1.5, 2.0, 4.0]),
    st.sampled_from([0.25, 0.5, 0.75]),
    st.integers(1, 4),
)
@pytest.mark.filterwarnings("ignore:Detected call of")  # of a schedule where the first steps are skipped
def test_scale_steps_and_schedule_go_as_with_torchs_own(
    factors: list[float], exponent: int, growth: float, backoff: float, interval: int
) -> None:
    options: Any = {
        "init_scale": 2.0**exponent,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }
    ctx, torchs = fp16(**options), torch.amp.GradScaler("cpu", **options)
    state = init_scaler(ctx)
    ours, theirs = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer, other = optimizer_over(ours), optimizer_over(theirs)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    steps = 0
    for factor in factors:
        state = af.backward(ctx, (ours * factor).sum(), state)
        torchs.scale((theirs * factor).sum()).backward()
        state = af.optimizer_step(ctx, optimizer, state)
        torchs.step(other)
        torchs.update()
        other.zero_grad()
        af.scheduler_step(ctx, scheduler, state)
        steps += math.isfinite(factor)
        other.param_groups[0]["lr"] = 0.5 * 0.9**steps
        assert float(state.scale) == torchs.get_scale()
        assert step_was_skipped(ctx, state) != math.isfinite(factor)
        assert scheduler.last_epoch == steps  # a skipped step moves no schedule
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0)
    assert int(state.num_skipped) == len(factors) - steps


@pytest.mark.parametrize("kind", ["sgd", "adamw", "fused"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_overflow_on_one_rank_skips_the_step_on_all(kind: str, world: int) -> None:
    def run(ctx: Context) -> tuple[list[float], list[float], int]:
        parameter = parameter_with(0.0)
        model = af.prepare_model(ctx, torch.nn.ParameterList([parameter]))
        parameter.sum().backward()
        parameter.grad = torch.full((3,), float("nan") if ctx.rank == world - 1 else 65536.0)
        optimizer = optimizer_over(parameter, kind)
        state = af.optimizer_step(ctx, optimizer, init_scaler(ctx))
        assert step_was_skipped(ctx, state)
        assert parameter.grad is None
        after_first = parameter.tolist()
        parameter.grad = torch.full((3,), 32768.0)
        state = af.optimizer_step(ctx, optimizer, state)
        assert not step_was_skipped(ctx, state)
        assert all(one is parameter for one in model.parameters())  # the model must stay
        return after_first, parameter.tolist(), int(state.num_skipped)

    for first, second, skipped in run_ranks(run, world, mixed_precision="fp16"):
        assert first == [1.0] * 3
        assert second != first
        assert skipped == 1


def test_float16_gradients_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    parameter.grad = torch.ones_like(parameter)
    with pytest.raises(ValueError, match=r"shape \(2,\) is float16"):
        af.unscale_gradients(fp16(), optimizer_over(parameter), init_scaler(fp16()))


def test_the_state_is_a_tree_of_tensors_and_pickled_and_copied_as_it_is() -> None:
    state = init_scaler(fp16())
    for twin in (af.send_to_device(state, "cpu"), copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert twin == state
        assert type(twin) is StepState


@pytest.mark.parametrize("weighted", [False, True])
def test_optimizers_that_are_unscaled_one_after_the_other_are_each_divided_once(weighted: bool) -> None:
    ctx = Context() if weighted else fp16(init_scale=8.0)
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizers = [torch.optim.SGD([one], lr=0.5) for one in parameters]
    loss = (parameters[0] + parameters[1]).sum() * (8 if weighted else 1)
    state = af.backward(ctx, loss, init_scaler(ctx), weight=8 if weighted else None)
    for optimizer, parameter in zip(optimizers, parameters, strict=True):
        state = af.unscale_gradients(ctx, optimizer, state)
        state = af.unscale_gradients(ctx, optimizer, state)
        assert parameter.grad == 1
    with pytest.raises(ValueError, match="unscaled already"):
        af.backward(ctx, loss, state)
    state = af.optimizer_step(ctx, optimizers, state)
    assert [float(one.detach()) for one in parameters] == [0.5, 0.5]
    assert (state.unscaled, state.weight) == ((), None)


def test_sparse_gradients_are_unscaled_too() -> None:
    ctx = fp16(init_scale=8.0)
    table = torch.nn.Embedding(3, 1, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    state = af.backward(ctx, table(torch.tensor([1, 1])).sum(), init_scaler(ctx))
    af.optimizer_step(ctx, optimizer, state)
    assert table.weight.tolist() == [[0.0], [-2.0], [0.0]]


def used_once(ctx: Context, optimizer: torch.optim.Optimizer) -> list[Callable[[StepState], object]]:
    """What takes a state."""
    parameter: torch.Tensor = optimizer.param_groups[0]["params"][0]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return [
        lambda state: af.backward(ctx, parameter.sum(), state),
        lambda state: af.unscale_gradients(ctx, optimizer, state),
        lambda state: af.optimizer_step(ctx, optimizer, state),
        lambda state: af.clip_grad_norm_(ctx, parameter, 1.0, scaler_state=state),
        lambda state: af.clip_grad_value_(ctx, parameter, 1.0, scaler_state=state),
        lambda state: af.scheduler_step(ctx, scheduler, state),
    ]


@pytest.mark.parametrize("mode", ["no", "fp16"])
def test_a_state_that_was_superseded_is_refused_wherever_it_is_used_next(mode: str) -> None:
    ctx = Context().replace(mixed_precision=mode)
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = optimizer_over(parameter)
    uses = used_once(ctx, optimizer)
    for supersedes in uses[:3]:
        before = init_scaler(ctx)
        newest = supersedes(before)
        assert isinstance(newest, StepState)
        for use in uses:
            with pytest.raises(ValueError, match=r"superseded: .*\n.*\n.*\nWrite `scaler = af.backward"):
                use(before)
        assert before.superseded_by is not None
        # What is made of it is another state; and only what has succeeded supersedes.
        for twin in (before._replace(), optree.tree_map(torch.clone, cast("Any", before))):
            assert isinstance(twin, StepState)
            assert twin.superseded_by is None
        with pytest.raises(ValueError, match="one number"):
            af.backward(ctx, parameter.expand(2), newest)
        assert newest.superseded_by is None
        parameter.grad = None


@pytest.mark.parametrize("function", ["optimizer_step", "unscale_gradients"])
def test_a_weight_goes_with_the_step_of_all_optimizers(function: str) -> None:
    ctx, models = Context(), [one_weight(1.0), one_weight(1.0)]
    first, second = map(sgd, models)
    loss = models[1](models[0](torch.ones(4, 1))).sum()
    scaler = af.backward(ctx, loss, af.init_scaler(ctx), weight=4)
    scaler = af.optimizer_step(ctx, first, scaler)
    with pytest.raises(ValueError, match=rf"^{function}: the latest losses had weights.*\[first, second\]"):
        getattr(af, function)(ctx, second, scaler)
    second.zero_grad()
    scaler = af.backward(ctx, models[1](torch.ones(4, 1)).sum(), scaler, weight=4)
    af.optimizer_step(ctx, second, scaler)


def test_complex_gradients_of_scaled_losses_are_divided() -> None:
    ctx = fp16(init_scale=8.0)
    parameter = torch.nn.Parameter(torch.tensor([1 + 2j]))
    for gradient, is_skipped in (
        (torch.tensor([4 - 8j]), False),
        (torch.tensor([complex(1, math.inf)]), True),
    ):
        parameter.grad = gradient
        scaler = af.unscale_gradients(ctx, torch.optim.SGD([parameter]), init_scaler(ctx))
        assert bool(scaler.found_inf) == is_skipped
    parameter.grad = torch.tensor([4 - 8j]).conj()
    af.unscale_gradients(ctx, torch.optim.SGD([parameter]), init_scaler(ctx))
    assert parameter.grad.tolist() == [0.5 + 1j]


def test_a_device_without_float64_unscales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelfn.training.scaler._WITHOUT_FLOAT64", frozenset({"cpu"}))
    monkeypatch.setattr(torch.Tensor, "double", None)
    ctx = af.Context().replace(mixed_precision="fp16")
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 8.0)
    scaler = af.init_scaler(ctx)._replace(scale=torch.tensor(4.0))
    af.unscale_gradients(ctx, torch.optim.SGD([parameter]), scaler)
    assert parameter.grad.tolist() == [2.0, 2.0]


def test_gradients_in_float64_are_divided_by_their_weight_in_float64() -> None:
    model, ctx = one_weight().double(), Context()
    scaler = af.backward(ctx, model.weight.sum(), init_scaler(ctx), weight=7.0)
    af.unscale_gradients(ctx, sgd(model), scaler)
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.item(), 1 / 7, rtol=1e-15, atol=0)
