"""The same training as ``train_digits.py``, through the Accelerator. Both end with the same weights.

accelfn launch --num_processes 2 docs/examples/train_digits_accelerator.py --output digits
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm
from train_digits import load, make_model

from accelfn import Accelerator, set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--output", default="digits-model-accelerator", help="folder for the trained weights")
    arguments = parser.parse_args()

    accelerator = Accelerator()
    set_seed(0)
    train, held_out = load()
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader, held_out_loader = accelerator.prepare(
        model, optimizer, DataLoader(train, batch_size=32, shuffle=True), DataLoader(held_out, batch_size=64)
    )
    for epoch in range(arguments.epochs):
        for images, labels in tqdm(
            loader, desc=f"epoch {epoch + 1}", disable=not accelerator.is_main_process
        ):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in held_out_loader:
            found, true = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
            right += int((found == true).sum())
            total += len(true)
    files = accelerator.save_model(model, arguments.output)
    accelerator.print(
        f"accuracy on {total} held-out digits: {right / total:.2%} ({accelerator.num_processes} processes)"
    )
    accelerator.print(f"saved {files[0]}")
    accelerator.close()


if __name__ == "__main__":
    main()
