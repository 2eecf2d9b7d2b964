"""One GPU: the step, the checkpoint and offloading, beside plain torch and Accelerate.

``python -m tests.bench gpu``: not among the parts that run by default, on the CPU.
"""

# torch leaves backward and its optimizers partly untyped, and the peer has no types.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from tests.bench.checkpoint import in_folders, loading, saving
from tests.bench.offload import on_gpu
from tests.bench.precision import GPT, Size, read_text
from tests.bench.training import Work, by_functions, by_hand, by_shim, show_epochs

# What is around a short step shows in the first; the second is an ordinary one.
SIZES = {"0.3 million parameters": Size(64, 2, 64, 8), "118 million parameters": Size(1024, 9, 1024, 8)}


def work_of(size: Size, *, casts: bool = False) -> Work:
    """Return 20 steps in bf16, clipped, with fused AdamW; the loss isn't read."""
    af.set_seed(0)
    model = GPT(size).cuda()

    def loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=casts):
            logits = model(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Work(model, optimizer, list(read_text(size, 20, torch.device("cuda"))), loss, 1.0)


def waiting(work: Callable[[], object]) -> Callable[[], object]:
    """Return ``work`` and a wait for the device."""

    def run() -> None:
        work()
        torch.cuda.synchronize()

    return run


def main() -> None:
    """Print the tables."""
    theirs: Any = importlib.import_module("accelerate")
    rows: dict[str, dict[str, Callable[[], object]]] = {}
    with af.init_context(mixed_precision="bf16") as ctx:
        for name, size in SIZES.items():
            ways = {
                "plain torch": by_hand(work_of(size, casts=True)),
                "functions": by_functions(ctx, work_of(size)),
                "`Accelerator`": by_shim(af.Accelerator(context=ctx), work_of(size)),
                "Accelerate": by_shim(theirs.Accelerator(mixed_precision="bf16"), work_of(size)),
            }
            rows[name] = {way: waiting(epoch) for way, epoch in ways.items()}
        show_epochs("gpu-step", "20 steps of a GPT of", rows, 11)
    in_folders(partial(saving, "gpu-", "cuda"), partial(loading, "gpu-", "cuda"))
    with torch.no_grad():
        on_gpu(9)


if __name__ == "__main__":
    main()
