"""Run programs: by accelfn in a world of ranks, and by the reference in this process."""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import itertools
import linecache
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.config import Guard
from accelfn.context import Context, ContextOptions, Mesh, configure, with_mesh
from accelfn.errors import AccelfnError, CollectiveTimeoutError, MissingRankError, RemoteRankError
from accelfn.testing.programs import parts, plain
from accelfn.testing.programs.grammar import Program
from accelfn.testing.programs.habits import resumed
from accelfn.testing.programs.layouts import context_arguments, world_arguments
from accelfn.testing.ranks import run_ranks

# How long ranks wait for each other in an operation; how much longer a program may take, after which its
# ranks report where they are, and end; and how much later their world's process ends.
TIMEOUT_S = 12.0
_PROGRAM_S = 12.0
_GRACE_S = 15.0
# Lines of a world's output that are reported with a rank that died.
_LINES = 30
_LINES_BEFORE = 5  # a signal, such as the message of the C library that raised it
IMPORTS = """\
import contextlib, copy, dataclasses, tempfile
from typing import Any
import torch
import accelfn as af
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, default_collate
from accelfn.testing import run_ranks
"""


class State(NamedTuple):
    """Parameters and buffers of a model on one rank, by name."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


class Value(NamedTuple):
    """What was logged under a name: a tensor, and the weight of a sum."""

    tensor: torch.Tensor
    weight: float | None


class Failure(NamedTuple):
    """An error of one rank.

    Attributes:
        kind: Name of its class.
        text: Its message.
        is_named: Whether accelfn raised it, and it is about the program.
        is_lost: Whether it says that another rank failed, died or didn't come.
        where: File and line that raised it.
    """

    kind: str
    text: str
    is_named: bool
    is_lost: bool
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """What one rank logged.

    Attributes:
        dp: Its place among the ranks with different rows.
        seq: Its place among the ranks that share sequences.
        values: By name, in order.
        states: Of models, by name.
    """

    dp: int = 0
    seq: int = 0
    values: Mapping[str, Sequence[Value]]
    states: Mapping[str, State]


class Log:
    """The function ``log(name, value)`` of a program."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._values: dict[str, list[Value]] = {}
        self._states: dict[str, State] = {}

    def __call__(self, name: str, value: Any) -> None:
        """Log a tensor, a loss with its weight, or the state of a model (a module or a dict of tensors)."""
        if isinstance(value, nn.Module):
            tensors = dict(value.named_parameters(remove_duplicate=False))
            self._states[name] = State(_by_name(tensors), _by_name(dict(value.named_buffers())))
        elif isinstance(value, dict):
            self._states[name] = State(_by_name(cast("dict[str, torch.Tensor]", value)), {})
        else:
            weight = getattr(value, "weight", None)
            number = value if isinstance(value, torch.Tensor) else value.value
            logged = Value(_whole(number), None if weight is None else float(_whole(torch.as_tensor(weight))))
            self._values.setdefault(name, []).append(logged)

    def read(self, ctx: Any) -> RankLog:
        """Return all that was logged on the rank of ``ctx``."""
        return RankLog(
            dp=ctx.coordinate("dp"), seq=ctx.coordinate("seq"), values=self._values, states=self._states
        )


def _by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # DistributedDataParallel's own module is in the names.
    return {name.removeprefix("module."): _whole(tensor) for name, tensor in tensors.items()}


def _whole(value: Any) -> torch.Tensor:
    tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach().to(torch.float64 if tensor.is_floating_point() else tensor.dtype).cpu().clone()


class Job(NamedTuple):
    """A program, or the part of one before or after the save that another world takes up.

    Attributes:
        program: The program.
        folder: For what it saves.
        part: 0, or 1 for the rest of a program that resumes in another world.
    """

    program: Program
    folder: str
    part: int = 0

    @property
    def layout(self) -> Program:
        """A program of the world that it runs in."""
        return self.program if self.part == 0 else resumed(self.program)


def execute(job: Job, ctx: Any, verbs: Any) -> RankLog:
    """Run a program with ``verbs`` as its ``af``, in this thread."""
    grammar, text = job.program.grammar, job.program.source()
    scope: dict[str, Any] = {"__name__": "program"}
    exec(IMPORTS + grammar.imports, scope)
    scope |= {**parts.SCOPE, **grammar.scope, "af": verbs, "FOLDER": job.folder, "PART": job.part}
    # For tracebacks, and for what reads its own source.
    linecache.cache["<program>"] = (len(text), None, text.splitlines(keepends=True), "<program>")
    exec(compile(text, "<program>", "exec"), scope)
    log = Log()
    scope["train"](ctx, log)
    return log.read(ctx)


