"""In which meshes of 64 ranks a model of six billion parameters fits, and what they send.

    python docs/examples/plan_ranks.py

No rank is started and no memory taken: the model is on the meta device.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af

WIDTH, LENGTH, BLOCKS, TOKENS = 4096, 2048, 30, 32000


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.inputs(self.norm1(x)).unflatten(-1, (3, 32, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Six billion parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def make_batch(ctx: af.Context, rows: int) -> torch.Tensor:
    return torch.empty(rows, LENGTH, dtype=torch.long, device="meta")


def main() -> None:
    with af.init_empty_weights():
        model = Model()
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    options: dict[str, Any] = {"mixed_precision": "bf16", "fsdp_plugin": plugin}
    for ranks_per_node in (8, 64):
        found = af.parallel.search_meshes(
            64,
            model,
            memory=40 * 10**9,
            num_rows=64,
            make_batch=make_batch,
            loss_fn=loss_fn,
            axes=("pp", "dp_replicate", "dp_shard"),
            ranks_per_node=ranks_per_node,
            **options,
        )
        print(f"{ranks_per_node} ranks in each node, {len(found.layouts)} meshes fit; those that send least:")
        for one in found.layouts[:3]:
            sizes = one.budget.total, one.traffic.received, one.between_nodes
            total, received, between = (f"{size / 1e9:.1f} GB" for size in sizes)
            print(f"  {one.name}: {total}, receives {received}, {between} of it from other nodes")
    print(f"dp_shard=64 sends:\n{next(one for one in found.layouts if one.name == 'dp_shard=64').traffic}")


if __name__ == "__main__":
    main()
