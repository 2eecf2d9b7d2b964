"""A small GPT whose linear layers have sizes that are multiples of 16, and its data."""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn import Context

VOCABULARY, WIDTH, LENGTH, ROWS, HEADS = 32, 32, 16, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind()
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.place.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


#: The first linear layer is blocks.0.qkv, the last one is the head.
CONVERTED = tuple(f"blocks.{block}.{name}" for block in range(2) for name in ("qkv", "out", "up", "down"))[1:]


def make(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT()


def batches(number: int, seed: int = 1) -> list[torch.Tensor]:
    """Return batches of sequences in which each token determines the next one."""
    generator = torch.Generator().manual_seed(seed)
    found: list[torch.Tensor] = []
    for _ in range(number):
        ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        for place in range(1, LENGTH + 1):
            ids[:, place] = (5 * ids[:, place - 1] + 3) % VOCABULARY
        found.append(ids)
    return found


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train(ctx: Context, model: Any, optimizer: Any, data: Iterable[torch.Tensor]) -> list[float]:
    """Train on this rank's rows of each batch; return the mean losses over all ranks."""
    scaler = af.init_scaler(ctx)
    losses: list[float] = []
    for ids in data:
        mine = ids.chunk(ctx.num_processes)[ctx.rank]
        loss = loss_of(model, mine)
        scaler = af.backward(ctx, loss, scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
        losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
    return losses
