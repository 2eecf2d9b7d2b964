"""The training step: whole epochs and peak memory, beside plain torch and Accelerate.

Run by ``python -m tests.bench``: as one process, and under torchrun, where each rank runs :func:`measure`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accelfn as af
from tests.bench.data import memory_of
from tests.bench.timing import Row, compare, print_table

plain: Any = cast("Any", dist)

Epoch = Callable[[], object]


class Work(NamedTuple):
    """A model, its optimizer and its data, made alike for each way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[Any]


def tiny(size: int = 1, rank: int = 0) -> Work:
    """Return an MLP of 1,000 parameters and 200 batches of 32 samples a rank."""
    af.set_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    data: Any = TensorDataset(torch.randn(6400 * size, 16), torch.randint(4, (6400 * size,)))
    sampler = DistributedSampler[Any](data, size, rank, shuffle=False) if size > 1 else None
    loader = DataLoader[Any](data, batch_size=32, sampler=sampler)
    return Work(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def by_hand(model: nn.Module, optimizer: Any, loader: DataLoader[Any]) -> Epoch:
    """Return an epoch in plain torch."""

    def epoch() -> None:
        for x, y in loader:
            nn.functional.cross_entropy(model(x), y).backward()  # pyright: ignore[reportUnknownMemberType]
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def by_functions(ctx: af.Context) -> Epoch:
    """Return an epoch through the functions."""
    model, optimizer, loader = af.prepare(ctx, *own(ctx))
    states = [af.init_scaler(ctx)]

    def epoch() -> None:
        state = states[0]
        for (x, y), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.cross_entropy(model(x), y)
                state = af.backward(ctx, loss, state, micro)
            if micro.sync:
                state = af.optimizer_step(ctx, optimizer, state)
        states[0] = state

    return epoch


def by_shim(accelerator: Any, work: Work) -> Epoch:
    """Return an epoch through an Accelerator, ours or theirs."""
    model, optimizer, loader = accelerator.prepare(*work)

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def own(ctx: af.Context) -> Work:
    """Return the work with a loader that is not dealt out yet."""
    work = tiny(ctx.num_processes, ctx.rank)
    return work._replace(loader=DataLoader[Any](work.loader.dataset, batch_size=32))


def ways(ctx: af.Context) -> dict[str, Epoch]:
    """Return all ways; every rank must call it."""
    from accelerate import Accelerator as Theirs

    work = tiny(ctx.num_processes, ctx.rank)
    model = work.model
    if ctx.num_processes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return {
        "plain torch": by_hand(model, work.optimizer, work.loader),
        "functions": by_functions(ctx),
        "Accelerator": by_shim(af.Accelerator(context=ctx), own(ctx)),
        "Accelerate": by_shim(Theirs(cpu=True), own(ctx)),
    }


def measure(ctx: af.Context, before: Callable[[], object] | None = None) -> list[Row]:
    """Compare epochs on this rank; every rank must call it."""
    times = compare(ways(ctx), rounds=25, calls=1, before=before)
    reference = times["plain torch"]
    where = f"on {ctx.num_processes} process{'es' if ctx.num_processes > 1 else ''}"
    # From plain torch's side: how many times as long the others take.
    others = {name: timing for name, timing in times.items() if name != "plain torch"}
    return [Row(f"an epoch of 200 steps of a tiny MLP, plain torch {where}", reference, others)]


def large() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """Return an MLP of 50 million parameters, and a batch."""
    af.set_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(64, 4096)


def peaks() -> dict[str, float]:
    """Measure by how many MiB a process grows at most in a step, after others like it."""

    def plainly() -> Epoch:
        model, optimizer, x = large()

        def step() -> None:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def with_functions() -> Epoch:
        ctx = af.Context()
        model, optimizer, x = large()
        model, optimizer = af.prepare(ctx, model, optimizer)
        states = [af.init_scaler(ctx)]
        ((_, micro),) = af.microbatches(ctx, [x])

        def step() -> None:
            with af.accumulate(ctx, micro, model):
                states[0] = af.backward(ctx, model(x).square().mean(), states[0], micro)
            states[0] = af.optimizer_step(ctx, optimizer, states[0])

        return step

    found: dict[str, float] = {}
    for name, make in (("plain torch", plainly), ("functions", with_functions)):
        step = make()
        step()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory_of("VmRSS")
        step()
        found[name] = (memory_of("VmHWM") - before) / 2**20
        del step
    return found


def main() -> None:
    torch.set_num_threads(1)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with af.init_context(cpu=True) as ctx:
        rows = measure(ctx, plain.barrier if ctx.num_processes > 1 else None)
        if ctx.is_main_process:
            print_table(rows)
        if ctx.num_processes == 1:
            for name, peak in peaks().items():
                print(f"a step of 50 million parameters, {name}: {peak:.1f} MiB at its peak")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
