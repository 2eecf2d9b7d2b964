"""Loading a checkpoint of 1.2 GB into a model, beside Accelerate; each time in a process of its own.

Time is that of the load and of looking at every weight once: what is mapped is read only then. Memory is the
most that the process had at a time, less what it had before. Nothing is on the CPU's side but pages of files
that are in the system's cache already.

In a virtual machine, memory that nobody has used yet may first have to come from the host, which takes longer
than the load itself. So each process uses as much memory as the model needs and gives it back, before.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

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


def _ours(**options: Any) -> Callable[[nn.Module, str], object]:
    from accelfn.bigmodel import load_checkpoint_in_model

    return lambda model, path: load_checkpoint_in_model(model, path, **options)


def _theirs(**options: Any) -> Callable[[nn.Module, str], object]:
    load_checkpoint_in_model: Any = importlib.import_module("accelerate").load_checkpoint_in_model

    return lambda model, path: load_checkpoint_in_model(model, path, **options)


class Way(NamedTuple):
    """One way to load.

    Attributes:
        name: In the table.
        start: Where the model is before: ``"meta"`` or ``"cpu"``.
        make: Gives what loads.
        options: For it.
        kind: Of the checkpoint's files.
    """

    name: str
    start: str
    make: Callable[..., Callable[[nn.Module, str], object]]
    options: dict[str, Any]
    kind: str = "safetensors"


_CPU: dict[str, Any] = {"device_map": {"": "cpu"}}
_HALF: dict[str, Any] = {**_CPU, "dtype": torch.bfloat16}
# In groups, which are compared: the first is ours.
WAYS = (
    (
        Way("into a model without memory, on the CPU: accelfn", "meta", _ours, _CPU),
        Way("Accelerate (maps the files)", "meta", _theirs, _CPU),
    ),
    (
        Way("mapped: accelfn, on the disk", "meta", _ours, {"device_map": {"": "disk"}}),
        Way("Accelerate (maps the files)", "meta", _theirs, _CPU),
    ),
    (
        Way("into a model in memory: accelfn", "cpu", _ours, {}),
        Way("Accelerate", "cpu", _theirs, {}),
    ),
    (
        Way("as bfloat16: accelfn", "meta", _ours, _HALF),
        Way("Accelerate", "meta", _theirs, _HALF),
    ),
    (
        Way("from .bin: accelfn", "meta", _ours, _CPU, "bin"),
        Way("Accelerate", "meta", _theirs, _CPU, "bin"),
    ),
)


def memory(field: str) -> int:
    """Return what the kernel says of this process's memory, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def measure(way: Way, folder: Path) -> dict[str, float]:
    """Load once; in this process."""
    model = build(way.start)
    load = way.make(**way.options)
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    torch.empty(size + size // 10, dtype=torch.uint8).fill_(1)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    start = time.perf_counter()
    load(model, str(folder / way.kind))
    loaded = time.perf_counter()
    with torch.no_grad():
        for one in model.parameters():
            one.view(-1)[:: 1024 if one.numel() > 1024 else 1].sum()  # an element of each page
    end = time.perf_counter()
    taken = memory("VmHWM") - before
    final = sum(one.numel() * one.element_size() for one in model.parameters())
    return {"load": loaded - start, "whole": end - start, "taken": taken, "model": final}


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    if len(sys.argv) > 1:
        group, number, folder = sys.argv[1:]
        print(json.dumps(measure(WAYS[int(group)][int(number)], Path(folder))))
        return
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        from accelfn import Context, save_model

        for kind in ("safetensors", "bin"):
            save_model(Context(), build("cpu"), folder / kind, "250MB", safe_serialization=kind != "bin")
        found: dict[tuple[int, int], list[dict[str, float]]] = {}
        for _ in range(_ROUNDS + 1):
            for group, ways in enumerate(WAYS):
                for number in range(len(ways)):
                    run = (
                        sys.executable,
                        "-W",
                        "ignore",
                        "-m",
                        "tests.bench.load",
                        str(group),
                        str(number),
                        place,
                    )
                    done = subprocess.run(run, capture_output=True, text=True, check=True)
                    found.setdefault((group, number), []).append(json.loads(done.stdout.splitlines()[-1]))
    print("| what | load, median (best) s | with a look at each weight | peak memory, of the model | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for group, ways in enumerate(WAYS):
        ours = _times(found[group, 0], "whole")
        for number, way in enumerate(ways):
            rows = found[group, number]
            whole = _times(rows, "whole")
            ratio = f"{whole[0] / ours[0]:.2f} ({whole[1] / ours[1]:.2f})" if number else ""
            peak = statistics.median(row["taken"] / row["model"] for row in rows[1:])
            print(f"| {way.name} | {_text(_times(rows, 'load'))} | {_text(whole)} | {peak:.0%} | {ratio} |")


def _times(rows: list[dict[str, float]], key: str) -> tuple[float, float]:
    taken = [row[key] for row in rows[1:]]
    return statistics.median(taken), min(taken)


def _text(times: tuple[float, float]) -> str:
    return f"{times[0]:.2f} ({times[1]:.2f})"


if __name__ == "__main__":
    main()
