"""A small model with layers that are quantised and others, and the ways to quantise it that run here."""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch import nn

from accelfn.bigmodel import BnbQuantizationConfig

__all__ = ("CONFIGS", "IDS", "QUANTIZED", "Net", "made")

IDS = torch.arange(24).reshape(3, 8)

QUANTIZED = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")

CONFIGS = MappingProxyType(
    {
        "int8": BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32"),
        "nf4": BnbQuantizationConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32"
        ),
        "fp4, twice": BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    }
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 192)
        self.down = nn.Linear(192, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Like a language model: a table, blocks, and an output layer."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.bn = nn.BatchNorm1d(64)
        self.register_buffer("mask", torch.ones(64), persistent=False)
        self.head = nn.Linear(64, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        # In the dtype of its own parameters, whatever products were computed in.
        x = self.bn(x.mT.to(self.bn.weight.dtype)).mT * self.mask.to(self.bn.weight.dtype)
        return self.head(x)


def made() -> Net:
    """Build it with values of its own, the same at each call."""
    generator = torch.Generator().manual_seed(3)
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / max(parameter.shape) ** 0.5)
    return model.eval()
