"""Models that compute otherwise on each rank, so that gradients are there in another order.

``DistributedDataParallel`` begins to average a bucket when its gradients are there: on one rank before
another collective of the backward pass, and on another rank after it.
"""

# torch leaves manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn import Context, ParallelismConfig
from accelfn.config import DistributedDataParallelKwargs
from accelfn.testing import run_ranks

WIDTH = 512  # a layer is a bucket of 1 MB
STEPS = 2
BUCKETS = [DistributedDataParallelKwargs(bucket_cap_mb=1)]


class Attention(nn.Module):
    """Causal attention of two heads."""

    num_heads = 2

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """Calls those of its two experts that get a row."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = route == number
            if chosen.any():
                y = y.index_put(chosen.nonzero(as_tuple=True), expert(x[chosen]))
        return x + y


class Mixture(nn.Module):
    """Two blocks of attention and experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, WIDTH)
        self.attention = nn.ModuleList(Attention() for _ in range(2))
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, ids: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for attention, experts in zip(self.attention, self.experts, strict=True):
            x = experts(attention(x), route)
        return self.head(x)


def losses_of_mixture(ctx: Context) -> list[float]:
    model = af.prepare_model(ctx, Mixture())
    optimizer = af.training.prepare_optimizer(ctx, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler, random, losses = af.init_scaler(ctx), torch.Generator().manual_seed(1), list[float]()
    for _ in range(STEPS):
        ids, labels = torch.randint(8, (2, 2, 16), generator=random)
        route = torch.zeros(2, 16, dtype=torch.int64)
        route[:, :4] = 1  # along cp and sp, all of them are rank 0's
        batch = {"ids": ids, "labels": labels, "route": route}
        if ctx.num_processes > 1:
            batch = af.shard_sequence(ctx, batch, dict.fromkeys(batch, 1))
        output = model(batch["ids"], batch["route"])
        loss = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
        scaler = af.backward(ctx, loss, scaler, weight=batch["labels"].numel())
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        losses.append(float(af.reduce(ctx, loss.detach())))
    return losses


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_attention_of_all_ranks_beside_experts_that_some_ranks_skip(axis: str) -> None:
    (one,) = run_ranks(losses_of_mixture, 1)
    sizes: Any = {f"{axis}_size": 2}
    found = run_ranks(
        losses_of_mixture,
        2,
        on="processes",
        timeout_s=30,
        kwargs_handlers=BUCKETS,
        parallelism_config=ParallelismConfig(**sizes),
    )
    for losses in found:
        assert losses == pytest.approx(one, rel=1e-4)


class Gathering(nn.Module):
    """Compares the rows of all ranks in its middle, and calls those of its last layers that are named."""

    def __init__(self, ctx: Context) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ctx = ctx
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.last = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
        x = af.all_gather(self.ctx, self.first(x))
        for number in chosen:
            x = x + self.last[number](x).tanh()
        return x


def losses_of_gathering(ctx: Context) -> list[float]:
    model = af.prepare_model(ctx, Gathering(ctx))
    optimizer = af.training.prepare_optimizer(ctx, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler, losses = af.init_scaler(ctx), list[float]()
    for _ in range(STEPS):
        rows = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(ctx.rank))
        loss = model(rows, [0, 1] if ctx.rank == 0 else [0]).square().mean()
        scaler = af.backward(ctx, loss, scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        losses.append(float(loss.detach()))
    return losses


def test_rows_of_all_ranks_before_layers_that_some_ranks_skip() -> None:
    on_threads = run_ranks(losses_of_gathering, 2)
    found = run_ranks(losses_of_gathering, 2, on="processes", timeout_s=30, kwargs_handlers=BUCKETS)
    for losses, expected in zip(found, on_threads, strict=True):
        assert losses == pytest.approx(expected, rel=1e-4)


class Stack(nn.Module):
    """Layers, some of which a call may leave out."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))

    def forward(self, x: torch.Tensor, left_out: int | None = None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != left_out:
                x = layer(x)
        return x


def weights_of_two_models(ctx: Context) -> list[float]:
    first, tower, last = (af.prepare_model(ctx, Stack(number)) for number in (1, 3, 2))
    parameters = [*first.parameters(), *tower.parameters(), *last.parameters()]
    optimizer = af.training.prepare_optimizer(ctx, torch.optim.SGD(parameters, lr=0.1))
    scaler = af.init_scaler(ctx)
    for step in range(STEPS):
        rows = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + ctx.rank))
        x = first(rows)
        x = x + tower(rows, 2 if ctx.rank == 1 else None)
        scaler = af.backward(ctx, last(x).square().mean(), scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)
    return [float(one.detach().double().sum()) for one in parameters]


def test_gradients_of_two_models_are_averaged_apart_where_a_rank_leaves_a_layer_out() -> None:
    on_threads = run_ranks(weights_of_two_models, 2)
    found = run_ranks(weights_of_two_models, 2, on="processes", timeout_s=30, kwargs_handlers=BUCKETS)
    for weights, expected in zip(found, on_threads, strict=True):
        assert weights == pytest.approx(expected, abs=1e-4)
