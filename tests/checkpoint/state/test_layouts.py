"""A run that is saved in one layout goes on in any other: to the last bit, from its place in the data."""

# torch leaves manual_seed and backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.context import Context
from accelfn.errors import ReplicaDriftError
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import whole
from tests.parallel.expert_models import SparseGPT
from tests.parallel.layouts import LAYOUTS, SAVED, SPARSE, Layout
from tests.parallel.tensor_models import GPT, LENGTH, VOCABULARY

T = TypeVar("T")
_ROWS = 4  # of a batch over all ranks

DENSE = partial(GPT, num_blocks=4)
PLACES = {**LAYOUTS, "pp2-uneven": Layout(pp=2, split=("blocks.3",))}
EVERY = (*SAVED, "fsdp4", "pp4", "pp2-interleaved", "pp2-uneven")
# What every run of the suite tries: the layouts that differ most, one after the other.
ROUTE = ("one", "fsdp4", "pp2xfsdp2", "tp2xfsdp2", "one")
SPARSE_ROUTE = ("one", "ep2xfsdp2", "fsdp2", "one")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


class Run(NamedTuple):
    """All that a training run consists of: one model for each optimizer, and the data that they share."""

    models: dict[str, nn.Module]
    optimizers: dict[str, torch.optim.Optimizer]
    schedulers: dict[str, torch.optim.lr_scheduler.LRScheduler]
    loader: Any


def make_run(ctx: Context, seed: int, make_model: Callable[..., nn.Module]) -> Run:
    """Begin a run; with another seed its weights differ, and its data don't."""
    models: dict[str, nn.Module] = {}
    optimizers: dict[str, torch.optim.Optimizer] = {}
    for name, make in OPTIMIZERS.items():
        model = make_model(seed=seed)
        models[name], optimizers[name] = af.prepare(ctx, model, make(model.parameters()))
    schedulers: dict[str, torch.optim.lr_scheduler.LRScheduler] = {
        name: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step)
        for name, one in optimizers.items()
    }
    torch.manual_seed(10 * ctx.coordinate("loss") + seed)
    ids = torch.randint(0, VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loader = DataLoader[Any](data, batch_size=_ROWS // ctx.axis_size("dp"), shuffle=True)
    return Run(models, optimizers, schedulers, af.prepare(ctx, loader))


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch."""
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def train(ctx: Context, run: Run) -> Iterator[torch.Tensor]:
    """Train; yield the token ids that this rank has read, step by step."""
    scaler = af.init_scaler(ctx)
    for batch, micro in af.microbatches(ctx, run.loader):
        for name, model in run.models.items():
            scaler, _ = af.forward_backward(ctx, model, mean_loss, batch, scaler, micro)
            scaler = af.optimizer_step(ctx, run.optimizers[name], scaler)
            run.schedulers[name].step()
        yield batch[0]


class Seen(NamedTuple):
    """What a rank has of a run."""

    tensors: dict[str, torch.Tensor]  # whole, by the optimizer's name first
    rates: list[float]
    draws: torch.Tensor  # random numbers
    data: torch.Tensor  # what all ranks together read next
    loss_rank: int


def look(ctx: Context, run: Run, steps: Iterator[torch.Tensor]) -> Seen:
    """Look where a run is, and go on for a step."""
    tensors = {
        f"{name}/{key}": value
        for name, model in run.models.items()
        for key, value in whole(model, run.optimizers[name], ctx).items()
    }
    rates = [group["lr"] for one in run.optimizers.values() for group in one.param_groups]
    draws = torch.rand(4)
    data = torch.cat(af.gather_object(ctx.along("dp"), [next(steps)]))
    return Seen(tensors, rates, draws, data, ctx.coordinate("loss"))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Name what isn't the same to the last bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def check_draws(ranks: list[Seen], saved: list[Seen] | None) -> None:
    """See that ranks that share data draw alike, others don't, and the layout of before goes on as it was."""
    by_loss_rank = {one.loss_rank: one.draws for one in ranks}
    for one in ranks:
        assert torch.equal(one.draws, by_loss_rank[one.loss_rank])
    assert len(set(map(repr, by_loss_rank.values()))) == len(by_loss_rank)
    if saved is not None:
        for one, before in zip(ranks, saved, strict=True):
            assert torch.equal(one.draws, before.draws)


def check_taken_up(ctx: Context, folder: Path, before: list[Seen], run: Run) -> Iterator[torch.Tensor]:
    """Load a run in this layout, and see that it goes on as it was; return its next steps."""
    af.load_state(ctx, folder, run)
    steps = train(ctx, run)
    found = look(ctx, run, steps)
    assert not differing(found.tensors, before[0].tensors)
    assert found.rates == before[0].rates
    assert torch.equal(found.data, before[0].data)
    ranks = af.gather_object(ctx, [found])
    is_same_layout = [one.loss_rank for one in ranks] == [one.loss_rank for one in before]
    check_draws(ranks, before if is_same_layout else None)
    return steps


def in_layout(name: str, work: Callable[[Context], T]) -> list[T]:
    """Run on the ranks of a layout."""
    sizes = PLACES[name]
    return run_ranks(work, sizes.size, "processes", timeout_s=300.0, parallelism_config=sizes.config())


def check_route(folder: Path, route: Sequence[str], make_model: Callable[..., nn.Module]) -> None:
    """Train, save and load one run in one layout after the other."""
    before: list[Seen] = []
    for stop, name in enumerate(route):

        def work(ctx: Context, stop: int = stop, before: list[Seen] = before) -> Seen:
            run = make_run(ctx, stop, make_model)
            if stop:
                steps = check_taken_up(ctx, folder / f"{stop - 1}", before, run)
            else:
                steps = train(ctx, run)
                next(steps)
                next(steps)
            af.save_state(ctx, folder / f"{stop}", run)
            seen = look(ctx, run, steps)
            # By itself too: then random numbers go on on each rank as they were.
            check_taken_up(
                ctx, folder / f"{stop}", af.gather_object(ctx, [seen]), make_run(ctx, -1, make_model)
            )
            return seen

        before = in_layout(name, work)


@pytest.mark.timeout(300)
def test_a_run_goes_from_layout_to_layout(tmp_path: Path) -> None:
    check_route(tmp_path, ROUTE, DENSE)


@pytest.mark.timeout(300)
def test_a_run_with_experts_goes_from_layout_to_layout(tmp_path: Path) -> None:
    check_route(tmp_path, SPARSE_ROUTE, SparseGPT)


class Checkpoints(NamedTuple):
    """Runs of one model that have been saved after two steps, each in its own folder, in some layouts."""

    folder: Path
    make_model: Callable[..., nn.Module]
    seen: dict[str, list[Seen]]  # what each was, by layout and rank


def save_in_each(folder: Path, names: Sequence[str], make_model: Callable[..., nn.Module]) -> Checkpoints:
    saved: dict[str, list[Seen]] = {}
    for name in names:

        def work(ctx: Context, name: str = name) -> Seen:
            run = make_run(ctx, 0, make_model)
            steps = train(ctx, run)
            for _ in range(2):
                next(steps)
            af.save_state(ctx, folder / name, run)
            return look(ctx, run, steps)

        saved[name] = in_layout(name, work)
    return Checkpoints(folder, make_model, saved)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return save_in_each(tmp_path_factory.mktemp("dense"), EVERY, DENSE)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return save_in_each(tmp_path_factory.mktemp("sparse"), SPARSE, SparseGPT)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EVERY)
def test_a_run_goes_on_in_any_layout(name: str, dense: Checkpoints) -> None:
    check_loads(name, dense)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SPARSE)
