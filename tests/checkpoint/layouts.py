"""One model in many layouts over processes: replicated, sharded, tensor parallel."""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import accelfn as af
from accelfn.context import Context
from accelfn.parallel.pointers import whole_of

# Imported before worlds of processes are forked.
for _module in ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.pipelining"):
    importlib.import_module(_module)

Tensors = dict[str, torch.Tensor]


class Layout(NamedTuple):
    """A layout of a model over the ranks of a world."""

    kind: str  # ddp, fsdp, hsdp, tp, or fsdp and tp
    shape: tuple[int, ...]  # of the mesh

    @property
    def size(self) -> int:
        return math.prod(self.shape)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.1, foreach=False),
    "fused": functools.partial(torch.optim.AdamW, lr=0.1, fused=True),
}


class Odd(nn.Module):
    """A model with sizes that 2, 3 and 4 don't divide, ties, buffers, frozen and bfloat16 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.norm = nn.LayerNorm(5)
        self.narrow = nn.Linear(5, 1, dtype=torch.bfloat16)  # a single row, which only one rank has
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.randn(5))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def mesh_of(layout: Layout) -> DeviceMesh:
    names = {"ddp": ("shard",), "fsdp": ("shard",), "hsdp": ("replica", "shard"), "tp": ("tensor",)}
    return init_device_mesh("cpu", layout.shape, mesh_dim_names=names.get(layout.kind, ("shard", "tensor")))


def laid_out(ctx: Context, layout: Layout, seed: int) -> nn.Module:
    """Make the model in a layout. Ranks: every rank of ``ctx``."""
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    model = Odd()
    if layout.kind == "ddp":
        return af.prepare(ctx, model)
    mesh = mesh_of(layout)
    if "tp" in layout.kind:
        tensor = mesh["tensor"]
        plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, tensor, plan)
        distribute_module(model, tensor)
        model.head.weight = model.embed.weight
        if layout.kind == "tp":
            return model
    sharded = mesh["shard"] if "tp" in layout.kind else mesh
    fully_shard(model.narrow, mesh=sharded)
    fully_shard(model, mesh=sharded)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, num: int = 1) -> None:
    """Step with gradients that are the same function of the parameters in any layout."""
    for _ in range(num):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach().sin()
        optimizer.step()
        optimizer.zero_grad()


def whole(
    model: nn.Module, optimizer: torch.optim.Optimizer, ctx: Context | None = None
) -> dict[str, torch.Tensor]:
    """Return the complete tensors of a model and its optimizer. Ranks: every rank.

    A model in stages needs ``ctx``; tensors that several stages have must be equal.
    """
    inner = af.unwrap_model(model)
    state = {f"model/{name}": value for name, value in inner.state_dict().items()}
    staged = whole_of(inner)
    for name, parameter in inner.named_parameters():
        name = name if staged is None else staged.first.get(name, name)
        entries = cast("dict[str, Any]", optimizer.state.get(parameter, {}))
        state.update({f"optimizer/{name}/{key}": value for key, value in entries.items()})
    own = {name: _whole(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    joined: dict[str, torch.Tensor] = {}
    for stage in [own] if ctx is None else af.gather_object(ctx.along("pp"), [own]):
        assert all(torch.equal(value, joined[name]) for name, value in stage.items() if name in joined)
        joined.update(stage)
    return joined


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def flat(tree: Any) -> Tensors:
    """Return what :func:`whole` does, from a checkpoint that one process has loaded."""
    tensors = {f"model/{name}": value for name, value in tree["model"].items()}
    for name, state in tree["optimizer"]["state"].items():
        place = f"optimizer/{name.removeprefix('model/')}"
        entries = state.items()
        tensors |= {f"{place}/{key}": value for key, value in entries if isinstance(value, torch.Tensor)}
    return tensors


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Name what is not the same to the last bit."""
    both = one.keys() & other.keys()
    odd = {name for name in both if one[name].dtype != other[name].dtype or not one[name].equal(other[name])}
    return sorted((one.keys() ^ other.keys()) | odd)
