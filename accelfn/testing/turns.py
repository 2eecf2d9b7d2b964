"""Turns: one thread of a world in memory runs at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from accelfn.context import Poll, Threads, wait_for
from accelfn.testing.faults import Fault, RankDeath, Reach, reach_without_schedule


def _die() -> None:
    raise RankDeath


class Turns:
    """Lets one rank run at a time: until it waits or ends; then the next one in rank order.

    This makes runs reproducible, lets a breakpoint stop the whole world, and avoids contention for the
    interpreter's lock, which each torch operation releases. Each rank has its own state of torch's and
    Python's global generators: it starts as a copy of the state where the world is opened, and is swapped in
    at each turn. Afterwards the original state is restored.

    Threads that a rank starts run whenever they want.
    """

    def __init__(self, size: int, faults: Sequence[Fault] = ()) -> None:
        """Start with the thread that opens the world."""
        self.size = size
        self._faults = faults
        # Guards all below and every rendezvous of the world. A schedule asks for what it awaits under it.
        self.lock: threading.RLock = threading.RLock()
        self.may_run: set[int] = set(range(size))
        self.running: int | None = None  # None: the thread that opened the world
        self.waiting: set[int] = set()  # ranks that wait for other ranks
        self.left: dict[int, str] = {}  # how ranks have ended
        self._semaphores = [threading.Semaphore(0) for _ in range(size)]
        self._random: dict[int | None, tuple[torch.Tensor, Any]] = {}  # of the threads that wait
        self._threads: dict[int, int] = {}  # by the system's identifier

    def open(self) -> None:
        """Let the first rank run."""
        with self.lock:
            self._advance()

    def enter(self, rank: int) -> None:
        """Wait for the first turn of a rank, which is this thread."""
        self._threads[threading.get_ident()] = rank
        self._semaphores[rank].acquire()

    def await_ranks(self, rank: int, patience_s: float) -> None:
        """End the turn of a rank that waits for other ranks. Needs the lock."""
        self.waiting.add(rank)
        self.give_up(rank, patience_s)

    def wake(self, ranks: Iterable[int]) -> None:
        """Let ranks that wait for others run again. Needs the lock."""
        for rank in ranks:
            self.waiting.discard(rank)
            self._ready(rank)

    def give_up(self, rank: int, patience_s: float) -> None:
        """End the turn of a rank that waits until it is woken. Needs the lock."""
        del patience_s
        self.may_run.discard(rank)
        self._advance()

    def await_turn(self, rank: int, patience_s: float) -> bool:
        """Wait for the next turn of a rank, after :meth:`give_up`; return False if it takes too long.

        Without a schedule the rank then runs beside the one that has the turn.
        """
        return self._semaphores[rank].acquire(timeout=min(patience_s, threading.TIMEOUT_MAX))

    def fail(self, rank: int) -> None:
        """Let the next rank run beside one that has failed and may run for long before it ends."""
        self._end(rank)

    def leave(self, rank: int, how: str) -> None:
        """End a rank, and let the others run."""
        with self.lock:
            self.left[rank] = how
            self.waiting.discard(rank)
            self.wake(tuple(self.waiting))  # they may wait in vain
            self._finish(rank, how)

    def reach_of(self, rank: int) -> Reach | None:
        """Return how a rank announces its collectives; None if it doesn't need to."""
        return reach_without_schedule(rank, self._faults, _die)

    def threads(self, rank: int) -> Threads:
        """Return the way in which a rank starts threads and waits."""
        return Threads(wait=partial(self._wait, rank), may_communicate=False)

    def _wait(self, rank: int, poll: Poll, timeout_s: float | None, what: str) -> bool:
        if self._threads.get(threading.get_ident()) != rank:
            return wait_for(poll, timeout_s, what)
        with self.lock:
            self._end(rank)
        try:
            return wait_for(poll, timeout_s, what)
        finally:
            with self.lock:
                self.may_run.add(rank)
                if self.running is None:
                    self._advance()
            self._semaphores[rank].acquire()

    def _ready(self, thread: int) -> None:
        self.may_run.add(thread)

    def _finish(self, thread: int, how: str) -> None:
        del how
        self._end(thread)

    def _end(self, rank: int) -> None:
        self.may_run.discard(rank)
        if self.running == rank:
            self._advance()

    def _advance(self) -> None:
        """Run the next thread; the one that is running has ended its turn."""
        self._give(self._next())

    def _next(self) -> int | None:
        order = self._order()
        return order[0] if order else None

    def _order(self) -> list[int]:
        """Return the threads that can run, in order after the current one."""
        after = -1 if self.running is None else self.running
        return sorted(self.may_run, key=lambda one: (one <= after, one))

    def _give(self, thread: int | None) -> None:
        self._random[self.running] = torch.default_generator.get_state(), random.getstate()
        self.running = thread
        of_torch, of_python = self._random.get(thread, self._random[None])
        torch.default_generator.set_state(of_torch)
        random.setstate(of_python)
        if thread is not None:
            self._semaphores[thread].release()
