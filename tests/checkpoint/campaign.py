"""Kill a program while it saves, over and over, and check each time whether anything was lost.

``python -m tests.checkpoint.campaign`` does it 240 times and prints a table. A trial is a program of one to
four ranks that saves one state after the other, to one directory or to a new one each time with the older
ones removed. The state is the same on all ranks, or a model and its AdamW that are sharded, in stages of a
pipeline, or both, and train on while they are saved in the background. The program is killed (SIGKILL), with
all its processes or one rank alone: either some time into a save, or just before one of the changes that a
rank makes to the disk, so that short phases are hit as well as long ones. The remaining ranks must raise an
error within seconds. Then the newest checkpoint must load, be bit-equal to the state of its step, and be no
older than the last step that was reported as committed; and reading must not change the directory. The next
trial continues in the same directory, with whatever the killed one left behind. With ``--s3``, programs save
to an object store on this machine, and are killed by the clock.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import statistics
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn, cast, get_args

import torch
from torch import nn

import accelfn as af
from accelfn.checkpoint import Keep
from accelfn.context import Context
from accelfn.errors import NoCheckpointError
from accelfn.storage.address import as_path, is_address
from accelfn.storage.disk import REAL_DISK, Status, walk
from accelfn.storage.object_store import disk_at, open_binary
from accelfn.testing import processes, run_ranks
from accelfn.tree import is_dtensor, local_of
from tests.checkpoint.layouts import differing, flat
from tests.checkpoint.watched_disk import CHANGES, installed, watched
from tests.parallel.layouts import LAYOUTS, Layout
from tests.storage.s3 import s3_server

Place = Literal["replaced", "rotated"]
Killed = Literal["program", "rank"]
State = Literal["whole", "sharded", "stages", "sharded stages"]

# By what is on the disk after a kill.
PHASES = (
    "no trace",  # between saves, or the rank that was left has cleaned up
    "tensors half written",
    "all written, manifest not swapped",
    "swapped, old files still there",
    "older one half removed",
)
# Of states that are a model and its optimizer.
_LAYOUTS: Mapping[State, Layout] = MappingProxyType(
    {"sharded": LAYOUTS["fsdp2"], "stages": LAYOUTS["pp2"], "sharded stages": LAYOUTS["pp2xfsdp2"]}
)
_PATIENCE_S = 30.0
_LAST = "last"


class _Message(NamedTuple):
    """A message of a rank to the campaign, through a pipe."""

    kind: str  # b: it begins; c: a step is committed; k: it kills; e: it got an error
    rank: int
    number: int  # of the process, or the step
    time_s: float

    def sent(self, writer: int) -> None:
        os.write(writer, _MESSAGE.pack(self.kind.encode(), *self[1:]))


_MESSAGE = struct.Struct("<cqqd")


class Program(NamedTuple):
    """A program that saves, and its end.

    Attributes:
        ranks: Of the program.
        state: What is saved: a state that is the same on all ranks, or a model and its optimizer, of which
            each has a part.
        killed: What is killed: the program with all its ranks, or one of its ranks.
        place: Whether each save replaces the one before, or has a directory of its own.
        background: Whether it saves in the background.
    """

    ranks: int
    state: State = "whole"
    killed: Killed = "program"
    place: Place = "replaced"
    background: bool = False


class _Trial(NamedTuple):
    """One program and its end."""

    program: Program
    first: int  # step
    victim: int | None  # rank; None for all of them
    saves: int  # that are awaited before it is killed
    change: int | None  # the rank kills just before this change to the disk after them; None: by the clock
    part: float  # of the time that a save takes, for the clock
    watching: int  # the rank whose changes are counted


@dataclass
class Report:
    """The results of a campaign."""

    kills: int = 0
    saves: int = 0  # that were reported as committed
    phases: Counter[str] = field(default_factory=Counter[str])
    lost: list[str] = field(default_factory=list[str])  # must stay empty
    told_after_s: list[float] = field(default_factory=list[float])  # until remaining ranks raised


def state_of_step(step: int) -> dict[str, torch.Tensor]:
    """Return a state that differs in every tensor from that of another step: 2.4 MB or 24 kB."""
    generator = torch.Generator().manual_seed(step)
    size = 200_000 if step % 2 else 2_000
    state = {str(number): torch.randn(size, generator=generator) for number in range(3)}
    state["half"] = torch.randn(1001, generator=generator).bfloat16()
    return {**state, "count": torch.tensor(step)}


def model_of_step(step: int) -> dict[str, torch.Tensor]:
    """Return the state of a model and its AdamW: 2.2 MB, by parameter and moment."""
    generator = torch.Generator().manual_seed(step)
    state: dict[str, torch.Tensor] = {}
    for name, value in _model("meta").named_parameters():
        for place in (f"model/{name}", f"optimizer/{name}/exp_avg", f"optimizer/{name}/exp_avg_sq"):
            state[place] = torch.rand(value.shape, generator=generator)
        state[f"optimizer/{name}/step"] = torch.tensor(float(step))
    return state


def _model(device: str = "cpu") -> nn.Module:
    return nn.Sequential(nn.Linear(300, 300, device=device), nn.Linear(300, 300, device=device))


def kill_while_saving(
    folder: str | Path, kills: int, program: Program, seed: int = 0, changes: Sequence[int] = ()
) -> Report:
    """Run trials one after the other in one directory.

    Args:
        folder: Of the checkpoints, or an address.
        kills: Trials; every other one is killed by the clock, and in an object store all are.
        program: What is killed.
        seed: Of the moments at which programs are killed.
        changes: The changes of the main rank to the disk at which the trials are killed, one after the other,
            instead of at random.
    """
    folder = as_path(folder)
    chance = random.Random(seed)
    report = Report()
    times = [0.05]  # seconds that saves took
    step = 0
    for number in range(kills):
        watching = 0 if changes else chance.randrange(program.ranks)
        # Of a save, the main rank makes about 14 changes to the disk, any other one 3 to 6.
        by_change = number % 2 and not is_address(folder)
        change = chance.randrange(16 if watching == 0 else 5) if by_change else None
        trial = _Trial(
            program=program,
            first=step,
            victim=watching if program.killed == "rank" else None,
            saves=chance.randrange(3),
            change=changes[number % len(changes)] if changes else change,
            part=chance.uniform(0.0, 1.1),
            watching=watching,
        )
        left = _unnamed(folder)
        committed, seconds = _run_and_kill(folder, trial, times)
        report.kills += 1
        report.saves += len(committed)
        report.phases[_phase(folder, left)] += 1
        if trial.victim is not None:
            if seconds is None:
                report.lost.append(f"trial {number}: not all remaining ranks raised ({trial})")
                return report
            report.told_after_s.append(seconds)
        acknowledged = max([*committed, step - 1])
        there = listing(folder)
        found = _newest(folder, acknowledged, program)
        if listing(folder) != there:
            found = "reading has changed the directory"
        if isinstance(found, str):
            report.lost.append(f"trial {number}: {found} ({trial})")
            return report
        step = found + 1
    return report


def _phase(folder: Path, left: Mapping[str, Status]) -> str:
    """Return where the save was that was killed, beside what was ``left`` by earlier ones."""
    there = listing(folder)
    unnamed = {name: one for name, one in _unnamed(folder).items() if name not in left}
    steps = sorted({name.partition("/")[0] for name in there}, key=_number)
    return PHASES[max((_phase_of(step, there, unnamed, step == steps[-1]) for step in steps), default=0)]


def _number(name: str) -> int:
    return 0 if name == _LAST else int(name.rpartition("-")[2])


def _phase_of(step: str, there: Mapping[str, Status], unnamed: Mapping[str, Status], is_newest: bool) -> int:
    manifest = there.get(f"{step}/manifest.json")
    files = {name: one for name, one in unnamed.items() if name.startswith(f"{step}/")}
    if manifest is None and not is_newest:
        return 4 if files else 0
    if any(name.startswith(f"{step}/manifest-") for name in files):
        return 2
    if any(manifest is None or one.modified_s > manifest.modified_s for one in files.values()):
        return 1
    return 3 if files else 0


def _unnamed(folder: Path) -> dict[str, Status]:
    """Return the files that no manifest names, by path."""
    there = listing(folder)
    named: set[str] = set()
    for manifest in [name for name in there if name.endswith("/manifest.json")]:
        with open_binary(folder / manifest) as file:
            files: list[str] = json.loads(file.read().partition(b"\n")[0])["files"]
        named |= {manifest, *(manifest.replace("manifest.json", name) for name in files)}
    return {name: one for name, one in there.items() if one.kind == "file" and name not in named}


def listing(folder: Path) -> dict[str, Status]:
    """Return what is in a directory by path, and whether anybody has touched it."""
    try:
        return dict(walk(disk_at(folder), str(folder)))
    except FileNotFoundError:  # nothing was saved to a store yet
        return {}


def _newest(folder: Path, acknowledged: int, program: Program) -> int | str:
    """Return the step of the newest checkpoint, or what is wrong with it."""
    try:
        found = cast(
            "dict[str, Any]", af.load_tree(folder / _LAST if program.place == "replaced" else folder)
        )
    except Exception as error:  # noqa: BLE001 -- any is a finding
        is_none_yet = acknowledged < 0 and isinstance(error, NoCheckpointError)
        return -1 if is_none_yet else f"step {acknowledged} was committed, and now: {error!r}"
    step = found["step"]
    if step < acknowledged:
        return f"step {acknowledged} was committed, and step {step} is the newest"
    is_whole = program.state == "whole"
    saved = state_of_step(step) if is_whole else model_of_step(step)
    is_same = not differing(found["model"] if is_whole else flat(found), saved)
    return step if is_same else f"step {step} isn't what was saved"


# --- the campaign's side -------------------------------------------------------------------------


def _run_and_kill(folder: Path, trial: _Trial, times: list[float]) -> tuple[list[int], float | None]:
    """Fork a program and have it killed.

    Returns:
        The steps that it reported as committed; and after how many seconds all remaining ranks had raised
        an error, None where one didn't.
    """
    reader, writer = os.pipe()

    def program() -> None:
        os.close(reader)
        os.setsid()
        _be_program(folder, trial, writer)

    child = forked(program)
    os.close(writer)
    committed: list[int] = []
    pids: dict[int, int] = {}
    errors: dict[int, float] = {}
    last_s = killed_s = None
    try:
        while (message := _receive(reader)) is not None:
            if message.kind == "b":
                pids[message.rank] = message.number
            elif message.kind == "c":
                committed.append(message.number)
                if last_s is not None and killed_s is None:
                    times.append(message.time_s - last_s)
                last_s = message.time_s
            elif message.kind == "k":
                killed_s = message.time_s
            elif killed_s is not None:
                errors[message.rank] = message.time_s
            if (
                trial.change is None
                and killed_s is None
                and (len(pids), len(committed)) == (trial.program.ranks, trial.saves)
            ):
                time.sleep(trial.part * statistics.median(times[-9:]))
                killed_s = time.monotonic()
                _kill(child if trial.victim is None else pids[trial.victim], trial)
    finally:
        os.killpg(child, signal.SIGKILL)  # not yet waited for, so the number is still its own
        os.waitpid(child, 0)
        os.close(reader)
    if killed_s is None or len(errors) < trial.program.ranks - 1:
        return committed, None
    return committed, max([*errors.values(), killed_s]) - killed_s


def forked(act: Callable[[], object]) -> int:
    """Let a fork of this process do something, whatever threads this one has: the fork uses none of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of it
        child = os.fork()
    if child == 0:  # nothing of the parent's may run here, so it ends without unwinding
        try:
            torch.set_num_threads(1)  # torch's own threads weren't forked
            act()
        finally:
            os._exit(1)
    return child


