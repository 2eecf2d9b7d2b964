"""Run a function once per rank, each rank a process forked from this one, in a real gloo world on loopback.

Forking a parent that has imported torch costs milliseconds where a fresh interpreter costs seconds, and the
function may be a closure. For what needs torch's global registry: DDP, FSDP2, DTensor, pipelines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import io
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import IO, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed re-exports it untyped

from accelfn.context import Context, process_group_collectives, store_board, text_of
from accelfn.errors import (
    CollectiveTimeoutError,
    DistributedError,
    MissingRankError,
    NotAvailableError,
    RemoteTraceback,
)
from accelfn.testing.faults import Fault, inject
from accelfn.testing.part import Outcome, conclude, taking_part
from accelfn.testing.threads import memory_world

T = TypeVar("T")
Connection = Any  # multiprocessing's connections are generic in stubs only

# After one rank has failed, the others get this long to fail in their own words before they are ended.
_GRACE_S = 3.0
# The pipe of a rank that was killed stays open as long as a process that it has forked, such as a loader's
# worker: so whether it still lives is asked this often.
_LOOK_S = 0.2
# A rank that does not end is asked where it is, by a signal that a function under test is unlikely to use. It
# answers even from C code that never returns.
_WHERE_ARE_YOU: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2) if os.name == "posix" else 0
_ANSWER_S = 1.0
# Before forking. Threads that have work of their own don't end.
_THREADS_END_S = 1.0
# The guard ends the waiting.
_NEVER = timedelta(days=30)


def run_on_processes(
    fn: Callable[[Context], T],
    size: int,
    configure: Callable[[Context], Context],
    timeout_s: float | None,
    faults: Sequence[Fault],
    num_nodes: int,
) -> list[T]:
    """Run ``fn`` on forked processes and return what each returned, which must be picklable."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NotAvailableError(
            'run_ranks(on="processes") forks, which this platform can\'t. Use on="memory" or on="gloo".'
        )
    memory_world(0, size, num_nodes)  # refuses a bad layout before anything starts
    forking = multiprocessing.get_context("fork")
    seconds = 3600.0 if timeout_s is None else timeout_s
    sys.stdout.flush()
    sys.stderr.flush()
    processes: list[Any] = []
    receivers: list[Connection] = []
    answers: list[IO[bytes]] = []
    try:
        for rank in range(size):
            receiver, sender = forking.Pipe()
            answers.append(tempfile.TemporaryFile())  # noqa: SIM115 -- closed below
            process = forking.Process(
                target=_work,
                args=(fn, rank, size, configure, seconds, faults, num_nodes, sender, answers[rank]),
                name=f"rank {rank} of {size}",
            )
            _let_threads_end()
            _fork(process)
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        # Hosted here, as a launcher does: it outlives every rank, and none that is stopped can hold it up.
        # Not before the forks, which must not find a thread at work.
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
        for receiver in receivers:
            with contextlib.suppress(OSError):  # of a rank that has ended already
                receiver.send(server.port)
        outcomes = _collect(
            processes, receivers, answers, None if timeout_s is None else time.monotonic() + seconds + 5.0
        )
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has forked too, whether or not it has ended
            if process.is_alive():
                process.kill()  # before it made a group of its own
            process.join()
            process.close()
        for pipe in (*receivers, *answers):
            pipe.close()
    return conclude(outcomes, "processes")


def _let_threads_end() -> None:
    """Wait for threads of the system that are on their way out, as those of a world of threads before.

    Python's join() returns before a thread has returned what its libraries keep for it. MKL does so under
    a lock, which a child that is forked meanwhile would find taken for ever: its first product of matrices
    hangs.
    """
    own = str(threading.get_native_id())
    until, last = time.monotonic() + _THREADS_END_S, None
    while time.monotonic() < until:
        states = _thread_states()
        states.pop(own, None)
        if states == last and "R" not in states.values():
            return
        last = states
        time.sleep(0.001)


def _thread_states() -> dict[str, str]:
    """Return the state of each of this process's threads (R: running); nothing where this isn't Linux."""
    states: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended
                with open(f"/proc/self/task/{thread}/stat", encoding="utf-8") as file:
                    states[thread] = file.read().rpartition(")")[2].split()[0]
    return states


def _fork(process: Any) -> None:
    collecting = gc.isenabled()
    # A collection in the child, before it freezes what it was given, would take down groups that the parent
    # has left for its own: gloo's threads are not in the child, and the epoll they wait on is the parent's.
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forking beside other threads; the child starts no torch thread pool.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        if collecting:
            gc.enable()


def _collect(
    processes: Sequence[Any],
    receivers: Sequence[Connection],
    answers: Sequence[IO[bytes]],
    deadline: float | None,
) -> list[Outcome]:
    """Wait until each rank has reported or died; after a failure not much longer."""
    outcomes: dict[int, Outcome] = {}
    while len(outcomes) < len(processes):
        waiting = [rank for rank in range(len(processes)) if rank not in outcomes]
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        ready = multiprocessing.connection.wait(
            [receivers[rank] for rank in waiting], _LOOK_S if left_s is None else min(left_s, _LOOK_S)
        )
        for rank in waiting:
            if receivers[rank] in ready:
                outcomes[rank] = _receive(rank, processes[rank], receivers[rank])
            elif processes[rank].exitcode is not None:
                # Dead by now, so that all it has said is here.
                said = receivers[rank].poll()
                outcomes[rank] = (
                    _receive(rank, processes[rank], receivers[rank])
                    if said
                    else _seen_to_die(rank, processes[rank])
                )
            else:
                continue
            if outcomes[rank].error is not None:
                soon = time.monotonic() + _GRACE_S
                deadline = soon if deadline is None else min(deadline, soon)
    return [
        outcomes.get(rank) or _unended(rank, _ask_where(processes[rank], answers[rank]))
        for rank in range(len(processes))
    ]


