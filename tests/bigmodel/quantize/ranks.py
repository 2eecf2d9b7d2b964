"""A program in which adapters of quantised models train on two real processes.

`python -m tests.bigmodel.quantize.ranks NAME...` quantises with `CONFIGS[NAME]`, and prints for each name the
loss before and after, and the largest difference between the ranks' adapters.

A separate program, since the kernels of bitsandbytes and torchao start threads: a fork of a process that has
used them hangs. Here only the ranks use them.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks
from tests.bigmodel.quantize.models import CONFIGS, IDS, made

__all__ = ("main",)

_STEPS = 6


class _Adapted(nn.Module):
    """A quantised model with a trained addition to its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        self.down, self.up = nn.Embedding(32, 4), nn.Linear(4, 32, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).float() + self.up(self.down(ids))


def main(*names: str) -> None:
    """Train."""

    def run(ctx: Context) -> list[tuple[float, float, torch.Tensor]]:
        return [_train(ctx, name) for name in names]

    assert not {"bitsandbytes", "torchao"} & sys.modules.keys()
    for first, second in zip(*run_ranks(run, 2, on="processes"), strict=True):
        print(first[0], first[1], (first[2] - second[2]).abs().max().item())


def _train(ctx: Context, name: str) -> tuple[float, float, torch.Tensor]:
    torch.random.manual_seed(ctx.rank)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    model = _Adapted(af.load_and_quantize_model(made(), CONFIGS[name]))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    prepared, optimizer = af.prepare(ctx, model, optimizer)
    scaler = af.init_scaler(ctx)
    ids = IDS + ctx.rank  # other data on each rank
    losses: list[float] = []
    for _ in range(_STEPS):
        loss = nn.functional.cross_entropy(prepared(ids % 32).mT, (ids + 1) % 32)
        scaler = af.backward(ctx, loss, scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        optimizer.zero_grad()
        losses.append(loss.item())
    trained = [one.detach().flatten() for one in model.parameters() if one.requires_grad]
    return losses[0], losses[-1], torch.cat(trained)


if __name__ == "__main__":
    main(*sys.argv[1:])