def kill_at_its_last_step(write: Callable[[], object]) -> None:
    """Run a program that writes something, and kill it where it first renames a file."""

    def die(*paths: object) -> NoReturn:
        os._exit(9)

    def program() -> None:
        with installed(replace(REAL_DISK, rename=die)):
            write()

    assert os.waitstatus_to_exitcode(os.waitpid(forked(program), 0)[1]) == 9


def _receive(reader: int) -> _Message | None:
    """Receive a message of the program; None when all its processes have ended."""
    ready, _, _ = select.select([reader], [], [], _PATIENCE_S)
    content = os.read(reader, _MESSAGE.size) if ready else b""
    if len(content) != _MESSAGE.size:
        return None
    kind, rank, number, time_s = _MESSAGE.unpack(content)
    return _Message(kind.decode(), rank, number, time_s)


def _kill(pid: int, trial: _Trial) -> None:
    if trial.victim is None:
        os.killpg(pid, signal.SIGKILL)
    else:
        os.kill(pid, signal.SIGKILL)


# --- the program's side --------------------------------------------------------------------------


def _be_program(folder: Path, trial: _Trial, writer: int) -> None:
    program = os.getpid()
    setattr(processes, "_GRACE_S", _PATIENCE_S)  # noqa: B010 -- it is this program's own copy

    def be_rank(ctx: Context) -> None:
        run = None if trial.program.state == "whole" else _Run(ctx)
        if is_address(folder):
            listing(folder)  # so that the client is connected
        _Message("b", ctx.rank, os.getpid(), time.monotonic()).sent(writer)
        saves = changes = 0

        def watch(kind: str, path: str) -> None:
            nonlocal changes
            del path
            if saves < trial.saves or kind not in CHANGES:
                return
            if changes == trial.change:
                _Message("k", ctx.rank, 0, time.monotonic()).sent(writer)
                _kill(program if trial.victim is None else os.getpid(), trial)
                _wait_for_the_end()
            changes += 1

        watches = trial.change is not None and ctx.rank == trial.watching
        with installed(watched(watch)) if watches else nullcontext():
            for step in range(trial.first, trial.first + 1000):
                _save(ctx, folder, trial, step, run)
                saves += 1
                if ctx.is_main_process:
                    _Message("c", 0, step, time.monotonic()).sent(writer)

    def report_errors(ctx: Context) -> None:
        try:
            be_rank(ctx)
        except Exception:
            _Message("e", ctx.rank, 0, time.monotonic()).sent(writer)
            raise

    if trial.program.ranks == 1:
        report_errors(Context())
    else:
        mesh = None if trial.program.state == "whole" else _LAYOUTS[trial.program.state].config()
        run_ranks(report_errors, trial.program.ranks, on="processes", parallelism_config=mesh)


