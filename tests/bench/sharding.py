"""A step of a small GPT whose ranks share parameters or layers, beside hand-written torch, on two processes.

Accelerate isn't among the ways: on the CPU it trains by DistributedDataParallel, with an FSDP plugin too.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import accelfn as af
from tests.bench.timing import Times, compare, on_ranks, plain, show_beside, show_table

Step = Callable[[], object]
_MAX_NORM = 1.0
_VOCABULARY, _HEADS = 512, 4
# Width and blocks: for speed, since what is around a short step shows, and for memory, which is of weights.
SMALL = (128, 4)
LARGE = (384, 4)

PLAN = {
    "embed": "embedding",
    "blocks.*.attend.query": "colwise",
    "blocks.*.attend.key": "colwise",
    "blocks.*.attend.value": "colwise",
    "blocks.*.attend.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
    "head": "gather",
    "blocks.*.before_*": "whole",
}


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head_dim = width // _HEADS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        parts = (
            layer(x).view(rows, length, -1, self.head_dim) for layer in (self.query, self.key, self.value)
        )
        query, key, value = (one.transpose(1, 2) for one in parts)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention, self.before_inner = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.before_attention(x))
        return x + self.down(F.gelu(self.up(self.before_inner(x))))


class GPT(nn.Module):
    """A small GPT: blocks of attention and two layers."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 8 rows of 64 tokens."""
    random = torch.Generator().manual_seed(rank)
    ids = torch.randint(_VOCABULARY, (8, 65), generator=random)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def trained(
    ctx: af.Context,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    max_norm: float | None = None,
    *,
    in_one_call: bool = False,
) -> tuple[nn.Module, Step]:
    """Prepare a model, and return it with its step through the functions.

    Args:
        ctx: Says what ranks share.
        model: Of tokens.
        optimizer: Of the model.
        batch: For :func:`loss_of`.
        max_norm: Of the gradients.
        in_one_call: Whether forward and backward pass are one call, as stages need.
    """
    model, optimizer = af.prepare(ctx, model, optimizer)
    ((_, micro),) = af.microbatches(ctx, [0])
    states = [af.init_scaler(ctx)]

    def step() -> None:
        if in_one_call:
            states[0], _ = af.forward_backward(ctx, model, loss_of, batch, states[0], micro)
        else:
            with af.accumulate(ctx, micro, model):
                states[0] = af.backward(ctx, loss_of(model, batch), states[0], micro)
        states[0] = af.optimizer_step(ctx, optimizer, states[0], max_norm=max_norm)

    return model, step


def stepped(
    loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer, max_norm: float | None = None
) -> Step:
    """Return a step in plain torch."""
    parameters = [one for group in optimizer.param_groups for one in group["params"]]

    def step() -> None:
        loss().backward()  # pyright: ignore[reportUnknownMemberType]
        if max_norm is not None:
            nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_functions(ctx: af.Context, size: tuple[int, int]) -> Step:
    """Return a step of the GPT through the functions; the context says what ranks share."""
    model = GPT(*size)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return trained(ctx, model, optimizer, batch_of(ctx.coordinate("dp")), _MAX_NORM)[1]


def by_hand(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Step:
    """Return a step in plain torch, of a model whose ranks share something already."""
    # Plain parameters beside sharded ones can't be stepped in one call.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    return stepped(lambda: loss_of(model, batch), optimizer, _MAX_NORM)


def fsdp_by_hand(rank: int, size: tuple[int, int]) -> Step:
    """Return a step with ``fully_shard``: the units, dtypes and clipping of the others."""
    from torch.distributed.fsdp import fully_shard

    model = GPT(*size)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return by_hand(model, batch_of(rank))


def tp_by_hand(size: tuple[int, int]) -> Step:
    """Return a step with ``parallelize_module`` and accelfn's plan; the other layers are replicated."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_module
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = GPT(*size)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "gather": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, {name: styles[style] for name, style in PLAN.items() if style in styles})
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            _norm_by_hand(distribute_module(module, mesh), mesh)
    return by_hand(model, batch_of(0))


def _norm_by_hand(norm: nn.Module, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate

    def enter(module: nn.Module, args: Any) -> Any:
        return tuple(DTensor.from_local(one, mesh, [Replicate()], run_check=False) for one in args)

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return output.to_local()

    norm.register_forward_pre_hook(enter)
    norm.register_forward_hook(leave)


def measure(ctx: af.Context) -> None:
    """Compare steps on this rank, and what they allocate; every rank must call it."""
    handler = af.config.TorchTensorParallelConfig(plan=PLAN)
    config = af.ParallelismConfig(tp_size=2, tp_handler=handler)
    layouts: dict[str, tuple[af.context.ContextOptions, Callable[[tuple[int, int]], Step]]] = {
        "FSDP2": (
            {"cpu": True, "fsdp_plugin": af.FullyShardedDataParallelPlugin(fsdp_version=2)},
            lambda size: fsdp_by_hand(ctx.rank, size),
        ),
        "tensor parallelism": ({"cpu": True, "parallelism_config": config}, tp_by_hand),
    }
    rows: dict[str, Times] = {}
    allocated: list[tuple[str, str, str]] = []
    for name, (options, hand) in layouts.items():
        with af.init_context(**options) as shared:
            ways = {"functions": by_functions(shared, SMALL), "by hand": hand(SMALL)}
            rows[name] = compare(ways, rounds=60, calls=3, before=plain.barrier)
            ours, theirs = (allocated_by(step) for step in (by_functions(shared, LARGE), hand(LARGE)))
            allocated.append((name, f"{ours:.1f}", f"{theirs:.1f}"))
    show_beside("sharding", rows, 1)
    show_table("sharding-memory", ("a step allocates at most, MB", ">functions", ">by hand"), allocated)


def allocated_by(step: Step, before: Callable[[], object] = plain.barrier) -> float:
    """Measure how many MB a step allocates at most at a time, as torch counts them; least of several."""
    step()
    found: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            before()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
                step()
            trace = Path(folder) / str(number)
            profiled.export_chrome_trace(str(trace))
            events: list[Any] = json.loads(trace.read_text())["traceEvents"]
            events = sorted((one for one in events if one["name"] == "[memory]"), key=lambda one: one["ts"])
            found.append(max(itertools.accumulate(one["args"]["Bytes"] for one in events)) / 1e6)
    return min(found)  # what gloo's threads let go of late counts in some


if __name__ == "__main__":
    on_ranks(measure)
