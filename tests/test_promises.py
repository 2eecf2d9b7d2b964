"""What the design promises of the library as a whole."""

# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks

Weights = list[torch.Tensor]


def training(ctx: Context, steps: int = 6) -> Iterator[Weights]:
    """Train a small model, one step at a time."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    model, optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=0.05))
    scaler = af.init_scaler(ctx)
    generator = torch.Generator().manual_seed(ctx.rank)
    batches = [torch.randn(3, 4, generator=generator) for _ in range(steps)]
    for x, micro in af.microbatches(ctx, batches):
        with af.accumulate(ctx, micro, model):
            scaler = af.backward(ctx, (model(x) - x.sum(1, keepdim=True)).square().mean(), scaler, micro)
        if micro.sync:
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        yield [parameter.detach().clone() for parameter in model.parameters()]


def last(trainings: Iterator[Any]) -> Any:
    return deque(trainings, maxlen=1).pop()


def variants(ctx: Context) -> tuple[Context, Context, Context]:
    return ctx, ctx.replace(mixed_precision="bf16"), ctx.replace(gradient_accumulation_steps=4)


def equal(first: Weights, second: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_contexts_train_alternately_as_if_each_were_alone(world: int) -> None:
    def run(ctx: Context) -> None:
        alone = [last(training(one)) for one in variants(ctx)]
        together = last(zip(*(training(one) for one in variants(ctx)), strict=True))
        assert all(equal(a, b) for a, b in zip(alone, together, strict=True))
        assert not equal(alone[0], alone[1])
        assert not equal(alone[0], alone[2])

    run_ranks(run, world)


def test_eight_ranks_as_threads_use_three_contexts_each_in_two_worlds_at_once() -> None:
    alone = run_ranks(lambda ctx: [last(training(one)) for one in variants(ctx)], 8)

    def work(ctx: Context) -> list[Weights]:
        return last(zip(*(training(one) for one in variants(ctx)), strict=True))

    def other(ctx: Context) -> list[tuple[int, list[int], float]]:
        found: list[tuple[int, list[int], float]] = []
        for number in range(40):
            for one in variants(ctx):
                total = int(af.reduce(one, torch.tensor(ctx.rank + number)))
                ranks = af.gather(one, {"r": torch.tensor([ctx.rank])})["r"].tolist()
                sent = float(af.broadcast(one, torch.tensor(float(ctx.rank)), from_process=number % 8))
                found.append((total, ranks, sent))
        return found

    results: dict[str, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda: results.update(work=run_ranks(work, 8))),
        threading.Thread(target=lambda: results.update(other=run_ranks(other, 8))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, found in zip(alone, results["work"], strict=True):
        assert all(equal(a, b) for a, b in zip(expected, found, strict=True))
    expected_other = [
        (28 + 8 * number, list(range(8)), float(number % 8)) for number in range(40) for _ in range(3)
    ]
    assert results["other"] == [expected_other] * 8