def run_reference(program: Program, ctx: plain.Context) -> RankLog:
    """Run the reference of a program, in this process.

    Raises:
        Exception: Of the program.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # for tensors this small, more threads cost more than they compute
    try:
        return execute(Job(program.reference(), ""), ctx, plain)
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a program came to in its world.

    Attributes:
        parts: The logs of the ranks; two for a program that resumed in another world.
        failures: Errors of ranks, or of the world as a whole.
    """

    parts: tuple[tuple[RankLog, ...], ...] = ()
    failures: tuple[Failure, ...] = ()


# What a rank would otherwise import for itself.
_WARM = (
    "accelfn.accelerator",
    "accelfn.checkpoint",
    "accelfn.parallel",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental",
    "torch.distributed.pipelining",
)


def run_programs(programs: Sequence[Program], *, timeout_s: float = TIMEOUT_S) -> list[Outcome]:
    """Run programs in worlds of ranks, those of as many ranks one after the other in the same world.

    A world ends with the first program that fails; the others run in a new one. A rank that hangs or dies
    ends its world in seconds.

    Args:
        programs: Any.
        timeout_s: How long ranks wait for each other; a program may take 12 s longer in all.

    Returns:
        Their outcomes, in the same order.
    """
    for module in _WARM:
        importlib.import_module(module)
    folder = tempfile.mkdtemp(prefix="programs_")
    try:
        jobs = [Job(program, f"{folder}/{number}") for number, program in enumerate(programs)]
        first = _run_jobs(jobs, timeout_s)
        later = [job._replace(part=1) for job in jobs if job.program["resume"] and not first[job].failures]
        second = _run_jobs(later, timeout_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rest = {job._replace(part=0): outcome for job, outcome in second.items()}
    empty = Outcome()
    return [
        Outcome(
            parts=(*first[job].parts, *rest.get(job, empty).parts),
            failures=(*first[job].failures, *rest.get(job, empty).failures),
        )
        for job in jobs
    ]


def _run_jobs(jobs: Sequence[Job], timeout_s: float) -> dict[Job, Outcome]:
    def world_of(job: Job) -> tuple[int, str]:
        return job.layout.num_ranks, job.layout["world"]

    outcomes: dict[Job, Outcome] = {}
    for _, group in itertools.groupby(sorted(jobs, key=world_of), world_of):
        waiting = [*group]
        while waiting:
            done = _run_world(waiting, timeout_s)
            outcomes |= zip(waiting, done, strict=False)
            waiting = waiting[len(done) :]
    return outcomes


def _run_world(jobs: Sequence[Job], timeout_s: float) -> list[Outcome]:
    """Run jobs one after the other in one world; return the outcomes up to the first that failed."""
    layout, limit_s = jobs[0].layout, timeout_s + _PROGRAM_S
    reports = tempfile.mkdtemp(prefix="reports_")

    def report_of(number: int, rank: int) -> str:
        return f"{reports}/{number}.{rank}"

    def give_up(report: str, thread: int) -> None:
        stack = "".join(traceback.format_stack(sys._current_frames()[thread])[-8:])  # pyright: ignore[reportPrivateUsage]
        torch.save(_lost(TimeoutError, f"after {limit_s:g} s the program is at\n{stack}"), report)
        os._exit(1)

    def work(ctx: Context) -> None:
        warnings.simplefilter("ignore")
        faulthandler.enable()
        meshes: dict[str, Mesh | None] = {}  # a mesh has groups, which programs of its layout share
        for number, job in enumerate(jobs):
            timer = threading.Timer(limit_s, give_up, (report_of(number, ctx.rank), threading.get_ident()))
            timer.daemon = True
            timer.start()
            try:
                options = world_arguments(job.layout), context_arguments(job.layout)
                own = configure(ctx, cast("ContextOptions", _arguments(", ".join(filter(None, options)))))
                axes = str(job.layout.layout)
                if axes not in meshes:
                    meshes[axes] = with_mesh(own).mesh
                report: Any = execute(job, dataclasses.replace(own, mesh=meshes[axes]), _accelfn())
            except BaseException as error:
                torch.save(_failure(error), report_of(number, ctx.rank))
                raise
            finally:
                timer.cancel()
            torch.save(report, report_of(number, ctx.rank))

    def start() -> Failure | None:
        _print_to(f"{reports}/printed")
        torch.set_num_threads(1)  # as on ranks that are processes: exact mode is compared bit by bit
        try:
            run_ranks(
                work,
                layout.num_ranks,
                layout["world"],
                timeout_s=limit_s * len(jobs),
                guard=Guard(timeout=timeout_s, long_timeout=timeout_s),
            )
        except BaseException as error:  # noqa: BLE001 -- reported with the ranks' own
            return _failure(error)
        return None

    # In a process of its own: threads that hang can't be ended.
    outside = _in_a_child(start, limit_s * len(jobs) + _GRACE_S)
    outcomes: list[Outcome] = []
    for number in range(len(jobs)):
        ranks = [_read(report_of(number, rank)) for rank in range(layout.num_ranks)]
        logs = [one for one in ranks if isinstance(one, RankLog)]
        if len(logs) == len(ranks):
            outcomes.append(Outcome(parts=(tuple(logs),)))
            continue
        failures = [one for one in ranks if isinstance(one, Failure)]
        if all(one.is_lost for one in failures):  # what ended the world says who has died or hangs
            cause = outside or _lost(MissingRankError, "a rank ended without a report")
            failures.append(cause._replace(text=cause.text + _last_lines(f"{reports}/printed")))
        outcomes.append(Outcome(failures=tuple(failures)))
        break
    shutil.rmtree(reports, ignore_errors=True)
    return outcomes


def _accelfn() -> Any:
    scope: dict[str, Any] = {}
    exec(IMPORTS, scope)  # as a program has it
    return scope["af"]


def _arguments(source: str) -> dict[str, Any]:
    return eval(f"dict({source})", {"af": _accelfn()})


def _print_to(path: str) -> None:
    """Send what this process and its ranks print to a file: only that of a rank that has died is wanted."""
    sys.stdout = sys.stderr = file = open(path, "a", buffering=1)  # noqa: SIM115 -- closed at its end
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)


