"""A campaign: many elastic runs, in each of which ranks are killed, stopped or fail at random instants.

``python -m tests.elastic.campaign --runs 200 --seed 7`` prints a table. Each run must end with the right
weights, or with an error by name; it must not hang. In exact mode the right weights have the same bits.
Processes are forked from a clean one, so that a run takes seconds; ``--launcher`` starts them with accelfn
launch instead. What hangs prints where each thread is.
"""

import argparse
import faulthandler
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Literal, NamedTuple, get_args

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from accelfn.context import store_board
from accelfn.context.failure import Loss, announce_loss
from tests.elastic.program import Faults, Program

STEPS = 40
# Those who connect to a process that is killed at that moment may wait for it for 75 s.
_LIMIT_S = 200.0
_HEARTBEAT_S = 3.0
_GRACE_S = 5.0  # for processes that run when the training is over
PROGRAM = Path(__file__).with_name("program.py")
# A process that has run other tests has threads, whose locks a fork of it would inherit.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["accelfn", "tests.elastic.program"])

End = Literal["right", "error", "wrong", "hung"]


class Plan(NamedTuple):
    """A run: its world, and its faults.

    Attributes:
        kind: Of the program.
        size: Number of processes.
        restarts: Replacements of each.
        steps: Of the program.
        faults: The second after the training has started, the slot, and what happens. Before 0, it is after
            the processes have started, which is while they form their first world.
        at_steps: Faults that a process makes itself, as of :class:`~tests.elastic.program.Program`.
    """

    kind: str
    size: int
    restarts: int
    steps: int
    faults: tuple[tuple[float, int, str], ...] = ()
    at_steps: Faults = frozenset()


class Outcome(NamedTuple):
    """How a run ended.

    Attributes:
        end: Whether that is right.
        text: What it printed.
        seconds: Its length.
        pauses: Of each new world, in seconds, as a survivor reports them.
        hits: What happened to which process.
        lost: Steps that had to be repeated in each new world.
    """

    end: End
    text: str
    seconds: float
    pauses: tuple[float, ...]
    hits: tuple[str, ...]
    lost: tuple[int, ...]


def plan_run(seed: int) -> Plan:
    """Draw a run. Pure."""
    draw = random.Random(seed)
    size = draw.choice((2, 3, 4))
    faults = [
        (draw.uniform(-0.5, 2.0), draw.randrange(size), draw.choice(("kill", "kill", "kill", "stop")))
        for _ in range(draw.randint(1, 3))
    ]
    return Plan(draw.choice(("ddp", "ddp", "fsdp2")), size, draw.randint(0, 2), STEPS, tuple(sorted(faults)))


def reference(kind: str, steps: int) -> list[float]:
    """Return the weights of a run that nobody disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        process = FORKS.Process(target=Program(Path(folder), kind, steps, 0.0).run)
        process.start()
        process.join()
        return json.loads((Path(folder) / "result-0.0").read_text())


def run(plan: Plan, weights: list[float], start: "Callable[[Plan, Path], Launch]") -> Outcome:
    """Run a plan, and judge how it ends."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="accelfn-elastic-") as name:
        folder = Path(name)
        launch = start(plan, folder)
        faults, hits = [*plan.faults], list[str]()
        since: dict[str, float] = {}
        while launch.poll() is None and time.monotonic() < began + _LIMIT_S:
            for what, count in (("pid", plan.size), ("training", 1)):
                if what not in since and len([*folder.glob(f"{what}-*")]) >= count:
                    since[what] = time.monotonic()
            while faults:
                start_s = since.get("pid" if faults[0][0] < 0 else "training", math.inf)
                if time.monotonic() < start_s + abs(faults[0][0]):
                    break
                hits += _strike(folder, *faults.pop(0)[1:])
            time.sleep(0.01)
        status = launch.poll()
        text = launch.stop()
        seconds = time.monotonic() - began
        results = [json.loads(path.read_text()) for path in folder.glob("result-*")]
        pauses = tuple(
            float(line.partition(" after ")[2].partition(" s")[0])
            for line in text.splitlines()
            if " on from " in line
        )
        begun = [line.split() for path in folder.glob("training-*") for line in path.read_text().splitlines()]
        lost = {(int(first), int(reached)) for reached, first in begun if reached != first}
        steps = tuple(reached - first for first, reached in sorted(lost))
        end = _judge(plan, status, results, text, weights)
        return Outcome(end, text, seconds, pauses, tuple(hits), steps)


