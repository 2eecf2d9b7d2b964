"""A torchrun script that keeps its process group, wrapper and step: accelfn reads, gathers and saves.

torchrun --nproc_per_node=2 docs/examples/embedding/plain_torchrun.py
"""

# pyright: basic
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af


def main(folder: str, epochs: str = "10") -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.linspace(-1, 1, 50).unsqueeze(1)
    model = DistributedDataParallel(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with af.init_context(cpu=True) as ctx:  # takes the group over, and leaves it when it closes
        loader = af.prepare_data_loader(
            ctx, DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)
        )
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
        state = af.load_latest(ctx, folder, state) or state
        for epoch in range(state["epoch"], int(epochs)):
            rows: list[torch.Tensor] = []
            for (inputs, targets), micro in af.microbatches(ctx, loader):
                errors = (model(inputs) - targets).square()
                errors.mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                rows.append(af.gather_for_metrics(ctx, errors.detach(), micro))
            errors = torch.cat(rows)
            if epoch % 3 == 0:
                af.print_once(ctx, f"epoch {epoch}: {len(errors)} samples, loss {errors.mean():.4f}")
            state["epoch"] = epoch + 1
            af.save_state(ctx, f"{folder}/{epoch}", state, step=epoch, keep=af.Keep(last=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:] or ["runs/torchrun"])
