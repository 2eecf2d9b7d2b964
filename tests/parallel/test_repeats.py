"""Equal blocks are found, and three of them cost what all do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.parallel import read_facts
from accelfn.parallel.dry_run import dry_run
from accelfn.parallel.plan import plan_places
from accelfn.parallel.repeats import find_repeats
from accelfn.parallel.step_cost import StageCost


class Block(nn.Module):
    def __init__(self, number: int, width: int = 4) -> None:
        super().__init__()
        self.number = number
        self.layer = nn.Linear(4, width)
        self.back = nn.Linear(width, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.layer(x).relu() * scale)


class Model(nn.Module):
    def __init__(self, count: int = 8, change: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(Block(number) for number in range(count))
        if change is not None:
            change(self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        scale = x.abs().mean(-1, keepdim=True)  # which all blocks keep
        for block in self.blocks:
            x = block(x, scale)
        return self.last(x).square().mean()


def names_of(model: nn.Module) -> list[tuple[str, ...]]:
    return [run.names for run in find_repeats(model, [f"blocks.{number}" for number in range(8)])]


def blocks(start: int, end: int) -> list[tuple[str, ...]]:
    return [tuple(f"blocks.{number}" for number in range(start, end))]


def test_blocks_that_differ_by_their_number_alone_are_equal() -> None:
    assert names_of(Model()) == blocks(0, 8)
    (run,) = find_repeats(Model(), [f"blocks.{number}" for number in range(8)])
    assert run.kept == ("blocks.0", "blocks.1", "blocks.2")
    assert [len(names) for names in run.stands_for.values()] == [1, 6, 1]


def freeze(found: Any) -> None:
    found[2].requires_grad_(False)


def widen(found: Any) -> None:
    found[2] = Block(2, 5)


def tie(found: Any) -> None:
    found[2].layer.weight = found[0].layer.weight


def hook(found: Any) -> None:
    def look(module: nn.Module, args: Any, output: Any) -> None:
        pass

    found[2].register_forward_hook(look)


def jump(found: Any) -> None:
    found[2].number = 7


def convert(found: Any) -> None:
    found[2].double()


@pytest.mark.parametrize("change", [freeze, widen, hook, jump, convert])
def test_blocks_around_one_that_is_different(change: Callable[[Any], None]) -> None:
    assert names_of(Model(change=change)) == blocks(3, 8)


def test_blocks_that_share_a_parameter_are_not_equal() -> None:
    assert names_of(Model(change=tie)) == blocks(3, 8)


def whole(ctx: Context, model: nn.Module, *, is_short: bool) -> tuple[StageCost, ...]:
    """Return the cost of each stage, by the blocks that stand for others or by all of them."""
    model = copy.deepcopy(model)
    if not is_short:
        for number, block in enumerate(cast("Any", model).blocks):
            block.number = 100 * number
    facts = read_facts(model)
    plans = plan_places(ctx, model, facts)
    cost = dry_run(ctx, model, facts, plans, torch.empty(5, 3), None)
    assert (len(cost.segments) == 4) == is_short
    pipeline = plans[0].pipeline
    return cost.stages(() if pipeline is None else pipeline.split)


@pytest.mark.parametrize("change", [None, freeze])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8])
def test_three_blocks_cost_what_all_of_them_do(
    num_stages: int, recomputes: bool, change: Callable[[Any], None] | None
) -> None:
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=recomputes)
    config = af.ParallelismConfig(pp_size=num_stages, dp_shard_size=2)
    ctx = af.plan_context(2 * num_stages, parallelism_config=config, fsdp_plugin=plugin)
    model = Model(8, change)
    short = whole(ctx, model, is_short=True) if change is None else None
    full = whole(ctx, model, is_short=False)
    if short is None:
        facts = read_facts(model)
        plans = plan_places(ctx, model, facts)
        cost = dry_run(ctx, model, facts, plans, torch.empty(5, 3), None)
        assert len(cost.segments) == 7  # the first three blocks, and three for the others
        short = cost.stages(() if plans[0].pipeline is None else plans[0].pipeline.split)
    assert short == full


class Indexed(Model):
    """Needs all of its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in range(8):
            x = self.blocks[number](x, x[:, :1])
        return self.last(x).square().mean()


class Repeated(Model):
    """Calls each of its blocks twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in (*self.blocks, *self.blocks):
            x = block(x, x[:, :1])
        return self.last(x).square().mean()


def number_by_chance(found: Any) -> None:
    for one in found[::2]:
        one.number = 0


@pytest.mark.parametrize("kind", [Indexed, Repeated])
def test_a_model_that_needs_all_of_its_blocks_is_run_whole(kind: type[Model]) -> None:
    model, x = kind(), torch.empty(5, 3)
    assert names_of(model) == blocks(0, 8)
    different = kind(change=number_by_chance)
    assert names_of(different) == []
    found = [af.plan_memory(Context(), one, batch=x).activations for one in (model, different)]
    assert found[0] == found[1]
    assert len(cast("Any", model).blocks) == 8
