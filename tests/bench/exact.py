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
from tests.bench.guard import Encoder, training_step
from tests.bench.timing import Row, compare, print_table

plain: Any = cast("Any", dist)


def wide() -> nn.Module:
    """Return a model of 2,100,000 parameters with little to compute: what moves counts here."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1000)
    )


def measure(ctx: af.Context) -> list[Row]:
    """Compare on this rank; every rank must call it."""
    rows: list[Row] = []
    for name, make in (("transformer", Encoder), ("wide", wide)):
        for microbatches in (2, 4, 12):
            mean = ctx.replace(gradient_accumulation_steps=microbatches // ctx.num_processes)
            exact = ctx.replace(reduction=af.CanonicalReduction(num_microbatches=microbatches))
            ways: dict[str, Callable[[], object]] = {
                "exact": training_step(exact, make),
                "mean": training_step(mean, make),
            }
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
