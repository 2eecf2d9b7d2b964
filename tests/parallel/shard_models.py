"""A small language model with tied embeddings, and its training."""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import accelfn as af
from accelfn import Context
from accelfn.data import plan_microbatch

VOCABULARY, WIDTH, LENGTH, ROWS = 24, 8, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute with parameters past ``forward``."""
        return F.linear(self.embed(ids), self.head.weight).square().mean()

    def evaluate(self, ids: torch.Tensor) -> torch.Tensor:
        """Call the model, and compute with parameters after it."""
        return self(ids) @ self.head.weight


def make(seed: int = 0, *, is_tied: bool = True) -> Model:
    torch.manual_seed(seed)
    return Model(is_tied=is_tied)


def ids_of(ctx: Context) -> torch.Tensor:
    """Return this rank's rows of one batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    return ids.chunk(ctx.axis_size("dp"))[ctx.coordinate("dp")]


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def train(ctx: Context, model: nn.Module, optimizer: Optimizer, steps: int = 2) -> dict[str, torch.Tensor]:
    """Train on windows of two batches, and return the parameters."""
    scaler = af.init_scaler(ctx)
    for _ in range(steps):
        for index in range(2):
            micro = plan_microbatch(index, 0, 2, 2)
            with af.accumulate(ctx, micro, model):
                loss = model(ids_of(ctx)).float().square().mean()
                scaler = af.backward(ctx, loss, scaler, micro)
        scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=0.5)
    return whole(model)


def is_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], value, atol=1e-6, rtol=0) for name, value in other.items()
    )


def whole(model: nn.Module, what: str = "data") -> dict[str, torch.Tensor]:
    """Gather the parameters of a model that may be sharded, or their gradients: ``grad``."""
    found: dict[str, torch.Tensor] = {}
    for name, one in model.named_parameters():
        value: Any = getattr(one, what).detach()
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found
