"""n ranks, b samples a batch, k batches a window, an uneven tail: the same as one rank with one batch."""

# torch leaves DataLoader and backward partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn import Context, DataLoaderConfiguration
from accelfn.testing import run_ranks
from tests.training.models import filled, gradients, sgd, values


class Case(NamedTuple):
    """A way to train for one epoch.

    Attributes:
        world: Number of ranks.
        batch: Samples of one rank in one batch.
        steps: Batches of a window.
        num: Samples altogether.
        even: Fill the last step up with samples that came before; otherwise leave it short.
        seed: Of the data.
    """

    world: int
    batch: int
    steps: int
    num: int
    even: bool = False
    seed: int = 0


def make_data(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give inputs, targets, and how much each sample counts: many of them nothing."""
    generator = torch.Generator().manual_seed(case.seed)
    x, y = (torch.rand(case.num, size, generator=generator) * 2 - 1 for size in (3, 2))
    return x, y, torch.randint(0, 4, (case.num,), generator=generator).float()


def make_model() -> nn.Module:
    return filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def losses_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean(dim=1)


def at_once(case: Case) -> list[list[torch.Tensor]]:
    """Train on one rank with each window as one batch; return each step's gradients, and the weights."""
    model = make_model()
    optimizer = sgd(model, 0.5)
    found: list[list[torch.Tensor]] = []
    window = case.world * case.batch * case.steps
    for start in range(0, case.num, window):
        x, y, counts = (one[start : start + window] for one in make_data(case))
        optimizer.zero_grad()
        # Without any weight there is nothing to learn.
        ((losses_of(model, x, y) * counts).sum() / counts.sum().clamp(min=1.0)).backward()
        found.append(gradients(model))
        optimizer.step()
    return [*found, values(model)]


def in_parts(ctx: Context, case: Case) -> list[list[torch.Tensor]]:
    """Do what :func:`at_once` does, on many ranks and in many batches."""
    model = make_model()
    dataset = cast("Any", TensorDataset(*make_data(case)))
    model, optimizer, loader = af.prepare(ctx, model, sgd(model, 0.5), DataLoader(dataset, case.batch))
    scaler = af.init_scaler(ctx)
    found: list[list[torch.Tensor]] = []
    for (x, y, weights), micro in af.microbatches(ctx, loader, "pad"):
        # Rows that are padding are left out: there are no others behind them.
        valid = torch.arange(len(x)) < (len(x) if micro.own_valid is None else micro.own_valid)
        counts = weights * valid
        with af.accumulate(ctx, micro, model):
            loss = (losses_of(model, x, y) * counts).sum()
            scaler = af.backward(ctx, loss, scaler, micro, weight=counts.sum())
        if micro.sync:
            scaler = af.unscale_gradients(ctx, optimizer, scaler)
            found.append(gradients(model))
            scaler = af.optimizer_step(ctx, optimizer, scaler)
    return [*found, values(model)]


def trained(case: Case) -> list[list[list[torch.Tensor]]]:
    return run_ranks(
        lambda ctx: in_parts(ctx, case),
        case.world,
        gradient_accumulation_steps=case.steps,
        dataloader_config=DataLoaderConfiguration(even_batches=case.even),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world, batch, steps = (draw(st.integers(1, 3)) for _ in range(3))
    # Each rank has at least one row: what a rank without any would repeat as padding, nobody knows.
    num = (world - 1) * batch + 1 + draw(st.integers(0, 12))
    return Case(world, batch, steps, num, draw(st.booleans()), draw(st.integers(0, 999)))


@settings(max_examples=12)
@given(cases())
@example(Case(3, 2, 2, 6))  # one sample more than it needs for a batch each: ranks 0 and 1 have theirs
@example(Case(3, 2, 1, 7))  # the last step leaves ranks 1 and 2 without a row
@example(Case(3, 2, 2, 7, even=True))  # the last step is padding on ranks 1 and 2
def test_sums_with_weights_over_an_uneven_tail(case: Case) -> None:
    expected = at_once(case)
    for found in trained(case):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_a_rank_without_any_row_is_refused_on_every_rank() -> None:
    with pytest.raises(ValueError, match="a rank has no batch"):
        trained(Case(3, 2, 1, 2))
