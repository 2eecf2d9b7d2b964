# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""The training step through the shim: what it accepts, what it refuses, and what it counts."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Accelerator, Context, DataLoaderConfiguration
from accelfn.config import GradScalerKwargs
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.training.models import one_weight, sgd, weight_of


def ones(num: int) -> Any:
    return DataLoader(torch.ones(num, 1), batch_size=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:compat=")
@pytest.mark.parametrize("compat", [None, "accelerate"])
def test_both_passes_in_one_call_are_those_of_the_block(compat: Any) -> None:
    def train(ctx: Context, in_one_call: bool) -> list[float]:
        accelerator = Accelerator(context=ctx, compat=compat)
        model, optimizer, loader = accelerator.prepare(model := one_weight(0.5), sgd(model, 0.1), ones(6))
        weights: list[float] = []
        for x in loader:  # windows of two, and a last one of one
            if in_one_call:
                accelerator.forward_backward(model, lambda model, x: model(x).square().mean(), x)
            else:
                with accelerator.accumulate(model):
                    accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            weights.append(weight_of(model))
        return weights

    for one, other in run_ranks(
        lambda ctx: (train(ctx, True), train(ctx, False)), 2, gradient_accumulation_steps=2
    ):
        assert one == other


def test_weights_serve_optimizers_that_step_together_only() -> None:
    accelerator = Accelerator(context=Context())
    p, q = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = accelerator.prepare(torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0))
    accelerator.backward(p.sum() + q.sum(), weight=2)
    first.step()
    second.step()
    assert (float(p.detach()), float(q.detach())) == (0.5, 0.5)
    first.zero_grad()
    second.zero_grad()
    accelerator.backward(p.sum() + q.sum(), weight=2)
    first.step()
    with pytest.raises(ConfigurationError, match="another one still has gradients"):
        accelerator.backward(p.sum(), weight=1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.integers(1, 3))
def test_two_optimizers_follow_torchs_own_scaler_step_for_step(
    overflows: list[tuple[bool, bool]], interval: int
) -> None:
    options: Any = {"init_scale": 1024.0, "growth_interval": interval}
    ctx = Context().replace(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)])
    accelerator = Accelerator(context=ctx)
    theirs = torch.amp.GradScaler("cpu", **options)

    def make() -> tuple[list[nn.Parameter], list[torch.optim.Optimizer], list[Any]]:
        parameters = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam([one], lr=0.1) for one in parameters]
        return parameters, optimizers, [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in optimizers]

    own, plain = make(), make()
    optimizers = accelerator.prepare(*own[1])
    over_proxy = torch.optim.lr_scheduler.StepLR(optimizers[0], 1, 0.5)
    schedules = accelerator.prepare(over_proxy, own[2][1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a schedule of a skipped first step
        for pair in overflows:
            factors = [float("inf") if one else 0.5 for one in pair]
            accelerator.backward(sum((p * f).sum() for p, f in zip(own[0], factors, strict=True)))  # pyright: ignore[reportArgumentType]
            scaled: Any = theirs.scale(sum((p * f).sum() for p, f in zip(plain[0], factors, strict=True)))  # pyright: ignore[reportCallIssue, reportArgumentType]
            scaled.backward()
            assert [p.grad for p in own[0]] == [p.grad for p in plain[0]]  # scaled by one scale for both
            for index in range(2):
                optimizers[index].step()
                schedules[index].step()
                optimizers[index].zero_grad()
                theirs.step(plain[1][index])
                if not pair[index]:
                    plain[2][index].step()
            theirs.update()
            assert accelerator.optimizer_step_was_skipped == any(pair)
            for optimizer in plain[1]:
                optimizer.zero_grad()
            assert [one.step_was_skipped for one in optimizers] == list(pair)
            assert all(torch.equal(*both) for both in zip(own[0], plain[0], strict=True))
            assert [one.get_last_lr() for one in schedules] == [one.get_last_lr() for one in plain[2]]


def test_gradients_that_wait_in_a_window_follow_the_scale_that_another_optimizer_has_moved() -> None:
    def run(ctx: Context) -> tuple[float, float]:
        accelerator = Accelerator(context=ctx)
        models: Any = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        optimizers: Any = [torch.optim.SGD(one.parameters(), lr=0.25) for one in models]
        model, other, *optimizers = accelerator.prepare(*models, *optimizers)
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.ones(1, 1)).mean())
        accelerator.backward(other(torch.ones(1, 1)).mean())
        optimizers[1].step()
        accelerator.backward(model(torch.ones(1, 1)).mean())
        gradient = model.weight.grad.item()
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
        return gradient, model.weight.grad.item()

    handlers = [GradScalerKwargs(init_scale=8.0, growth_interval=1)]
    for reduction in ("mean", "canonical"):
        found = run_ranks(run, 2, mixed_precision="fp16", kwargs_handlers=handlers, reduction=reduction)
        assert found == [(32.0, 2.0)] * 2


