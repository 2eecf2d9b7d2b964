"""Log two trainings on two processes, and read what was logged.

    accelfn launch --num_processes 2 docs/examples/tracking.py
    accelfn runs list

Every rank calls the same functions; rank 0 writes. The loss that is logged is the mean over ranks.
"""

import argparse
import logging
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.launch import read_run

logger = af.get_logger(__name__, "INFO")


def load() -> TensorDataset:
    """Give 512 points of the plane, float32 (2,), with their distance from the origin, float32 (1,)."""
    points = torch.randn(512, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(points, points.square().sum(dim=1, keepdim=True).sqrt())


def train(ctx: af.Context, folder: Path, learning_rate: float) -> Path:
    """Train for four epochs, and give the folder of the run."""
    af.set_seed(0, ctx=ctx)
    model: nn.Module = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    loader = DataLoader(load(), batch_size=32 // ctx.num_processes, shuffle=True)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)

    name = f"lr-{learning_rate}"
    trackers = af.init_trackers(
        ctx,
        "distances",
        log_with="jsonl",
        logging_dir=folder,
        config={"learning_rate": learning_rate, "ranks": ctx.num_processes},
        init_kwargs={"jsonl": {"run_name": name}},
    )
    step = 0
    for epoch in range(4):
        batches = af.microbatches(ctx, loader)
        for (points, distances), micro in af.tqdm(batches, ctx=ctx, total=len(loader), desc=f"epoch {epoch}"):
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.mse_loss(model(points), distances)
                scaler = af.backward(ctx, loss, scaler, micro)
            if micro.sync:
                scaler = af.optimizer_step(ctx, optimizer, scaler)
                step += 1
                mean = af.reduce(ctx, loss.detach(), "mean")
                af.log(trackers, {"loss": mean, "epoch": epoch}, step=step)
    af.tracking.log_table(trackers, "guesses", ["point", "distance"], rows(ctx, model), step=step)
    af.finish(trackers)
    logger.info("%s has ended after %d steps", name, step)
    return folder / "distances" / name


def rows(ctx: af.Context, model: nn.Module) -> list[list[object]]:
    """Let the model guess the distances of four points."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])
    with torch.no_grad():
        return [[point, guess] for point, guess in zip(points, model(points.to(ctx.device)), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--logging_dir", type=Path, default=Path("runs"))
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    with af.init_context() as ctx:
        folders = [train(ctx, options.logging_dir, rate) for rate in (0.03, 0.1)]
        if ctx.is_main_process:
            runs = [read_run(folder) for folder in folders]
            for run in runs:
                curve = run.curves["loss"]
                print(f"{run.name}: loss {curve.values[0]:.3f} at first, {curve.values[-1]:.4f} at last")
        af.wait_for_everyone(ctx)


if __name__ == "__main__":
    main()