def _judge(
    plan: Plan, status: int | None, results: list[list[float]], text: str, weights: list[float]
) -> End:
    if status is None:
        return "hung"
    if not results:
        return "error" if "accelfn.errors." in text or " was killed by " in text else "wrong"
    tolerance = 0.0 if plan.kind == "ddp" else 1e-4  # that is exact
    expected = torch.tensor(weights)
    is_right = [torch.allclose(torch.tensor(found), expected, tolerance, tolerance) for found in results]
    return "right" if all(is_right) else "wrong"


def _strike(folder: Path, slot: int, what: str) -> list[str]:
    """Kill or stop the newest process of a slot; one that doesn't train yet is killed in any case."""
    paths = sorted(folder.glob(f"pid-{slot}.*"), key=lambda path: int(path.name.rpartition(".")[2]))
    name = paths[-1].name.removeprefix("pid-")
    if not (folder / f"training-{name}").exists():
        what = "kill"  # the launcher listens for heartbeats from the first one on
    try:
        os.kill(int(paths[-1].read_text()), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    except (ValueError, ProcessLookupError):
        return []
    return [f"{what} {name}"]


# --- ways to start processes -----------------------------------------------------------------------


class Launch(NamedTuple):
    """A run in progress.

    Attributes:
        poll: Returns the status when it has ended.
        stop: Ends it, and returns what it has printed.
    """

    poll: Callable[[], int | None]
    stop: Callable[[], str]


def start_command(plan: Plan, folder: Path) -> Launch:
    """Start the processes with ``accelfn launch``."""
    flags = [f"--num_processes={plan.size}", f"--max_restarts={plan.restarts}"]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "accelfn", "launch", "--elastic", *flags),
                *(f"--heartbeat_timeout={_HEARTBEAT_S:g}", "--cpu", str(PROGRAM)),
                *(str(folder), plan.kind, str(plan.steps), "0.02"),
                *(":".join(map(str, fault)) for fault in plan.at_steps),
            ],
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])},
        )

    def stop() -> str:
        if process.poll() is None:
            process.kill()
        process.wait()
        return (folder / "output").read_text()

    return Launch(process.poll, stop)


def start_forks(plan: Plan, folder: Path) -> Launch:
    """Fork a process that forks the processes of the run, and replaces them as ``accelfn launch`` does."""
    process = FORKS.Process(target=_supervise, args=(plan, folder))
    process.start()

    def stop() -> str:
        process.terminate()
        process.join()
        return (folder / "output").read_text()

    return Launch(lambda: process.exitcode, stop)


