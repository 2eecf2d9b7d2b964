"""Train on handwritten digits, and survive the loss of processes.

    accelfn launch --elastic --num_processes 3 --max_restarts 1 docs/examples/elastic/digits.py

``--kill 1:20`` kills the process that was started as rank 1 at step 20. The fingerprint of the weights is the
same in any case.
"""

import argparse
import hashlib
import os
import signal
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af


def make_state(ctx: af.Context) -> dict[str, Any]:
    af.set_seed(0)
    data, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(data[:1728], dtype=torch.float32) / 16, torch.tensor(labels[:1728])
    loader = DataLoader(TensorDataset(images, targets), batch_size=12, shuffle=True)  # 24 steps per epoch
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "scaler": af.init_scaler(ctx),
        "step": 0,
    }


def train(
    ctx: af.Context, state: dict[str, Any], steps: int, kill: tuple[str, int] | None
) -> tuple[str, bool]:
    model, optimizer, loader = state["model"], state["optimizer"], state["loader"]
    while state["step"] < steps:
        for (images, labels), micro in af.microbatches(ctx, loader):
            with af.accumulate(ctx, micro, model):
                loss = nn.functional.cross_entropy(model(images), labels)
                state["scaler"] = af.backward(ctx, loss, state["scaler"], micro)
            if micro.sync:
                state["scaler"] = af.optimizer_step(ctx, optimizer, state["scaler"])
                state["step"] += 1
                if kill == (name(), state["step"]):
                    os.kill(os.getpid(), signal.SIGKILL)
                af.snapshot(ctx, state, every=5)
            if state["step"] == steps:
                break
    weights = af.unwrap_model(model).state_dict().values()
    fingerprint = hashlib.sha256(b"".join(one.numpy().tobytes() for one in weights)).hexdigest()[:16]
    return fingerprint, ctx.is_main_process  # of who is left


def name() -> str:
    """Return the rank as which this process was started; replacements have another name."""
    return os.environ.get("RANK", "0") + "'" * int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill", help="RANK:STEP")
    arguments = parser.parse_args()
    rank, _, step = (arguments.kill or "").partition(":")
    kill = (rank, int(step)) if step else None
    result = af.run_elastic(
        lambda ctx, state: train(ctx, state, arguments.steps, kill),
        make_state,
        cpu=True,
        reduction=af.config.CanonicalReduction(num_microbatches=6),  # exact mode, for 1, 2, 3 or 6 ranks
    )
    fingerprint, is_main = result or ("", False)
    if is_main:
        print(f"{arguments.steps} steps, weights {fingerprint}")


if __name__ == "__main__":
    main()
