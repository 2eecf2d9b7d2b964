"""Equal blocks are found, and three of them cost what all do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context


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


def freeze(found: Any) -> None:
    found[2].requires_grad_(False)


def numbered(model: Model) -> Model:
    """Return a model whose blocks differ by more than their place, so that none stands for another."""
    for number, block in enumerate(cast("Any", model).blocks):
        block.number = 100 * number
    return model


@pytest.mark.parametrize(
    ("recomputes", "change"), [(False, None), (True, freeze)], ids=["kept", "recomputed"]
)
def test_three_blocks_cost_what_all_of_them_do(
    recomputes: bool, change: Callable[[Any], None] | None
) -> None:
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=recomputes)
    for num_stages in (1, 3, 8):
        config = af.ParallelismConfig(pp_size=num_stages, dp_shard_size=2)
        ctx = af.plan_context(2 * num_stages, parallelism_config=config, fsdp_plugin=plugin)
        short, full = (
            af.plan_memory(ctx, one, batch=torch.empty(5, 3))
            for one in (Model(8, change), numbered(Model(8, change)))
        )
        assert short == full


def test_only_some_of_equal_blocks_are_run() -> None:
    """Ten thousand blocks cost no more than ten."""
    calls: list[int] = []

    class Counted(Block):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            calls.append(self.number)
            return super().forward(x, scale)

    model = Model(0)
    with torch.device("meta"):
        model.blocks = nn.ModuleList(Counted(number) for number in range(100))
    af.plan_memory(Context(), model, batch=torch.empty(5, 3))
    assert len(set(calls)) < 5


class Leaving(Block):
    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        self.left = super().forward(x, scale)
        return self.left


class Gathering(Model):
    """Needs what each of its blocks has left in itself."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Leaving(number) for number in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for number in range(8):
            x = self.blocks[number](x, x[:, :1])
        return torch.stack([cast("Any", block).left for block in self.blocks]).square().mean()


def test_a_model_that_needs_all_of_its_blocks_is_run_whole() -> None:
    model, x = Gathering(), torch.empty(5, 3)
    found = [af.plan_memory(Context(), one, batch=x).activations for one in (model, numbered(Gathering()))]
    assert found[0] == found[1]
    assert len(cast("Any", model).blocks) == 8
