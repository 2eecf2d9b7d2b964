"""Loading a checkpoint of 1.2 GB into a model, beside Accelerate; each time in a process of its own.

Time is that of the load and of looking at every weight once: what is mapped is read only then. Memory is the
most that the process had at a time, less what it had before. Nothing is on the CPU's side but pages of files
that are in the system's cache already.

In a virtual machine, memory that nobody has used yet may first have to come from the host, which takes longer
than the load itself. So each process uses as much memory as the model needs and gives it back, before.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.bench.timing import growth_of, rounds_of, show_table, timing_of

_WIDTH, _BLOCKS = 1024, 24
_ROUNDS = 5


class Block(nn.Module):
    """The weights of a layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)])
        self.attention = nn.ModuleList([nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)])
        self.mlp = nn.ModuleList([nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)])


def build(device: str) -> nn.Module:
    with torch.device(device):
        return nn.ModuleList([Block() for _ in range(_BLOCKS)])


class Way(NamedTuple):
    """One way to load, by both.

    Attributes:
        what: Is loaded into what.
        start: Where the model is before: ``"meta"`` or ``"cpu"``.
        ours: Our options.
        theirs: Those of Accelerate, which maps files.
        kind: Of the checkpoint's files.
    """

    what: str
    start: str
    ours: dict[str, Any]
    theirs: dict[str, Any]
    kind: str = "safetensors"

    def load(self, peer: bool) -> Callable[[nn.Module, str], object]:
        name = "accelerate" if peer else "accelfn.bigmodel"
        load: Any = importlib.import_module(name).load_checkpoint_in_model
        return lambda model, path: load(model, path, **(self.theirs if peer else self.ours))


_CPU: dict[str, Any] = {"device_map": {"": "cpu"}}
_HALF: dict[str, Any] = {**_CPU, "dtype": torch.bfloat16}
WAYS = (
    Way("an empty model on the CPU, dtypes unchanged", "meta", _CPU, _CPU),
    Way('the same, mapped by accelfn too (`{"": "disk"}`)', "meta", {"device_map": {"": "disk"}}, _CPU),
    Way("a model that has memory", "cpu", {}, {}),
    Way("an empty model, as bfloat16", "meta", _HALF, _HALF),
    Way("an empty model, from `.bin` files", "meta", _CPU, _CPU, "bin"),
)


def measure(way: Way, peer: bool, folder: Path) -> dict[str, float]:
    """Load once; in this process."""
    model, load = build(way.start), way.load(peer)
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    torch.empty(size + size // 10, dtype=torch.uint8).fill_(1)
    seconds = 0.0

    def run() -> None:
        nonlocal seconds
        start = time.perf_counter()
        load(model, str(folder / way.kind))
        with torch.no_grad():
            for one in model.parameters():
                one.view(-1)[:: 1024 if one.numel() > 1024 else 1].sum()  # an element of each page
        seconds = time.perf_counter() - start

    taken = growth_of(run)
    return {"seconds": seconds, "share": taken / sum(one.nbytes for one in model.parameters())}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    if len(sys.argv) > 1:
        number, peer, place = sys.argv[1:]
        print(json.dumps(measure(WAYS[int(number)], peer == "1", Path(place))))
        return
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as place:
        from accelfn import Context, save_model

        for kind in ("safetensors", "bin"):
            save_model(Context(), build("cpu"), Path(place, kind), "250MB", safe_serialization=kind != "bin")
        command = (sys.executable, "-W", "ignore", "-m", "tests.bench.load")
        for _ in range(rounds_of(_ROUNDS) + 1):
            for number, peer in itertools.product(range(len(WAYS)), (0, 1)):
                run = (*command, str(number), str(peer), place)
                done = subprocess.run(run, capture_output=True, text=True, check=True)
                found.setdefault((number, peer), []).append(json.loads(done.stdout.splitlines()[-1]))
    rows: list[Sequence[str]] = []
    for number, way in enumerate(WAYS):
        both = [found[number, peer][1:] for peer in (0, 1)]
        ours, theirs = (timing_of(row["seconds"] for row in side) for side in both)
        peaks = (f"{statistics.median(row['share'] for row in side):.0%}" for side in both)
        rows.append((way.what, ours.s(), theirs.s(), theirs.over(ours), ", ".join(peaks)))
    columns = ("into", "accelfn, s", "Accelerate, s", "ratio", "memory of accelfn, of Accelerate")
    show_table("load", columns, rows)


if __name__ == "__main__":
    main()
