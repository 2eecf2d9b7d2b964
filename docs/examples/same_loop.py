"""Train on handwritten digits; how ranks share the work is decided by flags of the launcher alone.

accelfn launch docs/examples/same_loop.py
accelfn launch --num_processes 2 docs/examples/same_loop.py
accelfn launch --num_processes 2 --use_fsdp --fsdp_version 2 docs/examples/same_loop.py
accelfn launch --num_processes 2 --use_deepspeed --zero_stage 3 docs/examples/same_loop.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af


def load() -> TensorDataset:
    """Give 1,797 images, float32 (64,) in 0..1, with labels 0..9."""
    data, target = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target, dtype=torch.int64)
    )


def main() -> None:
    with af.init_context(gradient_accumulation_steps=2) as ctx:
        af.set_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(load(), batch_size=64 // ctx.num_processes, shuffle=True, drop_last=True)
        model, optimizer, batches = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        for epoch in range(2):
            total, count = torch.zeros((), device=ctx.device), torch.zeros((), device=ctx.device)
            for (images, labels), micro in af.microbatches(ctx, batches):
                with af.accumulate(ctx, micro, model):
                    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
                    scaler = af.backward(ctx, loss, scaler, micro, weight=len(labels))
                if micro.sync:
                    scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
                total, count = total + loss.detach(), count + len(labels)
            total, count = af.reduce(ctx, (total, count))
            af.print_once(ctx, f"epoch {epoch}: loss {float(total / count):.5f}")


if __name__ == "__main__":
    main()
