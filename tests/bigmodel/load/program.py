"""A program that loads a model, and prints its peak memory, in units of the model.

`python -m tests.bigmodel.load.program FOLDER DTYPE` prints this once for loading, and once for a loading that
holds everything twice, so that a test knows that it would be seen. DTYPE may be "own".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from torch import nn

from accelfn.bigmodel import load_checkpoint_in_model

__all__ = ("COUNT", "SHAPE", "main")

COUNT, SHAPE = 8, (1 << 10, 5 << 10)


def _build(count: int) -> nn.Module:
    return nn.Sequential(*[nn.Linear(SHAPE[1], SHAPE[0], bias=False, device="meta") for _ in range(count)])


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _peak_of(load: Callable[[nn.Module], object]) -> float:
    model = _build(COUNT)
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    held = load(model)
    peak = _memory("VmHWM") - before
    del held
    return peak / sum(one.nbytes for one in model.parameters())


def main(folder: str, name: str) -> None:
    """Load it."""
    dtype = None if name == "own" else name

    def load(model: nn.Module) -> None:
        load_checkpoint_in_model(model, Path(folder) / "m.safetensors", {"": "cpu"}, dtype=dtype)

    def load_twice(model: nn.Module) -> object:
        load(model)
        return [one.detach().clone() for one in model.parameters()]

    # What libraries take once isn't counted.
    load_checkpoint_in_model(_build(1), Path(folder) / "small.safetensors", {"": "cpu"}, dtype=dtype)
    print(_peak_of(load), _peak_of(load_twice))


if __name__ == "__main__":
    main(*sys.argv[1:])
