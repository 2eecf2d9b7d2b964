# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
"""The training step through the shim: what it accepts, what it refuses, and what it counts."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Accelerator, Context, DataLoaderConfiguration, GradScalerKwargs
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.training.models import one_weight, sgd, weight_of


def ones(num: int) -> Any:
    return DataLoader(torch.ones(num, 1), batch_size=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:compat=")
@pytest.mark.parametrize("options", [{}, {"compat": "accelerate"}, {"reduction": "canonical"}])
def test_both_passes_in_one_call_are_those_of_the_block(options: dict[str, Any]) -> None:
    compat, is_exact = options.get("compat"), "reduction" in options

    def train(ctx: Context, in_one_call: bool) -> list[float]:
        accelerator = Accelerator(context=ctx, compat=compat)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5 * is_exact), nn.Linear(4, 1))
        model, optimizer, loader = accelerator.prepare(model, sgd(model), ones(6))
        torch.manual_seed(1)
        losses: list[float] = []

        def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        for x in loader:  # windows of two, and a last one of one
            if in_one_call:
                loss = accelerator.forward_backward(model, loss_fn, x)
            else:
                with accelerator.accumulate(model):
                    loss = loss_fn(model, x)
                    accelerator.backward(loss)
            losses.append(float(loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        return [*losses, *torch.cat([one.detach().flatten() for one in model.parameters()]).tolist()]

    given: Any = {"reduction": options.get("reduction", "mean"), "gradient_accumulation_steps": 2}
    world = 1 if is_exact else 2  # ranks that are threads share torch's default generator
    for one, other in run_ranks(lambda ctx: (train(ctx, True), train(ctx, False)), world, **given):
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


def test_no_sync_without_a_model_means_all_of_them() -> None:
    def run(ctx: Context) -> list[float]:
        accelerator = Accelerator(context=ctx)
        models = accelerator.prepare(one_weight(), one_weight())
        with accelerator.no_sync():
            for model in models:
                accelerator.backward(model(torch.full((1, 1), float(ctx.rank))).sum())
        return [float(model.weight.grad) for model in models]

    assert run_ranks(run, 2) == [[0.0, 0.0], [1.0, 1.0]]


def test_sync_gradients_may_be_set_by_hand() -> None:
    accelerator = Accelerator(context=Context())
    model = one_weight()
    optimizer = accelerator.prepare(sgd(model))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    accelerator.sync_gradients = False
    optimizer.step()
    assert weight_of(model) == 0
    accelerator.sync_gradients = True
    optimizer.step()
    assert weight_of(model) == -1


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


@pytest.mark.parametrize("world", [1, 2, 3])
def test_without_it_neither_ranks_nor_a_short_window_matter(world: int) -> None:
    expected = ([0.0, -1.0, -1.5], [1.0, 0.5, 0.25])
    found = run_ranks(lambda ctx: train(Accelerator(context=ctx)), world, gradient_accumulation_steps=2)
    assert found == [expected] * world


def test_a_schedule_with_a_last_step_ends_there_in_accelerates_arithmetic_too() -> None:
    def run(ctx: Context) -> int:
        with pytest.warns(UserWarning, match="compat"):
            accelerator = Accelerator(context=ctx, compat="accelerate")
        model = one_weight()
        optimizer: Any = sgd(model)
        scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        for _ in range(4):
            optimizer.step()
            scheduler.step()
        return scheduler.last_epoch

    assert run_ranks(run, 2) == [5] * 2


def test_an_unknown_arithmetic_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r'compat must be "accelerate" or None: got \'lightning\''):
        Accelerator(context=Context(), compat="lightning")  # pyright: ignore[reportArgumentType]


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


def test_in_a_real_world_proxies_are_copied_with_it_and_pickled_without() -> None:
    def run(ctx: Context) -> tuple[int, int, int]:
        accelerator = Accelerator(context=ctx)
        model, optimizer = accelerator.prepare(model := one_weight(), sgd(model))
        copied = copy.deepcopy(accelerator)
        twin, _ = copy.deepcopy((optimizer, model))
        loaded = pickle.loads(pickle.dumps(optimizer))
        assert twin.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
        return copied.num_processes, loaded._accelerator.num_processes, len(list(copied.optimizers))

    assert run_ranks(run, 2) == [(2, 1, 0)] * 2
    assert run_ranks(run, 2, on="processes") == [(2, 1, 0)] * 2


def test_arguments_of_older_accelerates_are_taken_and_may_not_contradict() -> None:
    accelerator = Accelerator(cpu=True, dispatch_batches=True, even_batches=False, use_seedable_sampler=True)
    assert accelerator.dispatch_batches
    assert not accelerator.even_batches
    assert accelerator.use_seedable_sampler
    accelerator.even_batches = True
    assert accelerator.context.loading.even_batches
    accelerator.close()
    config = DataLoaderConfiguration(even_batches=True)
    with pytest.raises(ConfigurationError, match=r"even_batches=False contradicts dataloader_config\.even"):
        Accelerator(cpu=True, even_batches=False, dataloader_config=config)


def test_questions_are_answered_by_the_context() -> None:
    accelerator = Accelerator(context=Context().replace(mixed_precision="bf16"))
    assert accelerator.native_amp
    assert not accelerator.multi_device
    assert accelerator.device_placement
    assert accelerator.step_scheduler_with_optimizer
    assert accelerator.rng_types == ("generator",)
    assert not accelerator.split_batches
    assert not accelerator.non_blocking
    assert not accelerator.use_stateful_dataloader
