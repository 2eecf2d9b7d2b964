"""Exact mode for training: what is drawn for a microbatch, functions of a tree, loss scaling, the shim."""

# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accelfn as af
from accelfn import Context
from accelfn.config import CanonicalReduction
from accelfn.errors import RemoteRankError
from accelfn.testing import Where, run_ranks
from tests.training.models import filled

Params = dict[str, torch.Tensor]


# --- what is drawn -------------------------------------------------------------------------------


def numbers(ctx: Context, loader: Any, most: int = 1000) -> list[tuple[int, float]]:
    """Draw a number for each batch, and say which sample it begins with."""
    found: list[tuple[int, float]] = []
    for batch, micro in af.microbatches(ctx, loader):
        with af.accumulate(ctx, micro):
            first = batch[0] if isinstance(batch, (list, tuple)) else batch
            found.append((int(first.flatten()[0]), torch.rand(()).item()))
        if len(found) == most:
            break
    return found


def test_epochs_blocks_and_seeds_draw_differently() -> None:
    def run(ctx: Context) -> list[float]:
        prepared = af.prepare(ctx, DataLoader(TensorDataset(torch.arange(8)), 2))
        found: list[float] = []
        for _ in range(2):
            for _, micro in af.microbatches(ctx, prepared):
                for _ in range(2):
                    with af.accumulate(ctx, micro):
                        found.append(torch.rand(()).item())
        return found

    one = run(Context().replace(reduction="canonical"))
    assert len(set(one)) == len(one) == 16
    assert run(Context().replace(reduction="canonical")) == one
    other = run(Context().replace(reduction=CanonicalReduction(seed=1)))
    assert not set(one) & set(other)


class Counting(IterableDataset[torch.Tensor]):
    """A stream without a length."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.tensor(number) for number in self.numbers])


ROWS = TensorDataset(torch.arange(24))
OWN_BATCHES = [[*range(*pair)] for pair in pairwise([0, 3, 4, 8, 9, 10, 14, 16, 17, 19, 20, 22, 24])]
# 24 samples, numbered as they come.
LOADERS: dict[str, Callable[[], Any]] = {
    "samples": lambda: DataLoader(ROWS, 2),
    "batches of the user's own": lambda: DataLoader(ROWS, batch_sampler=OWN_BATCHES),
    "items": lambda: DataLoader(ROWS, batch_size=None),
    "a stream": lambda: DataLoader(Counting(*range(24)), 2),
}
KINDS = (*LOADERS, "data of each rank's own")


def loader_of(ctx: Context, kind: str) -> Any:
    if kind in LOADERS:
        return af.prepare(ctx, LOADERS[kind]())
    own = [number for number in range(24) if number // 2 % ctx.num_processes == ctx.rank]
    return af.prepare_data_loader(ctx, DataLoader(Counting(*own), 2), "already_sharded")


@pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream")
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_draws_the_same_on_any_rank_and_after_a_resumption(kind: str) -> None:
    def begun(ctx: Context) -> tuple[list[tuple[int, float]], Any]:
        loader = loader_of(ctx, kind)
        return numbers(ctx, loader, 2), af.loader_state(loader)

    def resumed(ctx: Context) -> list[tuple[int, float]]:
        loader = loader_of(ctx, kind)
        af.restore_loader(loader, states[ctx.rank] if len(states) == ctx.num_processes else states[0])
        return numbers(ctx, loader)

    alone = run_ranks(lambda ctx: numbers(ctx, loader_of(ctx, kind)), 1, reduction="canonical")[0]
    assert len({number for _, number in alone}) == len(alone)
    found = run_ranks(lambda ctx: numbers(ctx, loader_of(ctx, kind)), 4, reduction="canonical")
    assert sorted(chain(*found)) == alone
    before = run_ranks(begun, 2, reduction="canonical")
    states = [state for _, state in before]
    after = run_ranks(resumed, 2 if kind == KINDS[-1] else 4, reduction="canonical")
    assert sorted(chain(*(found for found, _ in before), *after)) == alone


# --- functions of a tree -------------------------------------------------------------------------


def loss_of(params: Params, x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> Any:
    hidden = (x @ params["w"] + params["b"]).tanh()
    error = (hidden @ params["v"].float()).squeeze(1) - y
    return error.square().mean() * scale.sum(), {"error": error, "worst": error.max(), "name": "a"}


def descend(ctx: Context, steps: int = 20) -> tuple[list[torch.Tensor], Params, list[Any]]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 5), "b": (5,), "v": (5, 1)}
    params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    params["v"] = params["v"].bfloat16()
    step = af.value_and_grad(ctx, loss_of)
    losses: list[torch.Tensor] = []
    aux: list[Any] = []
    for _ in range(steps):
        x = torch.randn(24, 3, generator=generator)
        mine = af.split_between_processes(ctx, {"x": x, "y": x.sum(1).sin()})
        (loss, more), grads = step(params, mine["x"], y=mine["y"], scale=torch.ones(2))
        params = {name: value - 0.05 * grads[name] for name, value in params.items()}
        losses.append(loss)
        aux.append(more)
    return losses, params, aux


def test_gradients_of_a_function_have_the_same_bits_at_any_number_of_ranks() -> None:
    world = 3
    reduction = CanonicalReduction(num_microbatches=12)
    losses, params, aux = run_ranks(descend, 1, reduction=reduction)[0]
    assert losses[-1] < losses[0]
    found = run_ranks(descend, world, reduction=reduction)
    for rank, (other_losses, other_params, other_aux) in enumerate(found):
        assert torch.equal(torch.stack(losses), torch.stack(other_losses))
        for name, value in params.items():
            assert value.dtype == other_params[name].dtype
            assert torch.equal(value, other_params[name])
        rows = 24 // world
        for one, other in zip(aux, other_aux, strict=True):
            assert torch.equal(one["error"][rank * rows :][:rows], other["error"])
            assert torch.equal(one["worst"][rank * 12 // world :][: 12 // world], other["worst"])
            assert other["name"] == "a"


def test_a_batch_that_cant_be_cut_is_refused_on_all_ranks() -> None:
    def run(ctx: Context) -> None:
        step = af.value_and_grad(ctx, lambda params, x: (params * x).sum())
        kind = ValueError if ctx.rank == 1 else RemoteRankError
        with pytest.raises(
            kind, match="a batch of 5 rows can't be split into 2 equal microbatches, as 4 microbatches on 2 r"
        ):
            step(torch.ones(()), torch.ones(4 + ctx.rank))
        assert step(torch.ones(()), torch.ones(2))[0] == 1
        with pytest.raises((ValueError, RemoteRankError), match="holds no tensor with a first dimension"):
            step(torch.ones(()), torch.ones(()))

    run_ranks(run, 2, reduction=CanonicalReduction(num_microbatches=4))


# --- loss scaling and the shim -------------------------------------------------------------------


def data() -> TensorDataset:
    x = torch.randn(96, 3, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def make() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    model = filled(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1)))
    return model, torch.optim.AdamW(model.parameters(), 0.02), DataLoader(data(), 4)


def mean(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


# --- several loops, padding, ranks that are threads -----------------------------------------------


def pieces(ctx: Context, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make this rank's batches of data that nobody prepares: each ``ranks``-th of ``count`` microbatches."""
    x = torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(seed))
    rank, size = ctx.rank, ctx.num_processes
    return [(microbatch, microbatch.sum(1, keepdim=True).sin()) for microbatch in x[rank::size]]


