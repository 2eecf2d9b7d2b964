"""Train a small transformer in two stages, one on each process.

    accelfn launch --num_processes 2 docs/examples/train_pipeline.py

It reads scikit-learn's 1,797 scanned digits, which come with the package, as sequences: each row of an image
is one position. Every fifth image is held out. With ``--replicas 2`` and 4 processes, two such pipelines
train on batches of their own.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.config import PipelineParallelConfig

WIDTH, HEADS = 64, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def heads(self, features: torch.Tensor) -> torch.Tensor:
        return features.view(*features.shape[:2], HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        query, key, value = (self.heads(layer(h)) for layer in (self.query, self.key, self.value))
        h = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, WIDTH)
        self.positions = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.rows(images) + self.positions(torch.arange(8, device=images.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def load() -> tuple[TensorDataset, TensorDataset]:
    """Give 1,437 images to learn from and 360 held out: float32 (8, 8) in 0..1, with labels 0..9."""
    data, target = load_digits(return_X_y=True)
    images = torch.tensor(data, dtype=torch.float32).view(-1, 8, 8) / 16
    labels = torch.tensor(target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1, help="pipelines, each with its own batches")
    arguments = parser.parse_args()

    mesh = af.ParallelismConfig(
        dp_replicate_size=arguments.replicas,
        pp_size=2,
        pp_handler=PipelineParallelConfig(num_microbatches=6),
    )
    with af.init_context(parallelism_config=mesh) as ctx:
        af.set_seed(0)
        train, held_out = load()
        model = Reader()
        af.print_once(ctx, af.plan_model(ctx, model))
        model, optimizer, loader, held_out_loader = af.prepare(
            ctx,
            model,
            torch.optim.AdamW(model.parameters(), lr=4e-3),
            DataLoader(train, batch_size=96, shuffle=True),
            DataLoader(held_out, batch_size=60),
        )
        scaler = af.init_scaler(ctx)
        for _ in range(arguments.epochs):
            for batch, micro in af.microbatches(ctx, loader):
                scaler, _ = af.forward_backward(ctx, model, loss_fn, batch, scaler, micro)
                if micro.sync:
                    scaler = af.optimizer_step(ctx, optimizer, scaler)
        right = total = 0
        model.eval()
        for (images, labels), micro in af.microbatches(ctx, held_out_loader):
            answers = af.training.forward(ctx, model, images).argmax(dim=1)  # on every rank
            found = af.gather_for_metrics(ctx, answers == labels, micro)
            right, total = right + int(found.sum()), total + len(found)
        af.print_once(ctx, f"accuracy on {total} held-out digits: {right / total:.2%}")


if __name__ == "__main__":
    main()
