"""What exact mode costs: optimizer steps of several microbatches on two processes, beside the mean of ranks.

Run by ``python -m tests.bench``; each rank runs :func:`measure` under torchrun.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import accelfn as af
from tests.bench.guard import Encoder
from tests.bench.timing import Row, compare, print_table

plain: Any = cast("Any", dist)


def wide() -> nn.Module:
    """Give 2,100,000 parameters with little to compute: what moves counts here."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1000)
    )


def window(ctx: af.Context, make: Callable[[], nn.Module]) -> Callable[[], None]:
    """Give one optimizer step over windows of batches of 32 images."""
    af.set_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer = af.prepare(ctx, model, optimizer)
    images, labels = torch.rand(32, 8, 8), torch.randint(10, (32,))
    micros = [micro for _, micro in af.microbatches(ctx, range(ctx.gradient_accumulation_steps))]
    states = [af.init_scaler(ctx)]

    def step() -> None:
        for micro in micros:
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.cross_entropy(model(images), labels)
                states[0] = af.backward(ctx, loss, states[0], micro)
        states[0] = af.optimizer_step(ctx, optimizer, states[0])

    return step


def measure(ctx: af.Context) -> list[Row]:
    """Compare on this rank; every rank must call it."""
    rows: list[Row] = []
    for name, make in (("transformer", Encoder), ("wide", wide)):
        for microbatches in (2, 4, 12):
            mean = ctx.replace(gradient_accumulation_steps=microbatches // ctx.num_processes)
            exact = ctx.replace(reduction=af.CanonicalReduction(num_microbatches=microbatches))
            ways: dict[str, Callable[[], object]] = {"exact": window(exact, make), "mean": window(mean, make)}
            times = compare(ways, rounds=30, calls=2, before=plain.barrier)
            rows.append(Row(f"{name}, step of {microbatches} microbatches", times.pop("exact"), times))
    return rows


def main() -> None:
    torch.set_num_threads(1)
    with af.init_context(cpu=True) as ctx:
        rows = measure(ctx)
        if ctx.is_main_process:
            print_table(rows)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