@pytest.mark.parametrize(("world", "on"), [(3, "memory"), (2, "processes")])
def test_loops_that_alternate_draw_the_same_at_any_number_of_ranks(world: int, on: Where) -> None:
    def run(ctx: Context) -> list[Any]:
        """Train two models in turn, each by batches of its own."""
        both = [af.prepare(ctx, *make()[:2]) for _ in range(2)]
        loops = [af.microbatches(ctx, pieces(ctx, 24, seed)) for seed in range(2)]
        scalers = [af.init_scaler(ctx) for _ in range(2)]
        for turn in zip(*loops, strict=True):
            for index, (batch, micro) in enumerate(turn):
                model, optimizer = both[index]
                scalers[index], _ = af.forward_backward(ctx, model, mean, batch, scalers[index], micro)
                if micro.sync:
                    scalers[index] = af.optimizer_step(ctx, optimizer, scalers[index])
        return [one.tolist() for model, _ in both for one in model.parameters()]

    reduction = CanonicalReduction(num_microbatches=12)
    assert run_ranks(run, world, on, reduction=reduction) == run_ranks(run, 1, reduction=reduction) * world


@pytest.mark.parametrize("world", [1, 2])
def test_on_threads_the_programs_own_draws_are_those_of_a_world_of_one(world: int) -> None:
    def run(ctx: Context) -> list[float]:
        model = af.prepare(ctx, make()[0])
        scaler, found = af.init_scaler(ctx), [torch.rand(()).item()]
        for batch, micro in af.microbatches(ctx, pieces(ctx, 8, 0)[:2]):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, mean(model, batch), scaler, micro)
                inside = torch.rand(()).item()  # behind an exchange with the other ranks
                with af.accumulate(ctx, micro, model):
                    torch.rand(3)
                assert torch.rand(()).item() != inside
            found.append(torch.rand(()).item())
        return found

    torch.manual_seed(5)
    expected = run(Context().replace(reduction="canonical"))
    torch.manual_seed(5)
    assert run_ranks(run, world, reduction="canonical") == [expected] * world
    state = torch.default_generator.get_state()
    run_ranks(run, world, reduction="canonical")
    assert torch.equal(torch.default_generator.get_state(), state)  # whoever calls has drawn nothing
