"""The training program of :mod:`tests.bench.elastic`: a small GPT whose processes may be killed.

``accelfn launch --elastic --cpu -m tests.bench.elastic_run FOLDER KIND WIDTH BLOCKS [ROUNDS]``: each process
writes what it does, line by line, to ``FOLDER/SLOT.ATTEMPT``. Without ROUNDS it trains until it is stopped;
otherwise it times blocks of steps with and without ``remember`` in turn, and ends.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from tests.bench.sharding import GPT, loss_of

EVERY = 10  # steps per snapshot
_ROWS, _LENGTH, _BATCHES = 8, 64, 2000
_WARM_UP = 15  # so that snapshots fall into the middle of blocks, and their copies end within
_BLOCK = 2 * EVERY


class Diary:
    """A file to which a process writes what it does; what was written stays when the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, event: str, step: int = 0) -> None:
        """Write a line with the time, which all processes of a machine share."""
        self._file.write(json.dumps([event, step, time.monotonic()]) + "\n")


class Cost(NamedTuple):
    """Seconds of a step; all are medians over blocks of steps.

    Attributes:
        without: Of the loop without ``remember``.
        added: Of the loop with it, less those of the block without it beside it.
        within: Spent in ``remember``.
        cpu_without: As ``without``, of processor time of all threads of this process.
        cpu_added: As ``added``, of the same.
    """

    without: float
    added: float
    within: float
    cpu_without: float
    cpu_added: float


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
                af.remember(ctx, state, every=EVERY)
        except Exception:
            self.diary.note("error", state["step"])
            raise

    def measure(self, ctx: af.Context, state: dict[str, Any]) -> Cost:
        """Time blocks of steps with and without ``remember``, in turn."""
        steps = self.steps(ctx, state)
        within = [0.0]

        def remember() -> None:
            start = time.perf_counter()
            af.remember(ctx, state, every=EVERY)
            within[0] += time.perf_counter() - start

        def block(count: int, after: Callable[[], object]) -> tuple[float, float]:
            af.wait_for_everyone(ctx)
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                next(steps)
                after()
            af.wait_for_everyone(ctx)
            return (time.perf_counter() - start) / count, (time.process_time() - start_cpu) / count

        block(_WARM_UP, remember)
        ways: dict[str, Callable[[], object]] = {"with": remember, "without": lambda: None}
        rows: list[Cost] = []
        for number in range(self.rounds):
            within[0] = 0.0
            took = {name: block(_BLOCK, ways[name]) for name in sorted(ways, reverse=bool(number % 2))}
            (on, on_cpu), (off, off_cpu) = took["with"], took["without"]
            rows.append(Cost(off, on - off, within[0] / _BLOCK, off_cpu, on_cpu - off_cpu))
        return Cost(*map(statistics.median, zip(*rows, strict=True)))


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
