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

from accelfn import Accelerator, Context, set_seed, unwrap_model
from accelfn.testing import run_ranks

NUM_EPOCHS, PER_EPOCH = 3, 9


def train(ctx: Context, folder: Path, resume_from: str | None, dropout: float = 0.5) -> tuple[Any, ...]:
    """Do as complete_nlp_example does: return the samples of each step, rates, evaluations and weights."""
    accelerator = Accelerator(context=ctx)
    set_seed(42)
    num = PER_EPOCH * 2 * ctx.num_processes - 1  # the last batch is filled up
    rows = TensorDataset(torch.arange(num), torch.randn(num, 3))
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    train_dataloader: Any = DataLoader(rows, shuffle=True, batch_size=2)
    held_out = TensorDataset(*rows[:10])
    eval_dataloader: Any = DataLoader(held_out, shuffle=False, batch_size=4)
    total = PER_EPOCH * NUM_EPOCHS
    lr_scheduler = LambdaLR(optimizer, lambda step: max(0.0, (total - step) / total))
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    overall_step = starting_epoch = 0
    resume_step: int | None = None
    if resume_from is not None:
        accelerator.load_state(folder / resume_from)
        kind, _, number = resume_from.partition("_")
        if kind == "epoch":
            starting_epoch = int(number) + 1
        else:
            resume_step = int(number)
            starting_epoch = resume_step // len(train_dataloader)
            resume_step -= starting_epoch * len(train_dataloader)
    seen: list[list[int]] = []
    rates: list[float] = []
    evaluations: list[float] = []
    for epoch in range(starting_epoch, NUM_EPOCHS):
        model.train()
        if resume_from is not None and epoch == starting_epoch and resume_step is not None:
            active_dataloader = accelerator.skip_first_batches(train_dataloader, resume_step)
            overall_step += resume_step
        else:
            active_dataloader = train_dataloader
        for samples, x in active_dataloader:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            seen.append(samples.tolist())
            rates += lr_scheduler.get_last_lr()
            overall_step += 1
            if resume_from is None and overall_step % 3 == 0:
                accelerator.save_state(folder / f"step_{overall_step}")
        model.eval()
        outputs = [accelerator.gather_for_metrics(model(x).detach()) for _, x in eval_dataloader]
        evaluations.append(float(torch.cat(outputs).sum()))
        if resume_from is None:
            accelerator.save_state(folder / f"epoch_{epoch}")
    return seen, rates, evaluations, dict(unwrap_model(model).state_dict())


@pytest.mark.parametrize(
    ("resume_from", "world", "on"),
    [
        *((point, 1, "memory") for point in ("step_6", "step_9", "step_12", "epoch_0")),
        ("step_12", 2, "memory"),
        ("step_6", 2, "processes"),
    ],
)
def test_accelerates_own_example_trains_the_steps_that_are_left(
    resume_from: str, world: int, on: Any, tmp_path: Path
) -> None:
    # Threads share torch's generator, and dropout draws from it. So does torch as a pass begins, and behind
    # step 9 the resumed program leaves out the evaluation.
    dropout = 0.0 if (world, on) == (2, "memory") or resume_from == "step_9" else 0.5
    whole = run_ranks(lambda ctx: train(ctx, tmp_path, None, dropout), world, on)
    rest = run_ranks(lambda ctx: train(ctx, tmp_path, resume_from, dropout), world, on)
    kind, _, number = resume_from.partition("_")
    done = PER_EPOCH if kind == "epoch" else int(number)
    for (seen, rates, evaluations, weights), again in zip(whole, rest, strict=True):
        assert len(again[0]) == PER_EPOCH * NUM_EPOCHS - done
        assert again[0] == seen[done:]
        assert again[1] == rates[done:]
        assert again[2] == evaluations[done // PER_EPOCH :]
        for name, value in weights.items():
            assert torch.equal(again[3][name], value)
