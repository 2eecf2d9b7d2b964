"""Models whose layers ranks share train as in one process, through the library's own functions."""

# torch leaves backward and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import NotAvailableError
from accelfn.testing import run_ranks
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import GPT, PLAN, SEQUENCE, make_batch, summed_loss

STEPS, BATCHES, ROWS = 3, 2, 4
BOUND = 0.5  # of the norm, always exceeded: the norm before is what shows a wrong scale


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # The gradient of a key's bias is rounding and nothing else, which a small eps would make a step of.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def batch_of(step: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    return make_batch(100 * step + batch, ROWS)


def own_batches(number: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the ``number``-th of ``size`` parts of each batch."""
    batches = [batch_of(step, index) for step in range(STEPS) for index in range(BATCHES)]
    return [(ids.chunk(size)[number], labels.chunk(size)[number]) for ids, labels in batches]


def in_one_process(model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]) -> Trained:
    """Train on the sums of all losses, divided by the number of labels, without anything of the library."""
    optimizer = make(model)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(STEPS):
        parts = [summed_loss(model, batch_of(step, index)) for index in range(BATCHES)]
        loss = torch.stack([one for one, _ in parts]).sum() / sum(int(count) for _, count in parts)
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), BOUND).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, {name: one.detach() for name, one in model.named_parameters()})


def on_ranks(
    ctx: af.Context, model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]
) -> Trained:
    """Train on this rank's rows of each window."""
    model, optimizer = af.prepare(ctx, model, make(model))
    scaler = af.init_scaler(ctx)
    losses: list[float] = []
    norms: list[float] = []
    sums = torch.zeros(2)
    number, size = ctx.coordinate("dp"), ctx.axis_size("dp")
    for batch, micro in af.microbatches(ctx, own_batches(number, size)):
        with af.accumulate(ctx, micro, model):
            loss, count = summed_loss(model, batch)
            scaler = af.backward(ctx, loss, scaler, micro, weight=count)
        sums += torch.stack([loss.detach(), count])
        if micro.sync:
            scaler = af.unscale_gradients(ctx, optimizer, scaler)
            norm = af.clip_grad_norm_(ctx, model.parameters(), BOUND, scaler_state=scaler)
            norms.append(norm.item())
            scaler = af.optimizer_step(ctx, optimizer, scaler)
            total = af.reduce(ctx.along("dp"), sums, "sum")
            losses.append((total[0] / total[1]).item())
            sums.zero_()
    whole = {name: cast("Any", one).full_tensor().detach() for name, one in model.named_parameters()}
    return Trained(losses, norms, whole)


def check_equal(found: Trained, expected: Trained) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in found.parameters.items():
        assert float((value - expected.parameters[name]).abs().max()) < 1e-6, name


@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize(
    ("name", "plan", "tied"),
    [
        ("tp2", PLAN, True),
        ("tp2", SEQUENCE, True),
        ("tp2xdp2", PLAN, True),
        ("tp2xfsdp2", PLAN, True),
        ("tp2xfsdp2", SEQUENCE, False),
    ],
    ids=["tp2", "tp2-sequence", "tp2xdp2", "tp2xfsdp2", "tp2xfsdp2-sequence-untied"],
)
def test_training_is_that_of_one_process(
    name: str,
    plan: dict[str, str],
    tied: bool,
    make: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    expected = in_one_process(GPT(tied=tied), make)
    config = LAYOUTS[name].config(plan)
    for found in run_ranks(
        lambda ctx: on_ranks(ctx, GPT(tied=tied), make),
        config.total_size,
        "processes",
        parallelism_config=config,
        gradient_accumulation_steps=BATCHES,
        timeout_s=60,
    ):
        check_equal(found, expected)


def test_dropout_is_equal_on_ranks_that_share_layers_and_differs_between_batches() -> None:
    def draw(ctx: af.Context) -> tuple[int, list[float]]:
        model = af.prepare(ctx, GPT(dropout=0.5))
        torch.manual_seed(ctx.coordinate("loss"))
        return ctx.coordinate("loss"), model(make_batch(1)[0]).flatten()[:50].tolist()

    found = run_ranks(draw, 4, "processes", parallelism_config=LAYOUTS["tp2xdp2"].config())
    by_batch = [[drawn for coordinate, drawn in found if coordinate == one] for one in range(2)]
    for one, other in by_batch:
        assert one == other
    assert by_batch[0] != by_batch[1]


def test_the_plan_prints_what_each_rank_gets() -> None:
    config = LAYOUTS["tp2xfsdp2"].config()
    model = GPT(views_by_count=True)
    printed, *others = run_ranks(
        lambda ctx: str(af.plan_model(ctx, model)), 4, "processes", parallelism_config=config
    )
    assert others == [printed] * 3
    rows = dict(line.split("  ", 1) for line in printed.splitlines())
    assert rows["layers"].strip() == "shared by 2 ranks; whole where no style is named"
    assert rows["rowwise"].strip() == "blocks.*.attn.o, blocks.*.down"
    assert rows["attributes"].strip() == "blocks.*.attn.num_heads 4 -> 2"


def test_ranks_that_are_threads_cannot_share_layers() -> None:
    config = LAYOUTS["tp2"].config()
    with pytest.raises(NotAvailableError, match='on="processes"'):
        run_ranks(lambda ctx: af.prepare(ctx, GPT()), 2, parallelism_config=config)
