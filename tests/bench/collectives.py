"""gather, reduce and broadcast on two processes over gloo, beside Accelerate and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import accelfn as af
from tests.bench.timing import compare, on_ranks, plain, show_beside


def small_tree(rank: int) -> dict[str, torch.Tensor]:
    """Return a tree of 50 float32 leaves of 1 KiB."""
    return {f"layer{index}": torch.full((256,), float(rank)) for index in range(50)}


def measure(ctx: af.Context) -> None:
    """Compare on this rank; every rank must call it."""
    from accelerate import PartialState
    from accelerate.utils import operations as peer

    PartialState(cpu=True)
    tree = small_tree(ctx.rank)
    large = torch.full((16 * 2**20,), float(ctx.rank))  # 64 MiB

    def torch_gather() -> torch.Tensor:
        output = torch.empty(ctx.num_processes * large.numel())
        plain.all_gather_into_tensor(output, large)
        return output

    def torch_reduce() -> torch.Tensor:
        output = large.clone()
        plain.all_reduce(output)
        return output

    def torch_broadcast() -> torch.Tensor:
        # A new tensor where it is received, as ours is; in place where it is sent.
        output = large if ctx.is_main_process else torch.empty_like(large)
        plain.broadcast(output, 0)
        return output

    ours: dict[str, Callable[[Any], object]] = {
        "gather": lambda tree: af.gather(ctx, tree),
        "reduce": lambda tree: af.reduce(ctx, tree),
        "broadcast": lambda tree: af.broadcast(ctx, tree),
    }
    theirs = {
        "gather": lambda: peer.gather(tree),
        "reduce": lambda: peer.reduce(tree, "sum"),
        "broadcast": lambda: peer.broadcast(tree),
    }
    torchs = {"gather": torch_gather, "reduce": torch_reduce, "broadcast": torch_broadcast}
    small = {
        f"`{name}`, 50 leaves of 1 KiB": compare(
            {"ours": lambda call=call: call(tree), "Accelerate": theirs[name]}, before=plain.barrier
        )
        for name, call in ours.items()
    }
    whole = {
        f"`{name}`, one leaf of 64 MiB": compare(
            {"ours": lambda call=call: call(large), "plain torch": torchs[name]},
            rounds=40,
            calls=1,
            before=plain.barrier,
        )
        for name, call in ours.items()
    }
    show_beside("collectives", small | whole)


if __name__ == "__main__":
    on_ranks(measure)
