"""Operations on one rank's tree, beside Accelerate; worlds of ranks; importing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch

import accelfn as af
from accelfn.testing import run_ranks
from tests.bench.collectives import small_tree
from tests.bench.timing import compare, compiled, show_against, show_beside, show_table


def main() -> None:
    from accelerate import utils as peer
    from accelerate.utils import operations

    torch.set_num_threads(1)
    tree, part = small_tree(0), slice(0, 16)
    calls: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "send_to_device": (lambda: af.send_to_device(tree, "cpu"), lambda: peer.send_to_device(tree, "cpu")),
        "find_batch_size": (lambda: af.tree.find_batch_size(tree), lambda: peer.find_batch_size(tree)),
        "slice_tensors": (
            lambda: af.slice_tensors(tree, part),
            lambda: operations.slice_tensors(tree, part),
        ),
    }
    show_beside(
        "trees",
        {
            f"`{name}`, 50 leaves": compare({"ours": ours, "Accelerate": theirs}, rounds=60, calls=50)
            for name, (ours, theirs) in calls.items()
        },
    )

    worlds: dict[str, Callable[[], object]] = {
        "8 ranks in memory start, gather 50 leaves and end": lambda: run_ranks(
            lambda ctx: af.gather(ctx, tree), 8
        ),
        "2 ranks as processes start, wait for each other and end": lambda: run_ranks(
            lambda ctx: af.wait_for_everyone(ctx), 2, "processes"
        ),
    }
    times = compare(worlds, rounds=15, calls=1)
    show_table("worlds", ("what", "median (best) ms"), ((name, one.ms(1)) for name, one in times.items()))

    def run(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, env=compiled())

    everything = "import torch, accelfn\nfor name in accelfn.__all__: getattr(accelfn, name)"
    imports = {
        "`import torch`": run("import torch"),
        "`import torch, accelfn`": run("import torch, accelfn"),
        "the same, and every public name used": run(everything),
        "`import accelfn` alone": run("import accelfn"),
    }
    show_against("imports", compare(imports, rounds=9, calls=1))


if __name__ == "__main__":
    main()
