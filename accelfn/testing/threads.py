"""Ranks that are threads of this process: how they meet, and hand each other tensors."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # torch.distributed re-exports it untyped

from accelfn.context import (
    CallLog,
    Collectives,
    Context,
    Departure,
    MessageBoard,
    Part,
    ReduceOp,
    World,
    WorldIdentity,
    as_error,
    chunk_bytes,
    explain_departure,
    late_error,
    make_gloo_group,
    process_group_collectives,
    publish,
    store_board,
)
from accelfn.context.failure import FAILURE
from accelfn.context.peer_monitor import print_all_stacks
from accelfn.errors import CollectiveTimeoutError, Disagreement, MismatchError, MissingRankError
from accelfn.testing.faults import Fault, RankDeath, inject
from accelfn.testing.part import Outcome, conclude, taking_part


class _Brought(NamedTuple):
    """What one rank brings to a rendezvous."""

    call: str  # what it is doing; must be equal on every rank
    value: Any


class _Turns:
    """Whose turn it is among the threads of a world."""

    def __init__(self, size: int) -> None:
        """Begin with the program that opens the world."""
        self.lock = threading.Lock()  # guards all below, and every meeting place; held for moments
        self.semaphores = [threading.Semaphore(0) for _ in range(size)]
        self.may_run = set(range(size))
        self.running: int | None = None  # None: the program that has opened the world
        self._random: dict[int | None, tuple[torch.Tensor, Any]] = {}  # of those who don't run

    def pass_on(self) -> None:
        """Let the next rank run that can, in rank order after the one that ran."""
        after = -1 if self.running is None else self.running
        order = sorted(self.may_run, key=lambda one: (one <= after, one))
        self._random[self.running] = torch.default_generator.get_state(), random.getstate()
        self.running = order[0] if order else None
        of_torch, of_python = self._random.get(self.running, self._random[None])
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if order:
            self.semaphores[order[0]].release()


class Rendezvous:
    """A barrier of ``size`` threads that exchanges values, checks calls and never hangs.

    One rank runs at a time, until it waits for the others or ends; then the next one in rank order runs. So a
    world is the same on every run, a breakpoint in one rank isn't overrun by the others, and threads don't
    fight for the interpreter's lock: a torch operation gives it away each time, which costs more than all
    the rest. A rank that has failed doesn't hold up the others: it ends beside them.

    Each rank has torch's and Python's global generators for itself, as if it were a process: they begin as
    they are where the world is opened, change hands with the turn, and come back as they were.

    Ranks along an axis meet in a part of it, where they are numbered from 0 and take the same turns.

    Not part of the public interface: the one mutable object of a world in memory.
    """

    def __init__(self, size: int, whole: Rendezvous | None = None, members: Sequence[int] = ()) -> None:
        """Open the rendezvous for ``size`` ranks: those of a world, or ``members`` of ``whole``."""
        self._size = size
        self._whole = whole
        self._members = tuple(members) if whole is not None else tuple(range(size))
        self._turns = _Turns(size) if whole is None else whole._turns
        self._round = 0
        self._brought: dict[int, _Brought] = {}
        self._last: list[_Brought] = []
        self._left: dict[int, str] = {}  # how: "returned", "died" or "failed"
        self._words: dict[str, str] = {}
        self._parts: dict[tuple[int, tuple[int, ...]], Rendezvous] = {}
        self.board: MessageBoard = MessageBoard(post=self._post, post_once=self._post_once, read=self._read)

    def part(self, number: int, members: Sequence[int]) -> Rendezvous:
        """Return the meeting place of some ranks: the same to all that ask with the same ``number``."""
        with self._turns.lock:
            key = (number, tuple(members))
            if key not in self._parts:
                made = Rendezvous(len(members), self, members)
                made._left.update(
                    {place: self._left[rank] for place, rank in enumerate(members) if rank in self._left}
                )
                self._parts[key] = made
            return self._parts[key]

    def open(self) -> None:
        """Let the first rank run."""
        with self._turns.lock:
            self._turns.pass_on()

    def enter(self, rank: int) -> None:
        """Wait for this rank's first turn."""
        self._turns.semaphores[rank].acquire()

    def meet(self, rank: int, call: str, value: Any, call_log: CallLog) -> list[Any]:
        """Contribute ``value``, wait for all ranks, and return what each contributed, in rank order.

        Raises:
            MismatchError: The ranks brought different calls.
            RemoteRankError: A rank failed instead of coming.
            MissingRankError: A rank returned or died instead of coming.
            CollectiveTimeoutError: A rank did not come in time.
        """
        with self._turns.lock:
            number = self._round
            self._brought[rank] = _Brought(call, value)
            complete = len(self._brought) == self._size
            if complete:
                # Nobody can finish the next round before all have read this one, so one slot is enough.
                self._last = [self._brought[one] for one in range(self._size)]
                self._brought = {}
                self._round += 1
                self._turns.may_run.update(self._members)
            else:
                self._turns.may_run.discard(self._members[rank])
                self._check_absent(rank, call_log)
                self._turns.pass_on()
        if not complete:
            self._wait(rank, number, call_log)
        calls = [one.call for one in self._last]
        expected = max(calls, key=calls.count)
        rows = [Disagreement(rank, "", expected, own) for rank, own in enumerate(calls) if own != expected]
        if rows:
            raise MismatchError(expected, rows)
        return [one.value for one in self._last]

    @contextmanager
    def aside(self, rank: int) -> Generator[None, None, None]:
        """Let the other ranks run in a ``with`` block in which ``rank`` waits for something else."""
        turns, own = self._turns, self._members[rank]
        with turns.lock:
            turns.may_run.discard(own)
            if turns.running == own:
                turns.pass_on()
        try:
            yield
        finally:
            with turns.lock:
                turns.may_run.add(own)
                if turns.running is None:
                    turns.pass_on()
            turns.semaphores[own].acquire()

    def leave(self, rank: int, how: str) -> None:
        """Mark ``rank`` as joining no further rendezvous, and let the others run."""
        with self._turns.lock:
            self._go(rank, how)

    def _go(self, rank: int, how: str) -> None:
        self._left.setdefault(rank, how)
        self._brought.pop(rank, None)
        # Who waits can only wait in vain now: each gets a turn to find out.
        self._turns.may_run.update(self._members[one] for one in self._brought)
        for (_, members), part in self._parts.items():
            if rank in members:
                part._go(members.index(rank), how)
        if self._whole is None:  # who fails along an axis goes on in the world
            self._turns.may_run.discard(rank)
            if self._turns.running == rank:
                self._turns.pass_on()

    def _post(self, key: str, text: str) -> None:
        with self._turns.lock:
            self._words[key] = text

    def _post_once(self, key: str, text: str) -> str:
        with self._turns.lock:
            said = self._words.setdefault(key, text)
            if key == FAILURE:  # the rank that writes may go on for long before it ends
                self._go(json.loads(text)["rank"], "failed")
            return said

    def _read(self, key: str) -> str | None:
        with self._turns.lock:
            return self._said(key)

    def _said(self, key: str) -> str | None:
        """Return what stands on the board; of a part also what the whole world's says of a failure."""
        said = self._words.get(key)
        return self._whole._said(key) if said is None and self._whole is not None and key == FAILURE else said

    def _wait(self, rank: int, number: int, call_log: CallLog) -> None:
        """Wait for the turn that comes when the round is complete, or can't be completed any more."""
        turn = self._turns.semaphores[self._members[rank]]
        if turn.acquire(timeout=min(call_log.patience_s, threading.TIMEOUT_MAX)):
            with self._turns.lock:
                if self._round == number:
                    self._check_absent(rank, call_log)
            return
        with self._turns.lock:
            complete = self._round != number
            missing = [one for one in range(self._size) if one not in self._brought]
            running = self._turns.running
            if any(self._members[one] == running for one in missing):
                # The others only wait for their turn after that one.
                missing = [one for one in missing if self._members[one] == running]
        if complete:  # at the last moment: the turn is on its way
            turn.acquire()
            return
        error = late_error(call_log, rank, call_log.patience_s, missing)
        print_all_stacks(self.board, rank, self._size)
        publish(self.board, call_log, rank, error)
        raise error

    def _check_absent(self, rank: int, call_log: CallLog) -> None:
        gone = next((one for one in sorted(self._left) if one not in self._brought), None)
        if gone is None:
            return
        text = self._said(FAILURE)
        if text is not None:
            raise as_error(text)
        text = self._words.get("end")
        if text is not None:
            raise explain_departure(Departure(*json.loads(text)), call_log, rank)
        now = call_log.current
        raise MissingRankError(
            f"{now.operation}: rank {gone} {self._left[gone]} while rank {rank} waits for it in call "
            f"{now.number} at {now.site}. Every rank must call the same operations in the same order."
        )