def _receive(rank: int, process: Any, receiver: Connection) -> Outcome:
    try:
        value, error, text = _unpack(receiver.recv_bytes())
    except (EOFError, OSError):  # a socket says so if something was on its way
        return _seen_to_die(rank, process)
    if text and error is not None:
        error.__cause__ = RemoteTraceback(text)
    return Outcome(value=value, error=error)


def _seen_to_die(rank: int, process: Any) -> Outcome:
    process.join(5.0)
    code = process.exitcode
    how = (
        f"was killed by {signal.Signals(-code).name}"
        if code is not None and code < 0
        else f"exited with code {code}"
    )
    return Outcome(error=MissingRankError(f"rank {rank} {how} before it returned."), seen_to_die=True)


def _unended(rank: int, stack: str) -> Outcome:
    error = CollectiveTimeoutError(
        f"rank {rank} did not end in time and was ended. Give run_ranks a longer timeout_s, or look for what "
        "it waits for." + (f" It was here:\n{stack}" if stack else "")
    )
    return Outcome(error=error, ended=False, stack=stack)


def _ask_where(process: Any, answer: IO[bytes]) -> str:
    """Have a rank that does not end write where each of its threads is."""
    with contextlib.suppress(OSError, ValueError):  # it has ended after all
        os.kill(process.pid, _WHERE_ARE_YOU)
        until, said = time.monotonic() + _ANSWER_S, -1
        while said != (said := os.fstat(answer.fileno()).st_size) or not said:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return os.pread(answer.fileno(), 1 << 16, 0).decode(errors="replace")
    return ""


def _work(
    fn: Callable[[Context], Any],
    rank: int,
    size: int,
    configure: Callable[[Context], Context],
    seconds: float,
    faults: Sequence[Fault],
    num_nodes: int,
    sender: Connection,
    answer: IO[bytes],
) -> None:
    """Be one rank: the whole life of a forked child."""
    # The parent's threads were not forked. Neither torch's pool nor what the parent left for the garbage
    # collector (a process group joins its threads when it goes) may be touched here.
    gc.freeze()
    gc.enable()
    os.setpgid(0, 0)  # so that what it forks can be ended with it; Ctrl-C reaches the parent, which ends all
    faulthandler.register(_WHERE_ARE_YOU, file=answer, all_threads=True)
    threading.Thread(target=_end_with_parent, name="end with the parent", daemon=True).start()
    torch.set_num_threads(1)
    code = 0
    try:
        store = dist.TCPStore("127.0.0.1", sender.recv(), None, False, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage] -- documented, but not exported
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
        group = dist.group.WORLD
        assert group is not None
        control = cast(Callable[..., dist.ProcessGroup], dist.new_group)(backend="gloo", timeout=_NEVER)  # pyright: ignore[reportUnknownMemberType]
        collectives = process_group_collectives(
            group,
            rank,
            size,
            control=control,
            board=store_board(store),
            one_machine=num_nodes == 1,
            store=PrefixStore("accelfn/parts", store),
        )
        collectives.barrier()  # nobody may end while others still connect to it
        world = memory_world(rank, size, num_nodes, "gloo")
        ctx = Context(
            world=dataclasses.replace(world, group_ref=weakref.ref(group)),
            collectives=inject(collectives, rank, size, faults, _die),
        )
        del group, control  # torch keeps them, until fn or its end closes them
        ctx = configure(ctx)
        with taking_part(ctx, whole_process=True):
            report = (fn(ctx), None, "")
        message = _pack(report)
    except BaseException as error:  # noqa: BLE001 -- whatever ends a rank is reported to the parent
        code = 1
        message = _report(rank, error)
    with contextlib.suppress(OSError):  # the parent may have given up
        sender.send_bytes(message)
        sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no handlers of the parent's, no waiting for its threads


def _end_with_parent() -> None:
    """End this process, with what it has forked, when its parent has gone, however it went.

    Else it would wait, and hold pipes open.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _pack(report: Any) -> bytes:
    # By torch and not by pickle alone, which writes float8 and unsigned tensors but can't read them.
    buffer = io.BytesIO()
    torch.save(report, buffer)
    return buffer.getvalue()


def _unpack(message: bytes) -> Any:
    return torch.load(io.BytesIO(message), weights_only=False)  # from a child of this very process


def _report(rank: int, error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    try:
        message = _pack((None, error, text))
        _unpack(message)  # an exception may pickle and still not come back
    except Exception:  # noqa: BLE001 -- any failure means that it has to travel as text
        plain = DistributedError(f"rank {rank} raised {type(error).__name__}: {text_of(error)}")
        return _pack((None, plain, text))
    return message
