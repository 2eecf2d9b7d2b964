"""What exact mode costs: optimizer steps of several microbatches on two processes, beside the ranks' mean."""

from __future__ import annotations

from torch import nn

import accelfn as af
from tests.bench.guard import Encoder, training_step
from tests.bench.timing import Times, compare, on_ranks, plain, show_beside


def wide() -> nn.Module:
    """Return a model of 2,100,000 parameters with little to compute: what moves counts here."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1000)
    )


def measure(ctx: af.Context) -> None:
    """Compare on this rank; every rank must call it."""
    rows: dict[str, Times] = {}
    for name, make in (("transformer", Encoder), ("wide", wide)):
        for number in (2, 4, 12):
            exact = ctx.replace(reduction=af.config.CanonicalReduction(num_microbatches=number))
            mean = ctx.replace(gradient_accumulation_steps=number // ctx.num_processes)
            ways = {"exact mode": training_step(exact, make), "the mean": training_step(mean, make)}
            rows[f"{name}, {number} microbatches"] = compare(ways, calls=2, before=plain.barrier)
    show_beside("exact", rows)


if __name__ == "__main__":
    on_ranks(measure)
