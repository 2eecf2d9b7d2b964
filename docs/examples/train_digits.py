"""Train a small convolutional network on handwritten digits, on any number of processes.

    accelfn launch --num_processes 2 docs/examples/train_digits.py --output digits

The data are scikit-learn's 1,797 scanned digits, which come with the package. Every fifth image is held out;
the accuracy over those is gathered exactly, whatever the number of processes.
"""

import argparse
from collections.abc import Iterable
from typing import ClassVar

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import accelfn as af


def load() -> tuple[TensorDataset, TensorDataset]:
    """Give 1,437 images to learn from and 360 held out: float32 (1, 8, 8) in 0..1, with labels 0..9."""
    data, target = load_digits(return_X_y=True)
    images = torch.tensor(data, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


class Digits(nn.Sequential):
    """Layers one after the other, and how the ranks along a mesh's axis ``tp`` share two of them."""

    tp_plan: ClassVar[dict[str, str]] = {"6": "colwise", "8": "rowwise"}


def make_model() -> nn.Module:
    return Digits(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def evaluate(ctx: af.Context, model: nn.Module, loader: Iterable[list[torch.Tensor]]) -> tuple[int, int]:
    """Count the right answers and all answers over the held-out images of all ranks."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for (images, labels), micro in af.microbatches(ctx, loader):
            answers = {"found": model(images).argmax(dim=1), "true": labels}
            answers = af.gather_for_metrics(ctx, answers, micro)
            right += int((answers["found"] == answers["true"]).sum())
            total += len(answers["true"])
    model.train()
    return right, total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", default="digits-model", help="folder for the trained weights")
    arguments = parser.parse_args()

    with af.init_context() as ctx:
        af.set_seed(0)
        train, held_out = load()
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        model, optimizer, loader, held_out_loader = af.prepare(
            ctx,
            model,
            optimizer,
            DataLoader(train, batch_size=32, shuffle=True),
            DataLoader(held_out, batch_size=64),
        )
        scaler = af.init_scaler(ctx)
        for epoch in range(arguments.epochs):
            progress = tqdm(total=len(loader), desc=f"epoch {epoch + 1}", disable=not ctx.is_main_process)
            for (images, labels), micro in af.microbatches(ctx, loader):
                with af.accumulate(ctx, micro, model):
                    loss = nn.functional.cross_entropy(model(images), labels)
                    scaler = af.backward(ctx, loss, scaler, micro)
                if micro.sync:
                    scaler = af.optimizer_step(ctx, optimizer, scaler)
                progress.update()
            progress.close()
        right, total = evaluate(ctx, model, held_out_loader)
        files = af.save_model(ctx, model, arguments.output)
        af.print_once(
            ctx, f"accuracy on {total} held-out digits: {right / total:.2%} ({ctx.num_processes} processes)"
        )
        af.print_once(ctx, f"saved {files[0]}")


if __name__ == "__main__":
    main()
