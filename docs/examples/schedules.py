"""Two bugs that depend on who runs when, each found by its seed.

python docs/examples/schedules.py
"""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

import accelfn as af
from accelfn.testing import Exploration, explore, scheduling_point


def keep_best(ctx: af.Context, folder: str) -> float:
    best = Path(folder, "best.txt")
    for loss in (2.0, 1.0):
        loss = af.reduce(ctx, torch.tensor(loss), "mean").item()
        if not best.exists() or loss < float(best.read_text()):
            if ctx.is_main_process:
                best.write_text(str(loss))
            af.wait_for_everyone(ctx)
    return float(best.read_text())


def find_the_branch() -> Exploration[float]:
    return explore(keep_best, 2, setup=tempfile.TemporaryDirectory, budget=30)


def rotate(ctx: af.Context, folder: str) -> None:
    save = af.save_state(ctx, f"{folder}/step_2", {"step": 2}, asynchronous=True)
    if ctx.is_main_process:
        scheduling_point(ctx, "remove step_1")
        shutil.rmtree(f"{folder}/step_1")
    save.result()


@contextmanager
def one_checkpoint() -> Generator[str, None, None]:
    with tempfile.TemporaryDirectory() as folder:
        af.save_tree(f"{folder}/step_1", {"step": 1})
        yield folder
        af.latest_checkpoint(folder)  # there must be one, whatever has happened


def find_the_race() -> Exploration[None]:
    return explore(rotate, 2, setup=one_checkpoint, budget=30, max_faults=1)


if __name__ == "__main__":
    print(find_the_branch())
    lost = next(one for one in find_the_race().failures if one.text.startswith("NoCheckpointError"))
    print(f"\n{lost.text}\nwith schedule={lost.plainest.given}:\n{lost.plainest.trace.table()}")