def _last_lines(path: str) -> str:
    """Return the end of what was printed; of a signal what Python says of it, and what came before it."""
    with open(path, errors="replace") as file:
        lines = file.read().splitlines()
    signals = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error")]
    first = signals[-1] - _LINES_BEFORE if signals else len(lines) - _LINES
    lines = lines[max(0, first) :][:_LINES]
    return "\n".join(["", *(f"  | {line}" for line in lines)]) if lines else ""


def _read(path: str) -> Any:
    try:
        return torch.load(path, weights_only=False)  # written by a child of this process
    except (OSError, EOFError, RuntimeError):
        return None


def _in_a_child(start: Any, timeout_s: float) -> Any:
    """Return what ``start`` returns in a forked process, or a failure if it hangs or dies."""
    receiver, sender = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        gc.freeze()  # this process's groups and stores have threads that aren't there
        sender.send(start())
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=work)
    collecting = gc.isenabled()
    gc.disable()
    child.start()
    if collecting:
        gc.enable()
    sender.close()
    try:
        if receiver.poll(timeout_s):
            return receiver.recv()
        return _lost(CollectiveTimeoutError, f"the ranks did not end within {timeout_s:g} s")
    except EOFError:
        child.join(5.0)
        return _lost(MissingRankError, f"the ranks' process exited with code {child.exitcode}")
    finally:
        child.kill()
        child.join()


def _lost(kind: type[Exception], text: str) -> Failure:
    return Failure(kind.__name__, text, is_named=False, is_lost=True, where="")


def _failure(error: BaseException) -> Failure:
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    is_own = last is not None and "/accelfn/" in last.filename and "/accelfn/testing/" not in last.filename
    says_operation = re.match(r"[a-zA-Z_.]+(\[\d+\])?: ", str(error)) is not None
    is_named = isinstance(error, AccelfnError) or (
        isinstance(error, (ValueError, TypeError)) and is_own and says_operation
    )
    where = "" if last is None else f"{os.path.basename(last.filename)}:{last.lineno}"
    is_lost = isinstance(error, (CollectiveTimeoutError, MissingRankError, RemoteRankError))
    return Failure(type(error).__name__, str(error), is_named and not is_lost, is_lost, where)
