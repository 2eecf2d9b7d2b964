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
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

import accelfn as af
from accelfn.checkpoint.manifest import MANIFEST, parse_manifest
from accelfn.checkpoint.preemption import EXIT_PREEMPTED
from accelfn.context import Context
from accelfn.errors import MissingRankError
from accelfn.testing import run_ranks
from accelfn.training import ScalerState
from tests.checkpoint.layouts import OPTIMIZERS, Layout, mesh_of, whole

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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
    def __init__(self, hidden: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(self.drop(self.up(inputs).relu())).clone()  # FSDP2 warns of views


class Loop(NamedTuple):
    """What is trained with one optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    scaler: ScalerState


def new_loop(
    ctx: Context, layout: Layout, make: Callable[..., torch.optim.Optimizer], dropout: float
) -> Loop:
    # A row-wise layer computes with even parts alone.
    model: nn.Module = Net(12 if layout.kind == "tp_fsdp" else 13, dropout)
    if layout.kind == "ddp":
        model = af.prepare(ctx, model)
    else:
        mesh = mesh_of(layout)
        if layout.kind == "tp_fsdp":
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(model, mesh["tensor"], plan)
            distribute_module(model, mesh["tensor"])
            mesh = mesh["shard"]
        fully_shard(model, mesh=mesh)
    optimizer = af.prepare_optimizer(ctx, make(model.parameters()))
    schedule = af.prepare_scheduler(ctx, ExponentialLR(optimizer, 0.9))
    return Loop(model, optimizer, schedule, af.init_scaler(ctx))


class Kill(NamedTuple):
    """How a run ends before its time."""

    step: int
    rank: int
    how: str


class Plan(NamedTuple):
    """A run over some steps, whatever becomes of it."""

    layout: Layout
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


def train(ctx: Context, plan: Plan, log: Path) -> Result:
    """Train all loops on the same batches, from the newest checkpoint on where there is one."""
    af.set_seed(5, ctx=ctx)
    loops = {name: new_loop(ctx, plan.layout, OPTIMIZERS[name], plan.dropout) for name in plan.optimizers}
    af.set_seed(50, ctx=ctx, device_specific=True)
    # Ranks that work on one sample together read the same batches; no other context knows of them yet.
    together = plan.layout.shape[1] if plan.layout.kind == "tp_fsdp" else 1
    reader = ctx if together == 1 else Context(loading=ctx.loading)
    loader = DataLoader(
        Points(plan.samples),
        batch_size=plan.batch * (ctx.num_processes // together if together > 1 else 1),
        shuffle=True,
        num_workers=plan.workers,
        drop_last=together > 1,
    )
    loader = af.prepare_data_loader(reader, loader)
    tree: dict[str, Any] = {"loops": loops, "loader": loader, "step": 0}
    if plan.folder is not None and plan.folder.exists():
        tree = af.load_state(ctx, plan.folder, tree)
        loops = tree["loops"]
    step: int = tree["step"]
    while step < plan.steps:
        for rows, micro in af.microbatches(reader, loader):
            batch: Any = rows
            if plan.kill is not None and (plan.kill.step, plan.kill.rank) == (step, ctx.rank):
                if plan.kill.how == "exit":
                    os._exit(9)
                raise RuntimeError("killed")
            if together > 1:
                part = ctx.rank // together
                batch = [one[part * plan.batch : (part + 1) * plan.batch] for one in batch]
            losses: list[float] = []
            for name, (model, optimizer, schedule, scaler) in loops.items():
                with af.autocast(ctx):
                    loss = nn.functional.mse_loss(model(batch[1]).float(), batch[2])
                scaler = af.backward(ctx, loss, scaler)
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                af.scheduler_step(ctx, schedule, scaler)
                loops[name] = loops[name]._replace(scaler=scaler)
                losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
            seen = numbers_of(af.gather(ctx, batch[0]))
            step += 1
            if ctx.is_main_process:
                with log.open("a") as file:
                    file.write(f"{step} {micro.epoch} {losses!r} {seen!r}\n")
            if plan.folder is not None and step % plan.every == 0:
                af.save_state(ctx, plan.folder, {"loops": loops, "loader": loader, "step": step}, step=step)
            if step == plan.steps:
                break
    return Result(
        {name: whole(loop.model, loop.optimizer) for name, loop in loops.items()},
        [float(loop.schedule.get_last_lr()[0]) for loop in loops.values()],
        [float(loop.scaler.scale) for loop in loops.values()],
        (float(torch.rand(())), random.random()),
    )


def numbers_of(tensor: torch.Tensor) -> list[Any]:
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def history(log: Path) -> dict[int, str]:
    """Return the last log entry of each step."""
    lines = (line.partition(" ") for line in log.read_text().splitlines())
    return {int(step): rest for step, _, rest in lines}


class Step(NamedTuple):
    """What was logged of a step."""

    epoch: int
    losses: list[float]
    seen: list[int]


def parse(line: str) -> Step:
    epoch, _, rest = line.partition(" ")
    losses, seen = json.loads(f"[{rest.replace('] [', '], [')}]")
    return Step(int(epoch), losses, seen)


def check_equal(found: list[Result], expected: list[Result]) -> None:
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one[1:] == other[1:], rank
        for name, tensors in other.tensors.items():
            assert one.tensors[name].keys() == tensors.keys()
            for key, tensor in tensors.items():
                assert torch.equal(one.tensors[name][key], tensor), (rank, name, key)


CASES = [
    (Plan(Layout("ddp", (1,)), workers=2), "fp16"),
    (Plan(Layout("ddp", (2,)), workers=2), "fp16"),
    (Plan(Layout("ddp", (2,))), "bf16"),
    (Plan(Layout("fsdp", (2,)), workers=2), "no"),
    (Plan(Layout("hsdp", (2, 2))), "no"),
    (Plan(Layout("tp_fsdp", (2, 2))), "no"),
]


# Four worlds each: one that is left alone, two that are killed, and the one that comes to the end.
@pytest.mark.parametrize(("plan", "precision"), CASES, ids=[f"{one[0].layout}-{one[1]}" for one in CASES])
def test_killed_and_resumed_is_bit_equal_to_never_killed(tmp_path: Path, plan: Plan, precision: str) -> None:
    size = plan.layout.size
    options: dict[str, Any] = {
        "mixed_precision": precision,
        "dataloader_config": af.DataLoaderConfiguration(data_seed=7),
    }

    def run(plan: Plan, log: str) -> list[Result]:
        return run_ranks(lambda ctx: train(ctx, plan, tmp_path / log), size, "processes", **options)

    expected = run(plan, "straight")
    numbers = random.Random(f"{plan.layout} {precision}")
    saving = plan._replace(folder=tmp_path / "at")
    first = Kill(numbers.randint(2, 5), numbers.randrange(size), "raise")
    second = Kill(numbers.randint(first.step + 1, 8), numbers.randrange(size), "exit")
    for kill in (first, second):
        # Of the rank that ends, or what torch says on one that waited for it.
        with pytest.raises((RuntimeError, MissingRankError)):
            run(saving._replace(kill=kill), "killed")
    found = run(saving, "killed")
    assert history(tmp_path / "killed") == history(tmp_path / "straight")
    check_equal(found, expected)


# --- on other worlds -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_worlds_that_grow_and_shrink_read_every_sample_once(tmp_path: Path, kind: str) -> None:
    # Steps of 12 samples in any world, of which there are 10 in an epoch.
    options: dict[str, Any] = {
        "dataloader_config": af.DataLoaderConfiguration(data_seed=7, split_batches=True)
    }

    def run(size: int, plan: Plan, log: str) -> list[Result]:
        plan = plan._replace(layout=Layout(kind, (size,)), steps=12, samples=120, batch=12, dropout=0.0)
        return run_ranks(lambda ctx: train(ctx, plan, tmp_path / log), size, "processes", **options)

    plan = Plan(Layout(kind, (1,)), workers=1)
    expected = run(1, plan, "straight")
    saving = plan._replace(folder=tmp_path / "at", every=1)
    for size, step in ((4, 3), (2, 5), (3, 8)):
        with pytest.raises((RuntimeError, MissingRankError)):
            run(size, saving._replace(kill=Kill(step, size - 1, "raise")), "elastic")
    found = run(1, saving, "elastic")

    steps = [parse(line) for line in history(tmp_path / "elastic").values()]
    straight = [parse(line) for line in history(tmp_path / "straight").values()]
    assert [one.seen for one in steps] == [one.seen for one in straight]
    assert sorted(number for one in steps[:10] for number in one.seen) == list(range(120))
    for one, other in zip(steps, straight, strict=True):
        assert one.losses == pytest.approx(other.losses, rel=1e-5)
    for name, tensors in expected[0].tensors.items():
        for key, tensor in tensors.items():
            torch.testing.assert_close(found[0].tensors[name][key], tensor, rtol=1e-4, atol=1e-5)


# --- stopped by a signal -------------------------------------------------------------------------


def test_a_signal_to_one_rank_amid_a_step_saves_the_same_step_on_both(tmp_path: Path) -> None:
    at = tmp_path / "at"

    def program(ctx: Context, signalled: int | None) -> tuple[object, int, list[float]]:
        """Train, and end as a program does that was asked to stop; give its status, steps and weights."""
        af.set_seed(5, ctx=ctx, device_specific=True)
        model = af.prepare(ctx, Net(13, 0.3))
        optimizer = af.prepare_optimizer(ctx, OPTIMIZERS["adamw"](model.parameters()))
        loader = af.prepare(ctx, DataLoader(Points(26), batch_size=3, shuffle=True, num_workers=1))
        scaler, step, status = af.init_scaler(ctx), 0, cast("object", None)
        pids = af.gather_object(ctx, [os.getpid()])
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
        if at.exists():
            step = af.load_state(ctx, at, {**objects, "step": 0})["step"]
        with af.preemption(ctx) as guard:
            try:
                while step < 8:
                    for batch, micro in af.microbatches(ctx, loader):
                        with af.accumulate(ctx, micro, model):
                            loss = nn.functional.mse_loss(model(batch[1]), batch[2])
                            if (ctx.rank, step) == (0, signalled):
                                os.kill(pids[1], signal.SIGTERM)  # which is amid the same step
                            scaler = af.backward(ctx, loss, scaler, micro)
                        scaler = af.optimizer_step(ctx, optimizer, scaler)
                        step += 1
                        if guard.should_stop():
                            af.save_state(ctx, at, {**objects, "step": step}, step=step)
                            guard.exit()
                        if step == 8:
                            break
            except SystemExit as error:
                status = error.code
        weights = torch.cat([one.detach().flatten() for one in model.parameters()])
        return status, step, numbers_of(weights)

    def run(signalled: int | None) -> list[tuple[object, int, list[float]]]:
        return run_ranks(lambda ctx: program(ctx, signalled), 2, "processes", timeout_s=60)

    straight = run(None)
    stopped = run(3)
    assert [status for status, _, _ in stopped] == [EXIT_PREEMPTED] * 2
    assert stopped[0][1] == stopped[1][1]
    assert 4 <= stopped[0][1] <= 8
    assert parse_manifest((at / MANIFEST).read_bytes()).step == stopped[0][1]
    assert run(None) == straight
