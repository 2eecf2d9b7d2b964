"""A step of a small GPT on two ranks that have half of its experts each, beside hand-written torch.

And beside the same model under FSDP2 alone, which gathers every expert on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn import functional as F

import accelfn as af
from tests.bench.sharding import GPT, LARGE, SMALL, Attention, Step, batch_of, loss_of, stepped, trained
from tests.bench.timing import Times, compare, on_ranks, plain, show_beside, show_table
from tests.parallel.traffic import traffic_of

torchs: Any = functional

NUM_EXPERTS = 8
_CHOSEN = 2  # experts of a token
# What carries rows of tokens, parameters and gradients.
_CARRIES = ("all_to_all_single", "allgather", "reduce_scatter")


class Experts(nn.Module):
    """MLPs, each of which sees rows of its own."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(num_experts, 2 * width, width) / (2 * width) ** 0.5)

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts = zip(cast("Any", x).split(cast("Any", counts).tolist()), self.up, self.down, strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])


class SparseBlock(nn.Module):
    """A block of the GPT with experts in the place of its two layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = Attention(width)
        self.router = nn.Linear(width, NUM_EXPERTS, bias=False)
        self.experts: nn.Module = Experts(width, NUM_EXPERTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.before_attention(x))
        rows = self.before_inner(x).flatten(0, 1)
        weights, index = self.router(rows).softmax(-1).topk(_CHOSEN, -1)
        chosen = index.flatten()
        order = chosen.argsort(stable=True)
        made = self.experts(rows[order // _CHOSEN], chosen.bincount(minlength=NUM_EXPERTS))
        each = torch.empty_like(made).index_copy(0, order, made).view(*index.shape, -1)
        return x + (each * weights.unsqueeze(-1)).sum(1).view_as(x)


class SparseGPT(GPT):
    """The small GPT with such blocks."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__(width, num_blocks)
        self.blocks = nn.ModuleList(SparseBlock(width) for _ in range(num_blocks))


class _SpreadExperts(nn.Module):
    """A rank's experts as one writes them by hand: rows go to the ranks of their experts, and come back."""

    def __init__(self, whole: Experts, rank: int, size: int) -> None:
        super().__init__()
        count = whole.num_experts // size
        own = slice(rank * count, (rank + 1) * count)
        self.experts = Experts(whole.up.shape[1], count)
        self.experts.up = nn.Parameter(whole.up.detach()[own].clone())
        self.experts.down = nn.Parameter(whole.down.detach()[own].clone())
        self.size = size
        for parameter in self.parameters():
            cast("Any", parameter).register_hook(self._mean)

    def _mean(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self.size  # of all ranks' rows, as FSDP's are

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        group = cast("dist.ProcessGroup", plain.group.WORLD)
        received: torch.Tensor = torchs.wait_tensor(torchs.all_to_all_single(counts, None, None, group))
        received = received.view(self.size, -1)
        totals = torch.stack([counts.view(self.size, -1).sum(1), received.sum(1)])
        send, receive = cast("Any", totals).tolist()
        experts = torch.arange(received.shape[1]).repeat(self.size)
        order = experts.repeat_interleave(received.flatten()).argsort(stable=True)
        came = torchs.wait_tensor(torchs.all_to_all_single_autograd(x, receive, send, group))[order]
        made = self.experts(came, received.sum(0))
        back = torch.empty_like(made).index_copy(0, order, made)
        return torchs.wait_tensor(torchs.all_to_all_single_autograd(back, send, receive, group))


def by_functions(ctx: af.Context, size: tuple[int, int]) -> tuple[nn.Module, Step]:
    """Return a model and its step through the functions; the context says where experts are."""
    model = SparseGPT(*size)
    return trained(ctx, model, torch.optim.SGD(model.parameters(), 0.1), batch_of(ctx.rank))


def by_hand(rank: int, num_ranks: int, size: tuple[int, int]) -> tuple[nn.Module, Step]:
    """Return a model and its step in plain torch: ``fully_shard`` for all but the experts."""
    from torch.distributed.fsdp import fully_shard

    model = SparseGPT(*size)
    spread: set[nn.Parameter] = set()
    for block in cast("list[SparseBlock]", list(model.blocks)):
        block.experts = _SpreadExperts(cast("Experts", block.experts), rank, num_ranks)
        spread.update(block.experts.parameters())
        fully_shard(block, ignored_params=spread)
    fully_shard(model, ignored_params=spread)
    rest = [one for one in model.parameters() if one not in spread]
    # Plain parameters beside sharded ones can't be stepped in one call of torch: two groups.
    optimizer = torch.optim.SGD([{"params": rest}, {"params": list(spread)}], 0.1)
    batch = batch_of(rank)
    return model, stepped(lambda: loss_of(model, batch), optimizer)


def options(ep_size: int) -> af.context.ContextOptions:
    """Return the options of a context whose two ranks shard by FSDP2; ``ep_size`` of them share experts."""
    config = af.ParallelismConfig(dp_shard_size=2, ep_size=ep_size)
    return {"cpu": True, "parallelism_config": config}


def measure(ctx: af.Context) -> None:
    """Compare steps on this rank of two, and what they send; every rank must call it."""
    rows: dict[str, Times] = {}
    sent: list[Sequence[str]] = []
    for size, shown, rounds in ((SMALL, "width 128", 60), (LARGE, "width 384", 12)):
        # Of two meshes over the same ranks, for one run that all ways take turns in.
        with af.init_context(**options(2)) as spread, af.init_context(**options(1)) as whole:
            ways = {
                "ep2": by_functions(spread, size)[1],
                "hand-written `all_to_all`": by_hand(ctx.rank, ctx.num_processes, size)[1],
                "FSDP2 without ep": by_functions(whole, size)[1],
            }
            rows[f"{shown}, ep2"] = compare(ways, rounds=rounds, calls=3, before=plain.barrier)
            if size is SMALL:
                received = {way: traffic_of(step).received for way, step in ways.items()}
                sent = [
                    (way, *(f"{one[name] / 1e3:,.0f}" for name in _CARRIES)) for way, one in received.items()
                ]
    show_beside("experts", rows)
    columns = ("received per rank and step, kB", ">token rows", ">parameters", ">gradients")
    show_table("experts-received", columns, sent)


if __name__ == "__main__":
    on_ranks(measure)
