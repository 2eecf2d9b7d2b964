"""Turns that follow a schedule: the choices, the faults, the threads of ranks, and time that is counted."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from accelfn.context import MakeError, Poll, Threads, call_site
from accelfn.errors import CollectiveTimeoutError
from accelfn.testing.faults import (
    Fault,
    FaultKind,
    InjectedFaultError,
    RankDeath,
    RankFaults,
    Reach,
    happen,
)
from accelfn.testing.schedule import Schedule, Step, Switch, Trace, without_random_names
from accelfn.testing.turns import Turns

# How likely a seed departs from the default at a choice. Some bugs need one switch at the right place, others
# many, so each seed draws one of these.
_RATES = (0.03, 0.1, 0.3)
_FAULT_RATES = (0.01, 0.03, 0.1)
_DELAY_S = 1.0
_SILENT: tuple[FaultKind, ...] = ("die", "delay")  # which a thread that only waits can have
# A thread that could run and has not for so many operations comes next by default: a loop that asks whether a
# background thread is done ends.
_STARVED = 200


class _Choices:
    """The choices and faults of a schedule, and what came of them."""

    def __init__(self, size: int, schedule: Schedule) -> None:
        self.number = 0
        self.taken: list[Switch] = []
        self.delivered: list[Fault] = []
        self._switches = dict(schedule.switches)
        self._faults = [RankFaults(rank, schedule.faults) for rank in range(size)]
        self._may_draw = schedule.max_faults
        self._random = None if schedule.seed is None else random.Random(schedule.seed)
        self._rate, self._fault_rate = 0.0, 0.0
        if self._random is not None:
            self._rate = self._random.choice(_RATES)
            self._fault_rate = self._random.choice(_FAULT_RATES)

    def choose(self, count: int) -> int:
        """Return which of ``count`` threads that can run is next; 0 is the default."""
        if count < 2:
            return 0
        to = self._switches.get(self.number, 0)
        if self._random is not None and not to and self._random.random() < self._rate:
            to = self._random.randrange(1, count)
        index = 1 + (to - 1) % (count - 1) if to else 0
        if index:
            self.taken.append(Switch(self.number, index))
        self.number += 1
        return index

    def fault(
        self, rank: int, kinds: Sequence[FaultKind], beyond: Sequence[FaultKind]
    ) -> tuple[int, Fault | None]:
        """Return the number of the next operation of a rank, and the fault that happens at it.

        Args:
            rank: The rank.
            kinds: What can happen there.
            beyond: What can, but isn't drawn.
        """
        at, fault = self._faults[rank].next((*kinds, *beyond))
        drawn = None if fault is not None or not self._may_draw else self._random
        if drawn is not None and drawn.random() < self._fault_rate:
            self._may_draw -= 1
            kind = drawn.choice(kinds)
            fault = Fault(kind=kind, rank=rank, at=at, seconds=_DELAY_S if kind == "delay" else 0.0)
        if fault is not None:
            self.delivered.append(fault)
        return at, fault


class _Thread(NamedTuple):
    name: str
    rank: int
    site: str  # the line that started it; "" for a rank


class ScheduledTurns(Turns):
    """Lets one thread run at a time, as a schedule says, and records who did what.

    Background threads of ranks take part. Nothing depends on the clock: a thread that waits with a timeout
    runs again when what it awaits is there or, if no thread can run, when its timeout is the next one.
    """

    def __init__(self, size: int, schedule: Schedule) -> None:
        """Start with the ranks as the only threads."""
        super().__init__(size)
        self._choices = _Choices(size, schedule)
        self._members = [_Thread(f"rank {rank}", rank, "") for rank in range(size)]
        self._steps: list[Step] = []
        self._last_step: dict[int, int] = {}  # by thread
        self._switched: set[int] = set()  # threads that run because of a switch, until their next operation
        self._now_s = 0.0
        self._deadlines: dict[int, float] = {}  # of the threads that wait
        self._polls: dict[int, Poll] = {}
        self._late: set[int] = set()  # threads whose timeout is over
        self._dead: set[int] = set()  # ranks
        self._started: list[threading.Thread] = []

    def trace(self) -> Trace:
        """Return what has happened so far."""
        with self.lock:
            done = Schedule(switches=tuple(self._choices.taken), faults=tuple(self._choices.delivered))
            return Trace(steps=tuple(self._steps), schedule=done, num_choices=self._choices.number)

    def join(self, deadline: float | None) -> None:
        """Wait until the threads that ranks have started have ended, at most until a time of the clock."""
        for thread in tuple(self._started):
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def running_rank(self) -> int | None:
        """Return whose thread has the turn; None if none has."""
        with self.lock:
            return None if self.running is None else self._members[self.running].rank

    def give_up(self, rank: int, patience_s: float) -> None:
        """End the turn of a thread that waits until it is woken, or nothing else can run."""
        self._deadlines[rank] = self._now_s + patience_s
        super().give_up(rank, patience_s)

    def await_turn(self, rank: int, patience_s: float) -> bool:
        """Wait for the next turn of a thread; return False if its timeout is over."""
        del patience_s
        self._semaphores[rank].acquire()
        with self.lock:
            self._check_alive(rank)
            is_late = rank in self._late
            self._late.discard(rank)
        return not is_late

    def fail(self, rank: int) -> None:
        """Do nothing: the rank goes on alone until it ends."""

    def reach_of(self, rank: int) -> Reach:
        """Return how a rank announces its collectives: another thread may run first, or a fault happen."""
        return partial(self._reach, rank, make_error=InjectedFaultError, beyond=("skip", "swap"))

    def threads(self, rank: int) -> Threads:
        """Return the way in which a rank starts threads and waits, which is part of the schedule."""
        return Threads(
            start=partial(self._start, rank),
            wait=self._wait_scheduled,
            reach=self._reach_here,
            may_communicate=False,
        )

    # --- what threads do ---------------------------------------------------------------------------

    def _reach_here(self, operation: str, make_error: MakeError) -> None:
        """Announce an operation of this thread; threads that aren't part of the schedule just do it."""
        me = self._threads.get(threading.get_ident())
        if me is not None:
            self._reach(me, operation, self._members[me].site or call_site(), make_error)

    def _reach(
        self,
        me: int,
        operation: str,
        site: str,
        make_error: MakeError | None,
        beyond: Sequence[FaultKind] = (),
    ) -> FaultKind | None:
        """Announce an operation; kinds of faults ``beyond`` those that can be anywhere aren't drawn."""
        with self.lock:
            self._check_alive(me)
            chosen = self._next()
            if chosen != me:
                self._give(chosen)
        if chosen != me:
            self._semaphores[me].acquire()
        with self.lock:
            self._check_alive(me)
            rank = self._members[me].rank
            kinds = _SILENT if make_error is None else (*_SILENT, "raise")
            at, fault = self._choices.fault(rank, kinds, beyond)
            self._record(me, at, operation, site, "" if fault is None else fault.kind)
        make_error = make_error or InjectedFaultError
        return fault and happen(
            fault, operation, make_error, partial(self._kill, rank), partial(self._sleep, me)
        )

    def _sleep(self, me: int, seconds: float) -> None:
        with self.lock:
            self.give_up(me, seconds)
        self.await_turn(me, seconds)

    def _kill(self, rank: int) -> None:
        """End all threads of a rank, each where it is; this one here."""
        with self.lock:
            self._dead.add(rank)
            for thread in (*self._deadlines, *self._polls):
                if self._members[thread].rank == rank:
                    self._ready(thread)
        raise RankDeath

    def _start(self, rank: int, name: str, work: Callable[[], None]) -> None:
        count = sum(one.rank == rank and one.name.startswith(f"rank {rank} {name}") for one in self._members)
        called = f"rank {rank} {name}" + (f" {count + 1}" if count else "")
        site = call_site()
        self._reach_here(f"start {called}", RuntimeError)
        with self.lock:
            number = len(self._members)
            self._members.append(_Thread(called, rank, site))
            self._semaphores.append(threading.Semaphore(0))
            self._last_step[number] = len(self._steps)
            self.may_run.add(number)

        def run() -> None:
            self.enter(number)
            try:
                with self.lock:
                    self._check_alive(number)
                work()
            except RankDeath:
                pass
            finally:
                with self.lock:
                    self._finish(number, "died" if rank in self._dead else "ended")

        # A daemon: a world that hangs doesn't keep the interpreter from ending.
        thread = threading.Thread(target=run, name=called, daemon=True)
        self._started.append(thread)
        thread.start()

    def _wait_scheduled(self, poll: Poll, timeout_s: float | None, what: str) -> bool:
        me = self._threads.get(threading.get_ident())
        if me is None:
            raise RuntimeError(
                f"a thread that isn't part of the schedule waits for {what}. Start it with "
                "ctx.collectives.threads.start, or let the rank itself wait."
            )
        if poll(0.0):
            return True
        patience_s = math.inf if timeout_s is None else timeout_s
        self._reach(me, f"wait for {what}", self._members[me].site or call_site(), None)
        with self.lock:
            if poll(0.0):
                return True
            self._polls[me] = poll
            self.give_up(me, patience_s)
        if self.await_turn(me, patience_s):
            return True
        if timeout_s is None:
            raise CollectiveTimeoutError(
                f"{self._members[me].name} waits for {what}, and no thread of this world can run any more."
            )
        return False

    # --- who runs next, with the lock ---------------------------------------------------------------

    def _next(self) -> int | None:
        for thread, poll in tuple(self._polls.items()):
            if poll(0.0):
                self._ready(thread)
        if not self.may_run:
            self._expire()
        order = self._order()
        if not order:
            return None
        index = self._choices.choose(len(order))
        if index:
            self._switched.add(order[index])
        return order[index]

    def _order(self) -> list[int]:
        """Return the threads that can run: the current one first, unless one has starved."""
        order = super()._order()
        if self.running in order:
            order.insert(0, order.pop(order.index(self.running)))
        steps = len(self._steps)
        for thread in order:
            if thread != self.running and steps - self._last_step.get(thread, 0) > _STARVED:
                order.insert(0, order.pop(order.index(thread)))
                self._last_step[thread] = steps
                break
        return order

    def _expire(self) -> None:
        """End the wait whose timeout is the next one, since no thread can run."""
        if not self._deadlines:
            return
        thread = min(self._deadlines, key=lambda one: (self._deadlines[one], one))
        if self._deadlines[thread] < math.inf:
            self._now_s = max(self._now_s, self._deadlines[thread])
        self._late.add(thread)
        self._ready(thread)

    def _ready(self, thread: int) -> None:
        self._deadlines.pop(thread, None)
        self._polls.pop(thread, None)
        super()._ready(thread)

    def _check_alive(self, thread: int) -> None:
        if self._members[thread].rank in self._dead:
            raise RankDeath

    def _finish(self, thread: int, how: str) -> None:
        self._record(thread, None, how, "")
        self._threads.pop(threading.get_ident(), None)
        self._end(thread)

    def _record(self, thread: int, at: int | None, operation: str, site: str, fault: str = "") -> None:
        member = self._members[thread]
        is_switched = thread in self._switched
        self._switched.discard(thread)
        self._last_step[thread] = len(self._steps)
        name = without_random_names(operation)
        self._steps.append(Step(member.name, member.rank, at, name, site, is_switched, fault))
