"""Exact mode: the same bits at any number of ranks."""

# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
from collections.abc import Generator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn import Context
from accelfn.config import CanonicalReduction
from accelfn.errors import ConfigurationError, MismatchError, RemoteRankError
from accelfn.testing import Where, run_ranks

MICROBATCHES = 12
ROWS = 4  # of a microbatch
STEPS = 27  # more than an epoch


class Run(NamedTuple):
    """What a part of a training has come to."""

    losses: list[torch.Tensor]
    model: dict[str, Any]
    optimizer: dict[str, Any]
    loader: Any


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(MICROBATCHES * ROWS * 25, 5, generator=generator)
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def mlp() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(5, 16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 7), nn.Tanh(), nn.Linear(7, 1)
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def train(ctx: Context, steps: int, before: Run | None = None) -> Run:
    """Train for ``steps`` optimizer steps, from where another world has left off."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(dataset(), ROWS, shuffle=True, drop_last=True)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)
    losses: list[torch.Tensor] = []
    if before is not None:
        model.load_state_dict(before.model)
        optimizer.load_state_dict(copy.deepcopy(before.optimizer))
        af.restore_loader(loader, before.loader)
    while True:
        window: list[torch.Tensor] = []
        for (x, y), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.mse_loss(model(x), y)
                scaler = af.backward(ctx, loss, scaler, micro)
            window.append(af.gather(ctx, loss.detach()))
            if micro.sync:
                af.clip_grad_norm_(ctx, model.parameters(), 0.5, scaler_state=scaler)
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                losses.append(torch.cat(window).mean())
                window = []
                if len(losses) == steps:
                    state = {name: value.clone() for name, value in model.state_dict().items()}
                    return Run(losses, state, copy.deepcopy(optimizer.state_dict()), af.loader_state(loader))


def started(world: int, on: Where, steps: int, before: Run | None = None, **more: Any) -> Run:
    options = af.DataLoaderConfiguration(data_seed=7)
    found = run_ranks(
        lambda ctx: train(ctx, steps, before),
        world,
        on,
        reduction=CanonicalReduction(num_microbatches=MICROBATCHES),
        dataloader_config=options,
        timeout_s=100.0,
        **more,
    )
    for other in found[1:]:
        assert_equal(found[0], other)
    return found[0]


def assert_equal(one: Run, other: Run) -> None:
    assert [loss.item() for loss in one.losses] == [loss.item() for loss in other.losses]
    for name, value in one.model.items():
        assert torch.equal(value, other.model[name]), name
    for index, state in one.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(value, other.optimizer["state"][index][name])


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Generator[None]:
    """Compute on one thread: how many share a sum may decide its last bit, and here they fight for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(one_thread: None) -> Run:
    del one_thread
    return started(1, "memory", STEPS)


@pytest.mark.parametrize(("world", "on"), [(4, "memory"), (2, "processes")])
def test_training_gives_the_same_bits_at_any_number_of_ranks(alone: Run, world: int, on: Where) -> None:
    assert_equal(alone, started(world, on, STEPS))


def test_the_number_of_ranks_may_change_in_the_middle_of_an_epoch(alone: Run) -> None:
    first = started(4, "memory", 10)
    assert 0 < first.loader.consumed < len(dataset())
    second = started(2, "memory", 10, first)
    third = started(3, "memory", STEPS - 20, second)
    assert_equal(alone, Run(first.losses + second.losses + third.losses, *third[1:]))


# --- sums ----------------------------------------------------------------------------------------


