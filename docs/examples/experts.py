"""Train a small model whose experts two processes hold between them.

    accelfn launch --num_processes 2 docs/examples/experts.py

It reads scikit-learn's 1,797 scanned digits, which come with the package, as sequences: each row of an image
is one position, and two of eight experts see it. Every fifth image is held out. With 4 processes and
``--ranks 4`` each expert is shared by two of them.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af

WIDTH, HIDDEN, EXPERTS, CHOSEN = 64, 128, 8, 2


class Experts(nn.Module):
    """Parameters with a row for each expert, and a forward over rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        # The parameters that are here: of all experts in one process, and of this rank's own when prepared.
        parts = torch.split(x, [int(count) for count in counts])
        made = [F.gelu(part @ up) @ down for part, up, down in zip(parts, self.up, self.down, strict=True)]
        return torch.cat(made)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        rows = self.norm2(x).flatten(0, 1)
        shares = self.router(rows).softmax(-1)
        weights, index = shares.topk(CHOSEN, -1)
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)  # of all experts, wherever they are
        made = self.experts(rows[order // CHOSEN], counts)
        each = torch.empty_like(made).index_copy(0, order, made).view(*index.shape, WIDTH)
        # Lowest where all experts see equally many rows.
        balance = EXPERTS * (shares.mean(0) * counts / counts.sum()).sum()
        return x + (each * weights.unsqueeze(-1)).sum(1).view_as(x), balance


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Linear(8, WIDTH)
        self.positions = nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.rows(images) + self.positions(torch.arange(8, device=images.device))
        balances: list[torch.Tensor] = []
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        return self.head(self.norm(x).mean(dim=1)), torch.stack(balances).mean()


def load() -> tuple[TensorDataset, TensorDataset]:
    """Give 1,437 images to learn from and 360 held out: float32 (8, 8) in 0..1, with labels 0..9."""
    data, target = load_digits(return_X_y=True)
    images = torch.tensor(data, dtype=torch.float32).view(-1, 8, 8) / 16
    labels = torch.tensor(target, dtype=torch.int64)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), TensorDataset(
        images[held_out], labels[held_out]
    )


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    logits, balance = model(images)
    return F.cross_entropy(logits, labels) + 0.01 * balance


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()

    mesh = af.ParallelismConfig(dp_shard_size=arguments.ranks, ep_size=2)
    with af.init_context(parallelism_config=mesh) as ctx:
        af.set_seed(0)
        train, held_out = load()
        model = Reader()
        af.print_once(ctx, af.plan_model(ctx, model))
        model, optimizer, loader, held_out_loader = af.prepare(
            ctx,
            model,
            torch.optim.AdamW(model.parameters(), lr=4e-3),
            DataLoader(train, batch_size=96 // arguments.ranks, shuffle=True),
            DataLoader(held_out, batch_size=30),
        )
        scaler = af.init_scaler(ctx)
        for _ in range(arguments.epochs):
            for batch, micro in af.microbatches(ctx, loader):
                scaler, _ = af.forward_backward(ctx, model, loss_fn, batch, scaler, micro)
                if micro.sync:
                    scaler = af.optimizer_step(ctx, optimizer, scaler)
        right = total = 0
        model.eval()
        with torch.no_grad():
            for (images, labels), micro in af.microbatches(ctx, held_out_loader):
                answers = af.gather_for_metrics(ctx, model(images)[0].argmax(dim=1) == labels, micro)
                right, total = right + int(answers.sum()), total + len(answers)
        af.print_once(ctx, f"accuracy on {total} held-out digits: {right / total:.2%}")


if __name__ == "__main__":
    main()
