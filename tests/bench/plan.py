"""Spreading a model over places, by sizes alone, beside Accelerate.

Run by ``python -m tests.bench``. A model has blocks of 16 tensors, as a transformer's, an embedding and an
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

import accelfn as af
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


def layers(num_leaves: int) -> nn.Module:
    """Return a list of layers that are all alike."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_leaves // 2)))


def measure(what: str, make: Callable[[], nn.Module], rounds: int) -> Row:
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
    ways = {
        "ours": lambda: infer_auto_device_map(model, budgets),
        "Accelerate": theirs,
        "the pure plan alone": lambda: plan_device_map(shape, budgets),
    }
    times = compare(ways, rounds=rounds, calls=1)
    count = sum(1 for _ in shape.root.leaves())
    return Row(f"a device map of {count:,} tensors, {what}", times.pop("ours"), times)


def plan_for_ranks(num_ranks: int) -> Callable[[], object]:
    """Build a Llama of 70 billion parameters, and return a function that plans it for many ranks."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config)
    mesh = af.ParallelismConfig(dp_replicate_size=num_ranks // 80, dp_shard_size=10, tp_size=8)

    def plan() -> af.Budget:
        ctx = af.plan_context(num_ranks, parallelism_config=mesh, mixed_precision="bf16")
        return af.plan_memory(ctx, model)

    return plan


def main() -> None:
    # Of accelerators that this machine lacks.
    logging.getLogger("accelerate.utils.modeling").setLevel(logging.ERROR)
    rows: list[Row] = []
    for number, rounds in ((1_000, 20), (10_000, 5), (40_000, 1)):
        rows += [
            measure("in blocks", lambda number=number: Model(number, False), rounds),
            measure("in blocks, two tied", lambda number=number: Model(number, True), rounds),
        ]
        if number <= 10_000:  # the peer takes minutes for more
            rows.append(measure("in a list", lambda number=number: layers(number), rounds))
    print_table(rows)
    timing = compare({"ours": plan_for_ranks(10_000)}, rounds=10, calls=1)["ours"]
    print(f"what 10,000 ranks hold of a Llama of 70 billion: {timing.median:.3f} ({timing.best:.3f}) s")


if __name__ == "__main__":
    main()
