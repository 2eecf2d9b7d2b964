"""A program that quantises a model while loading it, and prints its peak memory.

`python -m tests.bigmodel.quantize.program FOLDER` prints two numbers: bytes at most, and bytes that are held.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

import accelfn as af

__all__ = ("COUNT", "WIDTH", "build", "main")

WIDTH, COUNT = 1024, 24


def build() -> nn.Module:
    """Build 100 MB of layers."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT)), nn.Linear(WIDTH, 2))


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main(folder: str) -> None:
    """Load it."""
    config = af.BnbQuantizationConfig(load_in_8bit=True, torch_dtype="fp32")
    small = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 2))
    af.load_and_quantize_model(small, config)  # the libraries' own memory
    with af.init_empty_weights():
        model = build()
    before = _memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    af.load_and_quantize_model(model, config, folder)
    print(_memory("VmHWM") - before, _memory("VmRSS") - before)


if __name__ == "__main__":
    main(sys.argv[1])
