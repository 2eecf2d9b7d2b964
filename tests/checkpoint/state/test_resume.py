"""Training that was killed goes on as if it never was: bit for bit, or closely on other worlds."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

import accelfn as af
from accelfn.checkpoint.stop_signals import EXIT_PREEMPTED
from accelfn.context import Context
from accelfn.errors import MissingRankError
from accelfn.testing import run_ranks
from accelfn.training import StepState
from tests.checkpoint.layouts import OPTIMIZERS, differing, whole
from tests.parallel.layouts import Layout


class Points(Dataset[tuple[int, torch.Tensor, torch.Tensor]]):
    """Gives each sample with its number."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.inputs = torch.randn(size, 6, generator=generator)
        self.targets = self.inputs @ torch.randn(6, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, self.inputs[index], self.targets[index]


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(6, 12)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(12, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(inputs).relu())).clone()  # FSDP2 warns of views


class Loop(NamedTuple):
    """What is trained with one optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    scaler: StepState


def new_loop(ctx: Context, make: Callable[..., torch.optim.Optimizer], dropout: float) -> Loop:
    model: nn.Module = Net(dropout)
    model, optimizer = af.prepare(ctx, model, make(model.parameters()))
    schedule = af.training.prepare_scheduler(ctx, ExponentialLR(optimizer, 0.9))
    return Loop(model, optimizer, schedule, af.init_scaler(ctx))


class Kill(NamedTuple):
    """How a run ends before its time."""

    step: int
    rank: int
    how: str


class Plan(NamedTuple):
    """A run over some steps, whatever becomes of it."""

    layout: Layout = Layout()
    folder: Path | None = None  # where it saves, and goes on from if there is something
    steps: int = 9
    samples: int = 26
    batch: int = 3
    workers: int = 0
    dropout: float = 0.3
    every: int = 2  # steps between two checkpoints
    optimizers: tuple[str, ...] = tuple(OPTIMIZERS)
    kill: Kill | None = None


class Result(NamedTuple):
    """What a rank has at the end."""

    tensors: dict[str, dict[str, torch.Tensor]]
    rates: list[float]
    scales: list[float]
    drawn: tuple[float, float]
    status: object = None  # of a program that was asked to stop


def train(ctx: Context, plan: Plan, log: Path) -> Result:
    """Train all loops on the same batches, from the newest checkpoint on where there is one."""
    af.set_seed(5, ctx=ctx)
    loops = {name: new_loop(ctx, OPTIMIZERS[name], plan.dropout) for name in plan.optimizers}
    af.set_seed(50, ctx=ctx, device_specific=True)
    loader = DataLoader(Points(plan.samples), plan.batch, shuffle=True, num_workers=plan.workers)
    loader = af.prepare_data_loader(ctx, loader)
    tree: dict[str, Any] = {"loops": loops, "loader": loader, "step": 0}
    if plan.folder is not None and plan.folder.exists():
        tree = af.load_state(ctx, plan.folder, tree)
        loops = tree["loops"]
    step: int = tree["step"]
    status = None
    with af.preemption(ctx) as guard:
        while step < plan.steps and status is None:
            for batch, micro in af.microbatches(ctx, loader):
                if plan.kill is not None and plan.kill[:2] == (step, ctx.rank):
                    end_by(plan.kill.how)
                losses: list[float] = []
                for name, (model, optimizer, schedule, scaler) in loops.items():
                    with af.autocast(ctx):
                        loss = nn.functional.mse_loss(model(batch[1]).float(), batch[2])
                    scaler = af.backward(ctx, loss, scaler)
                    scaler = af.optimizer_step(ctx, optimizer, scaler)
                    af.scheduler_step(ctx, schedule, scaler)
                    loops[name] = loops[name]._replace(scaler=scaler)
                    losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
                seen: list[int] = cast("Any", af.gather(ctx, batch[0])).tolist()
                step += 1
                if ctx.is_main_process:
                    with log.open("a") as file:
                        file.write(json.dumps([step, micro.epoch, losses, seen]) + "\n")
                stops = guard.should_stop()
                if plan.folder is not None and (step % plan.every == 0 or stops):
                    tree = {"loops": loops, "loader": loader, "step": step}
                    af.save_state(ctx, plan.folder, tree, step=step)
                if stops:
                    with pytest.raises(SystemExit) as caught:
                        guard.exit()
                    status = caught.value.code
                if stops or step == plan.steps:
                    break
    return Result(
        {name: whole(loop.model, loop.optimizer) for name, loop in loops.items()},
        [float(loop.schedule.get_last_lr()[0]) for loop in loops.values()],
        [float(loop.scaler.scale) for loop in loops.values()],
        (float(torch.rand(())), random.random()),
        status,
    )


def run_plan(plan: Plan, log: Path, **options: Any) -> list[Result]:
    """Run on the ranks of a plan's layout."""
    mesh = plan.layout.config({"up": "colwise", "down": "rowwise"})
    ranks = plan.layout.size
    return run_ranks(
        lambda ctx: train(ctx, plan, log), ranks, "processes", parallelism_config=mesh, **options
    )