def test_a_run_with_experts_goes_on_in_any_layout(name: str, sparse: Checkpoints) -> None:
    check_loads(name, sparse)


def check_loads(name: str, checkpoints: Checkpoints) -> None:
    """Load in one layout the runs of its own and of two others, and see that they go on as they were."""
    folder, make_model, saved = checkpoints
    names = [*saved]
    places = {(names.index(name) + distance) % len(names) for distance in (0, 1, 3)}

    def work(ctx: Context) -> None:
        for other in (names[place] for place in sorted(places)):
            check_taken_up(ctx, folder / other, saved[other], make_run(ctx, 1, make_model))

    in_layout(name, work)


@pytest.mark.parametrize(
    ("name", "leaf"),
    [("hsdp2x2", "blocks.0.up.weight"), ("tp2", "norm.weight")],
)
def test_copies_of_a_part_that_have_drifted_are_refused(name: str, leaf: str, tmp_path: Path) -> None:
    def work(ctx: Context) -> list[tuple[int, str]]:
        run = make_run(ctx, seed=0, make_model=GPT)
        model = run.models["sgd"]
        af.save_state(ctx, tmp_path / "at", model)
        if ctx.rank == ctx.num_processes - 1:
            part: Any = model.get_parameter(leaf)
            part.to_local().data.add_(1e-3)
        with pytest.raises(ReplicaDriftError) as caught:
            af.save_state(ctx, tmp_path / "at", model)
        fresh = make_run(ctx, seed=1, make_model=GPT).models["sgd"]
        af.load_state(ctx, tmp_path / "at", fresh)
        assert not differing(whole(fresh, run.optimizers["sgd"]), dict(GPT().state_dict(prefix="model/")))
        return [(row.rank, row.path) for row in caught.value.rows]

    sizes = LAYOUTS[name]
    ranks = run_ranks(work, sizes.size, "processes", timeout_s=120.0, parallelism_config=sizes.config())
    assert ranks == [[(sizes.size - 1, f"tree[{leaf!r}]")]] * sizes.size