T = TypeVar("T")
Configure = Callable[[Context], Context]

# Threads that wait in a rendezvous notice at once; one that computes gets this much longer before the world
# is given up.
_GRACE_S = 5.0


def run_on_memory(
    fn: Callable[[Context], T],
    size: int,
    configure: Configure,
    timeout_s: float | None,
    faults: Sequence[Fault],
    num_nodes: int,
) -> list[T]:
    """Run ``fn`` on threads that meet in memory."""
    rendezvous = Rendezvous(size)

    def enter(rank: int) -> tuple[World, Collectives]:
        rendezvous.enter(rank)
        return memory_world(rank, size, num_nodes), memory_collectives(rendezvous, rank, size, CallLog())

    return _run(fn, size, configure, timeout_s, faults, "memory", rendezvous.open, enter, rendezvous.leave)


def run_on_gloo_threads(
    fn: Callable[[Context], T],
    size: int,
    configure: Configure,
    timeout_s: float | None,
    faults: Sequence[Fault],
    num_nodes: int,
) -> list[T]:
    """Run ``fn`` on threads that each have a real gloo group over one in-process store."""
    store = cast("Any", dist).HashStore()  # documented, but not exported to checkers
    groups: list[dist.ProcessGroup | None] = [None] * size

    def enter(rank: int) -> tuple[World, Collectives]:
        groups[rank] = group = make_gloo_group(store, rank, size, timedelta(minutes=5), "lo")
        parts = PrefixStore("parts", store)
        collectives = process_group_collectives(
            group, rank, size, board=store_board(store), store=parts, interface="lo"
        )
        collectives.barrier()  # nobody may leave while others still connect to it
        return memory_world(rank, size, num_nodes, "gloo"), collectives

    def leave(rank: int, how: str) -> None:
        del how
        groups[rank] = None  # the last reference: peers that wait for this rank see a closed connection

    return _run(fn, size, configure, timeout_s, faults, "gloo threads", lambda: None, enter, leave)


