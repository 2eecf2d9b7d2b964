"""Saving and loading about 300 MB of state, beside Accelerate, plain torch and a plain write of the bytes.

In a directory of the current one, so that it is the disk that the program is on.
"""

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import accelfn as af
from accelfn.checkpoint.background import finish_background
from accelfn.context import Context
from tests.bench.timing import Timing

_WIDTH, _LAYERS = 1024, 24  # 24 million parameters: with AdamW's moments about 300 MB


class Training(NamedTuple):
    """A model and its optimizer after one step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def tree(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def start_training() -> Training:
    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, _WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return Training(model, optimizer)


def in_turn(
    ways: Mapping[str, Callable[[], object]], rounds: int, tidy: Callable[[], object] | None = None
) -> dict[str, Timing]:
    """Time each way once a round, each round beginning with another; the disk tidied and at rest before."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if tidy is not None:
                tidy()
            os.sync()
            start = time.perf_counter()
            ways[name]()
            if number:
                taken[name].append(time.perf_counter() - start)
    return {name: Timing(min(times), statistics.median(times)) for name, times in taken.items()}


def saving(rounds: int, folder: Path) -> None:
    from accelerate import Accelerator

    training = start_training()
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    blob = os.urandom(1 << 20) * 300
    peer: Any = Accelerator(cpu=True)
    prepared = peer.prepare(training.model, training.optimizer)
    numbers = iter(range(1_000_000))

    def fresh(name: str) -> Path:
        return folder / f"{name}-{next(numbers)}"

    ctx = Context()

    def tidy() -> None:
        finish_background(ctx)
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()

    def write_plainly() -> None:
        with open(fresh("plain"), "wb") as file:
            file.write(blob)

    def write_synced() -> None:
        with open(fresh("synced"), "wb") as file:
            file.write(blob)
            os.fsync(file)

    times = in_turn(
        {
            "accelfn, save_state": lambda: af.save_state(ctx, fresh("ours"), training.tree),
            "accelfn, save_state, deferred": lambda: af.save_state(
                ctx, fresh("deferred"), training.tree, durability="deferred"
            ),
            "Accelerate, save_state": lambda: peer.save_state(str(fresh("theirs"))),
            "torch.save": lambda: torch.save(state, fresh("torch")),
            "plain write": write_plainly,
            "plain write, fsync": write_synced,
        },
        rounds,
        tidy,
    )
    print_against("accelfn, save_state", times)
    del prepared

    stalls: list[float] = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        handle = af.save_state(ctx, fresh("background"), training.tree, asynchronous=True)
        stalls.append(time.perf_counter() - start)
        handle.result()
        tidy()
        os.sync()
    stall = Timing(min(stalls[1:]), statistics.median(stalls[1:]))
    whole = times["accelfn, save_state"]
    print(
        f"\nIn the background the loop is held up for {ms(stall)} ms, {stall.median / whole.median:.0%} "
        f"({stall.best / whole.best:.0%}) of a save that it waits for."
    )


def loading(rounds: int, folder: Path) -> None:
    from accelerate import Accelerator

    training = start_training()
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    peer: Any = Accelerator(cpu=True)
    prepared = peer.prepare(training.model, training.optimizer)
    af.save_state(Context(), folder / "ours", training.tree)
    af.save_tree(folder / "tree", state)
    peer.save_state(str(folder / "theirs"))
    torch.save(state, folder / "torch")

    def plain_load() -> None:
        loaded = torch.load(folder / "torch")
        training.model.load_state_dict(loaded["model"])
        training.optimizer.load_state_dict(loaded["optimizer"])

    times = in_turn(
        {
            "accelfn, load_state": lambda: af.load_state(Context(), folder / "ours", training.tree),
            "torch.load, load_state_dict": plain_load,
            "Accelerate, load_state": lambda: peer.load_state(str(folder / "theirs")),
        },
        rounds,
    )
    print_against("accelfn, load_state", times)
    print()
    times = in_turn(
        {
            "accelfn, load_tree": lambda: af.load_tree(folder / "tree"),
            "torch.load": lambda: torch.load(folder / "torch"),
        },
        rounds,
    )
    print_against("accelfn, load_tree", times)
    del prepared


def print_against(first: str, times: Mapping[str, Timing]) -> None:
    print("| what | median (best) ms | its time / ours, medians (bests) |")
    print("| --- | --- | --- |")
    ours = times[first]
    for name, one in times.items():
        ratio = "" if name == first else f"{one.median / ours.median:.2f} ({one.best / ours.best:.2f})"
        print(f"| {name} | {ms(one)} | {ratio} |")


def ms(timing: Timing) -> str:
    return f"{timing.median * 1e3:.0f} ({timing.best * 1e3:.0f})"


def many_leaves(folder: Path) -> None:
    tree = {f"layer{number}": {"weight": torch.zeros(4), "bias": torch.ones(1)} for number in range(20_000)}
    times = in_turn(
        {
            "accelfn, save_tree": lambda: af.save_tree(folder / "many", tree),
            "torch.save": lambda: torch.save(tree, folder / "many.pt"),
            "accelfn, load_tree": lambda: af.load_tree(folder / "many"),
            "torch.load": lambda: torch.load(folder / "many.pt"),
        },
        3,
    )
    print("\nA tree of 40,000 leaves:\n\n| what | median (best) ms |\n| --- | --- |")
    for name, one in times.items():
        print(f"| {name} | {ms(one)} |")


def memory(folder: Path) -> None:
    """Print by how much the process grows while it saves, sampled from another thread."""
    training = start_training()
    size = sum(
        tensor.numel() * tensor.dtype.itemsize
        for tensor in (
            *training.model.state_dict().values(),
            *(value for one in training.optimizer.state.values() for value in one.values()),
        )
    )
    af.save_state(Context(), folder / "before", {"model": nn.Linear(2, 2)})  # what a first save loads
    peak = base = resident()
    over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, resident())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    af.save_state(Context(), folder / "measured", training.tree)
    over.set()
    watcher.join()
    print(
        f"\nSaving {size / 1e6:.0f} MB takes {(peak - base) / 1e6:.1f} MB more memory at its peak: "
        f"{(peak - base) / size:.1%}."
    )


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    parts: list[Callable[[Path], None]] = [
        partial(saving, rounds),
        partial(loading, rounds),
        many_leaves,
        memory,
    ]
    for part in parts:
        with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
            part(Path(folder))
        print(flush=True)


if __name__ == "__main__":
    main()
