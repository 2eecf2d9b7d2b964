"""What the guard costs: a training step with it and without, one operation in its strictest mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import accelfn as af
from accelfn.config import GuardMode
from tests.bench.sharding import Step, stepped
from tests.bench.timing import compare, on_ranks, plain, show_beside


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


def images_of_a_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(32, 8, 8), torch.randint(10, (32,))


def training_step(ctx: af.Context, make: Callable[[], nn.Module]) -> Step:
    """Return one optimizer step over a window of batches of 32 images per rank."""
    af.set_seed(0)
    model = make()
    model, optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters(), 1e-3))
    images, labels = images_of_a_batch()
    micros = [micro for _, micro in af.microbatches(ctx, range(ctx.gradient_accumulation_steps))]
    states = [af.init_scaler(ctx)]

    def step() -> None:
        for micro in micros:
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.cross_entropy(model(images), labels)
                states[0] = af.backward(ctx, loss, states[0], micro)
        states[0] = af.optimizer_step(ctx, optimizer, states[0])

    return step


def plain_step() -> Step:
    """Return the same step in plain torch."""
    af.set_seed(0)
    model = nn.parallel.DistributedDataParallel(Encoder())
    images, labels = images_of_a_batch()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return stepped(lambda: nn.functional.cross_entropy(model(images), labels), optimizer)


def measure(ctx: af.Context) -> None:
    """Compare on this rank; every rank must call it."""
    modes = {mode.value: ctx.replace(guard=mode.value) for mode in (GuardMode.SAMPLED, *GuardMode)}
    steps = {f'guard="{name}"': training_step(one, Encoder) for name, one in modes.items()}
    steps["plain torch"] = plain_step()
    what = "a training step with the default guard"
    show_beside("guard-step", {what: compare(steps, rounds=60, calls=5, before=plain.barrier)})
    rows: dict[str, Any] = {}
    for leaves in (1, 50, 500):
        # Too large for the opening exchange, so that the check needs an exchange of its own.
        tree = [torch.zeros(max(32, 160_000 // leaves)) for _ in range(leaves)]
        calls: dict[str, Step] = {
            f'guard="{name}"': lambda name=name, tree=tree: af.reduce(modes[name], tree)
            for name in ("full", "off")
        }
        times = compare(calls, rounds=60, calls=5, before=plain.barrier)
        rows[f'`reduce` of {leaves} leaves, guard="full"'] = times
    show_beside("guard-reduce", rows)


if __name__ == "__main__":
    on_ranks(measure)
