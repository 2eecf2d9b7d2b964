"""Elastic training: what snapshots cost, and how long the others pause when a process is killed.

``python -m tests.bench.elastic [cost] [pause] [torchft]`` prints the tables. The last one needs ``--torchft
PYTHON``: an environment with ``torchft-nightly``, ``optree`` and ``safetensors`` beside torch.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.bench.elastic_run import EVERY, Cost
from tests.bench.timing import show_table

SIZES = {"0.9 million": (128, 4), "10 million": (448, 4)}
_KINDS = {"ddp": "DDP", "fsdp2": "FSDP2"}
_LIMIT_S = 500.0  # of a busy machine
_SETTLED = EVERY + 5  # steps in a world before one of its processes is killed


class Note(NamedTuple):
    """A line of a process's diary."""

    event: str
    step: int
    time_s: float


class Pause(NamedTuple):
    """What a kill cost the survivor that took longest. Times are in seconds.

    Attributes:
        size: Number of processes before.
        pause: From its last step before the kill to its first one in the new world.
        repeated: Number of steps that were computed again.
        parts: From the kill: until its operation raised; until the new world was open; in ``make_state``;
            until the state was restored; until the first step was complete.
    """

    size: int
    pause: float
    repeated: int
    parts: tuple[float, ...]


@contextmanager
def running(*command: str, folder: Path, **variables: str) -> Generator[subprocess.Popen[bytes]]:
    """Run a command while in the block, and end it and the processes that have written their pids."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    with (folder / f"output-{os.getpid()}-{time.monotonic_ns()}").open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(done: Callable[[], bool], folder: Path, *processes: subprocess.Popen[bytes]) -> None:
    """Wait until something is so, for as long as the processes run.

    Raises:
        RuntimeError: It took too long, or one of them has ended.
    """
    end = time.monotonic() + _LIMIT_S
    while not done():
        if time.monotonic() > end or any(one.poll() is not None for one in processes):
            texts = [path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("output-*"))]
            raise RuntimeError("\n".join(texts))
        time.sleep(0.05)


def notes_of(path: Path) -> list[Note]:
    """Return the complete lines of a diary."""
    text = path.read_text() if path.exists() else ""
    return [Note(*json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def launch(num_processes: int, *arguments: str) -> list[str]:
    """Return the command of an elastic launch of the program."""
    flags = (f"--num_processes={num_processes}", "--cpu", "-m", "tests.bench.elastic_run")
    return [sys.executable, "-m", "accelfn", "launch", "--elastic", *flags, *arguments]


def cost_of(kind: str, size: tuple[int, int], rounds: int) -> Cost:
    """Measure what ``snapshot`` adds to a step on two processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = launch(2, name, kind, *map(str, size), str(rounds))
        with running(*command, folder=folder) as process:
            wait_for(lambda: (folder / "cost-0.0").exists() or process.poll() is not None, folder)
            process.wait(30)
        return Cost(*json.loads((folder / "cost-0.0").read_text()))


def pauses_of(kind: str, size: tuple[int, int], draw: random.Random) -> list[Pause]:
    """Start four processes, and kill one after the other."""
    found: list[Pause] = []
    alive = [0, 1, 2, 3]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with running(*launch(4, name, kind, *map(str, size)), folder=folder) as process:
            since = 0.0

            def diaries() -> list[list[Note]]:
                return [notes_of(folder / f"{slot}.0") for slot in alive]

            def has_settled() -> bool:
                return all(len(_steps(notes, since)) >= _SETTLED for notes in diaries())

            def goes_on() -> bool:
                return all(_steps(notes, _time_of(notes, "train", since)) for notes in diaries())

            while len(alive) > 1:
                wait_for(has_settled, folder, process)
                first, *_, last = _steps(diaries()[0], since)
                time.sleep(draw.random() * EVERY * (last.time_s - first.time_s) / (last.step - first.step))
                slot = draw.choice(alive)
                alive.remove(slot)
                since = time.monotonic()
                os.kill(int((folder / f"pid-{slot}.0").read_text()), signal.SIGKILL)
                wait_for(goes_on, folder, process)
                pauses = (_pause(notes, since, len(alive) + 1) for notes in diaries())
                found.append(max(pauses, key=lambda one: one.pause))
                since = max(_time_of(notes, "train", since) for notes in diaries())
    return found


def _steps(notes: Sequence[Note], since: float) -> list[Note]:
    return [note for note in notes if note.event == "step" and note.time_s > since]


def _time_of(notes: Sequence[Note], event: str, since: float) -> float:
    """Return when an event first happened after a time; infinity if it hasn't."""
    return min((note.time_s for note in notes if note.event == event and note.time_s > since), default=1e99)


def _pause(notes: Sequence[Note], killed: float, size: int) -> Pause:
    before = [note for note in notes if note.event == "step" and note.time_s <= killed][-1]
    events = [_time_of(notes, event, killed) for event in ("error", "make", "made", "train")]
    after = _steps(notes, events[-1])[0]
    marks = [killed, *events, after.time_s]
    lasts = [note.step for note in notes if note.event == "step" and note.time_s < events[0]]
    parts = tuple(end - start for start, end in itertools.pairwise(marks))
    return Pause(size, after.time_s - before.time_s, lasts[-1] - (after.step - 1), parts)


# --- torchft ---------------------------------------------------------------------------------------


