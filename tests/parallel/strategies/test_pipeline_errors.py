"""Tests of accelfn.parallel.strategies.pipeline: an error in a stage reaches all ranks and does no harm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.errors import RemoteRankError
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel.tensor_models import GPT, make_batch, summed_loss

Batch = tuple[torch.Tensor, torch.Tensor]
NUM_MICROBATCHES = 4


class Trap:
    """Raises on one rank, in the third microbatch after it was set."""

    def __init__(self, ctx: af.Context) -> None:
        self.ctx = ctx
        self.place = ""
        self.left = 0

    def set(self, place: str, rank: int) -> None:
        self.place, self.left = (place, 3) if self.ctx.rank == rank else ("", 0)

    def step_on(self, place: str) -> None:
        if place == self.place:
            self.left -= 1
            if self.left == 0:
                raise KeyError(f"{place} of rank {self.ctx.rank}")


class Trapped(nn.Module):
    """A block with a trap in its forward and in its backward pass."""

    def __init__(self, block: nn.Module, trap: Trap) -> None:
        super().__init__()
        self.block = block
        self.trap = trap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.trap.step_on("forward")
        output = self.block(x)
        if output.requires_grad:
            output.register_hook(self.on_gradient)
        return output

    def on_gradient(self, gradient: torch.Tensor) -> None:
        del gradient
        self.trap.step_on("backward")


class Found(NamedTuple):
    """What a rank has seen."""

    errors: list[BaseException]
    refused: list[str]
    as_before: list[bool]  # the gradients of the next window


def work(ctx: af.Context, cases: list[tuple[str, int]]) -> Found:
    trap = Trap(ctx)
    whole = GPT(num_blocks=8)  # as many as stages of the largest schedule
    whole.blocks = nn.ModuleList(Trapped(block, trap) for block in whole.blocks)
    optimizer = af.prepare(ctx, torch.optim.SGD(whole.parameters(), lr=0.1))
    model = af.prepare(ctx, whole)

    def loss_fn(model: nn.Module, batch: Batch) -> af.Loss:
        trap.step_on("before the call")
        total, count = summed_loss(model, batch)
        trap.step_on("after the call")
        return af.Loss(total, count)

    def window(before_last: Callable[[], None] = lambda: None) -> Mapping[str, torch.Tensor]:
        scaler = af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, [make_batch(0, 8), make_batch(1, 8)]):
            if micro.sync:
                before_last()
            scaler, _ = af.forward_backward(ctx, model, loss_fn, batch, scaler, micro)
        named = af.unwrap_model(model).named_parameters()
        return {name: local_of(one.grad).clone() for name, one in named if one.grad is not None}

    found = Found([], [], [])
    expected = window()
    for place, rank in cases:
        optimizer.zero_grad()
        try:
            window(lambda place=place, rank=rank: trap.set(place, rank))
        except (KeyError, RemoteRankError) as error:
            found.errors.append(error)
        try:
            af.optimizer_step(ctx, optimizer, af.init_scaler(ctx))
        except af.errors.ConfigurationError as error:
            found.refused.append(str(error))
        optimizer.zero_grad()
        after = window()
        same = [torch.equal(one, after[name]) for name, one in expected.items()]
        found.as_before.append(all(same) and expected.keys() == after.keys())
    return found


@pytest.mark.parametrize(
    ("pp", "dp", "schedule", "each"),
    [
        (2, 1, "1f1b", False),
        pytest.param(4, 1, "interleaved1f1b", True, marks=pytest.mark.slow),
        pytest.param(2, 2, "gpipe", True, marks=pytest.mark.slow),
    ],
)
def test_an_error_in_a_stage_reaches_all_ranks_and_the_next_window_is_as_before(
    pp: int, dp: int, schedule: Any, each: bool
) -> None:
    last = pp * dp - 1
    places = ("before the call", "forward", "backward")
    cases = [(place, rank) for place in places for rank in sorted({0, pp * dp // 2, last})]
    cases.append(("after the call", last))
    handler = af.config.PipelineParallelConfig(NUM_MICROBATCHES, schedule)
    ranks = run_ranks(
        lambda ctx: work(ctx, cases),
        pp * dp,
        "processes",
        timeout_s=90,
        parallelism_config=af.ParallelismConfig(pp_size=pp, dp_replicate_size=dp, pp_handler=handler),
        gradient_accumulation_plugin=af.config.GradientAccumulationPlugin(2, sync_each_batch=each),
    )
    for number, found in enumerate(ranks):
        assert [type(error) for error in found.errors] == [
            KeyError if rank == number else RemoteRankError for _, rank in cases
        ]
        for (place, rank), error in zip(cases, found.errors, strict=True):
            assert f"{place} of rank {rank}" in str(error)
        assert len(found.refused) == len(cases)
        assert all("were not averaged" in text for text in found.refused)
        assert found.as_before == [True] * len(cases)


def test_a_stage_that_sends_another_shape_is_refused_by_name() -> None:
    class Growing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat(1 + int(x[0, 0] > 0), 1)

    def attempt(ctx: af.Context) -> str:
        model = nn.Sequential(Growing(), nn.Linear(2, 2), nn.Linear(2, 2))
        model = af.prepare(ctx, model)
        with pytest.raises((af.errors.ConfigurationError, RemoteRankError)) as caught:
            af.training.forward(ctx, model, torch.tensor([[-1.0, 1.0], [1.0, 1.0]]))
        return str(caught.value)

    handler = af.config.PipelineParallelConfig(2, "gpipe", split=("1",))
    for said in run_ranks(
        attempt,
        2,
        "processes",
        timeout_s=60,
        parallelism_config=af.ParallelismConfig(pp_size=2, pp_handler=handler),
    ):
        assert "args[0] in the call of 1, which stage 0 sends, is" in said
