# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accelfn as af
from accelfn import Context, DataLoaderConfiguration, GradientAccumulationPlugin
from accelfn.data import microbatches, prepare_data_loader
from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError, MismatchError, NotAvailableError, RemoteRankError
from accelfn.testing import run_ranks
from tests.training.models import filled, sgd

UNEVEN = DataLoaderConfiguration(even_batches=False)
State = dict[str, torch.Tensor]


def samples(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num, 3, dtype=torch.float64, generator=generator)
    return x, torch.randn(num, 2, dtype=torch.float64, generator=generator)


def loader_of(num: int, batch_size: int = 2) -> DataLoader[Any]:
    return DataLoader(cast("Any", TensorDataset(*samples(num))), batch_size=batch_size)


def make(with_buffers: bool = False) -> nn.Module:
    parts = [nn.Linear(3, 4), nn.Tanh(), *[nn.BatchNorm1d(4)] * with_buffers, nn.Linear(4, 2)]
    return filled(nn.Sequential(*parts)).double()


def loss_of(model: nn.Module, rows: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(rows[0]), rows[1])


def train(ctx: Context, model: nn.Module, loader: Any) -> None:
    """Train for an epoch, in windows of the context's length."""
    optimizer, scaler = sgd(model, 0.1), af.init_scaler(ctx)
    for rows, micro in microbatches(ctx, loader, "join"):
        with af.accumulate(ctx, micro, model):
            scaler = af.backward(ctx, loss_of(model, rows), scaler, micro)
        if micro.sync:
            scaler = af.optimizer_step(ctx, optimizer, scaler)


def state_of(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in af.unwrap_model(model).state_dict().items()}


def equal(first: State, second: State) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


COUNTS = [(3, 2), (4, 3), (1, 4), (5, 0)]
Rows = tuple[torch.Tensor, torch.Tensor]


def rows_by_rank(counts: tuple[int, int]) -> list[Rows]:
    x, y = samples(2 * sum(counts))
    return [(x[: 2 * counts[0]], y[: 2 * counts[0]]), (x[2 * counts[0] :], y[2 * counts[0] :])]


@pytest.mark.parametrize("window", [1, 2])
def test_windows_are_reduced_by_all_and_lose_no_gradient(window: int) -> None:
    def run(ctx: Context) -> list[State]:
        states: list[State] = []
        for counts in COUNTS:
            rows = cast("Any", TensorDataset(*rows_by_rank(counts)[ctx.rank]))
            model = af.prepare(ctx, make())
            loader = prepare_data_loader(ctx, DataLoader[Any](rows, batch_size=2), "already_sharded")
            with af.join_uneven_inputs(ctx, [model], [loader], even_batches=False):
                train(ctx, model, loader)
            states.append(state_of(model))
        return states

    for first, second, counts in zip(
        *run_ranks(run, 2, "processes", gradient_accumulation_steps=window), COUNTS, strict=True
    ):
        torch.testing.assert_close(first, alone(counts, window), msg=str(counts))
        assert equal(first, second)


def alone(counts: tuple[int, int], size: int) -> State:
    """Train on one process: windows that also close where a rank ends, and a mean over both ranks."""
    own = rows_by_rank(counts)
    model = make()
    optimizer = sgd(model, 0.1)
    first = 0
    for end in sorted({*counts} - {0}):
        for begin in range(first, end, size):
            window = range(begin, min(begin + size, end))
            optimizer.zero_grad()
            for rank, (rows, target) in enumerate(own):
                for index in window:
                    if index < counts[rank]:
                        part = slice(2 * index, 2 * index + 2)
                        (loss_of(model, (rows[part], target[part])) / len(window) / 2).backward()
            optimizer.step()
        first = end
    return state_of(model)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 4))
def test_ranks_close_windows_in_the_same_steps_and_each_closes_its_last(
    counts: Sequence[int], num_steps: int
) -> None:
    def run(ctx: Context) -> list[Any]:
        own: list[torch.Tensor] = [torch.zeros(1)] * counts[ctx.rank]
        return [micro for _, micro in microbatches(ctx, own, "join")]

    ranks = run_ranks(run, len(counts), gradient_accumulation_steps=num_steps)
    assert [len(micros) for micros in ranks] == list(counts)
    for step in range(max(counts)):
        here = {
            (micros[step].index, micros[step].place, micros[step].window, micros[step].sync)
            for micros in ranks
            if step < len(micros)
        }
        assert len(here) == 1
        ((index, place, window, sync),) = here
        assert index == step
        assert place < window <= num_steps
        assert sync == (place == window - 1)
    for micros in ranks:
        assert [micro.is_last for micro in micros] == [False] * (len(micros) - 1) + [True] * bool(micros)
        assert all(micro.sync for micro in micros[-1:])


