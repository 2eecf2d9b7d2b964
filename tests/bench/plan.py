"""Spreading a model over places, by sizes alone, beside Accelerate.

Run by ``python -m tests.bench``. The model has blocks of 16 tensors, as a transformer's, an embedding and an
output layer; budgets are such that two accelerators, the host and the disk all hold a part of it.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import nn

from accelfn.bigmodel import infer_auto_device_map, plan_device_map, read_shape
from tests.bench.timing import Row, compare, print_table

PEER: Any = importlib.import_module("accelerate")


class Block(nn.Module):
    """Of 16 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("q", "k", "v", "out")})
        self.mlp = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.norms = nn.ModuleList([nn.LayerNorm(64), nn.LayerNorm(64)])


class Model(nn.Module):
    """Of about ``num_leaves`` tensors."""

    def __init__(self, num_leaves: int, ties: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(Block() for _ in range(num_leaves // 16))
        self.head = nn.Linear(64, 1000, bias=False)
        if ties:
            self.head.weight = self.words.weight


def measure(num_leaves: int, ties: bool, rounds: int) -> Row:
    """Compare on one model."""
    with torch.device("meta"):
        model = Model(num_leaves, ties)
    shape = read_shape(model)
    part = shape.num_bytes // 4
    budgets: dict[int | str, int] = {0: part, 1: part, "cpu": part}

    def theirs() -> dict[str, Any]:
        return PEER.infer_auto_device_map(model, max_memory=dict(budgets))

    ours = infer_auto_device_map(model, budgets)
    assert ours == theirs()
    assert set(ours.values()) == {0, 1, "cpu", "disk"}
    ways = {
        "ours": lambda: infer_auto_device_map(model, budgets),
        "Accelerate": theirs,
        "the pure plan alone": lambda: plan_device_map(shape, budgets),
    }
    times = compare(ways, rounds=rounds, calls=1)
    count = sum(1 for _ in shape.root.leaves())
    what = f"a device map of {count:,} tensors{', two of them tied' if ties else ''}"
    return Row(what, times.pop("ours"), times)


def main() -> None:
    # Of accelerators that this machine lacks.
    logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)
    sizes = ((1_000, 20), (10_000, 5), (40_000, 1))
    print_table([measure(number, ties, rounds) for number, rounds in sizes for ties in (False, True)])


if __name__ == "__main__":
    main()