def _run(
    fn: Callable[[Context], T],
    size: int,
    configure: Configure,
    timeout_s: float | None,
    faults: Sequence[Fault],
    where: str,
    started: Callable[[], None],
    enter: Callable[[int], tuple[World, Collectives]],
    leave: Callable[[int, str], None],
) -> list[T]:
    outcomes: list[Outcome | None] = [None] * size

    def die() -> None:
        raise RankDeath

    def work(rank: int) -> None:
        how = "returned"
        try:
            world, collectives = enter(rank)
            ctx = configure(Context(world=world, collectives=inject(collectives, rank, size, faults, die)))
            with taking_part(ctx, whole_process=False):
                outcomes[rank] = Outcome(value=fn(ctx))
        except RankDeath:
            how = "died"
            outcomes[rank] = Outcome()
        except BaseException as raised:  # noqa: BLE001 -- SystemExit and KeyboardInterrupt of one rank are its outcome too
            how = "failed"
            outcomes[rank] = Outcome(error=raised)
        finally:
            leave(rank, how)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank} of {size}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    started()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s + _GRACE_S
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    ended = [one or _unended(rank, timeout_s) for rank, one in enumerate(outcomes)]
    return conclude(ended, where)


def _unended(rank: int, timeout_s: float | None) -> Outcome:
    return Outcome(
        error=CollectiveTimeoutError(
            f"rank {rank} did not end within {timeout_s} s, and is not waiting in a collective. "
            "Give run_ranks a longer timeout_s, or look for what it computes for ever."
        ),
        ended=False,
    )


