"""Saving and loading about 300 MB of state, beside Accelerate, plain torch and a plain write of the bytes.

In a directory of the current one, so that it is the disk that the program is on.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import accelfn as af
from accelfn.checkpoint.background import finish_background
from accelfn.context import Context
from tests.bench.timing import compare, growth_of, rounds_of, show_against, show_table, timing_of

# 24 million parameters, with AdamW's moments about 300 MB; on a GPU four times as many.
_WIDTHS, _LAYERS = {"cpu": 1024, "cuda": 2048}, 24
_ROUNDS = 9


def start_training(device: str = "cpu") -> dict[str, Any]:
    """Return a model and its optimizer after one step."""
    torch.random.manual_seed(0)  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
    width = _WIDTHS[device]
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS))).to(device)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model(torch.randn(1, width, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def state_of(training: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in training.items()}


def saving(name: str, device: str, folder: Path) -> None:
    """Print times of saves, in a table whose name begins with ``name``."""
    from accelerate import Accelerator

    training, ctx, numbers = start_training(device), Context(), iter(range(1_000_000))
    state = state_of(training)
    blob = os.urandom(1 << 20) * (12 * sum(one.numel() for one in training["model"].parameters()) >> 20)
    peer: Any = Accelerator(cpu=device == "cpu")
    prepared = peer.prepare(*training.values())

    def fresh(name: str) -> Path:
        return folder / f"{name}-{next(numbers)}"

    def tidy() -> None:
        finish_background(ctx)
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        os.sync()

    def write(syncs: bool) -> None:
        with open(fresh("plain"), "wb") as file:
            file.write(blob)
            if syncs:
                os.fsync(file)

    ways: dict[str, Callable[[], object]] = {
        "accelfn, `save_state`": lambda: af.save_state(ctx, fresh("ours"), training),
        "the same bytes written plainly, with fsync": lambda: write(True),
        "the same bytes written plainly, no fsync": lambda: write(False),
        "Accelerate, `save_state`, no fsync": lambda: peer.save_state(str(fresh("theirs"))),
        "`torch.save`, no fsync": lambda: torch.save(state, fresh("torch")),
    }
    times = compare(ways, rounds=_ROUNDS, calls=1, before=tidy)
    del prepared

    stalls: list[float] = []
    for _ in range(rounds_of(_ROUNDS) + 1):
        tidy()
        start = time.perf_counter()
        handle = af.save_state(ctx, fresh("background"), training, asynchronous=True)
        stalls.append(time.perf_counter() - start)
        handle.result()
    times["accelfn, in the background: until the loop goes on"] = timing_of(stalls[1:])
    show_against(f"{name}saving", times)


def loading(name: str, device: str, folder: Path) -> None:
    """Print times of loads, in tables whose names begin with ``name``."""
    from accelerate import Accelerator

    training = start_training(device)
    peer: Any = Accelerator(cpu=device == "cpu")
    prepared = peer.prepare(*training.values())
    af.save_state(Context(), folder / "ours", training)
    af.save_tree(folder / "tree", state_of(training))
    peer.save_state(str(folder / "theirs"))
    torch.save(state_of(training), folder / "torch")

    def plain_load() -> None:
        loaded = torch.load(folder / "torch")
        for name, part in training.items():
            part.load_state_dict(loaded[name])

    states: dict[str, Callable[[], object]] = {
        "accelfn, `load_state`, every byte verified": lambda: af.load_state(
            Context(), folder / "ours", training
        ),
        "`torch.load` and `load_state_dict`, nothing verified": plain_load,
        "Accelerate, `load_state`, nothing verified": lambda: peer.load_state(str(folder / "theirs")),
    }
    show_against(f"{name}loading-state", compare(states, rounds=_ROUNDS, calls=1, before=os.sync))
    trees: dict[str, Callable[[], object]] = {
        "accelfn, `load_tree`, every byte verified": lambda: af.load_tree(folder / "tree"),
        "`torch.load` of the same, nothing verified": lambda: torch.load(folder / "torch"),
    }
    show_against(f"{name}loading-tree", compare(trees, rounds=_ROUNDS, calls=1, before=os.sync))
    del prepared


def many_leaves(folder: Path) -> None:
    tree = {f"layer{number}": {"weight": torch.zeros(4), "bias": torch.ones(1)} for number in range(20_000)}
    ways: dict[str, Callable[[], object]] = {
        "`save_tree`": lambda: af.save_tree(folder / "many", tree),
        "`torch.save`": lambda: torch.save(tree, folder / "many.pt"),
        "`load_tree`": lambda: af.load_tree(folder / "many"),
        "`torch.load`": lambda: torch.load(folder / "many.pt"),
    }
    times = compare(ways, rounds=3, calls=1, before=os.sync)
    rows = ((name, one.s()) for name, one in times.items())
    show_table("many-leaves", ("40,000 small tensors", "median (best) s"), rows)


def memory(folder: Path) -> None:
    """Print by how much the process grows while it saves."""
    training = start_training()
    af.save_state(Context(), folder / "before", {"model": nn.Linear(2, 2)})  # what a first save loads
    grown = growth_of(lambda: af.save_state(Context(), folder / "measured", training))
    show_table("saving-memory", ("a save takes at its peak", ">MB"), [("`save_state`", f"{grown / 1e6:.1f}")])


def in_folders(*parts: Callable[[Path], None]) -> None:
    """Run parts, each in a folder of its own on the disk of the current one."""
    for part in parts:
        with tempfile.TemporaryDirectory(dir=".", prefix=".bench-") as folder:
            part(Path(folder))


if __name__ == "__main__":
    in_folders(partial(saving, "", "cpu"), partial(loading, "", "cpu"), many_leaves, memory)
