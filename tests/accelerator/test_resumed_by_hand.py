"""Programs like Accelerate's examples, which load a state and skip batches by hand."""

# torch leaves DataLoader partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from accelfn import Accelerator, Context, set_seed
from accelfn.testing import run_ranks

NUM_EPOCHS, PER_EPOCH = 3, 9


def train(ctx: Context, folder: Path, resume_step: int) -> tuple[list[list[int]], list[float], list[Any]]:
    """Do as complete_nlp_example does: return the samples and rates of each step, and the weights."""
    accelerator = Accelerator(context=ctx)
    set_seed(42)
    num = PER_EPOCH * 2 * ctx.num_processes - 1  # the last batch is filled up
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train_dataloader: Any = DataLoader(TensorDataset(torch.arange(num), torch.randn(num, 3)), 2, shuffle=True)
    model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, LambdaLR(optimizer, lambda step: 1 - step / 100)
    )
    if resume_step:
        accelerator.load_state(folder / f"step_{resume_step}")
    starting_epoch, skipped = divmod(resume_step, PER_EPOCH)
    overall_step = resume_step
    seen: list[list[int]] = []
    rates: list[float] = []
    for epoch in range(starting_epoch, NUM_EPOCHS):
        active_dataloader = train_dataloader
        if resume_step and epoch == starting_epoch:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, skipped)
        for samples, x in active_dataloader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            seen.append(samples.tolist())
            rates += lr_scheduler.get_last_lr()
            overall_step += 1
            if not resume_step and overall_step % 3 == 0:
                accelerator.save_state(folder / f"step_{overall_step}")
    return seen, rates, [one.tolist() for one in model.parameters()]


@pytest.mark.parametrize(("step", "world", "on"), [(6, 2, "processes"), (9, 1, "memory"), (12, 1, "memory")])
def test_accelerates_own_example_trains_the_steps_that_are_left(
    step: int, world: int, on: Any, tmp_path: Path
) -> None:
    whole = run_ranks(lambda ctx: train(ctx, tmp_path, 0), world, on)
    rest = run_ranks(lambda ctx: train(ctx, tmp_path, step), world, on)
    for (seen, rates, weights), again in zip(whole, rest, strict=True):
        assert again == (seen[step:], rates[step:], weights)
