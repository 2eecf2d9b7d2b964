"""A small GPT whose blocks have experts, for tests of ranks that hold different ones."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from tests.parallel.tensor_models import GPT, WIDTH, Block

HIDDEN, CHOSEN = 2 * WIDTH, 2


class Experts(nn.Module):
    """MLPs, each of which sees rows of its own."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.empty(num_experts, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(num_experts, HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts: tuple[torch.Tensor, ...] = cast("Any", x).split(cast("Any", counts).tolist())
        assert len(parts) == self.num_experts == len(self.up)
        return torch.cat(
            [F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)]
        )


class SparseBlock(Block):
    """Has experts in the place of a hidden layer; each position chooses some of them."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(views_by_count=False, norms_heads=False, dropout=0.0)
        del self.up, self.down
        self.router = nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = Experts(num_experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        rows = self.norm2(x).flatten(0, 1)
        weights, index = self.router(rows).softmax(-1).topk(CHOSEN, -1)
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.out_features)
        made = self.experts(rows[order // CHOSEN], counts)
        each = torch.empty_like(made).index_copy(0, order, made).view(*index.shape, WIDTH)
        return x + (each * weights.unsqueeze(-1)).sum(1).view_as(x)


class SparseGPT(GPT):
    """Its blocks have different numbers of experts: 4, and 6, whose half no even number divides."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.blocks = nn.ModuleList(SparseBlock(count) for count in (4, 6))
        for parameter in self.blocks.parameters():
            nn.init.normal_(parameter, std=0.3)
