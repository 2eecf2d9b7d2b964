"""A step of a small GPT on two ranks that have half of its experts each, beside hand-written torch.

And beside the same model under FSDP2 alone, which gathers every expert on every rank. Run by ``python -m
tests.bench``: each rank runs :func:`measure`.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn import functional as F

import accelfn as af
from tests.bench.sharding import GPT, SMALL, Attention, Step, batch_of, loss_of
from tests.bench.timing import Row, compare, print_table
from tests.parallel.traffic import traffic_of

plain: Any = cast("Any", dist)
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
    model: nn.Module = SparseGPT(*size)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), 0.1))
    batch = batch_of(ctx.rank)
    ((_, micro),) = af.microbatches(ctx, [0])
    states = [af.init_scaler(ctx)]

    def step() -> None:
        with af.accumulate(ctx, micro, model):
            states[0] = af.backward(ctx, loss_of(model, batch), states[0], micro)
        states[0] = af.optimizer_step(ctx, optimizer, states[0])

    return model, step


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
    optimizer: Any = torch.optim.SGD([{"params": rest}, {"params": list(spread)}], 0.1)
    batch = batch_of(rank)

    def step() -> None:
        loss_of(model, batch).backward()  # pyright: ignore[reportUnknownMemberType]
        optimizer.step()
        optimizer.zero_grad()

    return model, step


class Sent(NamedTuple):
    """What a rank receives in a step."""

    way: str
    received: dict[str, int]  # bytes, by the name of the collective


def options(ep_size: int) -> af.ContextOptions:
    """Return the options of a context whose two ranks shard by FSDP2; ``ep_size`` of them share experts."""
    config = af.ParallelismConfig(dp_shard_size=2, ep_size=ep_size)
    return {"cpu": True, "parallelism_config": config}


def measure(rounds: int, size: tuple[int, int] = SMALL) -> tuple[list[Row], list[Sent]]:
    """Compare steps on this rank of two, and what they send; every rank must call it."""
    with af.init_context(**options(2)) as ctx:
        ways: dict[str, Step] = {
            "ep2": by_functions(ctx, size)[1],
            "hand-written `all_to_all`": by_hand(ctx.rank, ctx.num_processes, size)[1],
        }
        # Of another mesh over the same ranks, for one run that all ways take turns in.
        with af.init_context(**options(1)) as whole:
            ways["FSDP2 without ep"] = by_functions(whole, size)[1]
            times = compare(ways, rounds=rounds, calls=3, before=plain.barrier)
            sent = [Sent(way, dict(traffic_of(step).received)) for way, step in ways.items()]
    return [Row("a step of a small GPT with 8 experts, ep2", times.pop("ep2"), times)], sent


def main() -> None:
    torch.set_num_threads(1)
    with af.init_context(cpu=True) as ctx:
        is_main = ctx.is_main_process
    rows, sent = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
    if is_main:
        print_table(rows)
        print("\n| a rank receives in a step, kB | rows of tokens | parameters | gradients |")
        print("| --- | --: | --: | --: |")
        for way, received in sent:
            sizes = (received.get(name, 0) / 1e3 for name in _CARRIES)
            print(f"| {way} | {' | '.join(f'{size:,.0f}' for size in sizes)} |")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
