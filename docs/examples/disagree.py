"""Two ranks disagree in one way after the other. Prints what rank 0 raises.

python docs/examples/disagree.py
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta

import torch

import accelfn as af
from accelfn.errors import DistributedError, RemoteTraceback
from accelfn.testing import run_ranks

ONE, TWO = torch.tensor([1.0]), torch.tensor([2.0])


def other_shape(ctx: af.Context) -> None:
    af.gather(ctx, {"x": torch.zeros(2 + ctx.rank)})


def other_operation(ctx: af.Context) -> None:
    if ctx.rank == 0:
        af.gather(ctx, ONE)
    else:
        af.reduce(ctx, ONE)


def swapped(ctx: af.Context) -> None:
    if ctx.rank == 0:
        af.gather(ctx, ONE)
        af.gather(ctx, TWO)
    else:
        af.gather(ctx, TWO)
        af.gather(ctx, ONE)


def skipped(ctx: af.Context) -> None:
    for step in range(2):
        if ctx.rank == 0 or step == 0:
            af.gather(ctx, ONE)
        af.gather(ctx, TWO)


def failing(ctx: af.Context) -> None:
    with af.failing_together(ctx, "writing the log"):
        if ctx.rank == 1:
            raise OSError("the disk is full")
    af.wait_for_everyone(ctx)


def returning(ctx: af.Context) -> None:
    af.gather(ctx, ONE)
    if ctx.rank == 1:
        return
    af.gather(ctx, TWO)


def killed(ctx: af.Context) -> None:
    af.gather(ctx, ONE)
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    af.gather(ctx, TWO)


def late(ctx: af.Context) -> None:
    af.gather(ctx, ONE)
    if ctx.rank == 1:
        time.sleep(1.5)
    af.gather(ctx, TWO)


def a_batch_fewer(ctx: af.Context) -> None:
    for batch, _ in af.microbatches(ctx, [ONE] * (3 - ctx.rank)):
        af.gather(ctx, batch)


def drifted(ctx: af.Context) -> None:
    weight = torch.ones(4)
    if ctx.rank == 1:
        weight[2] = torch.nextafter(weight[2], torch.tensor(2.0))
    af.comm.check_replicas(ctx, {"weight": weight})


IN_MEMORY = (other_shape, other_operation, swapped, skipped, failing, returning, a_batch_fewer, drifted)
ON_PROCESSES = (killed, late)


def show(case: Callable[[af.Context], None]) -> None:
    def act(ctx: af.Context) -> None:
        try:
            case(ctx)
        except DistributedError as error:
            if ctx.rank == 0:
                cause = f"\n{error.__cause__}" if isinstance(error.__cause__, RemoteTraceback) else ""
                print(f"{type(error).__name__}: {error}{cause}", flush=True)
            raise

    print(f"\n{case.__name__}:", flush=True)
    guard = af.Guard(timeout=timedelta(seconds=0.5 if case is late else 20))
    with contextlib.suppress(Exception):  # of the world; rank 0 has printed its own
        run_ranks(act, 2, "processes" if case in ON_PROCESSES else "memory", guard=guard)


if __name__ == "__main__":
    for case in (*IN_MEMORY, *ON_PROCESSES):
        show(case)
