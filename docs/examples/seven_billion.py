"""A model of seven billion parameters: built without memory for them, and how much it would take.

    python docs/examples/seven_billion.py

``accelfn estimate-memory seven_billion:build`` says the same as a table, in the folder of this file.
"""

import sys
import time

import torch
from torch import nn

import accelfn as af
from accelfn.bigmodel import draw_estimate, estimate_memory


class Block(nn.Module):
    """A layer of a transformer, as those of Llama are."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.before_attention = nn.RMSNorm(width)
        self.before_gate = nn.RMSNorm(width)


class SevenBillion(nn.Module):
    """All of its weights; what it computes is left out."""

    _no_split_modules = ("Block",)

    def __init__(
        self, width: int = 4096, inner: int = 11008, num_blocks: int = 32, tokens: int = 32000
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(num_blocks))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)
        # Computed from nothing but numbers: it is real, and no checkpoint has to hold it.
        frequencies = 1.0 / 10_000 ** (torch.arange(0, 128, 2) / 128)
        self.register_buffer("frequencies", frequencies, persistent=False)


def build() -> nn.Module:
    return SevenBillion()


def peak_mb() -> float:
    if sys.platform != "linux":
        return float("nan")
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1000


def main() -> None:
    before, begin = peak_mb(), time.perf_counter()
    with af.init_empty_weights():
        model = build()
    seconds = time.perf_counter() - begin
    print(f"built in {seconds:.2f} s with {peak_mb() - before:.0f} MB of memory", file=sys.stderr)
    weight, frequencies = model.get_parameter("head.weight"), model.get_buffer("frequencies")
    print(f"head.weight: {tuple(weight.shape)} on {weight.device}")
    print(f"frequencies: {tuple(frequencies.shape)} on {frequencies.device}, the first is {frequencies[0]}")
    print(draw_estimate(estimate_memory(model), "seven billion"))


if __name__ == "__main__":
    main()