def test_outside_of_its_loop_nobody_knows_where_a_window_ends() -> None:
    accelerator = Accelerator(context=Context().replace(gradient_accumulation_steps=2))
    model = accelerator.prepare(one_weight())
    with accelerator.accumulate(model):  # a program with loops of its own
        assert not accelerator.sync_gradients
    assert accelerator.step == 1
    loader = accelerator.prepare(ones(2))
    refused = pytest.raises(ConfigurationError, match="no prepared loader has a current batch")
    with refused, accelerator.accumulate():
        raise AssertionError("went in")
    for _ in loader:
        with accelerator.accumulate(model):
            pass
    assert accelerator.sync_gradients
    optimizer = accelerator.prepare(sgd(model))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).sum())
        optimizer.zero_grad()
        assert model.weight.grad
        break
    optimizer.zero_grad()  # the loop was left within a window
    assert model.weight.grad is None


def test_no_sync_without_a_model_means_all_of_them() -> None:
    def run(ctx: Context) -> list[float]:
        accelerator = Accelerator(context=ctx)
        models = accelerator.prepare(one_weight(), one_weight())
        with accelerator.no_sync():
            for model in models:
                accelerator.backward(model(torch.full((1, 1), float(ctx.rank))).sum())
        return [float(model.weight.grad) for model in models]

    assert run_ranks(run, 2) == [[0.0, 0.0], [1.0, 1.0]]


class ScheduleFree(torch.optim.SGD):
    mode = ""

    def train(self) -> None:
        self.mode = "train"

    def eval(self) -> None:
        self.mode = "eval"


def test_schedule_free_optimizers_are_told_and_others_need_no_telling() -> None:
    accelerator = Accelerator(context=Context())
    inner = ScheduleFree([nn.Parameter(torch.ones(1))], lr=1.0)
    free, plain = accelerator.prepare(inner, sgd(one_weight()))
    free.train()
    assert inner.mode == "train"
    free.eval()
    assert inner.mode == "eval"
    plain.train()
    plain.eval()


def test_a_closure_gives_its_loss_back() -> None:
    accelerator = Accelerator(context=Context())
    model = one_weight(3.0)
    optimizer = accelerator.prepare(torch.optim.LBFGS(model.parameters(), lr=0.5))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 1)) - 1).square().sum()
        accelerator.backward(loss)
        return loss

    assert float(optimizer.step(closure).detach()) == 4.0
    for _ in range(20):
        optimizer.step(closure)
    assert weight_of(model) == pytest.approx(1.0, abs=1e-4)


def train(accelerator: Accelerator) -> tuple[list[float], list[float]]:
    """Three batches a rank in windows of two: weights and learning rates after the steps."""
    model = one_weight()
    optimizer: Any = sgd(model)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    loader: Any = ones(3 * accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    weights: list[float] = []
    rates: list[float] = []
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        assert all(one.grad is None for one in model.parameters()) == accelerator.sync_gradients
        weights += [float(one.detach()) for one in model.parameters()]
        rates += scheduler.get_last_lr()
    return weights, rates


def test_accelerates_arithmetic_is_had_for_the_asking() -> None:
    def run(ctx: Context) -> tuple[list[float], list[float]]:
        with pytest.warns(UserWarning, match="divided by the number of batches of a full one"):
            accelerator = Accelerator(context=ctx, compat="accelerate")
        return train(accelerator)

    # The last window has one batch of two: half of its gradient; and the rate halves for each rank.
    expected = ([0.0, -1.0, -1.0 - 0.5 * 0.25], [1.0, 0.25, 0.0625])
    assert run_ranks(run, 2, gradient_accumulation_steps=2) == [expected] * 2
    split = DataLoaderConfiguration(split_batches=True)
    ctx = Context().replace(gradient_accumulation_steps=2, dataloader_config=split)
    assert run(ctx) == ([0.0, -1.0, -1.25], [1.0, 0.5, 0.25])


def test_an_unknown_arithmetic_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'compat must be "accelerate" or None: got \'lightning\''):
        Accelerator(context=Context(), compat="lightning")  # pyright: ignore[reportArgumentType]


class HeadTrained(nn.Module):
    """A model that overrides ``parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(1, 1), nn.Linear(1, 1)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.head.parameters(recurse)


def test_what_is_prepared_together_has_to_belong_together() -> None:
    accelerator = Accelerator(context=Context())
    for prepare in (accelerator.prepare, lambda *them: af.prepare(Context(), *them)):
        with pytest.raises(ConfigurationError, match="object 1, a SGD, has no parameter of the models"):
            prepare(one_weight(), sgd(one_weight()))
        optimizer = sgd(one_weight())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(ConfigurationError, match="the SGD of the StepLR was not prepared"):
            prepare(scheduler)
        prepare(scheduler, optimizer)  # in any order
        critic = prepare(one_weight())
        prepare(one_weight(), sgd(critic))  # of a model that was prepared before
        model = HeadTrained()
        prepare(model, sgd(model.body))
