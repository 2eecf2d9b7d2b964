"""A small GPT for tests of tensor parallelism, its data, and the training of it in one process."""

# torch leaves backward and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LENGTH = 32, 16, 4, 8

PLAN = {
    "embed": "embedding",
    "blocks.*.attn.q": "colwise",
    "blocks.*.attn.k": "colwise",
    "blocks.*.attn.v": "colwise",
    "blocks.*.attn.o": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "blocks.*.norm1": "whole",
    "blocks.*.norm2": "whole",
    "head": "gather",
}
SEQUENCE = {**PLAN, "blocks.*.norm1": "sequence", "blocks.*.norm2": "sequence", "norm": "sequence"}


class Attention(nn.Module):
    def __init__(self, views_by_count: bool, norms_heads: bool) -> None:
        super().__init__()
        self.num_heads = HEADS
        self.views_by_count = views_by_count
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head_norm = nn.LayerNorm(WIDTH // HEADS) if norms_heads else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        count = self.num_heads if self.views_by_count else -1

        def heads(layer: nn.Module) -> torch.Tensor:
            return layer(x).view(rows, length, count, WIDTH // HEADS)

        q, k, v = heads(self.q), heads(self.k), heads(self.v)
        if self.head_norm is not None:
            q, k = self.head_norm(q), self.head_norm(k)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, views_by_count: bool, norms_heads: bool, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(views_by_count, norms_heads)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attn(self.norm1(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    def __init__(
        self,
        *,
        tied: bool = True,
        views_by_count: bool = False,
        norms_heads: bool = False,
        dropout: float = 0.0,
        num_blocks: int = 2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        blocks = (Block(views_by_count, norms_heads, dropout) for _ in range(num_blocks))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():  # norms that begin as ones and zeros hide mistakes
            nn.init.normal_(parameter, std=0.3)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1]) if positions is None else positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_batch(seed: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels; some labels are ignored."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=random)
    labels = ids[:, 1:].clone()
    labels[torch.rand(rows, LENGTH, generator=random) < 0.3] = -100
    return ids[:, :-1].contiguous(), labels


def summed_loss(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of the losses of all labels, and their number."""
    ids, labels = batch
    logits = model(ids).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum"), (labels != -100).sum()


class Lora(nn.Module):
    """A layer with an adapter, with peft's names."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Adapted(nn.Module):
    """A GPT as peft wraps it, with adapters in its first block and at its head."""

    def __init__(self) -> None:
        super().__init__()
        gpt = GPT(tied=False)
        attn: Attention = gpt.blocks[0].attn  # pyright: ignore[reportAssignmentType]
        attn.q, attn.o, gpt.head = Lora(attn.q), Lora(attn.o), Lora(gpt.head)  # pyright: ignore[reportAttributeAccessIssue]
        self.base_model = nn.ModuleDict({"model": gpt})

    def forward(self, ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return self.base_model["model"](ids, positions)
