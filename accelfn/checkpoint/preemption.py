"""Stop at a step's end when the cluster asks for it: a signal on one rank becomes one answer on all."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, Final, NoReturn, cast

import torch

from accelfn.comm import Call, agree, failing_together
from accelfn.context import Context, check_context
from accelfn.data.workers import Hold, SignalHolder

__all__ = ("EXIT_PREEMPTED", "STOP_SIGNALS", "PreemptionGuard", "preemption")

# sysexits.h: EX_TEMPFAIL, "try again later".
EXIT_PREEMPTED: Final = 75
# SIGUSR1 doesn't exist everywhere.
STOP_SIGNALS: Final = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGUSR1", "SIGINT") if name in signal.Signals.__members__
)


class PreemptionGuard:
    """Knows whether the program should stop. Made by :func:`preemption`.

    Attributes:
        signals: Those it listens to; none outside of the process's main thread.
        is_leaving: Whether this rank of several ends with ``exit``. Then SIGTERM is ignored for good, since
            launchers send it to all ranks as soon as the first one has ended.
    """

    def __init__(
        self, ctx: Context, time_limit_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Use :func:`preemption` instead."""
        self.signals: tuple[signal.Signals, ...] = ()
        self._ctx = ctx
        self._clock = clock
        self._end = clock() + time_limit_s
        self._is_asked = False  # on this rank
        self._is_agreed = False  # on every rank
        self.is_leaving: bool = False

    def request_stop(self) -> None:
        """Ask all ranks to stop, as a signal does. Ranks: any; the others learn of it in ``should_stop``.

        May be called from another thread.
        """
        self._is_asked = True

    def should_stop(self) -> bool:
        """Return whether any rank was asked to stop, or its time is up.

        Ask where a step is complete, for instance when ``micro.sync`` is true: from what is saved then, a
        program can go on. Once the answer is yes it stays so, and no more communication is needed.

        Ranks: every rank of ``ctx``; one exchange of a byte. All get the same answer at the same call.

        Raises:
            MismatchError: Another rank called another operation instead.
        """
        if self._is_agreed:
            return True
        is_asked = self._is_asked or self._clock() >= self._end
        if self._ctx.world.size > 1:
            rows = agree(self._ctx, Call("should_stop"), torch.tensor([is_asked], dtype=torch.uint8))
            is_asked = any(bool(row[0]) for row in rows)
        self._is_agreed = is_asked
        return is_asked

    def exit(self) -> NoReturn:
        """End the program with status 75, ``EXIT_PREEMPTED``, when every rank has come here.

        Ranks: every rank of ``ctx``; those that come early wait as long as ``Guard.long_timeout``.

        Raises:
            SystemExit: Always, with that status.
            MismatchError: Another rank called another operation instead.
        """
        if self._ctx.world.size > 1:
            agree(self._ctx, Call("preemption.exit", takes_long=True))
            self.is_leaving = True
        raise SystemExit(EXIT_PREEMPTED)


class _StopHandler(SignalHolder):
    """Takes one signal for a request to stop. Runs between any two instructions, so it only sets flags."""

    def __init__(self, guard: PreemptionGuard, hold: Hold, previous: Any) -> None:
        self.previous = previous
        self.is_open = True
        self._guard = guard
        self._hold = hold
        self._has_come = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._has_come:
            signal.default_int_handler(number, frame)
        for handler in self._chain():
            handler._has_come = True
            # What asks the process to stop asks the loops around this one too.
            handler._guard.request_stop()

    def holds(self) -> tuple[Hold, ...]:
        return tuple(handler._hold for handler in self._chain())

    def outer(self) -> Any:
        """Return what handles the signal when this one doesn't any more."""
        previous = self.previous
        while isinstance(previous, _StopHandler) and not previous.is_open:
            previous = previous.previous
        return previous

    def _chain(self) -> Generator[_StopHandler, None, None]:
        handler: Any = self
        while isinstance(handler, _StopHandler):
            yield handler
            handler = handler.previous


