"""Train on XLA's stand-in, and print what came out as JSON."""

import importlib
import json
from typing import Any

import torch

import accelfn as af

torch_xla: Any = importlib.import_module("torch_xla")

if __name__ == "__main__":
    with torch_xla.OnHost(), af.init_context(gradient_accumulation_steps=2) as ctx:
        af.set_seed(ctx.rank)  # prepare takes rank 0's values
        model = torch.nn.Sequential(torch.nn.Linear(3, 60000), torch.nn.Tanh(), torch.nn.Linear(60000, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = torch.utils.data.TensorDataset(torch.linspace(-1, 1, 48).view(16, 3), torch.linspace(0, 1, 16))
        loader = torch.utils.data.DataLoader(data, batch_size=4 // ctx.num_processes)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        losses: list[float] = []
        del torch_xla.calls[:]
        for batch, micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = (model(batch[0]).squeeze(-1) - batch[1]).square().mean()
                scaler = af.backward(ctx, loss, scaler, micro)
            losses.append(float(af.reduce(ctx, loss.detach(), "mean")))
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler, max_norm=1.0)
        calls = [call[0] for call in torch_xla.calls]
        moved = af.scatter(ctx, torch.arange(2.0 * ctx.num_processes) if ctx.rank == 0 else None)
        report: dict[str, Any] = {
            "type": str(ctx.distributed_type),
            "device": str(ctx.device),
            "world": [ctx.rank, ctx.num_processes, ctx.world.backend],
            "model": type(model).__name__,
            "losses": losses,
            "weights": [round(float(p.detach().sum()), 6) for p in model.parameters()],
            "syncs": calls.count("sync"),
            "collectives": sorted(set(calls) - {"sync"}),
            "scattered": [float(value) for value in moved],
        }
        print(json.dumps(report), flush=True)
