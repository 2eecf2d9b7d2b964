"""Kill a program while it saves, over and over, and look each time whether anything was lost.

``python -m tests.checkpoint.campaign`` does it 200 times and prints what it saw. A trial is a program of one
or two ranks that saves one state after the other, to one place or to a new one each time with the older ones
removed. It is killed (SIGKILL, with all its processes) after a random time. Then the newest checkpoint must
load, be bit-equal to the state of its step, and be no older than the last step that the program was told is
committed. The next trial goes on in the same directory, with whatever the killed one left behind.
"""

import argparse
import os
import random
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch

import accelfn as af
from accelfn.checkpoint import Keep
from accelfn.context import Context
from accelfn.testing import run_ranks

__all__ = ("Place", "Report", "kill_while_saving", "state_of_step")

Place = Literal["replaced", "rotated"]

_STEP = struct.Struct("<q")
_PATIENCE_S = 60.0


class Report(NamedTuple):
    """What a campaign saw."""

    kills: int
    saves: int  # that were told to be committed
    during: Counter[str]  # by what was found beside the checkpoints after the kill
    lost: tuple[str, ...]  # what must never be


def state_of_step(step: int) -> dict[str, Any]:
    """Give a state that differs in every tensor from that of any other step; about 3 MB."""
    generator = torch.Generator().manual_seed(step)
    return {
        "weights": {str(number): torch.randn(200_000, generator=generator) for number in range(3)},
        "half": torch.randn(1001, generator=generator).bfloat16(),
        "count": torch.tensor(step),
        "step": step,
    }


def kill_while_saving(
    folder: Path, kills: int, *, ranks: int, place: Place, seed: int = 0, background: bool = False
) -> Report:
    """Run trials one after the other in one directory.

    Args:
        folder: Of the checkpoints.
        kills: Trials.
        ranks: Of the program.
        place: Whether each save replaces the one before, or has a directory of its own.
        seed: Of the times at which programs are killed.
        background: Whether the program saves in the background.
    """
    chance = random.Random(seed)
    step, saves = 0, 0
    lost: list[str] = []
    during: Counter[str] = Counter()
    for number in range(kills):
        told = _run_and_kill(folder, step, ranks, place, chance.uniform(0.0, 0.12), background)
        saves += len(told)
        acknowledged = max([*told, step - 1])
        during.update({_leftover(name) for name in os.listdir(folder) if name.startswith(".")} or {"nothing"})
        found = _newest(folder, acknowledged)
        if isinstance(found, str):
            lost.append(f"trial {number}: {found}")
            return Report(number + 1, saves, during, tuple(lost))
        step = found + 1
    return Report(kills, saves, during, tuple(lost))


def _leftover(name: str) -> str:
    return next((kind for kind in ("staging", "replaced", "trash") if kind in name), "something else")


def _newest(folder: Path, acknowledged: int) -> int | str:
    """Give the step of the newest checkpoint, or what is wrong with it."""
    try:
        found = cast("dict[str, Any]", af.load_tree(folder / "last" if _replaces(folder) else folder))
    except Exception as error:  # noqa: BLE001 -- any is a finding
        return -1 if acknowledged < 0 else f"step {acknowledged} was committed, and now: {error!r}"
    step = found["step"]
    if step < acknowledged:
        return f"step {acknowledged} was committed, and step {step} is the newest"
    return step if _same(found, state_of_step(step)) else f"step {step} isn't what was saved"


def _replaces(folder: Path) -> bool:
    return any("last" in name for name in os.listdir(folder))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        ours, theirs = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        return ours.keys() == theirs.keys() and all(_same(ours[key], theirs[key]) for key in ours)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


def _run_and_kill(
    folder: Path, step: int, ranks: int, place: Place, delay_s: float, background: bool
) -> list[int]:
    """Fork a program, kill it some time after its first save began, and give the steps it was told of."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of the parent's may run here, so it ends without unwinding
        try:
            os.close(reader)
            os.setsid()
            _save_on_and_on(folder, step, ranks, place, writer, background)
        finally:
            os._exit(1)
    os.close(writer)
    told: list[int] = []
    try:
        _read_step(reader)  # it begins
        time.sleep(delay_s)
        os.killpg(child, signal.SIGKILL)
        while (found := _read_step(reader)) is not None:
            told.append(found)
    finally:
        os.waitpid(child, 0)
        os.close(reader)
    return told


def _read_step(reader: int) -> int | None:
    """Read one word of the program; None when all its processes have ended."""
    ready, _, _ = select.select([reader], [], [], _PATIENCE_S)
    content = os.read(reader, _STEP.size) if ready else b""
    return _STEP.unpack(content)[0] if len(content) == _STEP.size else None


def _save_on_and_on(
    folder: Path, first: int, ranks: int, place: Place, writer: int, background: bool
) -> None:
    def program(ctx: Context) -> None:
        if ctx.is_main_process:
            os.write(writer, _STEP.pack(-1))
        for step in range(first, first + 1000):
            at = folder / ("last" if place == "replaced" else f"step-{step}")
            keep = None if place == "replaced" else Keep(last=2)
            if background:
                af.save_state(ctx, at, state_of_step(step), True, step=step, keep=keep).result()
            else:
                af.save_state(ctx, at, state_of_step(step), step=step, keep=keep)
            if ctx.is_main_process:
                os.write(writer, _STEP.pack(step))

    if ranks == 1:
        program(Context())
    else:
        run_ranks(program, ranks, on="processes")


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill programs while they save, and look what is lost.")
    parser.add_argument("--kills", type=int, default=200, help="trials in all (200)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds: list[tuple[int, Place, bool]] = [
        (ranks, place, background)
        for ranks in (1, 2)
        for place in ("replaced", "rotated")
        for background in (False, True)
    ]
    print("| ranks | place | saved | killed | committed saves | beside the checkpoints, after kills | lost |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    failed = False
    for ranks, place, background in kinds:
        with tempfile.TemporaryDirectory() as folder:
            report = kill_while_saving(
                Path(folder),
                -(-options.kills // len(kinds)),
                ranks=ranks,
                place=place,
                seed=options.seed,
                background=background,
            )
            if report.lost:  # to be looked at
                shutil.copytree(folder, f"{folder}-lost")
                print(*report.lost, f"{folder}-lost", sep="\n")
                failed = True
        seen = ", ".join(f"{kind} {number}" for kind, number in sorted(report.during.items()))
        how = "in the background" if background else "waiting"
        print(
            f"| {ranks} | {place} | {how} | {report.kills} | {report.saves} | {seen} | {len(report.lost)} |"
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
