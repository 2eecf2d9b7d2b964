"""Workers of Ray Train: the context takes their process group over, and resumes with any number of them.

python docs/examples/embedding/ray_train.py
"""

# pyright: basic, reportMissingImports=false
import os
import sys
from typing import Any

from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import accelfn as af


def train(config: dict[str, Any]) -> str:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    x = torch.linspace(-1, 1, 50).unsqueeze(1)
    with af.init_context(cpu=True) as ctx:
        af.set_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=16 // ctx.num_processes, shuffle=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0}
        state = af.load_latest(ctx, config["folder"], state) or state
        errors = torch.empty(0)
        while state["epoch"] < config["epochs"]:
            rows: list[torch.Tensor] = []
            for (inputs, targets), micro in af.microbatches(ctx, loader):
                errors = (model(inputs) - targets).square()
                scaler = af.backward(ctx, errors.mean(), scaler, micro)
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                rows.append(af.gather_for_metrics(ctx, errors.detach(), micro))
            errors = torch.cat(rows)
            state["epoch"] += 1
            af.save_state(ctx, f"{config['folder']}/{state['epoch']}", state, step=state["epoch"])
        result = f"{state['epoch']} epochs, {len(errors)} samples, loss {errors.mean():.4f}"
        return f"{result} on {ctx.num_processes} workers"


def main(folder: str, num_workers: str = "2", epochs: str = "10") -> None:
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": f"{folder}/states", "epochs": int(epochs)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=int(num_workers)),
        run_config=RunConfig(storage_path=folder, name=f"{num_workers}-workers"),
    )
    print(trainer.fit().return_value)


if __name__ == "__main__":
    main(*sys.argv[1:] or [os.path.abspath("runs/ray_train")])