def test_windows_of_streams_or_beyond_the_epoch_can_not_be_joined() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    for ctx, data in (
        (Context().replace(gradient_accumulation_steps=2), iter([torch.zeros(1)])),
        (Context().replace(gradient_accumulation_plugin=plugin), [torch.zeros(1)]),
    ):
        with pytest.raises(ConfigurationError, match="windows of 2 batches"):
            next(microbatches(ctx, data, "join"))


def test_behind_the_block_everything_is_as_before() -> None:
    def run(ctx: Context) -> list[torch.Tensor]:
        model = af.prepare(ctx, make())
        loader = prepare_data_loader(ctx, loader_of(10))
        config = cast("Any", model)._join_config  # with which torch would notify ranks that don't wait
        with af.join_uneven_inputs(ctx, [model], [loader], even_batches=False):
            train(ctx, model, loader)
        assert cast("Any", model)._join_config == config
        assert len(loader) == 3
        train(ctx, model, loader)
        # Forward passes are compared again.
        if ctx.rank:
            model(samples(2)[0])
        with pytest.raises(MismatchError, match="forward"):
            af.wait_for_everyone(ctx)
        return list(state_of(model).values())

    first, second = run_ranks(run, 2, "processes")
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("config", [True, False])
def test_with_even_batches_nobody_has_to_be_joined(config: bool) -> None:
    def run(ctx: Context) -> list[int]:
        model = af.prepare(ctx, make())
        loader = prepare_data_loader(ctx, loader_of(10))
        with af.join_uneven_inputs(ctx, [model], [loader], None if config else True) as is_joined:
            assert not is_joined
            lengths = [len(x) for x, _ in loader]
            train(ctx, model, loader)
        assert passes_of(loader).reader.even_batches is config
        return lengths

    for on in ("memory", "processes"):
        found = run_ranks(run, 2, on, dataloader_config=DataLoaderConfiguration(even_batches=config))
        assert found == [[2, 2, 2]] * 2


REFUSED: dict[str, tuple[type[Exception], str]] = {
    "frozen": (TypeError, "got Sequential"),
    "nothing": (ValueError, "got no joinables"),
    "fp16": (NotAvailableError, "float16"),
    "replicas": (ConfigurationError, "check_replicas_every"),
    "unprepared": (TypeError, "loaders must be prepared, got DataLoader"),
    "dispatched": (ConfigurationError, "because of the way it reads"),
    "own": (ConfigurationError, "even_batches=True, because of the way it reads"),
}
ON_THREADS: dict[str, tuple[type[Exception], str]] = {
    "threads": (NotAvailableError, "ranks that are threads .*\n?.*pad")
}


@pytest.mark.parametrize(("on", "cases"), [("memory", ON_THREADS), ("processes", REFUSED)])
def test_what_can_not_be_joined_is_refused_on_every_rank_before_anything_changes(
    on: Any, cases: dict[str, tuple[type[Exception], str]]
) -> None:
    def run(ctx: Context) -> list[str]:
        return [refused(ctx, case, error, text) for case, (error, text) in cases.items()]

    def refused(ctx: Context, case: str, error: type[Exception], text: str) -> str:
        if case == "fp16":
            ctx = ctx.replace(mixed_precision="fp16")
        if case == "replicas":
            ctx = ctx.replace(guard=af.Guard(check_replicas_every=1))
        model = af.prepare(ctx, make().requires_grad_(case != "frozen"))
        loader: Any = prepare_data_loader(ctx, loader_of(10))
        loaders = [loader]
        if case == "unprepared":
            loaders.append(loader_of(2))
        if case == "dispatched":
            config = DataLoaderConfiguration(dispatch_batches=True)
            loaders.append(prepare_data_loader(ctx.replace(dataloader_config=config), loader_of(4)))
        if case == "own":
            sampler = DistributedSampler(cast("Any", range(4)), num_replicas=2, rank=ctx.rank)
            sharded = DataLoader(cast("Any", range(4)), sampler=sampler)
            loaders.append(prepare_data_loader(ctx, sharded, "already_sharded"))
        joinables = [] if case == "nothing" else [model]
        with (
            pytest.raises(error, match=text) as caught,
            af.join_uneven_inputs(ctx, joinables, loaders, even_batches=case == "own"),
        ):
            raise AssertionError("went in")
        assert passes_of(loader).reader.even_batches is True
        af.wait_for_everyone(ctx)
        return str(caught.value)

    first, second = run_ranks(run, 2, on)
    assert first == second


def test_ranks_that_join_differently_are_told() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare(ctx, make())
        mismatch = pytest.raises(MismatchError, match="even_batches=False")
        with mismatch, af.join_uneven_inputs(ctx, [model], even_batches=bool(ctx.rank)):
            raise AssertionError("went in")
        told = pytest.raises(RemoteRankError if ctx.rank else TypeError, match="got Sequential")
        with told, af.join_uneven_inputs(ctx, [model if ctx.rank else make()]):
            raise AssertionError("went in")

    run_ranks(run, 2, "processes", dataloader_config=UNEVEN)
