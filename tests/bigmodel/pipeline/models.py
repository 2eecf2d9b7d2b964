"""Small models that a pipeline is made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

__all__ = ("Answer", "Block", "Net", "Skipping", "Tied", "seeded")


class Answer(NamedTuple):
    """Results of several kinds."""

    y: torch.Tensor
    parts: dict[str, Any]


class Block(nn.Module):
    """A layer that writes in place into what it gets, and has a buffer of its own."""

    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)

    def forward(self, x: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
        made = self.norm(self.linear(x)) * self.scale
        made.add_(offset)
        return torch.tanh(made) + x


class Net(nn.Module):
    """Blocks, and arguments and results of several kinds."""

    def __init__(self, width: int = 8, depth: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(width, 3)

    def forward(
        self, x: torch.Tensor, offset: torch.Tensor, *, options: Mapping[str, Any], factor: float = 1.0
    ) -> Answer:
        hidden = torch.relu(self.first(x))
        for block in self.blocks:
            hidden = block(hidden, offset)
        y = self.last(self.drop(hidden) * factor)
        if options["add"] is not None:
            y = y + options["add"]
        kept = options["keep"] == "all"
        return Answer(y, {"ids": options["ids"] + 1, "kind": "net", "h": hidden if kept else None})


class Tied(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(ids)))


class Skipping(nn.Module):
    """The last layer also gets the output of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        y = first(x)
        return third(second(y)) + y


def seeded(model: nn.Module) -> nn.Module:
    """Give its tensors values of their own, the same at each call."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.4 + 0.05)
    return model
