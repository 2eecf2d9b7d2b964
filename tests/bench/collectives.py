"""gather, reduce and broadcast on two processes over gloo, beside Accelerate and plain torch.

Run by ``python -m tests.bench``; each rank runs :func:`measure` under torchrun.
"""

import os
import sys
from typing import Any, cast

import torch
import torch.distributed as dist

import accelfn as af
from tests.bench.timing import Row, compare, print_table

# torch.distributed's own functions are only partly typed.
plain: Any = cast("Any", dist)


def small_tree(rank: int, leaves: int = 50, elements: int = 256) -> dict[str, torch.Tensor]:
    """Return a tree of 50 float32 leaves of 1 KiB."""
    return {f"layer{index}": torch.full((elements,), float(rank)) for index in range(leaves)}


def measure(ctx: af.Context) -> list[Row]:
    """Compare on this rank; every rank must call it."""
    from accelerate import PartialState
    from accelerate.utils import operations as peer

    PartialState(cpu=True)
    tree = small_tree(ctx.rank)
    large = torch.full((16 * 2**20,), float(ctx.rank))  # 64 MiB
    size = ctx.num_processes

    def torch_gather() -> torch.Tensor:
        output = torch.empty(size * large.numel())
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

    def wait() -> None:
        plain.barrier()

    rows: list[Row] = []
    for name, ours, theirs in (
        ("gather, 50 leaves of 1 KiB", lambda: af.gather(ctx, tree), lambda: peer.gather(tree)),
        ("reduce, 50 leaves of 1 KiB", lambda: af.reduce(ctx, tree), lambda: peer.reduce(tree, "sum")),
        ("broadcast, 50 leaves of 1 KiB", lambda: af.broadcast(ctx, tree), lambda: peer.broadcast(tree)),
    ):
        times = compare({"ours": ours, "Accelerate": theirs}, before=wait)
        rows.append(Row(name, times.pop("ours"), times))
    for name, ours, beside in (
        ("gather, one leaf of 64 MiB", lambda: af.gather(ctx, large), torch_gather),
        ("reduce, one leaf of 64 MiB", lambda: af.reduce(ctx, large), torch_reduce),
        ("broadcast, one leaf of 64 MiB", lambda: af.broadcast(ctx, large), torch_broadcast),
    ):
        times = compare({"ours": ours, "plain torch": beside}, rounds=40, calls=1, before=wait)
        rows.append(Row(name, times.pop("ours"), times))
    return rows


def main() -> None:
    torch.set_num_threads(1)
    # The peer stays a world of one on the CPU unless it is told so by the environment.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with af.init_context(cpu=True) as ctx:
        rows = measure(ctx)
        if ctx.is_main_process:
            print_table(rows)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
