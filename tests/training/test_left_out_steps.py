"""A step that one rank leaves out, or takes alone: found at the next thing that ranks do together."""

from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.errors import MismatchError
from accelfn.testing import run_ranks


def train(ctx: Context, rank: int, at: int, steps: int) -> None:
    """Train, but on ``rank`` without the step ``at``."""
    model = nn.Linear(1, 1)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = af.init_scaler(ctx)
    for number in range(steps):
        scaler = af.backward(ctx, model(torch.ones(1, 1)).sum(), scaler)
        if (ctx.rank, number) == (rank, at):
            optimizer.zero_grad()
        else:
            scaler = af.optimizer_step(ctx, optimizer, scaler)
    af.wait_for_everyone(ctx)


@pytest.mark.parametrize(("world", "guard", "rank", "at"), [(2, "sampled", 1, 3), (3, "full", 0, 0)])
def test_a_step_that_one_rank_leaves_out_is_an_error_on_every_rank(
    world: int, guard: Any, rank: int, at: int
) -> None:
    found: list[str] = []

    def run(ctx: Context) -> None:
        try:
            train(ctx, rank, at, 4)
        except MismatchError as error:
            found.append(str(error))
            raise

    with pytest.raises(MismatchError):
        run_ranks(run, world, guard=guard)
    assert len(found) == world
    assert len(set(found)) == 1
    assert "optimizer_step" in found[0]


def test_ranks_that_train_by_themselves_step_as_often_as_they_like() -> None:
    def run(ctx: Context) -> float:
        model = nn.Linear(1, 1)
        model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
        with af.no_sync(ctx, model):
            for _ in range(ctx.rank + 1):
                scaler = af.backward(ctx, model(torch.ones(1, 1)).sum(), af.init_scaler(ctx))
                af.optimizer_step(ctx, optimizer, scaler)
        af.training.average_parameters(ctx, model)
        return model.weight.item()

    first, *others = run_ranks(run, 3)
    assert others == [first] * 2
