"""Ranks that share layers give the model one batch; where they don't, all hear which input differs."""

# torch leaves manual_seed and backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, WeightedRandomSampler

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks
from tests.seen import Seen, look


class Net(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(p)

    def forward(self, x: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
        x = self.drop(self.down(self.up(x).relu()))
        return x if bias is None else x + bias


HANDLER = af.config.TorchTensorParallelConfig(plan={"up": "colwise", "down": "rowwise"})
MESH = af.ParallelismConfig(dp_replicate_size=2, tp_size=2, tp_handler=HANDLER)


def batches(ctx: Context) -> list[list[int]]:
    """What a rank reads by a sampler that draws from the program's generator, in which ranks differ."""
    torch.manual_seed(ctx.rank)
    sampler = WeightedRandomSampler([1.0] * 8, 8)
    data: Any = torch.arange(8)
    return [[int(one) for one in batch] for batch in af.prepare(ctx, DataLoader(data, 2, sampler=sampler))]


def step(ctx: Context, model: nn.Module, rows: int, *, scale: float = 1.0, records: bool = True) -> Seen:
    x = torch.full((rows, 4), scale)

    def forward() -> tuple[int, ...]:
        with contextlib.nullcontext() if records else torch.no_grad():
            out = model(x, bias=x)
        if records:
            out.sum().backward()
        return tuple(out.shape)

    return look(forward)


def program(ctx: Context) -> dict[str, Any]:
    rank, tp, dp = ctx.rank, ctx.coordinate("tp"), ctx.coordinate("dp")
    torch.manual_seed(0)
    found: dict[str, Any] = {"read": batches(ctx)}
    torch.manual_seed(0)
    model = af.prepare(ctx, Net())
    found["uneven"] = step(ctx, model, 1 + dp)  # which is lawful: those have batches of their own
    found["shape"] = step(ctx, model, 2 if rank == 3 else 1)
    found["mode"] = step(ctx, model, 1, records=rank != 1)
    found["value"] = step(ctx, model, 1, scale=1.0 + tp)
    full = af.prepare(ctx.replace(guard="full"), Net())
    found["equal"] = step(ctx, full, 1, scale=1.0 + dp)
    found["digest"] = step(ctx, full, 1, scale=3.0 if rank == 1 else 2.0)
    found["after"] = step(ctx, full, 1)
    dropping = af.prepare(ctx, Net(0.5))
    found["drawn"] = step(ctx, dropping, 1)
    torch.manual_seed(rank)
    found["draws"] = step(ctx, dropping, 1)
    dropping.eval()
    found["none drawn"] = step(ctx, dropping, 1)
    return found


def test_what_ranks_along_tp_give_the_model_is_compared() -> None:
    ranks = run_ranks(program, 4, on="processes", parallelism_config=MESH, timeout_s=60)
    reads = [found["read"] for found in ranks]
    assert reads[0] == reads[1]
    assert reads[2] == reads[3]
    for name in (
        "uneven",
        "equal",
        "after",
        "value",
        "drawn",
        "none drawn",
    ):  # values are compared by guard="full" alone
        assert [found[name].error for found in ranks] == [""] * 4, ranks[0][name]
    for name in ("shape", "mode", "digest", "draws"):
        assert {found[name].error for found in ranks} == {"MismatchError"}, ranks[0][name]
        assert len({found[name].text for found in ranks}) == 1
    shape = ranks[0]["shape"].text
    assert "  3     forward    " in shape
    assert " args[0] " in shape
    assert "float32 (2, 4)" in shape
    assert "float32 (1, 4)" in shape
    assert " kwargs['bias'] " in shape
    assert 'split_between_processes(ctx.along("dp"), ...)' in shape
    assert "gradients=False" in ranks[0]["mode"].text
    assert "the generator of cpu, for dropout" in ranks[0]["draws"].text
    assert "digest" in ranks[0]["digest"].text
    assert "  1     forward    " in ranks[0]["digest"].text