def _supervise(plan: Plan, folder: Path) -> None:
    """Fork the processes, replace those that die, and kill those that are silent."""
    target = os.open(folder / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)
    faulthandler.register(signal.SIGUSR1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start(slot: int, attempt: int) -> int:
        program = Program(folder, plan.kind, plan.steps, faults=plan.at_steps, me=f"{slot}.{attempt}")
        names = {"STORE": f"127.0.0.1:{port}", "SIZE": str(plan.size), "SLOT": str(slot)}
        variables = {f"ACCELFN_ELASTIC_{name}": value for name, value in names.items()}
        places = {"LOCAL_RANK": str(slot), "GROUP_RANK": "0", "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        return _fork(program.run, {**variables, **places})

    pids = {start(slot, 0): (slot, 0) for slot in range(plan.size)}

    def end(number: int, frame: FrameType | None) -> None:
        for number in (signal.SIGUSR1, signal.SIGKILL):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(1.0 if number == signal.SIGUSR1 else 0.0)
        sys.stdout.flush()
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    store = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=60), wait_for_workers=False)
    board = store_board(PrefixStore("accelfn/elastic", store))
    beats: dict[int, tuple[str | None, float]] = {}
    over_s = 0.0
    while pids:
        time.sleep(0.03)
        found, status = os.waitpid(-1, os.WNOHANG)
        for pid, (slot, attempt) in pids.items():
            beat = board.read(f"beat/{slot}.{attempt}")
            known, since = beats.get(pid, (None, time.monotonic()))
            beats[pid] = (beat, time.monotonic()) if beat != known else (known, since)
            over_s = over_s or (time.monotonic() if board.read("over") is not None else 0.0)
            is_late = over_s and time.monotonic() > over_s + _GRACE_S
            if is_late and pid != found:
                os.kill(pid, signal.SIGKILL)
            if beat is not None and time.monotonic() > beats[pid][1] + _HEARTBEAT_S and pid != found:
                os.kill(pid, signal.SIGUSR1)
                time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
        if not found:
            continue
        slot, attempt = pids.pop(found)
        code = os.waitstatus_to_exitcode(status)
        is_over = board.read("over") is not None
        again = code != 0 and attempt < plan.restarts and not is_over
        state = "done" if code == 0 else "restarting" if again else "failed"
        board.post(f"slot/{slot}", json.dumps({"state": state}))
        if code:
            why = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
            announce_loss(board, Loss(f"{slot}.{attempt}", why))
            print(f"process {slot}.{attempt} {why}")
        if again:
            sys.stdout.flush()
            pids[start(slot, attempt + 1)] = (slot, attempt + 1)
    is_over = board.read("over") is not None
    del board, store
    raise SystemExit(0 if is_over else 1)


def _fork(work: Callable[[], None], variables: Mapping[str, str]) -> int:
    """Run ``work`` in a new process, and return its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(variables)
        work()
        status = 0
    except SystemExit as stop:
        status = int(stop.code or 0)
    except BaseException:  # noqa: BLE001 -- printed as at the end of a program
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# --- the table -------------------------------------------------------------------------------------


def main() -> int:
    """Run the campaign, and print a line for each failure and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--launcher", action="store_true")
    given = parser.parse_args()
    start = start_command if given.launcher else start_forks
    weights = {kind: reference(kind, STEPS) for kind in ("ddp", "fsdp2")}
    rows: Counter[tuple[str, int, str]] = Counter()
    hits: Counter[str] = Counter()
    pauses: list[float] = []
    lost: list[int] = []
    print(
        "| seed | model | processes | replacements | what happened | pauses (s) | steps repeated | weights |"
    )
    print("| --: | --- | --: | --: | --- | --- | --- | --- |")
    for number in range(given.runs):
        seed = given.seed * 100_000 + number
        plan = plan_run(seed)
        outcome = run(plan, weights[plan.kind], start)
        rows[plan.kind, plan.size, outcome.end] += 1
        hits.update(hit.partition(" ")[0] for hit in outcome.hits)
        pauses += outcome.pauses
        lost += outcome.lost
        same = "the same bits" if plan.kind == "ddp" else "right"
        ends = {"right": same, "error": "error by name"}
        cells = (
            *(seed, plan.kind, plan.size, plan.restarts, ", ".join(outcome.hits)),
            *(", ".join(map(str, numbers)) for numbers in (outcome.pauses, outcome.lost)),
            ends.get(outcome.end, outcome.end.upper()),
        )
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if outcome.end not in ends:
            print(outcome.text[-4000:], flush=True)
    print("\n| kind | processes | right weights | error by name | wrong | hung |")
    print("| --- | --: | --: | --: | --: | --: |")
    for kind, size in sorted({(kind, size) for kind, size, _ in rows}):
        cells = " | ".join(str(rows[kind, size, end]) for end in get_args(End))
        print(f"| {kind} | {size} | {cells} |")
    pauses.sort()
    if pauses:
        middle, most = pauses[len(pauses) // 2], pauses[int(len(pauses) * 0.95)]
        print(
            f"\n{hits['kill']} processes killed, {hits['stop']} stopped; {len(pauses)} new worlds, after "
            f"{middle:.1f} s (median) and {most:.1f} s (95 %); at most {max(lost, default=0)} steps repeated"
        )
    return int(any(end in ("wrong", "hung") for _, _, end in rows))


if __name__ == "__main__":
    raise SystemExit(main())
