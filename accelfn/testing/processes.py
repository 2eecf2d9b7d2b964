"""Ranks as processes forked from this one, in a gloo world on loopback.

For code that needs torch's global process group: DDP, FSDP2, DTensor, pipelines. Forking takes milliseconds
where a fresh interpreter takes seconds to import torch, and the function may be a closure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed re-exports it untyped

from accelfn.context import Context, process_group_collectives
from accelfn.context.rendezvous import serve_store
from accelfn.errors import (
    CollectiveTimeoutError,
    DistributedError,
    NotAvailableError,
)
from accelfn.testing.faults import Fault, announcing, reach_without_schedule
from accelfn.testing.part import (
    STACK_SIGNAL,
    Outcome,
    collect,
    conclude,
    died,
    pack,
    pack_error,
    read_stacks,
    taking_part,
    unpack_outcome,
)
from accelfn.testing.threads import memory_world

T = TypeVar("T")
Connection = Any  # multiprocessing's connections are generic in stubs only

# Interval of checks that ranks are alive: children of a killed rank, such as loader workers, keep its pipe
# open.
_POLL_S = 0.2
# Time for new processes to compute and to connect, which takes milliseconds: for each attempt.
_START_TIMEOUTS_S = (1.0, 2.0, 4.0, 8.0, 16.0)


def run_on_processes(
    fn: Callable[[Context], T],
    size: int,
    configure: Callable[[Context], Context],
    timeout_s: float | None,
    faults: Sequence[Fault],
    num_nodes: int,
) -> list[T]:
    """Run ``fn`` on forked processes and return the results, which must be picklable."""
    if "fork" not in multiprocessing.get_all_start_methods():
        raise NotAvailableError(
            'run_ranks(on="processes") needs fork, which this platform lacks. Use on="memory".'
        )
    memory_world(0, size, num_nodes)  # checks the layout before any process starts
    seconds = 3600.0 if timeout_s is None else timeout_s
    sys.stdout.flush()
    sys.stderr.flush()
    processes: list[Any] = []
    receivers: list[Connection] = []
    stack_files: list[IO[bytes]] = [tempfile.TemporaryFile() for _ in range(size)]  # noqa: SIM115 -- closed below
    try:
        for attempt_s in _START_TIMEOUTS_S:
            for rank in range(size):
                arguments = (fn, rank, size, configure, seconds, faults, num_nodes, stack_files[rank])
                process, receiver = _start(f"rank {rank} of {size}", arguments)
                processes.append(process)
                receivers.append(receiver)
            # Hosted by the parent, so that it outlives every rank. After the forks, since it starts a thread.
            server = serve_store("127.0.0.1", 0)
            if _are_ready(receivers, server.port, attempt_s):
                break
            _end(processes, receivers)
        else:
            raise DistributedError(
                f"{size} processes were forked {len(_START_TIMEOUTS_S)} times, and not all could multiply "
                f"matrices and connect to this one within {_START_TIMEOUTS_S[-1]:g} s: threads of this "
                'process hold locks of libraries. Let them end before, or use run_ranks(on="memory").'
            )
        outcomes = _collect(
            processes,
            receivers,
            stack_files,
            math.inf if timeout_s is None else time.monotonic() + seconds + 5.0,
        )
    finally:
        _end(processes, receivers)
        for file in stack_files:
            file.close()
    return conclude(outcomes, "processes")


def _start(name: str, arguments: tuple[Any, ...]) -> tuple[Any, Connection]:
    """Return a forked process and this end of its pipe."""
    forking = multiprocessing.get_context("fork")
    receiver, sender = forking.Pipe()
    process = forking.Process(target=_run_rank, args=(*arguments, sender), name=name)
    _fork(process)
    sender.close()
    return process, receiver


def _are_ready(receivers: Sequence[Connection], port: int, timeout_s: float) -> bool:
    """Return whether each rank can compute and connect to the store at ``port``.

    A lock that a thread holds at the fork stays held in the child. MKL holds one while a thread that ends
    frees its buffers, which Python's join() doesn't wait for: the child's first matrix product never ends.
    """
    until = time.monotonic() + timeout_s
    for receiver in receivers:
        with contextlib.suppress(OSError):  # the rank has ended
            receiver.send(port)
    for receiver in receivers:
        if not receiver.poll(max(0.0, until - time.monotonic())):
            return False
        with contextlib.suppress(EOFError, OSError):  # it has ended, which is reported later
            receiver.recv()
    for receiver in receivers:
        with contextlib.suppress(OSError):
            receiver.send("go")
    return True


def _end(processes: list[Any], receivers: list[Connection]) -> None:
    """Kill the ranks and their children, and forget them."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its children too, even if it has ended
        if process.is_alive():
            process.kill()  # it had no process group yet
        process.join()
        process.close()
    for receiver in receivers:
        receiver.close()
    processes.clear()
    receivers.clear()


