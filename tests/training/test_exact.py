"""Exact mode for training: what is drawn for a microbatch, functions of a tree, loss scaling, the shim."""

# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accelfn as af
from accelfn import CanonicalReduction, Context
from accelfn.errors import MismatchError, RemoteRankError
from accelfn.testing import Where, run_ranks
from accelfn.training import rescale_gradients
from tests.training.models import filled, gradients

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


@pytest.mark.parametrize("world", [1, 2, 4])
def test_data_that_was_not_prepared_is_known_by_its_place_in_a_pass(world: int) -> None:
    def run(ctx: Context) -> list[tuple[int, float]]:
        batches = [[torch.tensor([microbatch])] for microbatch in range(ctx.rank, 8, ctx.num_processes)]
        return [one for _ in range(2) for one in numbers(ctx, batches)]

    alone = run_ranks(run, 1, reduction=CanonicalReduction(num_microbatches=4))[0]
    assert len({number for _, number in alone}) == 16
    found = run_ranks(run, world, reduction=CanonicalReduction(num_microbatches=4))
    assert sorted(chain(*found)) == sorted(alone)


def test_the_programs_own_random_numbers_go_on_behind_the_block() -> None:
    ctx = Context().replace(reduction="canonical")
    micro = next(iter(af.microbatches(ctx, [0])))[1]
    torch.manual_seed(4)
    expected = torch.rand(3).tolist()
    torch.manual_seed(4)
    found = [torch.rand(()).item()]
    with af.accumulate(ctx, micro):
        torch.rand(5)
    found.append(torch.rand(()).item())
    with pytest.raises(RuntimeError, match="negative dimension"), af.accumulate(ctx, micro):
        torch.rand(-1)
    assert [*found, torch.rand(()).item()] == expected


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
    for world in (2, 4):
        found = run_ranks(lambda ctx: numbers(ctx, loader_of(ctx, kind)), world, reduction="canonical")
        assert sorted(chain(*found)) == alone
        before = run_ranks(begun, 2, reduction="canonical")
        states = [state for _, state in before]
        after = run_ranks(resumed, 2 if kind == KINDS[-1] else world, reduction="canonical")
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


@pytest.mark.parametrize("world", [2, 3, 4, 6, 12])
def test_gradients_of_a_function_have_the_same_bits_at_any_number_of_ranks(world: int) -> None:
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
            kind,
            match="a batch of 5 rows can't be split into 2 equal microbatches, as 4 microbatches on 2 r",
        ):
            step(torch.ones(()), torch.ones(4 + ctx.rank))
        assert step(torch.ones(()), torch.ones(2))[0] == 1
        with pytest.raises((ValueError, RemoteRankError), match="holds no tensor with a first dimension"):
            step(torch.ones(()), torch.ones(()))
        with pytest.raises(MismatchError, match=r"float32 \(2,\)"):
            step(torch.ones(2 if ctx.rank else 1), torch.ones(2, 1))

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


def counted_sum(model: nn.Module, batch: Any) -> af.Loss:
    x, y = batch
    counted = x[:, 0] > 0  # another number of them in each batch, and sometimes none
    total = nn.functional.mse_loss(model(x)[counted], y[counted], reduction="sum")
    return af.Loss(total, counted.sum())


def by_functions(ctx: Context, loss_fn: Callable[..., Any] = mean) -> list[Any]:
    model, optimizer, loader = af.prepare(ctx, *make())
    scaler = af.init_scaler(ctx)
    for _ in range(3):
        for batch, micro in af.microbatches(ctx, loader):
            scaler, _ = af.forward_backward(ctx, model, loss_fn, batch, scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=0.1)
    return [*(one.tolist() for one in model.parameters()), scaler.num_skipped.item()]


@pytest.mark.parametrize("mode", ["no", "bf16", "fp16"])
def test_any_precision_is_as_exact(mode: Any) -> None:
    options: Any = {
        "reduction": CanonicalReduction(num_microbatches=4),
        "mixed_precision": mode,
        "kwargs_handlers": [af.GradScalerKwargs(init_scale=2.0**20)],
    }
    expected = run_ranks(by_functions, 1, **options)[0]
    assert (expected[-1] > 0) == (mode == "fp16")
    for world in (2, 4):
        assert run_ranks(by_functions, world, **options) == [expected] * world


def test_sums_with_whole_weights_are_divided_by_the_same_number_at_any_number_of_ranks() -> None:
    reduction = CanonicalReduction(num_microbatches=12)
    expected = run_ranks(lambda ctx: by_functions(ctx, counted_sum), 1, reduction=reduction)
    assert expected[0][:-1] != [one.tolist() for one in make()[0].parameters()]
    for world in (2, 3, 4):
        found = run_ranks(lambda ctx: by_functions(ctx, counted_sum), world, reduction=reduction)
        assert found == expected * world


