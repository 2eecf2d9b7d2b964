"""Stop in the middle of an epoch, start again from the checkpoint, and end with the very same weights.

    accelfn launch --num_processes 2 docs/examples/resume.py

The same training runs once without a stop. Then it runs once more, and is asked to stop on the way, as a
cluster would ask by a signal; and it goes on from what it has saved. A real program ends with
``guard.exit()`` where this one returns.
"""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af


class Run(NamedTuple):
    """What has become of a training."""

    num_steps: int
    loss: float  # of the last step, on this rank
    weights: torch.Tensor  # float32 (n,)


def load() -> TensorDataset:
    """Give 1,797 images, float32 (64,) in 0..1, with labels 0..9."""
    data, target = load_digits(return_X_y=True)
    return TensorDataset(
        torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target, dtype=torch.int64)
    )


def train(ctx: af.Context, folder: Path | None = None, stop_after: int | None = None) -> Run:
    """Train for two epochs; with a folder, go on from a checkpoint in it, and save one when asked to stop."""
    af.set_seed(0, ctx=ctx, device_specific=True)
    model: nn.Module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loader = DataLoader(load(), batch_size=64 // ctx.num_processes, shuffle=True, num_workers=1)
    model, optimizer, schedule, loader = af.prepare(ctx, model, optimizer, schedule, loader)
    objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    state: dict[str, Any] = {"scaler": af.init_scaler(ctx), "epoch": 0, "num_steps": 0}
    if folder is not None:
        state = af.load_latest(ctx, folder, {**objects, **state}) or state
    scaler, epoch, num_steps = state["scaler"], state["epoch"], state["num_steps"]
    value = float("nan")

    with af.preemption(ctx) as guard:
        while epoch < 2:
            # The first pass after a restart is over what is left of the epoch.
            for (images, labels), micro in af.microbatches(ctx, loader):
                with af.accumulate(ctx, micro, model), af.autocast(ctx):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    scaler = af.backward(ctx, loss, scaler, micro)
                if not micro.sync:  # the window goes on
                    continue
                scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=schedule)
                num_steps, value = num_steps + 1, loss.item()
                if num_steps == stop_after and ctx.is_last_process:
                    guard.request_stop()
                if folder is not None and guard.should_stop():
                    state = {"scaler": scaler, "epoch": epoch, "num_steps": num_steps}
                    af.save_state(ctx, folder / f"step-{num_steps}", {**objects, **state}, step=num_steps)
                    return result(num_steps, value, model)
            epoch += 1
    return result(num_steps, value, model)


def result(num_steps: int, loss: float, model: nn.Module) -> Run:
    weights = torch.cat([item.detach().flatten() for item in model.parameters()])
    return Run(num_steps, loss, weights.clone())


def main() -> None:
    with af.init_context() as ctx, tempfile.TemporaryDirectory() as own:
        folder = Path(str(af.broadcast_object_list(ctx, [own])[0]))  # rank 0's, for all
        straight = train(ctx)
        af.print_once(ctx, f"without a stop: {straight.num_steps} steps, loss {straight.loss:.4f}")

        stopped = train(ctx, folder, stop_after=straight.num_steps * 2 // 3)
        saved = ", ".join(path.name for path in af.find_checkpoints(folder))
        af.print_once(ctx, f"asked to stop: {stopped.num_steps} steps, and saved {saved}")

        resumed = train(ctx, folder)
        af.print_once(ctx, f"started again: {resumed.num_steps} steps, loss {resumed.loss:.4f}")
        if stopped.num_steps >= resumed.num_steps or not torch.equal(straight.weights, resumed.weights):
            raise RuntimeError("the weights are others than those of the run without a stop")
        af.print_once(ctx, f"all {len(resumed.weights)} weights are equal, bit for bit")
        af.wait_for_everyone(ctx)  # rank 0 removes the folder now


if __name__ == "__main__":
    main()
