"""Train with the same bits on any number of processes.

Run it with one, two, three or four processes: every run prints the same lines.
"""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af


def main() -> None:
    torch.set_num_threads(1)  # how many threads share a sum may decide its last bit
    af.set_seed(0)
    x = torch.randn(960, 8)
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    reduction = af.config.CanonicalReduction(num_microbatches=12)
    with af.init_context(reduction=reduction) as ctx:
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.Tanh(), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        for epoch in range(3):
            losses: list[torch.Tensor] = []
            for (inputs, targets), micro in af.microbatches(ctx, loader):
                with af.accumulate(ctx, micro, model):
                    loss = nn.functional.mse_loss(model(inputs), targets)
                    scaler = af.backward(ctx, loss, scaler, micro)
                losses.append(af.gather(ctx, loss.detach()))  # of a step, in the order of its microbatches
                if micro.sync:
                    scaler = af.optimizer_step(ctx, optimizer, scaler)
            af.print_once(ctx, f"epoch {epoch}: loss {float(torch.cat(losses).mean()).hex()}")
        weights = hashlib.sha256()
        for parameter in model.parameters():
            weights.update(bytes(parameter.detach().view(torch.uint8).flatten()))
        af.print_once(ctx, f"weights {weights.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