@contextmanager
def torchft_groups(python: str, folder: Path, *arguments: str) -> Generator[list[subprocess.Popen[bytes]]]:
    """Run a lighthouse and two replica groups."""
    lighthouse, port = _free_port(), _free_port()
    command = [str(Path(python).with_name("torchft_lighthouse")), f"--bind=127.0.0.1:{lighthouse}"]
    limits = ("--min_replicas=1", "--heartbeat_timeout_ms=2000", "--join_timeout_ms=2000")
    variables = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{lighthouse}", "BENCH_PORT": str(port)}
    variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    with contextlib.ExitStack() as stack:
        stack.enter_context(running(*command, *limits, "--quorum_tick_ms=100", folder=folder))
        program = (python, "-m", "tests.bench.elastic_torchft", str(folder))
        commands = ((*program, name, *arguments) for name in "01")
        yield [stack.enter_context(running(*one, folder=folder, **variables)) for one in commands]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchft_cost(python: str, size: tuple[int, int], rounds: int) -> tuple[float, float]:
    """Measure what torchft's manager adds to a step: seconds without, and added."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with torchft_groups(python, folder, *map(str, size), str(rounds)) as groups:
            wait_for(lambda: (folder / "cost-0").exists(), folder, groups[1])
            found = json.loads((folder / "cost-0").read_text())
        return found["without"], found["added"]


def torchft_pause(python: str, size: tuple[int, int], draw: random.Random) -> Pause:
    """Kill one of two replica groups."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with torchft_groups(python, folder, *map(str, size)) as groups:
            paths = [folder / "0", folder / "1"]
            wait_for(lambda: all(len(_steps(notes_of(path), 0)) > 20 for path in paths), folder, *groups)
            time.sleep(draw.random() * 2)
            victim = draw.randrange(2)
            killed = time.monotonic()
            groups[victim].kill()
            left = paths[1 - victim]
            wait_for(lambda: len(_steps(notes_of(left), killed)) > 5, folder, groups[1 - victim])
            notes = notes_of(left)
        # A step that was complete at the time of the kill may be noted after it.
        times = [note.time_s for note in _steps(notes, 0)]
        near = [pair for pair in itertools.pairwise(times) if killed - 0.5 < pair[1]][:8]
        pause = max(end - start for start, end in near)
        discarded = sum(note.event == "discarded" and note.time_s > killed for note in notes)
        return Pause(2, pause, discarded, ())


# --- the tables ------------------------------------------------------------------------------------


def print_costs(rounds: int) -> None:
    """Print shares of a step: medians, and the quartiles of what can be told from whole loops."""
    rows: list[Sequence[str]] = []
    for kind, shown in _KINDS.items():
        for name, size in SIZES.items():
            cost = cost_of(kind, size, max(2, rounds * 192 // size[0]))  # larger models take longer
            step = statistics.median(cost.steps)
            low, added, high = (f"{100 * one / step:+.1f}" for one in statistics.quantiles(cost.added, n=4))
            within = f"{100 * statistics.median(cost.within) / step:.2f} %"
            cpu = f"{100 * cost.snapshot_cpu / EVERY / cost.step_cpu:.2f} %"
            cells = (f"{step * 1e3:.0f}", within, cpu, f"{added} % ({low}, {high})")
            rows.append((f"{shown}, {name} parameters", *cells))
    columns = ("model", ">step, ms", ">in `snapshot`", ">processor time", ">whole loops (quartiles)")
    show_table("elastic-cost", columns, rows)


def print_pauses(rounds: int) -> None:
    draw = random.Random(1)
    rows: list[Sequence[str]] = []
    for kind, shown in _KINDS.items():
        pauses = [one for _ in range(rounds) for one in pauses_of(kind, SIZES["0.9 million"], draw)]
        for size in (2, 3, 4):
            some = [one for one in pauses if one.size == size]
            parts = [statistics.median(part) for part in zip(*(one.parts for one in some), strict=True)]
            rows.append((f"{shown}, 1 of {size}", *_of_pauses(some), *(f"{part:.2f}" for part in parts)))
    columns = (
        *("killed", ">pause, s: median (least, most)", ">steps repeated"),
        *(">error", ">new world", ">state", ">restored", ">step"),
    )
    show_table("elastic-pause", columns, rows)


def _of_pauses(pauses: Sequence[Pause]) -> tuple[str, str]:
    times = [one.pause for one in pauses]
    repeated = [one.repeated for one in pauses]
    spread = f"{statistics.median(times):.2f} ({min(times):.2f}, {max(times):.2f})"
    return spread, f"{statistics.mean(repeated):.1f} (at most {max(repeated)})"


def print_torchft(python: str, rounds: int) -> None:
    size, draw = SIZES["0.9 million"], random.Random(1)
    pauses = [torchft_pause(python, size, draw) for _ in range(rounds)]
    without, added = torchft_cost(python, size, rounds)
    cells = (*_of_pauses(pauses), f"{without * 1e3:.0f}", f"{100 * added / without:+.1f} %")
    columns = (
        *("torchft", ">pause, s: median (least, most)", ">steps discarded"),
        *(">a step of DDP, ms", ">with the manager"),
    )
    show_table("elastic-torchft", columns, [("1 of 2 replica groups", *cells)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tables", nargs="*", help="cost, pause or torchft; all of them by default")
    parser.add_argument("--torchft", default="", help="a Python interpreter that has torchft")
    parser.add_argument("--rounds", type=int, default=6)
    given = parser.parse_args()
    tables = given.tables or ["cost", "pause", *(["torchft"] if given.torchft else [])]
    if "cost" in tables:
        print_costs(given.rounds)
    if "pause" in tables:
        print_pauses(max(1, given.rounds // 2))
    if "torchft" in tables:
        print_torchft(given.torchft, given.rounds)


if __name__ == "__main__":
    main()
