"""How a rank starts threads and waits for them.

The defaults are the operating system's. Where ranks are threads of one process and run in turn, they let
each other run meanwhile; where they follow a schedule (``accelfn.testing``), it decides who runs next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

# How often a wait looks at the clock; what is awaited ends it at once.
_SLICE_S = 1.0

Poll = Callable[[float], bool]
MakeError = Callable[[str], Exception]


def start_thread(name: str, work: Callable[[], None]) -> None:
    """Start a thread of the operating system.

    It isn't a daemon: the interpreter waits for it at exit, so that what it does is completed.
    """
    threading.Thread(target=work, name=f"accelfn-{name}").start()


def wait_for(poll: Poll, timeout_s: float | None, what: str) -> bool:
    """Wait until ``poll`` returns True, or the time is over; return whether it did."""
    del what
    end = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        rest_s = _SLICE_S if end is None else min(_SLICE_S, end - time.monotonic())
        if poll(max(0.0, rest_s)):
            return True
        if rest_s <= 0:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Threads of a rank, and waiting for them, as plain callables.

    Attributes:
        start: ``(name, work)``: runs ``work()`` in a new thread.
        wait: ``(poll, timeout_s, what)``: waits until ``poll(seconds)``, which itself waits for at most so
            many seconds, returns True; returns False after ``timeout_s``, unless that is None. ``what`` is
            named in traces of schedules. Not for collectives, which wait themselves.
        reach: ``(operation, make_error)``: announces that this thread is about to do something that other
            ranks can notice, such as writing a file: another thread may run before it does, and it may raise
            ``make_error(text)`` instead. None if no schedule is followed.
        may_communicate: Whether a started thread may call collectives of a group of its own.
    """

    start: Callable[[str, Callable[[], None]], None] = start_thread
    wait: Callable[[Poll, float | None, str], bool] = wait_for
    reach: Callable[[str, MakeError], None] | None = None
    may_communicate: bool = True