def _fork(process: Any) -> None:
    collecting = gc.isenabled()
    # A collection in the child before gc.freeze() would destroy process groups that are garbage in the
    # parent: gloo's threads don't exist in the child, and it shares the parent's epoll.
    gc.disable()
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of forking with other threads; the child starts no torch thread pool.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    finally:
        if collecting:
            gc.enable()


def _collect(
    processes: Sequence[Any],
    receivers: Sequence[Connection],
    stack_files: Sequence[IO[bytes]],
    deadline: float,
) -> list[Outcome]:
    def poll(rank: int) -> Outcome | None:
        code = processes[rank].exitcode  # first, so that a report of one that has exited is complete
        if receivers[rank].poll():
            return _receive(rank, processes[rank], receivers[rank])
        return None if code is None else died(rank, code)

    def pause(waiting: Sequence[int], seconds: float) -> None:
        multiprocessing.connection.wait([receivers[rank] for rank in waiting], min(seconds, _POLL_S))

    outcomes = collect(len(processes), poll, pause, deadline)
    return [
        outcomes.get(rank) or _timed_out(rank, read_stacks(process.pid, stack_files[rank]))
        for rank, process in enumerate(processes)
    ]


def _receive(rank: int, process: Any, receiver: Connection) -> Outcome:
    try:
        return unpack_outcome(receiver.recv_bytes())
    except (EOFError, OSError):  # OSError: closed in the middle of a message
        process.join(5.0)
        return died(rank, process.exitcode)


def _timed_out(rank: int, stack: str) -> Outcome:
    error = CollectiveTimeoutError(
        f"rank {rank} did not end in time and was killed. Pass run_ranks a longer timeout_s, or look for "
        "what it waits for." + (f" Its stacks:\n{stack}" if stack else "")
    )
    return Outcome(error=error, ended=False, stack=stack)


def _run_rank(
    fn: Callable[[Context], Any],
    rank: int,
    size: int,
    configure: Callable[[Context], Context],
    seconds: float,
    faults: Sequence[Fault],
    num_nodes: int,
    stack_file: IO[bytes],
    sender: Connection,
) -> None:
    """Run one rank in a forked child, and exit."""
    # The parent's threads don't exist here: neither torch's thread pool nor the parent's garbage (a process
    # group joins its threads when it is destroyed) may be touched.
    gc.freeze()
    gc.enable()
    os.setpgid(0, 0)  # so that its children can be killed with it; Ctrl-C reaches the parent, which kills all
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    threading.Thread(target=_exit_with_parent, name="exit with parent", daemon=True).start()
    torch.set_num_threads(1)
    torch.nn.functional.linear(*(torch.ones(shape, device="cpu") for shape in ((8, 8), (16, 8), (16,))))
    store = dist.TCPStore("127.0.0.1", sender.recv(), None, False, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage] -- documented, but not exported
    sender.send("ready")  # see _are_ready
    sender.recv()  # where a rank isn't ready all are forked again, and none may have begun
    code = 0
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
        )
        group = dist.group.WORLD
        assert group is not None
        collectives, reference, owner = process_group_collectives(
            group,
            rank,
            size,
            store=PrefixStore("accelfn", store),
            timeout=timedelta(seconds=seconds),
            one_machine=num_nodes == 1,
        )
        del group  # only torch may own it
        collectives.barrier()  # no rank may end while others still connect to it
        world = memory_world(rank, size, num_nodes, "gloo")
        ctx = Context(
            world=dataclasses.replace(world, group_ref=reference, group_owner=owner),
            collectives=announcing(collectives, rank, size, reach_without_schedule(rank, faults, _die)),
        )
        ctx = configure(ctx)
        with taking_part(ctx):
            report = (fn(ctx), None, "")
        message = pack(report)
    except BaseException as error:  # noqa: BLE001 -- reported to the parent
        code = 1
        message = pack_error(rank, error)
    with contextlib.suppress(OSError):  # the parent may have closed the pipe
        sender.send_bytes(message)
        sender.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # skips the parent's exit handlers and threads


def _exit_with_parent() -> None:
    """Kill this process and its children when the parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
