"""The memory that a load takes at its peak: what the ranks of a machine keep, and little more for each."""

# torch leaves its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel.layouts import Layout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not Path("/proc/self/clear_refs").exists(), reason="the system doesn't count memory so"
    ),
]

MB = 10**6
WIDTH = 2048  # a layer has 17 MB, and 50 with its moments
# For each rank, beside what it keeps: 67 MB that are read before anything is changed, buffers, and what a
# process imports when it prepares its first model. The documentation says at most 256 MB.
MORE = 160 * MB
BUFFER = 16 * MB  # a megabyte for each thread that reads, and what Python needs


def memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


def resident() -> int:
    """Return the memory of this process, without what it has freed."""
    ctypes.CDLL(None).malloc_trim(0)
    return memory("VmRSS")


def peak_of(action: Callable[[], object]) -> int:
    """Return the memory that this process has at most in an action."""
    resident()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    action()
    return memory("VmHWM")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Deep(nn.Module):
    """A model of wide blocks, without random numbers."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        for number, one in enumerate(self.parameters()):
            nn.init.constant_(one, number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
LAYOUTS = {
    "replicated": Layout(replicate=2),
    "fully sharded": Layout(shard=4),
    "tensor parallel": Layout(tp=2),
    "stages": Layout(pp=2),
}


class Run(NamedTuple):
    """What is saved and loaded."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def tensors(self) -> list[torch.Tensor]:
        """Return what this rank has of the weights and their moments."""
        states = self.optimizer.state.values()
        moments = [one for state in states for one in state.values() if one.dim()]
        return [local_of(one).detach() for one in (*self.model.parameters(), *moments)]


def make_run(ctx: Context, num_blocks: int, steps: int) -> Run:
    plain = Deep(num_blocks)
    model, optimizer = af.prepare(ctx, plain, torch.optim.AdamW(plain.parameters(), lr=0.1, foreach=False))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach()  # which needs no memory
        optimizer.step()
        optimizer.zero_grad()
    return Run(model, optimizer)


class Taken(NamedTuple):
    """Memory of a rank.

    Attributes:
        state: Of what it has of the state.
        peak: At most, beyond what the process had before there was a state.
    """

    state: int
    peak: int


@pytest.mark.parametrize("steps", [0, 1], ids=["into a new optimizer", "over an old state"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_machine_needs_the_state_once_and_little_for_each_rank(
    tmp_path: Path, name: str, steps: int
) -> None:
    layout = LAYOUTS[name]
    num_blocks = 2 if name == "replicated" else 2 * layout.size

    def save(ctx: Context) -> float:
        run = make_run(ctx, num_blocks, 2)
        af.save_state(ctx, tmp_path / "at", run)
        return sum(one.double().sum().item() for one in run.tensors())

    def load(ctx: Context) -> tuple[float, Taken]:
        af.save_state(ctx, tmp_path / "small", {"x": torch.ones(1)})  # what a first call imports
        af.load_state(ctx, tmp_path / "small", {"x": torch.ones(1)})
        before = resident()
        run = make_run(ctx, num_blocks, steps)
        peak = peak_of(lambda: af.load_state(ctx, tmp_path / "at", run))
        tensors = run.tensors()
        size = sum(one.nbytes for one in tensors)
        return sum(one.double().sum().item() for one in tensors), Taken(size, peak - before)

    config = layout.config(PLAN)
    saved = run_ranks(save, layout.size, "processes", parallelism_config=config)
    sums, taken = zip(*run_ranks(load, layout.size, "processes", parallelism_config=config), strict=True)
    print(f"{name}, {steps} steps: {taken}")
    assert list(sums) == saved
    state, peak = sum(one.state for one in taken), sum(one.peak for one in taken)
    assert state == (layout.size if name == "replicated" else 1) * num_blocks * 2 * 3 * WIDTH * WIDTH * 4
    assert peak <= state + layout.size * MORE


@pytest.mark.parametrize("cut", ["whole", "by rows"])
def test_columns_take_their_own_memory_and_a_buffer(tmp_path: Path, cut: str) -> None:
    size, rows, columns = 4, 4096, 16384  # of which a quarter has 67 MB

    def save(ctx: Context) -> None:
        tensor = torch.arange(columns, dtype=torch.float32).repeat(rows, 1)
        mesh = init_device_mesh("cpu", (size,))
        state = tensor if cut == "whole" else distribute_tensor(tensor, mesh, [Shard(0)])
        af.save_state(ctx, tmp_path / "at", {"x": state})

    def load(ctx: Context) -> tuple[int, int]:
        mesh = init_device_mesh("cpu", (size,))

        def columns_of(name: str, shape: tuple[int, int]) -> torch.Tensor:
            place = distribute_tensor(torch.empty(shape, device="meta"), mesh, [Shard(1)])
            return local_of(af.load_state(ctx, tmp_path / name, {"x": place})["x"])

        af.save_state(ctx, tmp_path / "small", {"x": torch.ones(8, 8)})  # what a first call imports
        columns_of("small", (8, 8))
        before = resident()
        found: list[torch.Tensor] = []
        peak = peak_of(lambda: found.append(columns_of("at", (rows, columns)))) - before
        first = ctx.rank * columns // size
        assert torch.equal(found[0], torch.arange(first, first + columns // size).float().expand(rows, -1))
        return found[0].nbytes, peak

    run_ranks(save, size, "processes")
    found = run_ranks(load, size, "processes")
    print(f"{cut}: {found}")
    for wanted, peak in found:
        assert wanted == rows * columns // size * 4
        assert peak <= wanted + BUFFER
