"""The training step: whole epochs and peak memory, beside plain torch and Accelerate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import accelfn as af
from tests.bench.sharding import Step
from tests.bench.timing import compare, growth_of, on_ranks, plain, show_table


class Work(NamedTuple):
    """What is trained, made alike for each way."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    max_norm: float | None = None


def by_hand(work: Work) -> Step:
    """Return an epoch in plain torch."""
    model, optimizer, batches, loss, max_norm = work
    parameters = list(model.parameters())

    def epoch() -> None:
        for batch in batches:
            loss(model, batch).backward()  # pyright: ignore[reportUnknownMemberType]
            if max_norm is not None:
                nn.utils.clip_grad_norm_(parameters, max_norm)
            optimizer.step()
            optimizer.zero_grad()

    return epoch


def by_functions(ctx: af.Context, work: Work) -> Step:
    """Return an epoch through the functions."""
    model, optimizer, batches = af.prepare(ctx, *work[:3])
    states = [af.init_scaler(ctx)]

    def epoch() -> None:
        state = states[0]
        for batch, micro in af.microbatches(ctx, batches):
            with af.accumulate(ctx, micro, model):
                state = af.backward(ctx, work.loss(model, batch), state, micro)
            if micro.sync:
                state = af.optimizer_step(ctx, optimizer, state, max_norm=work.max_norm)
        states[0] = state

    return epoch


def by_shim(accelerator: Any, work: Work) -> Step:
    """Return an epoch through an Accelerator, ours or theirs."""
    model, optimizer, batches = accelerator.prepare(*work[:3])
    parameters = list(model.parameters())

    def epoch() -> None:
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(work.loss(model, batch))
                if work.max_norm is not None:
                    accelerator.clip_grad_norm_(parameters, work.max_norm)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def show_epochs(name: str, first_column: str, rows: Mapping[str, Mapping[str, Step]], rounds: int) -> None:
    """Compare and print epochs; those in plain torch come first. Every rank must call it."""
    found: list[Sequence[str]] = []
    columns: Sequence[str] = ()
    for what, ways in rows.items():
        times = compare(ways, rounds=rounds, calls=1, before=plain.barrier if dist.is_initialized() else None)
        hand = times.pop("plain torch")
        found.append((what, hand.ms(), *(one.over(hand) for one in times.values())))
        columns = (first_column, "plain torch, ms", *(f"{way}, over it" for way in times))
    show_table(name, columns, found)


def tiny(ctx: af.Context, *, is_shared: bool = False) -> Work:
    """Return an MLP of 700 parameters and 200 batches of 32 samples a rank, shared out already or not."""
    af.set_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size = ctx.num_processes
    data: Any = TensorDataset(torch.randn(6400 * size, 16), torch.randint(4, (6400 * size,)))
    sampler = None
    if is_shared and size > 1:
        sampler = DistributedSampler[Any](data, size, ctx.rank, shuffle=False)
        model = nn.parallel.DistributedDataParallel(model)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Work(model, optimizer, DataLoader[Any](data, batch_size=32, sampler=sampler), loss)


def peaks() -> None:
    """Measure by how much a process grows in a step of 50 million parameters, after another one."""

    def mean_of_squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    def large() -> Work:
        af.set_seed(0)
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Work(model, optimizer, [torch.randn(64, 4096)], mean_of_squares)

    row = ["a step of 50 million parameters, at its peak"]
    for make in (by_hand, partial(by_functions, af.Context())):
        step = make(large())
        step()
        row.append(f"{growth_of(step) / 2**20:.1f}")
        del step
    show_table("training-memory", ("MiB", ">plain torch", ">functions"), [row])


def measure(ctx: af.Context) -> None:
    """Compare on this rank; every rank must call it."""
    from accelerate import Accelerator as Theirs

    ways = {
        "plain torch": by_hand(tiny(ctx, is_shared=True)),
        "functions": by_functions(ctx, tiny(ctx)),
        "`Accelerator`": by_shim(af.Accelerator(context=ctx), tiny(ctx)),
        "Accelerate": by_shim(Theirs(cpu=True), tiny(ctx)),
    }
    size = ctx.num_processes
    where = "one process" if size == 1 else "two processes, `DistributedDataParallel`"
    show_epochs(f"training-{size}", "epochs of 200 steps", {where: ways}, 25)
    if size == 1:
        peaks()


if __name__ == "__main__":
    on_ranks(measure)