def end_by(how: str) -> None:
    """End this rank amid a step, or ask it to stop."""
    if how == "exit":
        os._exit(9)
    if how == "raise":
        raise RuntimeError("killed")
    os.kill(os.getpid(), signal.SIGTERM)


def history(log: Path) -> dict[int, list[Any]]:
    """Return the last log entry of each step: the epoch, losses, and samples."""
    return {row[0]: row[1:] for row in map(json.loads, log.read_text().splitlines())}


def check_equal(resumed: list[Result], expected: list[Result]) -> None:
    for rank, (ours, theirs) in enumerate(zip(resumed, expected, strict=True)):
        assert ours[1:] == theirs[1:], rank
        for name, tensors in theirs.tensors.items():
            assert not differing(ours.tensors[name], tensors), (rank, name)


CASES = [
    ("one-fp16", Plan(workers=2)),
    ("dp2-bf16", Plan(Layout(replicate=2))),
    ("dp2-fp16", Plan(Layout(replicate=2), workers=2)),
    ("fsdp2-no", Plan(Layout(shard=2), workers=2)),
    ("hsdp2x2-no", Plan(Layout(replicate=2, shard=2))),
    ("tp2xfsdp2-no", Plan(Layout(shard=2, tp=2))),
]


# Four worlds each: one that is left alone, two that are killed, and the one that comes to the end.
@pytest.mark.parametrize(
    ("name", "plan"), [*CASES[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES[2:])]
)
def test_killed_and_resumed_is_bit_equal_to_never_killed(tmp_path: Path, name: str, plan: Plan) -> None:
    size = plan.layout.size
    options: dict[str, Any] = {
        "mixed_precision": name.rpartition("-")[2],
        "dataloader_config": af.DataLoaderConfiguration(data_seed=7),
    }

    def run(plan: Plan, log: str) -> list[Result]:
        return run_plan(plan, tmp_path / log, **options)

    expected = run(plan, "straight")
    numbers = random.Random(name)
    saving = plan._replace(folder=tmp_path / "at")
    first = Kill(numbers.randint(2, 5), numbers.randrange(size), "raise")
    second = Kill(numbers.randint(first.step + 1, 8), numbers.randrange(size), "exit")
    for kill in (first, second):
        # Of the rank that ends, or what torch says on one that waited for it.
        with pytest.raises((RuntimeError, MissingRankError)):
            run(saving._replace(kill=kill), "killed")
    check_equal(run(saving, "killed"), expected)
    assert history(tmp_path / "killed") == history(tmp_path / "straight")


# --- on other worlds -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["replicate", pytest.param("shard", marks=pytest.mark.slow)])
def test_worlds_that_grow_and_shrink_read_every_sample_once(tmp_path: Path, kind: str) -> None:
    # Steps of 12 samples in any world, of which there are 10 in an epoch.
    options: dict[str, Any] = {
        "dataloader_config": af.DataLoaderConfiguration(data_seed=7, split_batches=True)
    }

    def run(size: int, plan: Plan, log: str) -> list[Result]:
        plan = plan._replace(layout=Layout()._replace(**{kind: size}))
        return run_plan(plan, tmp_path / log, **options)

    plan = Plan(workers=1, steps=12, samples=120, batch=12, dropout=0.0)
    expected = run(1, plan, "straight")
    saving = plan._replace(folder=tmp_path / "at", every=1)
    for size, step in ((4, 3), (2, 5), (3, 8)):
        with pytest.raises((RuntimeError, MissingRankError)):
            run(size, saving._replace(kill=Kill(step, size - 1, "raise")), "elastic")
    resumed = run(1, saving, "elastic")

    steps, straight = (list(history(tmp_path / log).values()) for log in ("elastic", "straight"))
    assert [seen for _, _, seen in steps] == [seen for _, _, seen in straight]
    assert sorted(number for _, _, seen in steps[:10] for number in seen) == list(range(120))
    for (_, losses, _), (_, expected_losses, _) in zip(steps, straight, strict=True):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, tensors in expected[0].tensors.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(resumed[0].tensors[name][key], tensor, rtol=1e-4, atol=1e-5)


# --- stopped by a signal -------------------------------------------------------------------------


def test_a_signal_to_one_rank_amid_a_step_saves_the_same_step_on_both(tmp_path: Path) -> None:
    plan = Plan(Layout(replicate=2), workers=1, optimizers=("adamw",), every=100)
    straight = run_plan(plan, tmp_path / "straight")
    saving = plan._replace(folder=tmp_path / "at")
    stopped = run_plan(saving._replace(kill=Kill(3, 1, "signal")), tmp_path / "killed")
    assert [result.status for result in stopped] == [EXIT_PREEMPTED] * 2
    assert af.verify_checkpoint(tmp_path / "at").step == 4
    check_equal(run_plan(saving, tmp_path / "killed"), straight)
    assert history(tmp_path / "killed") == history(tmp_path / "straight")
