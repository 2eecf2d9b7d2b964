"""A loop of Lightning Fabric, whose strategy trains: accelfn reads, gathers and saves in its process group.

python docs/examples/embedding/fabric.py
"""

# pyright: basic, reportMissingImports=false
import sys
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af


def main(folder: str, epochs: str = "10") -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    x = torch.linspace(-1, 1, 50).unsqueeze(1)
    model = nn.Linear(1, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with af.init_context(cpu=True) as ctx:
        loader = af.prepare_data_loader(
            ctx, DataLoader(TensorDataset(x, 3 * x + 1), batch_size=8, shuffle=True)
        )
        state: dict[str, Any] = {
            "model": model.module,
            "optimizer": optimizer.optimizer,
            "loader": loader,
            "epoch": 0,
        }
        state = af.load_latest(ctx, folder, state) or state
        for epoch in range(state["epoch"], int(epochs)):
            rows: list[torch.Tensor] = []
            for (inputs, targets), micro in af.microbatches(ctx, loader):
                errors = (model(inputs) - targets).square()
                fabric.backward(errors.mean())
                optimizer.step()
                optimizer.zero_grad()
                rows.append(af.gather_for_metrics(ctx, errors.detach(), micro))
            errors = torch.cat(rows)
            if epoch % 3 == 0:
                fabric.print(f"epoch {epoch}: {len(errors)} samples, loss {errors.mean():.4f}")
            state["epoch"] = epoch + 1
            af.save_state(ctx, f"{folder}/{epoch}", state, step=epoch, keep=af.Keep(last=2))


if __name__ == "__main__":
    main(*sys.argv[1:] or ["runs/fabric"])
