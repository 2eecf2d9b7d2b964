"""Exact mode: the same bits at any number of ranks."""

# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
import pickle
from collections.abc import Generator
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn import CanonicalReduction, Context
from accelfn.errors import ConfigurationError, MismatchError, RemoteRankError
from accelfn.testing import Where, run_ranks

MICROBATCHES = 12
ROWS = 4  # of a microbatch


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
    return started(1, "memory", 60)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_training_gives_the_same_bits_at_any_number_of_ranks(alone: Run, world: int) -> None:
    assert_equal(alone, started(world, "memory", 60))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_give_the_bits_of_threads(alone: Run, world: int) -> None:
    mesh = af.ParallelismConfig(dp_replicate_size=world)  # as without one
    assert_equal(alone, started(world, "processes", 60, parallelism_config=mesh if world > 1 else None))


def test_the_number_of_ranks_may_change_in_the_middle_of_an_epoch(alone: Run) -> None:
    first = started(4, "memory", 20)
    assert 0 < first.loader.consumed < len(dataset())
    second = started(2, "memory", 20, first)
    third = started(3, "memory", 20, second)
    assert_equal(alone, Run(first.losses + second.losses + third.losses, *third[1:]))


def test_dropout_and_the_fixed_order_are_what_makes_it_exact(alone: Run) -> None:
    # The mean of ranks, as it is without exact mode, is near and not equal.
    found = run_ranks(
        lambda ctx: train(ctx, 3),
        4,
        gradient_accumulation_steps=MICROBATCHES // 4,
        dataloader_config=af.DataLoaderConfiguration(data_seed=7),
    )
    assert [loss.item() for loss in found[0].losses] != [loss.item() for loss in alone.losses[:3]]


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


