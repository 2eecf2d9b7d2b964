"""What the guard costs: a training step with it and without, one operation in its strictest mode.

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
from accelfn.context.config import GuardMode
from tests.bench.timing import Row, compare, print_table

plain: Any = cast("Any", dist)


class Encoder(nn.Module):
    """A small transformer over the rows of 8x8 images: 105,000 parameters in 28 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.classify = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classify(self.encode(self.embed(images)).mean(1))


def training_step(ctx: af.Context, make: Callable[[], nn.Module]) -> Callable[[], None]:
    """Return one optimizer step over a window of batches of 32 images per rank."""
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


def plain_step() -> Callable[[], None]:
    """Return the same step in plain torch."""
    af.set_seed(0)
    model = nn.parallel.DistributedDataParallel(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    images, labels = torch.rand(32, 8, 8), torch.randint(10, (32,))

    def step() -> None:
        nn.functional.cross_entropy(model(images), labels).backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        optimizer.zero_grad(set_to_none=True)

    return step


def measure(ctx: af.Context) -> list[Row]:
    """Compare on this rank; every rank must call it."""
    modes = {mode.value: ctx.replace(guard=mode.value) for mode in GuardMode}
    steps: dict[str, Callable[[], object]] = {
        name: training_step(one, Encoder) for name, one in modes.items()
    }
    steps["plain torch"] = plain_step()
    times = compare(steps, rounds=60, calls=5, before=plain.barrier)
    sampled = times.pop("sampled")
    rows = [Row("training step, guard as it is by default", sampled, times)]
    for leaves in (1, 50, 500):
        # Too large for the opening exchange, so that the check needs an exchange of its own.
        tree = [torch.zeros(max(32, 160_000 // leaves)) for _ in range(leaves)]
        calls: dict[str, Callable[[], object]] = {
            name: (lambda one=one, tree=tree: af.reduce(one, tree))
            for name, one in modes.items()
            if name != "sampled"
        }
        times = compare(calls, rounds=60, calls=5, before=plain.barrier)
        rows.append(Row(f"reduce, {leaves} leaves, guard full", times.pop("full"), times))
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
