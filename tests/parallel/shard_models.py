"""A small language model with tied embeddings, its data, and one plain process that trains it."""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer

import accelfn as af
from accelfn import Context
from accelfn.data import plan_microbatch

VOCABULARY, WIDTH, LENGTH, ROWS = 24, 8, 6, 4
MAX_NORM = 0.5
BATCH = dict[str, torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute with parameters past ``forward``."""
        return F.linear(self.embed(ids), self.head.weight).square().mean()

    def evaluate(self, ids: torch.Tensor) -> torch.Tensor:
        """Call the model, and compute with parameters after it."""
        return self(ids) @ self.head.weight


def make(seed: int = 0, *, is_tied: bool = True) -> Model:
    torch.manual_seed(seed)
    return Model(is_tied=is_tied)


def windows(number: int, size: int, seed: int = 1) -> list[list[BATCH]]:
    """Return windows of batches, whose rows have labels in different numbers."""
    generator = torch.Generator().manual_seed(seed)

    def batch() -> BATCH:
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[
            torch.rand(ROWS, LENGTH, generator=generator) < torch.rand(ROWS, 1, generator=generator)
        ] = -100
        labels[:, 0] = tokens[:, 1]
        return {"ids": tokens[:, :-1], "labels": labels}

    return [[batch() for _ in range(size)] for _ in range(number)]


def loss_of(model: nn.Module, batch: BATCH, is_weighted: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum over tokens and their number, or the mean over all and None."""
    logits = model(batch["ids"]).flatten(0, 1)
    if not is_weighted:
        return logits.float().square().mean(), None
    total = F.cross_entropy(logits.float(), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
    return total, (batch["labels"] != -100).sum()


class Trained(NamedTuple):
    parameters: dict[str, torch.Tensor]
    losses: list[float]
    norms: list[float]

    def distance(self, other: Trained) -> float:
        """Return the largest difference: of parameters absolute, of losses and norms relative."""
        assert self.parameters.keys() == other.parameters.keys()
        values = [(one - other.parameters[name]).abs().max().item() for name, one in self.parameters.items()]
        pairs = zip(self.losses + self.norms, other.losses + other.norms, strict=True)
        return max(*values, *(abs(a - b) / abs(b) for a, b in pairs))


MakeOptimizer = Callable[[Any], Optimizer]


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def train_plain(make_optimizer: MakeOptimizer, size: int, is_weighted: bool) -> Trained:
    """Train on one process without accelfn."""
    model = make()
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    norms: list[float] = []
    for window in windows(3, size):
        total, weight = 0.0, 0.0
        for batch in window:
            loss, number = loss_of(model, batch, is_weighted)
            loss.backward()
            total, weight = total + loss.item(), weight + (1.0 if number is None else number.item())
        for one in model.parameters():
            assert one.grad is not None
            one.grad /= weight
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        losses.append(total / weight)
        optimizer.step()
        optimizer.zero_grad()
    return Trained({name: one.detach() for name, one in model.named_parameters()}, losses, norms)


def train(
    ctx: Context, model: nn.Module, optimizer: Optimizer, size: int, is_weighted: bool, number: int = 3
) -> Trained:
    """Train what was prepared on this rank's rows."""
    scaler = af.init_scaler(ctx)
    losses: list[float] = []
    norms: list[float] = []
    place, parts = ctx.coordinate("dp"), ctx.axis_size("dp")
    for window in windows(number, size):
        totals = torch.zeros(2, dtype=torch.float64)
        for index, batch in enumerate(window):
            rows = {name: one.chunk(parts)[place] for name, one in batch.items()}
            micro = plan_microbatch(index, 0, size, size)
            with af.accumulate(ctx, micro, model):
                loss, weight = loss_of(model, rows, is_weighted)
                scaler = af.backward(ctx, loss, scaler, micro, weight)
            totals += torch.tensor([loss.item(), 1.0 if weight is None else weight.item()])
        scaler = af.unscale_gradients(ctx, optimizer, scaler)
        norm = af.clip_grad_norm_(ctx, model.parameters(), MAX_NORM, scaler_state=scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        totals = af.reduce(ctx, totals, "sum")
        losses.append((totals[0] / totals[1]).item())
        norms.append(norm.item())
    return Trained(whole(model), losses, norms)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the parameters of a model that may be sharded."""
    found: dict[str, torch.Tensor] = {}
    for name, one in model.named_parameters():
        value: Any = one.detach()
        found[name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found