def _wait_for_the_end() -> NoReturn:
    while True:
        time.sleep(1.0)


def _mean(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean()


class _Run:
    """A model and its AdamW, of which each rank of a program has a part."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        model = _model()
        self.model, self.optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters()))
        self.train()  # which makes the moments

    def train(self) -> None:
        """Step once."""
        scaler = af.init_scaler(self.ctx)
        for batch, micro in af.microbatches(self.ctx, [torch.ones(2, 300)]):
            scaler, _ = af.forward_backward(self.ctx, self.model, _mean, batch, scaler, micro)
            scaler = af.optimizer_step(self.ctx, self.optimizer, scaler)

    def be_at(self, step: int) -> dict[str, Any]:
        """Set the state of a step, and return it for saving."""
        from torch.distributed.tensor import distribute_tensor

        whole = model_of_step(step)
        for name, parameter in self.model.named_parameters():
            state: dict[str, Any] = self.optimizer.state[parameter]
            places = {f"optimizer/{name}/{key}": value for key, value in state.items()}
            for place, own in {f"model/{name}": parameter.detach(), **places}.items():
                target, part = cast("Any", own), whole[place]
                if is_dtensor(target):
                    part = distribute_tensor(part, target.device_mesh, target.placements, src_data_rank=None)
                local_of(target).copy_(local_of(part))
        return {"model": self.model, "optimizer": self.optimizer, "step": step}


def _save(ctx: Context, folder: Path, trial: _Trial, step: int, run: _Run | None) -> None:
    at = folder / (_LAST if trial.program.place == "replaced" else f"step-{step}")
    keep = None if trial.program.place == "replaced" else Keep(last=2)
    state = {"model": state_of_step(step), "step": step} if run is None else run.be_at(step)
    if not trial.program.background:
        af.save_state(ctx, at, state, step=step, keep=keep)
        return
    handle = af.save_state(ctx, at, state, True, step=step, keep=keep)
    while True:  # the training goes on meanwhile, in which ranks meet
        if run is not None:
            run.train()
        done = af.reduce(ctx, torch.tensor(int(handle.done())), "min")
        if done.item():
            break
    handle.result()


# --- the command ---------------------------------------------------------------------------------


def main() -> None:
    """Run a campaign, print its table, and fail where anything was lost or a phase was never hit."""
    parser = argparse.ArgumentParser(description="Kill programs while they save, and look what is lost.")
    parser.add_argument("--kills", type=int, default=240, help="trials in all (240)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--state", choices=get_args(State), help="what is saved (all)")
    parser.add_argument("--s3", action="store_true", help="save to a server of S3 that moto provides")
    options = parser.parse_args()
    with s3_server() if options.s3 else nullcontext() as server:
        _run(options, None if server is None else server.address)


def _run(options: argparse.Namespace, address: str | None) -> None:
    torch.set_num_threads(1)
    kinds: list[tuple[int, Killed, State]] = [
        *((1, "program", "whole"), (2, "program", "whole"), (2, "rank", "whole")),
        *((one.size, killed, state) for state, one in _LAYOUTS.items() for killed in get_args(Killed)),
    ]
    programs = [
        Program(ranks, state, killed, place, background)
        for ranks, killed, state in kinds
        for place in get_args(Place)
        for background in (False, True)
        if options.state in (None, state)
    ]
    headings = ("ranks", "state", "killed", "place", "saved", "kills", "committed saves", *PHASES, "lost")
    print(f"| {' | '.join(headings)} |", f"|{' --- |' * len(headings)}", sep="\n")
    sums: Counter[str] = Counter()
    seconds: list[float] = []
    for number, program in enumerate(programs):
        with tempfile.TemporaryDirectory() as folder:
            kills = -(-options.kills // len(programs))
            place = folder if address is None else f"{address}/{number}"
            report = kill_while_saving(place, kills, program, options.seed + number)
            if report.lost and address is None:  # to be looked at
                shutil.copytree(folder, f"{folder}-lost")
                print(*report.lost, f"{folder}-lost", sep="\n", file=sys.stderr)
        row = (
            *program[:2],
            *("all" if program.killed == "program" else "one rank", program.place),
            *("in the background" if program.background else "waiting", report.kills, report.saves),
            *(report.phases[phase] for phase in PHASES),
            len(report.lost),
        )
        print(f"| {' | '.join(map(str, row))} |", flush=True)
        sums.update(report.phases)
        sums.update({"kills": report.kills, "saves": report.saves, "lost": len(report.lost)})
        seconds += report.told_after_s
    total = (sums["kills"], sums["saves"], *(sums[phase] for phase in PHASES), sums["lost"])
    print(f"| all | | | | | {' | '.join(map(str, total))} |")
    if seconds:
        print(f"\nRanks that were left had raised an error after {max(seconds) * 1000:.0f} ms at the latest.")
    # In a store, the manifest appears at once.
    wanted = PHASES if address is None else (*PHASES[:2], *PHASES[3:])
    missed = [phase for phase in wanted if not sums[phase]]
    if missed:
        print(f"\nNo kill came: {', '.join(missed)}.")
    sys.exit(bool(sums["lost"] or missed))


if __name__ == "__main__":
    main()