class Parts(nn.Module):
    """Parameters of several dtypes and shapes, of which each call uses some."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator))

        self.parts = nn.ParameterList([made(3, 5), made(7), made(), made(2, 2).double(), made(4).bfloat16()])

    def forward(self, used: int, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        total = torch.zeros(())
        for index, part in enumerate(self.parts):
            if used >> index & 1:
                factor = torch.randn(part.shape, generator=generator)
                # Zeros of both signs, whose sums must keep theirs.
                factor = torch.where(factor.abs() < 0.4, torch.copysign(torch.zeros(()), factor), factor)
                total = total + (part * factor.to(part.dtype)).sum().float()
        return total


Grads = list[torch.Tensor | None]


def grads_of(model: nn.Module) -> Grads:
    return [None if one.grad is None else one.grad.clone() for one in model.parameters()]


def same_bits(one: Grads, other: Grads) -> bool:
    def bits(grads: Grads) -> list[Any]:
        return [None if grad is None else grad.reshape(-1).view(torch.uint8).tolist() for grad in grads]

    return bits(one) == bits(other)


def clear(model: nn.Module, how: str) -> None:
    if how == "some":
        for one in [*model.parameters()][1::2]:
            one.grad = None
    elif how == "in place":
        torch.optim.SGD(model.parameters()).zero_grad(set_to_none=False)
    elif how:
        model.zero_grad()


CLEARED = st.sampled_from(["", "", "all", "some", "in place"])


@given(
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.lists(st.lists(st.integers(1, 31), min_size=12, max_size=12), min_size=1, max_size=3),
    st.lists(CLEARED, min_size=3, max_size=3),
    st.tuples(CLEARED, st.integers(0, 12)),
    st.booleans(),
)
def test_gradients_are_those_that_torch_adds_up_one_by_one(
    world: int, windows: list[list[int]], cleared: list[str], dropped: tuple[str, int], each: bool
) -> None:
    how, until = dropped[0], dropped[1] // world * world  # in the middle of each window
    model = Parts()
    expected: list[Grads] = []
    for number, window in enumerate(windows):
        for microbatch, used in enumerate(window):
            (model(used, 100 * number + microbatch) / 12).backward()
            if microbatch + 1 == until < 12:
                clear(model, how)
        expected.append(grads_of(model))
        clear(model, cleared[number])

    def run(ctx: Context) -> list[Grads]:
        model = af.prepare_model(ctx, Parts())
        scaler = af.init_scaler(ctx)
        microbatches = [
            (number, microbatch)
            for number in range(len(windows))
            for microbatch in range(ctx.rank, 12, world)
        ]
        found: list[Grads] = []
        for (number, microbatch), micro in af.microbatches(ctx, microbatches):
            with af.accumulate(ctx, micro, model):
                loss = model(windows[number][microbatch], 100 * number + microbatch)
                scaler = af.backward(ctx, loss, scaler, micro)
            if micro.sync:
                found.append(grads_of(model))
                clear(model, cleared[number])
            elif (micro.place + 1) * world == until:
                clear(model, how)
        return found

    plugin = af.GradientAccumulationPlugin(num_steps=12 // world, sync_each_batch=each)
    for found in run_ranks(run, world, reduction="canonical", gradient_accumulation_plugin=plugin):
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


# --- what can't hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
def test_what_cannot_be_exact_is_refused_by_name(world: int) -> None:
    def statistics(ctx: Context) -> None:
        model = af.prepare_model(ctx, nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4))))
        with pytest.raises(ConfigurationError, match=r"1\.0\.num_batches_tracked can't be .* GroupNorm"):
            model(torch.ones(2, 3))
        model[1].eval()
        model(torch.ones(2, 3))
        with pytest.raises(ConfigurationError, match=r"call its eval\(\) after each model\.train\(\)"):
            model.train()(torch.ones(2, 3))

    def counter(ctx: Context) -> None:
        class Counted(nn.Linear):
            calls: torch.Tensor

            def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
                if self.training:
                    self.calls += 1
                return super().forward(x)

        model = Counted(3, 1)
        model.register_buffer("calls", torch.tensor(0))
        model = af.prepare_model(ctx, model)
        with pytest.raises(ConfigurationError, match="calls can't be changed by a forward pass in training"):
            model(torch.ones(2, 3))
        model.eval()(torch.ones(2, 3))

    def passes(ctx: Context) -> None:
        """Backward passes past accelfn."""
        model = af.prepare_model(ctx, Parts())
        words = r"call accelfn\.backward\(ctx, loss, scaler, micro\) instead"
        with pytest.raises(ConfigurationError, match=words):
            model(31, 0).backward()
        other = ctx.replace(reduction="mean")
        with pytest.raises(ConfigurationError, match=r"call accelfn\.backward"):
            af.backward(other, model(31, 0), af.init_scaler(other))

    def sparse(ctx: Context) -> None:
        model = af.prepare_model(ctx, nn.Embedding(4, 2, sparse=True))
        old = model.weight.grad = torch.ones(4, 2)
        kind = ConfigurationError if ctx.rank == 0 else (ConfigurationError, RemoteRankError)
        with pytest.raises(kind, match=r"gradient of weight has layout torch\.sparse_coo"):
            af.backward(ctx, model(torch.tensor([1])).sum(), af.init_scaler(ctx))
        assert model.weight.grad is old
        assert old.eq(1).all()

    def run(ctx: Context) -> None:
        statistics(ctx)
        counter(ctx)
        passes(ctx)
        sparse(ctx)

    run_ranks(run, world, reduction="canonical")


@pytest.mark.parametrize("world", [1, 2])
def test_a_second_gradient_from_one_batch_is_refused_on_all_ranks(world: int) -> None:
    def run(ctx: Context) -> list[Grads]:
        model = af.prepare_model(ctx, Parts())
        scaler = af.init_scaler(ctx)
        found: list[Grads] = []
        for microbatch, micro in af.microbatches(ctx, range(2)):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, model(3, microbatch), scaler, micro)  # of the first two parameters
                scaler = af.backward(
                    ctx, model(12, microbatch), scaler, micro
                )  # and of two others: all is well
                if microbatch == 0:
                    continue
                kind = ConfigurationError if ctx.rank == 0 else RemoteRankError
                with pytest.raises(kind, match=r"parts\.1 got a second gradient from one batch"):
                    scaler = af.backward(ctx, model(2 if ctx.rank == 0 else 16, microbatch), scaler, micro)
                found.append(grads_of(model))
        return found

    run_ranks(run, world, reduction="canonical", gradient_accumulation_steps=2)


def test_ranks_that_close_different_windows_hear_of_it() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare_model(ctx, Parts())
        with af.no_sync(ctx, *([model] if ctx.rank else [])):
            af.backward(ctx, model(31, 0), af.init_scaler(ctx))

    with pytest.raises(MismatchError, match=r"window  closes=False sums=0 +closes=True sums=0"):
        run_ranks(run, 2, reduction="canonical")


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_step_needs_the_sum_over_all_ranks(is_inside: bool) -> None:
    def run(ctx: Context) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=1.0))
        scaler = af.optimizer_step(ctx, optimizer, af.init_scaler(ctx))  # nothing to average
        loss = model(torch.full((1, 1), ctx.rank + 2.0)).mean()
        with af.no_sync(ctx, model):
            scaler = af.backward(ctx, loss, scaler)
            if is_inside:
                with pytest.raises(ConfigurationError, match=r"each rank for itself can't step in exact"):
                    af.optimizer_step(ctx, optimizer, scaler)
        with pytest.raises(ConfigurationError, match=r"added to them under no_sync"):
            af.optimizer_step(ctx, optimizer, scaler)
        scaler = af.backward(ctx, model(torch.ones(1, 1)).mean(), scaler)
        af.optimizer_step(ctx, optimizer, scaler)
        return model.weight.flatten().tolist()

    assert run_ranks(run, 2, reduction="canonical") == [[-2.5], [-2.5]]  # 1 - (2 + 3) / 2 - 1


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_window_that_was_left_has_summed_stays(world: int) -> None:
    """As in plain torch, at any number of ranks."""

    def run(ctx: Context) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        data: Any = DataLoader([torch.full((1,), float(x)) for x in range(1, 9)])  # pyright: ignore[reportArgumentType]
        model, optimizer, loader = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=1.0), data)
        scaler = af.init_scaler(ctx)
        for epoch in range(2):
            for x, micro in af.microbatches(ctx, loader):
                with af.accumulate(ctx, micro, model):
                    scaler = af.backward(ctx, model(x).sum(), scaler, micro)
                if micro.sync:
                    scaler = af.optimizer_step(ctx, optimizer, scaler)
                if epoch == 0 and micro.consumed == 6:
                    break
        return model.weight.item()

    found = run_ranks(run, world, reduction=CanonicalReduction(num_microbatches=4))
    assert found == [-(10 + (5 + 6 + 10) + 26) / 4] * world


def test_models_belong_to_one_kind_of_reduction() -> None:
    def run(ctx: Context) -> None:
        mean = ctx.replace(reduction="mean")
        model = af.prepare_model(mean, nn.Linear(2, 2))
        with pytest.raises(ConfigurationError, match='and reduction "canonical" where it was "mean"'):
            af.prepare_model(ctx, model)
        micro = next(iter(af.microbatches(ctx, [0])))[1]
        with pytest.raises(ConfigurationError, match="the model was prepared by one without it"):
            with af.accumulate(ctx, micro, model):
                pass
        exact = af.prepare_model(ctx, nn.Sequential(nn.Linear(2, 2)))
        assert af.prepare_model(ctx, exact) is exact
        with pytest.raises(ConfigurationError, match='and reduction "mean" where it was "canonical"'):
            af.prepare_model(mean, exact)
        with pytest.raises(
            ConfigurationError, match=r"the parameter 0\.weight is already in another prepared model"
        ):
            af.prepare_model(ctx, nn.Sequential(exact[0]))

    run_ranks(run, 2, reduction="canonical")
