"""Train a small language model in fp8, or in the precision that the launcher is told.

    accelfn launch --num_processes 2 --mixed_precision fp8 docs/examples/fp8.py
    accelfn launch --num_processes 2 --mixed_precision fp8 --use_fsdp --fsdp_version 2 docs/examples/fp8.py

It learns the bytes of Python's own argparse.py for 50 steps. On the CPU, fp8 is emulated: compare losses, not
times. ``--curve`` writes the losses to a file.
"""

import argparse
import inspect
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af

WIDTH, HEADS, LENGTH, ROWS, STEPS = 64, 4, 64, 16, 50


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(self.norm1(x)).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        query, key, value = parts.split(HEADS, 1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places(torch.arange(LENGTH, device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load() -> TensorDataset:
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    return TensorDataset(text[: len(text) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--curve", type=Path)
    arguments = parser.parse_args()

    with af.init_context() as ctx:
        af.set_seed(0)
        model: nn.Module = Writer()
        af.print_once(ctx, af.plan_model(ctx, model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = DataLoader(load(), ROWS // ctx.num_processes, shuffle=True, drop_last=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        losses: list[float] = []
        while len(losses) < STEPS:
            for (rows,), micro in af.microbatches(ctx, loader):
                logits = model(rows[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                scaler = af.backward(ctx, loss, scaler, micro)
                scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
                losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
                if len(losses) % 10 == 0:
                    af.print_once(ctx, f"step {len(losses)}: loss {losses[-1]:.3f}")
                if len(losses) == STEPS:
                    break
        if arguments.curve is not None and ctx.is_main_process:
            lines = (f"{step},{loss}" for step, loss in enumerate(losses, 1))
            arguments.curve.write_text("\n".join(("step,loss", *lines)) + "\n")


if __name__ == "__main__":
    main()
