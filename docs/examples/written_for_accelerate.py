"""A program written for Accelerate: it knows nothing of accelfn."""

# Accelerate's types are incomplete.
# pyright: basic, reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    set_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x = torch.linspace(-1, 1, 24).unsqueeze(1)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    loader = DataLoader(TensorDataset(x, 3 * x + 1), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(30):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
    if accelerator.is_main_process:
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(f"{folder}/checkpoint")
            accelerator.save_model(model, f"{folder}/model")
    weight, bias = (round(parameter.item(), 3) for parameter in model.parameters())
    accelerator.print(f"{accelerator.num_processes} processes: weight {weight}, bias {bias}")


if __name__ == "__main__":
    main()
