"""The training program of :mod:`tests.bench.elastic`: a small GPT whose processes may be killed.

``accelfn launch --elastic --cpu -m tests.bench.elastic_run FOLDER KIND WIDTH BLOCKS [ROUNDS]``: each process
writes what it does, line by line, to ``FOLDER/SLOT.ATTEMPT``. Without ROUNDS it trains until it is stopped;
otherwise it times blocks of steps with and without ``snapshot`` in turn, and ends.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from tests.bench.sharding import GPT, loss_of

EVERY = 10  # steps per snapshot
_ROWS, _LENGTH, _BATCHES = 8, 64, 2000
_WARM_UP = 15  # so that snapshots fall into the middle of blocks, and their copies end within


class Diary:
    """A file to which a process writes what it does; what was written stays when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, event: str, step: int = 0) -> None:
        """Write a line with the time, which all processes of a machine share."""
        self._file.write(json.dumps([event, step, time.monotonic()]) + "\n")


class Cost(NamedTuple):
    """What a process has measured, in seconds.

    Attributes:
        steps: Of a step without ``snapshot``, by block.
        added: What ``snapshot`` adds to a step, by block: the difference to the block beside it.
        within: Spent in ``snapshot`` per step, by block.
        step_cpu: Processor time of all threads of this process for a step.
        snapshot_cpu: The same for a snapshot and its copy for the neighbour, between steps.
    """

    steps: Sequence[float]
    added: Sequence[float]
    within: Sequence[float]
    step_cpu: float
    snapshot_cpu: float


class Program(NamedTuple):
    """What a process does.

    Attributes:
        kind: ``ddp`` or ``fsdp2``.
        size: Width and number of blocks of the GPT.
        rounds: Pairs of blocks to time; 0 to train until it is stopped.
        diary: Of this process.
    """

    kind: str
    size: tuple[int, int]
    rounds: int
    diary: Diary

    def make_state(self, ctx: af.Context) -> dict[str, Any]:
        """Make a prepared state."""
        self.diary.note("make")
        model = GPT(*self.size)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        ids = torch.randint(512, (_BATCHES * _ROWS, _LENGTH + 1), generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(ids), batch_size=_ROWS, shuffle=True)
        model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
        scaler = af.init_scaler(ctx)
        self.diary.note("made")
        return {"model": model, "optimizer": optimizer, "loader": loader, "scaler": scaler, "step": 0}

    def steps(self, ctx: af.Context, state: dict[str, Any]) -> Generator[None]:
        """Train, a step at a time, for as long as it is asked for."""
        model, optimizer = state["model"], state["optimizer"]
        while True:
            for (ids,), micro in af.microbatches(ctx, state["loader"]):
                batch = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
                with af.accumulate(ctx, micro, model):
                    state["scaler"] = af.backward(ctx, loss_of(model, batch), state["scaler"], micro)
                state["scaler"] = af.optimizer_step(ctx, optimizer, state["scaler"], max_norm=1.0)
                state["step"] += 1
                yield

    def train(self, ctx: af.Context, state: dict[str, Any]) -> None:
        """Train until it is stopped."""
        self.diary.note("train", state["step"])
        try:
            for _ in self.steps(ctx, state):
                self.diary.note("step", state["step"])
                af.snapshot(ctx, state, every=EVERY)
        except Exception:
            self.diary.note("error", state["step"])
            raise

    def measure(self, ctx: af.Context, state: dict[str, Any]) -> Cost:
        """Time blocks of steps with and without ``snapshot``, in turn."""
        steps = self.steps(ctx, state)
        within = [0.0]

        def with_snapshots() -> None:
            start = time.perf_counter()
            af.snapshot(ctx, state, every=EVERY)
            within[0] += time.perf_counter() - start

        def block(count: int, after: Callable[[], object]) -> tuple[float, float]:
            af.wait_for_everyone(ctx)
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                next(steps)
                after()
            af.wait_for_everyone(ctx)
            return (time.perf_counter() - start) / count, (time.process_time() - start_cpu) / count

        block(_WARM_UP, with_snapshots)
        ways: dict[str, Callable[[], object]] = {"with": with_snapshots, "without": lambda: None}
        rows: list[tuple[float, float, float]] = []
        cpu: list[float] = []
        for number in range(self.rounds):
            within[0] = 0.0
            took = {name: block(EVERY, ways[name]) for name in sorted(ways, reverse=bool(number % 2))}
            rows.append((took["without"][0], took["with"][0] - took["without"][0], within[0] / EVERY))
            cpu.append(took["without"][1])
        blocks, added, inside = zip(*rows, strict=True)
        return Cost(blocks, added, inside, statistics.median(cpu), self._snapshot_cpu(ctx, state))

    def _snapshot_cpu(self, ctx: af.Context, state: dict[str, Any]) -> float:
        taken: list[float] = []
        snapshots = ctx.world.background.snapshots
        assert snapshots is not None
        for _ in range(10):
            af.wait_for_everyone(ctx)
            start = time.process_time()
            af.snapshot(ctx, state, every=1)
            snapshots.settle()
            taken.append(time.process_time() - start)
        return statistics.median(taken)


def main() -> None:
    """Run as a process of an elastic launch."""
    torch.set_num_threads(1)
    folder, kind, width, blocks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    rounds = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    name = f"{os.environ['ACCELFN_ELASTIC_SLOT']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}"
    (folder / f"pid-{name}").write_text(str(os.getpid()))
    program = Program(kind, (width, blocks), rounds, Diary(folder / name))
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2) if kind == "fsdp2" else None
    if not rounds:
        af.run_elastic(program.train, program.make_state, cpu=True, fsdp_plugin=plugin)
        return
    found = af.run_elastic(program.measure, program.make_state, cpu=True, fsdp_plugin=plugin)
    (folder / f"cost-{name}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