def memory_world(rank: int, size: int, num_nodes: int = 1, backend: str = "memory") -> World:
    """Describe rank ``rank`` of a world of threads, laid out as ``num_nodes`` equal nodes."""
    if size < 1 or num_nodes < 1 or size % num_nodes:
        raise ValueError(
            f"run_ranks: num_nodes must divide world_size, got world_size={size}, num_nodes={num_nodes}."
        )
    local_size = size // num_nodes
    return World(
        rank=rank,
        size=size,
        local_rank=rank % local_size,
        local_size=local_size,
        node_rank=rank // local_size,
        num_nodes=num_nodes,
        backend=backend,
        identity=WorldIdentity(),
    )


def memory_collectives(rendezvous: Rendezvous, rank: int, size: int, call_log: CallLog) -> Collectives:
    """Fill the seam with meetings of threads.

    A buffer that a caller goes on using is read by the others between two meetings: nobody returns before all
    have read.
    """

    def meet(call: str, value: Any) -> list[Any]:
        return rendezvous.meet(rank, call, value, call_log)

    def finish(name: str) -> None:
        meet(f"the end of {name}", None)

    def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Messages are never written again, so one rendezvous is enough.
        return tuple(meet("all_gather_bytes", message))

    def all_gather(buffer: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(meet("all_gather", buffer))
        finish("all_gather")
        return joined

    def all_reduce(buffer: torch.Tensor, op: ReduceOp) -> None:
        stacked = torch.stack(meet(f"all_reduce {op}", buffer))
        if op == "sum":
            result = stacked.sum(0, dtype=stacked.dtype)
        else:
            result = stacked.amax(0) if op == "max" else stacked.amin(0)
        finish("all_reduce")
        buffer.copy_(result)

    def reduce_scatter(buffer: torch.Tensor) -> torch.Tensor:
        parts = meet("reduce_scatter", buffer)
        stacked = torch.stack([part.view(size, -1)[rank] for part in parts])
        finish("reduce_scatter")
        return stacked.sum(0, dtype=stacked.dtype)

    def broadcast(buffer: torch.Tensor, source: int) -> None:
        sent = meet(f"broadcast from {source}", buffer)[source]
        if rank != source:
            buffer.copy_(sent)
        finish("broadcast")

    def scatter(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        sent = meet(f"scatter from {source}", buffer)[source]
        output.copy_(sent.view(size, -1)[rank])
        finish("scatter")

    def all_to_all(buffer: torch.Tensor) -> torch.Tensor:
        parts = meet("all_to_all", buffer)
        received = torch.cat([part.view(size, -1)[rank] for part in parts])
        finish("all_to_all")
        return received

    def permute(outgoing: torch.Tensor, incoming: torch.Tensor, to: int, source: int) -> None:
        del to
        sent = meet("permute", outgoing)
        if incoming.numel():
            incoming.copy_(sent[source])
        finish("permute")

    def barrier() -> None:
        meet("barrier", None)

    numbers = itertools.count()

    def split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
        del timeout
        return tuple(_part(rendezvous.part(next(numbers), members), rank, members) for members in groups)

    return Collectives(
        all_gather_bytes=all_gather_bytes,
        all_gather=all_gather,
        all_reduce=all_reduce,
        reduce_scatter=reduce_scatter,
        broadcast=broadcast,
        scatter=scatter,
        all_to_all=all_to_all,
        permute=permute,
        barrier=barrier,
        split=split,
        chunk=chunk_bytes(size),
        while_blocked=lambda: rendezvous.aside(rank),
        board=rendezvous.board,
        call_log=call_log,
    )


def _part(place: Rendezvous, rank: int, members: Sequence[int]) -> Part:
    if len(members) == 1:
        return Part(Collectives())
    return Part(memory_collectives(place, list(members).index(rank), len(members), CallLog()))
