"""Train a small language model on sequences that two processes share.

    accelfn launch --num_processes 2 docs/examples/long_sequences.py

It learns the bytes of Python's own argparse.py, 512 at a time, of which every process has half. ``--axis sp``
exchanges heads instead of passing keys and values around; ``--axis none`` trains on one process.
"""

import argparse
import inspect

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af

WIDTH, HEADS, LENGTH = 64, 4, 512


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = parts.split(HEADS, 1)
        # Over the whole sequence, though each process has a piece of it.
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load() -> TensorDataset:
    """Return rows of bytes, their positions, and the next byte of each; the last byte of a row has none."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    ids = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    labels = torch.cat([ids[:, 1:], torch.full((len(ids), 1), -100)], 1)
    return TensorDataset(ids, torch.arange(LENGTH).expand_as(ids), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--axis", choices=("cp", "sp", "none"), default="cp")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    mesh = {
        "cp": af.ParallelismConfig(cp_size=2),
        "sp": af.ParallelismConfig(sp_size=2),
        "none": None,
    }[arguments.axis]
    loading = af.DataLoaderConfiguration(sequence={0: 1, 1: 1, 2: 1})  # the second dimension of all three
    with af.init_context(parallelism_config=mesh, dataloader_config=loading) as ctx:
        af.set_seed(0)
        model: nn.Module = Writer()
        af.print_once(ctx, af.plan_model(ctx, model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = DataLoader(load(), batch_size=8, shuffle=True, drop_last=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        for epoch in range(arguments.epochs):
            seen = torch.zeros(2, device=ctx.device)  # losses, and how many bytes they are of
            for (ids, positions, labels), micro in af.microbatches(ctx, loader):
                with af.accumulate(ctx, micro, model):
                    logits = model(ids, positions).flatten(0, 1)
                    loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
                    weight = (labels != -100).sum()
                    scaler = af.backward(ctx, loss, scaler, micro, weight)
                if micro.sync:
                    scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
                seen += torch.stack([loss.detach(), weight])
            total, count = af.reduce(ctx, seen)
            af.print_once(ctx, f"epoch {epoch}: loss {total / count:.3f} of {int(count):,} bytes")
        af.print_once(
            ctx, f"each process had {LENGTH // ctx.axis_size('seq')} of the {LENGTH} bytes of a row"
        )


if __name__ == "__main__":
    main()
