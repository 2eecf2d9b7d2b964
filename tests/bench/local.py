"""Operations on one rank's tree, beside Accelerate; worlds of ranks; importing."""

import subprocess
import sys
import time
from collections.abc import Callable

import torch

import accelfn as af
from accelfn.testing import run_ranks
from tests.bench.collectives import small_tree
from tests.bench.timing import Row, Timing, compare, compiled, print_table


def trees() -> list[Row]:
    """Compare the operations of one rank on a tree of 50 leaves."""
    from accelerate import utils as peer
    from accelerate.utils import operations

    tree = small_tree(0)
    part = slice(0, 16)
    rows: list[Row] = []
    for name, ours, theirs in (
        ("send_to_device", lambda: af.send_to_device(tree, "cpu"), lambda: peer.send_to_device(tree, "cpu")),
        ("find_batch_size", lambda: af.find_batch_size(tree), lambda: peer.find_batch_size(tree)),
        ("slice_tensors", lambda: af.slice_tensors(tree, part), lambda: operations.slice_tensors(tree, part)),
    ):
        times = compare({"ours": ours, "Accelerate": theirs}, rounds=60, calls=50)
        rows.append(Row(f"{name}, 50 leaves", times.pop("ours"), times))
    return rows


def worlds() -> list[tuple[str, Timing]]:
    """Time whole worlds: start, work, end."""
    tree = small_tree(0)

    def eight() -> None:
        run_ranks(lambda ctx: af.gather(ctx, tree), 8)

    def two() -> None:
        run_ranks(lambda ctx: af.wait_for_everyone(ctx), 2, "processes")

    times = compare({"memory": eight, "processes": two}, rounds=15, calls=1)
    return [
        ("8 ranks in memory start, gather 50 leaves and end", times["memory"]),
        ("2 ranks as processes start, wait for each other and end", times["processes"]),
    ]


def imports() -> dict[str, Timing]:
    """Time fresh interpreters."""

    def run(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, env=compiled())

    everything = "import torch, accelfn\nfor name in accelfn.__all__: getattr(accelfn, name)"
    return compare(
        {
            "import torch": run("import torch"),
            "import torch, accelfn": run("import torch, accelfn"),
            "the same, and every public name used": run(everything),
            "import accelfn alone": run("import accelfn"),
        },
        rounds=9,
        calls=1,
    )


def main() -> None:
    torch.set_num_threads(1)
    print_table(trees())
    print("\n| what | median (best) ms |\n| --- | --- |")
    for name, timing in worlds():
        print(f"| {name} | {timing.median * 1e3:.1f} ({timing.best * 1e3:.1f}) |")
    start = time.perf_counter()
    times = imports()
    base = times["import torch"]
    print("\n| what | median (best) ms | over import torch, medians (bests) |\n| --- | --- | --- |")
    for name, timing in times.items():
        print(
            f"| {name} | {timing.median * 1e3:.0f} ({timing.best * 1e3:.0f}) "
            f"| {timing.median / base.median - 1:+.1%} ({timing.best / base.best - 1:+.1%}) |"
        )
    print(f"\n({time.perf_counter() - start:.0f} s of imports)", file=sys.stderr)


if __name__ == "__main__":
    main()