@given(
    st.sampled_from([1, 2, 3, 4, 6, 12]),
    st.lists(st.lists(st.integers(1, 31), min_size=12, max_size=12), min_size=1, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.booleans(),
)
def test_gradients_are_those_that_torch_adds_up_one_by_one(
    world: int, windows: list[list[int]], cleared: list[bool], each: bool
) -> None:
    model = Parts()
    expected: list[Grads] = []
    for number, window in enumerate(windows):
        for microbatch, used in enumerate(window):
            (model(used, 100 * number + microbatch) / 12).backward()
        expected.append(grads_of(model))
        if cleared[number]:
            model.zero_grad()

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
                if cleared[number]:
                    model.zero_grad()
        return found

    plugin = af.GradientAccumulationPlugin(num_steps=12 // world, sync_each_batch=each)
    for found in run_ranks(run, world, reduction="canonical", gradient_accumulation_plugin=plugin):
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("way", ["forward", "method", "free function"])
def test_any_way_that_a_gradient_arises_is_summed(way: str) -> None:
    class Twice(nn.Linear):
        def other(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) * 2

    def run(ctx: Context) -> Grads:
        generator = torch.Generator().manual_seed(0)
        model = Twice(3, 2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        model = af.prepare_model(ctx, model)
        rows = torch.randn(4, 2, 3, generator=generator)
        for x, micro in af.microbatches(ctx, rows[ctx.rank :: ctx.num_processes]):
            with af.accumulate(ctx, micro, model):
                if way == "forward":
                    result = model(x)
                elif way == "method":
                    result = model.other(x)
                else:
                    result = x @ model.weight.T + model.bias
                af.backward(ctx, result.square().mean(), af.init_scaler(ctx), micro)
        return grads_of(model)

    reduction = CanonicalReduction(num_microbatches=4)
    (expected,) = run_ranks(run, 1, reduction=reduction)
    for found in run_ranks(run, 2, reduction=reduction):
        assert same_bits(expected, found)


def test_a_window_that_is_left_open_is_dropped_by_the_next_one() -> None:
    def run(ctx: Context) -> list[Grads]:
        model = af.prepare_model(ctx, Parts())
        scaler = af.init_scaler(ctx)
        found: list[Grads] = []
        for stop_at in (2, 4):
            microbatches = list(range(ctx.rank, 12, ctx.num_processes))
            for microbatch, micro in af.microbatches(ctx, microbatches):
                if micro.index == stop_at:
                    break
                with af.accumulate(ctx, micro, model):
                    scaler = af.backward(ctx, model(31, microbatch), scaler, micro)
            found.append(grads_of(model))
            model.zero_grad()
        return found

    alone = Parts()
    for microbatch in range(12):
        (alone(31, microbatch) / 12).backward()
    for open_window, closed in run_ranks(run, 3, reduction=CanonicalReduction(num_microbatches=12)):
        assert open_window == [None] * 5
        assert same_bits(closed, grads_of(alone))


def test_backward_outside_of_accumulate_comes_together_at_once() -> None:
    def run(ctx: Context) -> list[Grads]:
        model = af.prepare_model(ctx, Parts())
        scaler = af.init_scaler(ctx)
        found: list[Grads] = []
        for step in range(2):
            scaler = af.backward(ctx, model(7, 2 * step + ctx.rank), scaler)
            found.append(grads_of(model))
        with af.no_sync(ctx, model):
            scaler = af.backward(ctx, model(31, 4 + ctx.rank), scaler)
        scaler = af.backward(ctx, model(31, 6 + ctx.rank), scaler)
        return [*found, grads_of(model)]

    alone, expected = Parts(), list[Grads]()
    for microbatch in range(8):
        (alone(7 if microbatch < 4 else 31, microbatch) / 2).backward()
        if microbatch in (1, 3, 7):
            expected.append(grads_of(alone))
    for found in run_ranks(run, 2, reduction="canonical"):
        assert all(same_bits(a, b) for a, b in zip(expected, found, strict=True))


class Asking(torch.autograd.Function):
    """Returns its input; its backward asks for the gradient of a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, asked: list[nn.Parameter]) -> torch.Tensor:
        ctx.asked = asked
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        with torch.enable_grad():
            torch.autograd.grad(ctx.asked[0].sum(), ctx.asked[0])
        return gradients[0], None


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_backward_pass_asks_for_is_no_gradient_of_a_shard_either(world: int) -> None:
    def run(ctx: Context) -> tuple[Grads, Grads]:
        model = af.prepare_model(ctx, Parts())
        af.backward(ctx, model(31, 0), af.init_scaler(ctx))
        before = grads_of(model)
        loss = cast("torch.Tensor", Asking.apply(model(2, 1), [model.parts[0]]))
        af.backward(ctx, loss, af.init_scaler(ctx))
        return before, grads_of(model)

    for before, after in run_ranks(run, world, reduction="canonical"):
        assert same_bits(before[:1], after[:1])
        assert not same_bits(before[1:2], after[1:2])


def test_a_pass_inside_of_a_pass_counts_as_one() -> None:
    # A parameter gets a gradient from each of them, which only together are the one of the microbatch.
    def run(ctx: Context) -> Grads:
        model = af.prepare_model(ctx, mlp().eval())
        generator = torch.Generator().manual_seed(5)
        rows = torch.randn(6, 3, 5, generator=generator)
        for x, micro in af.microbatches(ctx, rows[ctx.rank :: ctx.num_processes]):
            with af.accumulate(ctx, micro, model):
                halves = [
                    checkpoint(model, half.requires_grad_(), use_reentrant=True) for half in (x, x.sin())
                ]
                af.backward(ctx, torch.cat(cast("Any", halves)).square().mean(), af.init_scaler(ctx), micro)
        return grads_of(model)

    (expected,), found = (
        run_ranks(run, world, reduction=CanonicalReduction(num_microbatches=6)) for world in (1, 3)
    )
    assert all(same_bits(expected, one) for one in found)
    assert expected[0] is not None


def test_copies_are_summed_by_themselves_and_pickles_hold_no_world() -> None:
    def run(ctx: Context) -> tuple[Grads, Grads, Grads]:
        model = af.prepare_model(ctx, Parts())
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        af.backward(ctx, twin(31, ctx.rank), af.init_scaler(ctx))
        loaded(31, 0).backward()
        return grads_of(model), grads_of(twin), grads_of(loaded)

    for own, twin, loaded in run_ranks(run, 2, reduction="canonical"):
        alone = Parts()
        for microbatch in range(2):
            (alone(31, microbatch) / 2).backward()
        assert own == [None] * 5
        assert same_bits(twin, grads_of(alone))
        assert loaded[0] is not None


# --- what can't hold -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4)], ids=lambda norm: type(norm).__name__
)
def test_running_statistics_are_refused_by_name(world: int, norm: nn.Module) -> None:
    def run(ctx: Context) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(copy.deepcopy(norm)))
        with pytest.raises(
            ConfigurationError, match=rf"1\.0 \({type(norm).__name__}\) can't be trained.* GroupNorm"
        ):
            af.prepare_model(ctx, model)
        model[1].eval()
        model = af.prepare_model(ctx, model)
        model(torch.ones(2, 3))
        with pytest.raises(ConfigurationError, match=r"1\.0 .* call its eval\(\) before prepare"):
            model.train()(torch.ones(2, 3))

    run_ranks(run, world, reduction="canonical")


@pytest.mark.parametrize("world", [1, 2])
def test_a_backward_pass_past_accelfn_is_refused(world: int) -> None:
    def run(ctx: Context) -> None:
        model = af.prepare_model(ctx, Parts())
        with pytest.raises(
            ConfigurationError, match=r"call accelfn\.backward\(ctx, loss, scaler, micro\) instead"
        ):
            model(31, 0).backward()
        other = ctx.replace(reduction="mean")
        with pytest.raises(ConfigurationError, match=r"call accelfn\.backward"):
            af.backward(other, model(31, 0), af.init_scaler(other))

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


def test_several_steps_from_one_batch_are_allowed_where_each_is_a_window() -> None:
    def run(ctx: Context) -> Grads:
        model = af.prepare_model(ctx, Parts())
        for microbatch, micro in af.microbatches(ctx, [ctx.rank]):
            for _ in range(2):
                model.zero_grad()
                with af.accumulate(ctx, micro, model):
                    af.backward(ctx, model(31, microbatch), af.init_scaler(ctx), micro)
        return grads_of(model)

    alone = Parts()
    for microbatch in range(2):
        (alone(31, microbatch) / 2).backward()
    for found in run_ranks(run, 2, reduction="canonical"):
        assert same_bits(found, grads_of(alone))


@pytest.mark.parametrize("world", [1, 2])
def test_sparse_gradients_are_refused_and_nothing_is_changed(world: int) -> None:
    def run(ctx: Context) -> None:
        model = af.prepare_model(ctx, nn.Embedding(4, 2, sparse=True))
        old = model.weight.grad = torch.ones(4, 2)
        kind = ConfigurationError if ctx.rank == 0 else (ConfigurationError, RemoteRankError)
        with pytest.raises(kind, match=r"gradient of weight has layout torch\.sparse_coo"):
            af.backward(ctx, model(torch.tensor([1])).sum(), af.init_scaler(ctx))
        assert model.weight.grad is old
        assert old.eq(1).all()

    run_ranks(run, world, reduction="canonical")


def test_ranks_that_close_different_windows_hear_of_it() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare_model(ctx, Parts())
        with af.no_sync(ctx, *([model] if ctx.rank else [])):
            af.backward(ctx, model(31, 0), af.init_scaler(ctx))

    with pytest.raises(MismatchError, match=r"window  closes=False open=False +closes=True open=False"):
        run_ranks(run, 2, reduction="canonical")


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


def test_ranks_without_batches_cant_be_joined() -> None:
    def run(ctx: Context) -> None:
        with af.join_uneven_inputs(ctx, [af.prepare_model(ctx, nn.Linear(1, 1))], even_batches=False):
            pass

    with pytest.raises(ConfigurationError, match='join_uneven_inputs: with reduction="canonical"'):
        run_ranks(run, 2, reduction="canonical")