def test_a_change_of_scale_amid_a_window_reaches_its_sums() -> None:
    def run(ctx: Context) -> list[Any]:
        model, optimizer, loader = af.prepare(ctx, *make())
        scaler = af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, loader):
            scaler, _ = af.forward_backward(ctx, model, mean, batch, scaler, micro)
            if (micro.place + 1) * ctx.num_processes == 4:
                after = scaler._replace(scale=scaler.scale / 4)
                rescale_gradients([optimizer], scaler, after)
                scaler = after
            if micro.sync:
                return [one.tolist() for one in gradients(model)]
        raise AssertionError

    reduction = CanonicalReduction(num_microbatches=8)
    expected = run_ranks(run, 1, reduction=reduction, mixed_precision="fp16")
    assert run_ranks(run, 2, reduction=reduction, mixed_precision="fp16") == expected * 2
    assert expected[0]


# --- several loops, padding, ranks that are threads -----------------------------------------------


def pieces(ctx: Context, count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make this rank's batches of data that nobody prepares: each ``ranks``-th of ``count`` microbatches."""
    x = torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(seed))
    rank, size = ctx.rank, ctx.num_processes
    return [(microbatch, microbatch.sum(1, keepdim=True).sin()) for microbatch in x[rank::size]]


def adversaries(ctx: Context) -> list[Any]:
    """Train two models in turn, each by batches of its own, and evaluate in between."""
    both = [af.prepare(ctx, *make()[:2]) for _ in range(2)]
    variant = ctx.replace(guard="off")  # shares the world
    for epoch in range(2):
        loops = [af.microbatches(one, pieces(ctx, 24, seed)) for seed, one in enumerate((ctx, variant))]
        scalers = [af.init_scaler(ctx) for _ in range(2)]
        for turn in zip(*loops, strict=True):
            for index, ((x, y), micro) in enumerate(turn):
                model, optimizer = both[index]
                for number in range(2):  # two blocks for one batch, of which the second trains
                    with af.accumulate(ctx, micro, model):
                        loss = nn.functional.mse_loss(model(x + torch.rand(()) / 10), y)
                        if number:
                            scalers[index] = af.backward(ctx, loss, scalers[index], micro)
                if micro.sync:
                    scalers[index] = af.optimizer_step(ctx, optimizer, scalers[index])
                    for (x, _), seen in af.microbatches(ctx, pieces(ctx, 12, 7 + epoch)):
                        with torch.no_grad(), af.accumulate(ctx, seen, model):
                            model(x)
    return [one.tolist() for model, _ in both for one in model.parameters()]


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_loops_that_alternate_draw_the_same_at_any_number_of_ranks(on: Where) -> None:
    reduction = CanonicalReduction(num_microbatches=12)
    expected = run_ranks(adversaries, 1, reduction=reduction)
    for world in (2, 3, 4):
        assert run_ranks(adversaries, world, on, reduction=reduction) == expected * world
        if on == "processes":
            break


def padded(ctx: Context, steps: int, before: Any = None) -> Any:
    """Train on 27 samples, which 2 and 4 ranks both read as 8 microbatches of 4, the last ones padded."""
    model, optimizer, _ = make()
    loader: Any = DataLoader(TensorDataset(*data()[:27]), 4, shuffle=True)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    if before is not None:
        model.load_state_dict(before[0])
        optimizer.load_state_dict(copy.deepcopy(before[1]))
        af.restore_loader(loader, before[2])
    scaler = af.init_scaler(ctx)
    while True:
        for batch, micro in af.microbatches(ctx, loader):
            scaler, _ = af.forward_backward(ctx, model, mean, batch, scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                steps -= 1
                if steps == 0:
                    weights = {name: value.clone() for name, value in model.state_dict().items()}
                    return weights, copy.deepcopy(optimizer.state_dict()), af.loader_state(loader)


@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("second", [2, 4])
def test_padded_steps_draw_the_same_after_a_resumption(first: int, second: int) -> None:
    options: Any = {
        "reduction": CanonicalReduction(num_microbatches=4),
        "dataloader_config": af.DataLoaderConfiguration(data_seed=1),
    }
    expected = run_ranks(lambda ctx: padded(ctx, 8), 2, **options)[0][0]
    before = run_ranks(lambda ctx: padded(ctx, 3), first, **options)[0]
    for found in run_ranks(lambda ctx: padded(ctx, 5, before), second, **options):
        for name, value in expected.items():
            assert torch.equal(value, found[0][name]), name


@pytest.mark.parametrize("world", [1, 2, 4])
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
