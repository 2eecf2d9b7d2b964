"""Fit a line on any number of processes: the smallest training.

accelfn launch --num_processes 2 docs/examples/first_run.py
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af


def train(ctx: af.Context) -> list[float]:
    """Return the weight and the bias of the line."""
    af.set_seed(0)
    x = torch.linspace(-1, 1, 64).unsqueeze(1)
    model: nn.Module = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=16 // ctx.num_processes, shuffle=True)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)
    for epoch in range(20):
        for (inputs, targets), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                scaler = af.backward(ctx, loss, scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
        if epoch % 5 == 4:
            mean = af.reduce(ctx, nn.functional.mse_loss(model(x), 3 * x + 1).detach(), "mean")
            af.print_once(ctx, f"epoch {epoch + 1}: loss {mean.item():.5f}")
    return [round(one.item(), 2) for one in model.parameters()]


if __name__ == "__main__":
    with af.init_context() as ctx:
        print(f"rank {ctx.rank} of {ctx.num_processes}: {train(ctx)}")
