"""Spreading a model over places, by sizes alone, beside Accelerate.

A model has blocks of 16 tensors, as a transformer's, an embedding and an
output layer; or it is a list of layers of two tensors each. Budgets are such that two accelerators, the host
and the disk all hold a part of it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from accelfn.bigmodel import infer_auto_device_map, plan_device_map, read_shape
from tests.bench.timing import Times, compare, show_beside

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


def layers(num_leaves: int) -> nn.Module:
    """Return a list of layers that are all alike."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_leaves // 2)))


def measure(make: Callable[[], nn.Module], rounds: int) -> Times:
    """Compare on one model."""
    with torch.device("meta"):
        model = make()
    shape = read_shape(model)
    part = shape.num_bytes // 4
    budgets: dict[int | str, int] = {0: part, 1: part, "cpu": part}

    def theirs() -> dict[str, Any]:
        return PEER.infer_auto_device_map(model, max_memory=dict(budgets))

    ours = infer_auto_device_map(model, budgets)
    assert ours == theirs()
    assert set(ours.values()) == {0, 1, "cpu", "disk"}
    ways: dict[str, Callable[[], object]] = {
        "ours": lambda: infer_auto_device_map(model, budgets),
        "Accelerate": theirs,
        "the plan alone, without reading the modules": lambda: plan_device_map(shape, budgets),
    }
    return compare(ways, rounds=rounds, calls=1)


def main() -> None:
    # Of accelerators that this machine lacks.
    logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)
    rows: dict[str, Times] = {}
    for number, rounds in ((1_000, 20), (10_000, 5), (40_000, 1)):
        rows[f"{number:,} tensors, in blocks"] = measure(lambda number=number: Model(number, False), rounds)
        rows[f"{number:,} tensors, in blocks, two tied"] = measure(
            lambda number=number: Model(number, True), rounds
        )
        if number <= 10_000:  # the peer takes minutes for more
            rows[f"{number:,} tensors, in a list"] = measure(lambda number=number: layers(number), rounds)
    show_beside("plan", rows, 1)


if __name__ == "__main__":
    main()