@contextmanager
def preemption(
    ctx: Context,
    signals: Collection[int] = STOP_SIGNALS,
    *,
    time_limit: timedelta | float | None = None,
) -> Generator[PreemptionGuard, None, None]:
    """Turn signals, in a ``with`` block, into a question that all ranks answer alike, ``should_stop``.

    A signal that comes in the block only leaves a note, and no handler of the program's own sees it; so the
    step under way goes on to its end on every rank. A second SIGINT raises ``KeyboardInterrupt`` at once.
    Behind the block the handlers are those of before. A SIGINT that the program ignores, as one does that
    runs in the background, stays ignored.

    Workers of prepared loaders that start in the block outlive these signals while it lasts. They leave as
    always when the loader is done with them or the rank is gone.

    Python lets only the main thread of a process handle signals. Elsewhere, as where ranks are threads,
    the guard has none, and ``guard.request_stop()`` or the time limit ask instead. Blocks can be nested: a
    signal asks all of them, a call asks one.

    Ranks: every rank of ``ctx``; doesn't communicate where the arguments are valid. Effect: sets the handlers
    of this process's signals.

    Args:
        ctx: The world whose ranks agree.
        signals: What asks to stop. None at all is possible.
        time_limit: A timedelta or seconds, counted from the beginning of the block. Then it is as if
            a signal had come.

    Yields:
        The guard.

    Raises:
        ValueError: A signal doesn't exist or can't be handled, or the limit isn't positive.
        TypeError: One of them is of another type.

    >>> with preemption(Context(), time_limit=timedelta(hours=1)) as guard:
    ...     before = guard.should_stop()
    ...     guard.request_stop()
    ...     before, guard.should_stop()
    (False, True)
    """
    check_context("preemption", ctx)
    with failing_together(ctx, "preemption"):
        wanted = _check_signals(signals)
        guard = PreemptionGuard(ctx, _seconds(time_limit))
    hold = Hold()
    handlers: dict[signal.Signals, _StopHandler] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in wanted:
                previous = signal.getsignal(number)
                if number == signal.SIGINT and previous == signal.SIG_IGN:
                    continue
                handlers[number] = handler = _StopHandler(guard, hold, previous)
                signal.signal(number, handler)
            guard.signals = tuple(handlers)
        yield guard
    finally:
        for number, handler in handlers.items():
            handler.is_open = False
            if guard.is_leaving and number == signal.SIGTERM:
                signal.signal(number, signal.SIG_IGN)
            elif (
                signal.getsignal(number) is handler
            ):  # else somebody has set another since, who has to undo it
                # None: what was there wasn't set by Python, which can't set it again.
                signal.signal(number, handler.outer() or signal.SIG_DFL)
        hold.is_on.value = 0


def _check_signals(signals: Collection[int]) -> tuple[signal.Signals, ...]:
    if isinstance(cast("object", signals), int | str) or not all(
        isinstance(cast("object", one), int) for one in signals
    ):
        raise TypeError(f"preemption: signals must be a tuple of signals, got {signals!r}.")
    refused = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    for number in signals:
        if number not in signal.valid_signals() or number in refused:
            names = ", ".join(one.name for one in STOP_SIGNALS)
            raise ValueError(
                f"preemption: signals must be ones that a process can handle, got {number!r}. Use some of "
                f"{names}, or others of the module signal."
            )
    return tuple(dict.fromkeys(signal.Signals(number) for number in signals))


def _seconds(time_limit: timedelta | float | None) -> float:
    if time_limit is None:
        return math.inf
    seconds = time_limit.total_seconds() if isinstance(time_limit, timedelta) else time_limit
    if not isinstance(cast("object", seconds), int | float) or isinstance(seconds, bool):
        raise TypeError(f"preemption: time_limit must be seconds or a timedelta, got {time_limit!r}.")
    if not seconds > 0:
        raise ValueError(
            f"preemption: time_limit must be more than 0 seconds, got {time_limit!r}. "
            "For no limit leave it out."
        )
    return float(seconds)
