"""A GPT in bf16 and in fp8 on one device: losses side by side, and the time of a step.

``python -m tests.bench.precision [--steps N]``. Without a GPU, fp8 is emulated and the model is small: only
the losses say something.
"""

from __future__ import annotations

import argparse
import glob
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af


class Size(NamedTuple):
    """The sizes of a GPT and of its batches."""

    width: int
    layers: int
    length: int
    rows: int


SMALL, LARGE = Size(64, 2, 64, 8), Size(4096, 4, 2048, 8)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 128)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        query, key, value = parts.chunk(3, 1)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, size.width), nn.Embedding(size.length, size.width)
        self.first = nn.Linear(size.width, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 256)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.first(self.tokens(ids) + self.places.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(size: Size, steps: int, device: torch.device) -> torch.Tensor:
    """Return batches of bytes of Python's standard library: [steps, rows, length + 1] int64."""
    needed = steps * size.rows * (size.length + 1)
    text = bytearray()
    for file in sorted(glob.glob(str(Path(sysconfig.get_path("stdlib")) / "*.py"))):
        text += Path(file).read_bytes()
    text *= needed // len(text) + 1
    ids = torch.frombuffer(text, dtype=torch.uint8)[:needed].view(-1, size.length + 1)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return ids[order].view(steps, size.rows, -1).to(device, torch.int64)


def train(mode: str, compiled: bool, size: Size, steps: int) -> tuple[list[float], float, float]:
    """Return the losses, milliseconds per step after the first fifth, and the peak memory in GiB."""
    options: dict[str, Any] = {"dynamo_backend": "inductor"} if compiled else {}
    with af.init_context(mixed_precision=mode, **options) as ctx:
        af.set_seed(0)
        is_cuda = ctx.device.type == "cuda"
        if is_cuda:
            torch.cuda.reset_peak_memory_stats()
        model: Any = GPT(size)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, optimizer = af.prepare(ctx, model, optimizer)
        scaler = af.init_scaler(ctx)
        losses: list[torch.Tensor] = []
        started = 0.0
        for step, ids in enumerate(read_text(size, steps, ctx.device)):
            if step == steps // 5:
                if is_cuda:
                    torch.cuda.synchronize()
                started = time.perf_counter()
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            scaler = af.backward(ctx, loss, scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
            losses.append(loss.detach())
        if is_cuda:
            torch.cuda.synchronize()
        passed = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() / 2**30 if is_cuda else 0.0
        return [float(loss) for loss in losses], 1000 * passed / (steps - steps // 5), peak


def main() -> None:
    """Print one row for each precision, compiled or not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--csv", type=Path, help="write the losses of each step")
    arguments = parser.parse_args()
    size = LARGE if torch.cuda.is_available() else SMALL
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "the CPU, fp8 emulated"
    print(
        f"a GPT of {sum(p.numel() for p in GPT(size).parameters()) / 1e6:.0f} million parameters on {where},"
    )
    print(f"{size.rows} rows of {size.length} bytes, torch {torch.__version__}")
    curves: dict[str, list[float]] = {}
    for compiled in (False, True):
        for mode in ("bf16", "fp8"):
            losses, ms, peak = train(mode, compiled, size, arguments.steps)
            name = f"{mode}{' compiled' if compiled else ''}"
            curves[name] = losses
            reference = curves["bf16" + " compiled" * compiled]
            distance = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
            told = " ".join(f"{losses[step]:.3f}" for step in range(0, len(losses), max(1, len(losses) // 8)))
            print(
                f"{name:14s} {ms:8.1f} ms a step, peak {peak:.1f} GiB, distance {distance:.4f}, losses {told}"
            )
            sys.stdout.flush()
    if arguments.csv is not None:
        rows = (",".join(map(str, row)) for row in zip(*curves.values(), strict=True))
        arguments.csv.write_text("\n".join((",".join(curves), *rows)) + "\n")


if __name__ == "__main__":
    main()
