"""A run that is saved in one layout goes on in any other: to the last bit, from its place in the data.

Its weights are saved from every layout as complete tensors, and loaded into any.
"""

# torch leaves manual_seed and backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.context import Context
from accelfn.errors import ReplicaDriftError
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.checkpoint.layouts import differing, whole
from tests.parallel.expert_models import SparseGPT
from tests.parallel.layouts import LAYOUTS, Layout
from tests.parallel.tensor_models import GPT, LENGTH, VOCABULARY

pytestmark = pytest.mark.usefixtures("dtensors")

T = TypeVar("T")
MakeModel = Callable[..., nn.Module]
_ROWS = 4  # of a batch over all ranks

DENSE = partial(GPT, num_blocks=4)
PLACES = {
    **LAYOUTS,
    "pp2xtp2xfsdp2": Layout(pp=2, tp=2, shard=2, split=("blocks.3",)),  # of three blocks and of one
}


class Run(NamedTuple):
    """All that a training run consists of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    loader: Any


def make_run(ctx: Context, seed: int, make_model: MakeModel) -> Run:
    """Begin a run; with another seed its weights differ, and its data don't."""
    plain = make_model(seed=seed)
    model, optimizer = af.prepare(ctx, plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    torch.manual_seed(10 * ctx.coordinate("loss") + seed)
    ids = torch.randint(0, VOCABULARY, (64, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    loader = DataLoader[Any](data, batch_size=_ROWS // ctx.axis_size("dp"), shuffle=True)
    return Run(model, optimizer, scheduler, af.prepare(ctx, loader))


def mean_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch."""
    ids, labels = batch
    return F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def train(ctx: Context, run: Run) -> Iterator[torch.Tensor]:
    """Train; yield the token ids that this rank has read, step by step."""
    scaler = af.init_scaler(ctx)
    for batch, micro in af.microbatches(ctx, run.loader):
        scaler, _ = af.forward_backward(ctx, run.model, mean_loss, batch, scaler, micro)
        scaler = af.optimizer_step(ctx, run.optimizer, scaler)
        run.scheduler.step()
        yield batch[0]


class Seen(NamedTuple):
    """What a rank has of a run."""

    tensors: dict[str, torch.Tensor]  # whole
    rate: float
    draws: torch.Tensor  # random numbers
    data: torch.Tensor  # what all ranks together read next
    loss_rank: int


def look(ctx: Context, run: Run, steps: Iterator[torch.Tensor]) -> Seen:
    """Look where a run is, and go on for a step."""
    tensors, draws = whole(run.model, run.optimizer, ctx), torch.rand(4)
    data = torch.cat(af.gather_object(ctx.along("dp"), [next(steps)]))
    return Seen(tensors, run.optimizer.param_groups[0]["lr"], draws, data, ctx.coordinate("loss"))


def begin(ctx: Context, folder: Path, make_model: MakeModel) -> Seen:
    """Train for two steps, and save the run and its weights."""
    run = make_run(ctx, 0, make_model)
    steps = train(ctx, run)
    next(steps)
    next(steps)
    return save_and_look(ctx, folder, run, steps, make_model)


def save_and_look(
    ctx: Context, folder: Path, run: Run, steps: Iterator[torch.Tensor], make_model: MakeModel
) -> Seen:
    """Save a run and its weights, and look where it is."""
    af.save_state(ctx, folder, run)
    with torch.random.fork_rng(devices=[]):
        save_weights(ctx, run.model, folder.with_suffix(".weights"), make_model)
    return look(ctx, run, steps)


def check_taken_up(ctx: Context, folder: Path, before: list[Seen], run: Run) -> Iterator[torch.Tensor]:
    """Load a run in this layout, and see that it goes on as it was; return its next steps."""
    af.load_state(ctx, folder, run)
    steps = train(ctx, run)
    found = look(ctx, run, steps)
    assert not differing(found.tensors, before[0].tensors)
    assert found.rate == before[0].rate
    assert torch.equal(found.data, before[0].data)
    # Ranks that share data draw alike, others don't, and the layout of before goes on as it was.
    ranks = af.gather_object(ctx, [found])
    by_loss_rank = {rank.loss_rank: rank.draws for rank in ranks}
    assert all(torch.equal(rank.draws, by_loss_rank[rank.loss_rank]) for rank in ranks)
    assert len(set(map(repr, by_loss_rank.values()))) == len(by_loss_rank)
    if [rank.loss_rank for rank in ranks] == [rank.loss_rank for rank in before]:
        assert all(torch.equal(rank.draws, old.draws) for rank, old in zip(ranks, before, strict=True))
    return steps


def save_weights(ctx: Context, model: nn.Module, folder: Path, make_model: MakeModel) -> None:
    """Save a model's weights from this layout, and load them into other models of it."""
    expected = whole(model, torch.optim.SGD([torch.ones(1)]), ctx)
    state = af.get_state_dict(ctx, model)
    spread = ctx.axis_size("dp_shard", "tp", "pp") > 1  # then only the main rank has the state dict
    assert ctx.is_main_process or bool(state) == (not spread)
    assert not state or not differing({f"model/{name}": value for name, value in state.items()}, expected)
    files = af.save_model(ctx, model, folder, max_shard_size=4000)
    assert len(files) > 3
    stored: dict[str, torch.Tensor] = {}
    for file in set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()):
        stored.update(load_file(folder / file))
    assert stored.keys() == {name.removeprefix("model/") for name in expected} - {"head.weight"}  # tied
    assert not differing(
        {f"model/{name}": value for name, value in stored.items()},
        {name: value for name, value in expected.items() if name != "model/head.weight"},
    )
    for load in (af.load_model, af.bigmodel.load_checkpoint_in_model):
        fresh = af.prepare(ctx, make_model(seed=1))
        load(fresh, folder)
        assert not differing(whole(fresh, torch.optim.SGD([torch.ones(1)]), ctx), expected)


def in_layout(name: str, work: Callable[[Context], T]) -> list[T]:
    """Run on the ranks of a layout."""
    sizes = PLACES[name]
    return run_ranks(work, sizes.size, "processes", timeout_s=300.0, parallelism_config=sizes.config())


# A run is taken up in each from the one before it, and saved there for the next. The programs of
# tests/programs resume from layouts of at most two axes; they have no experts and no other schedules.
_DENSE = ("pp2xtp2xfsdp2", "pp2-interleaved", "fsdp4")
_SPARSE = ("fsdp2", "ep2xfsdp2", "one")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("names", "make_model"),
    [
        pytest.param(("one", "pp2xfsdp2", "one"), GPT, id="sample"),
        pytest.param(_DENSE, DENSE, id="dense", marks=pytest.mark.slow),
        pytest.param(_SPARSE, SparseGPT, id="sparse", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_from_layout_to_layout(
    names: Sequence[str], make_model: MakeModel, tmp_path: Path
) -> None:
    before = in_layout(names[0], lambda ctx: begin(ctx, tmp_path / "0", make_model))
    for stop, name in enumerate(names[1:], start=1):

        def work(ctx: Context, stop: int = stop, before: list[Seen] = before) -> Seen:
            run = make_run(ctx, stop, make_model)
            steps = check_taken_up(ctx, tmp_path / f"{stop - 1}", before, run)
            if stop == len(names) - 1:
                return look(ctx, run, steps)
            return save_and_look(ctx, tmp_path / f"{stop}", run, steps, make_model)

        before = in_layout(name, work)


@pytest.mark.parametrize(
    ("name", "leaf", "reported"),
    [
        pytest.param("hsdp2x2", "blocks.0.up.weight", "blocks.0.up.weight", marks=pytest.mark.slow),
        ("tp2", "norm.weight", "norm.weight"),
        ("pp2", "head.weight", "embed.weight"),  # which the stages share
    ],
)
def test_copies_of_a_part_that_have_drifted_are_refused(
    name: str, leaf: str, reported: str, tmp_path: Path
) -> None:
    def work(ctx: Context) -> None:
        model = af.prepare(ctx, GPT(seed=0))
        last = ctx.num_processes - 1
        if ctx.rank == last:
            local_of(af.unwrap_model(model).get_parameter(leaf)).data.add_(1e-3)
        saves: dict[str, Callable[[], object]] = {
            "tree": lambda: af.save_state(ctx, tmp_path / "at", model),
            "model": lambda: af.save_model(ctx, model, tmp_path / "weights"),
        }
        for root, save in saves.items():
            with pytest.raises(ReplicaDriftError) as caught:
                save()
            assert [(row.rank, row.path) for row in caught.value.rows] == [(last, f"{root}[{reported!r}]")]

    in_layout(name, work)
    assert not [*tmp_path.iterdir()]
