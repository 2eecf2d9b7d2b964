"""Stop all ranks after the same step when the cluster sends a signal to any of them."""

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
from accelfn.context import Context, takes_context
from accelfn.data.workers import Hold, SignalHolder

__all__ = ("EXIT_PREEMPTED", "STOP_SIGNALS", "PreemptionGuard", "preemption")

# sysexits.h: EX_TEMPFAIL, "try again later".
EXIT_PREEMPTED: Final = 75
# SIGUSR1 doesn't exist everywhere.
STOP_SIGNALS: Final = tuple(
    signal.Signals[name] for name in ("SIGTERM", "SIGUSR1", "SIGINT") if name in signal.Signals.__members__
)


class PreemptionGuard:
    """Tells whether the program should stop. Returned by :func:`preemption`.

    Attributes:
        signals: The signals that it handles; none outside of the process's main thread.
        is_leaving: Whether ``exit`` was called in a world of several ranks. SIGTERM is ignored from then on,
            because launchers send it to all ranks as soon as the first one exits.
    """

    def __init__(
        self, ctx: Context, time_limit_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Use :func:`preemption` instead."""
        self.signals: tuple[signal.Signals, ...] = ()
        self._ctx = ctx
        self._clock = clock
        self._end = clock() + time_limit_s
        self._is_requested = False  # on this rank
        self._is_agreed = False  # on every rank
        self.is_leaving: bool = False

    def request_stop(self) -> None:
        """Request a stop, as a signal does. Ranks: any; the others are informed in ``should_stop``.

        May be called from any thread.
        """
        self._is_requested = True

    def should_stop(self) -> bool:
        """Return whether a stop was requested on any rank, or the time limit has passed.

        Call it when a step is complete, for example when ``micro.sync`` is true, so that the program can
        resume from what is saved then. Once the result is True it stays True without communication.

        Ranks: every rank of ``ctx``; exchanges one byte. All ranks get the same result from the same call.

        Raises:
            MismatchError: Another rank called another operation instead.
        """
        if self._is_agreed:
            return True
        is_requested = self._is_requested or self._clock() >= self._end
        if self._ctx.world.size > 1:
            rows = agree(self._ctx, Call("should_stop"), torch.tensor([is_requested], dtype=torch.uint8))
            is_requested = any(bool(row[0]) for row in rows)
        self._is_agreed = is_requested
        return is_requested

    def exit(self) -> NoReturn:
        """Exit with status 75, ``EXIT_PREEMPTED``, once every rank has called this.

        Ranks: every rank of ``ctx``; early ranks wait for up to ``Guard.long_timeout``.

        Raises:
            SystemExit: Always, with that status.
            MismatchError: Another rank called another operation instead.
        """
        if self._ctx.world.size > 1:
            agree(self._ctx, Call("preemption.exit", takes_long=True))
            self.is_leaving = True
        raise SystemExit(EXIT_PREEMPTED)


class _StopHandler(SignalHolder):
    """Converts a signal to a stop request. It may run between any two instructions, so it only sets flags."""

    def __init__(self, guard: PreemptionGuard, hold: Hold, previous: Any) -> None:
        self.previous = previous
        self.is_open = True
        self._guard = guard
        self._hold = hold
        self._was_received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._was_received:
            signal.default_int_handler(number, frame)
        for handler in self._chain():
            handler._was_received = True
            # The signal is for the whole process, so enclosing blocks get the request too.
            handler._guard.request_stop()

    def holds(self) -> tuple[Hold, ...]:
        return tuple(handler._hold for handler in self._chain())

    def outer(self) -> Any:
        """Return the handler to reinstall at the end of the block."""
        previous = self.previous
        while isinstance(previous, _StopHandler) and not previous.is_open:
            previous = previous.previous
        return previous

    def _chain(self) -> Generator[_StopHandler, None, None]:
        handler: Any = self
        while isinstance(handler, _StopHandler):
            yield handler
            handler = handler.previous


@takes_context
@contextmanager
def preemption(
    ctx: Context,
    signals: Collection[int] = STOP_SIGNALS,
    *,
    time_limit: timedelta | float | None = None,
) -> Generator[PreemptionGuard, None, None]:
    """Handle signals in a ``with`` block, so that all ranks stop after the same step; see ``should_stop``.

    A signal during the block is only recorded, and the program's own handlers aren't called, so every rank
    completes its current step. A second SIGINT raises ``KeyboardInterrupt`` immediately. The previous
    handlers are restored at the end of the block. If the program ignores SIGINT, as background jobs do, it
    remains ignored.

    Workers of prepared loaders that start in the block ignore these signals until it ends. They exit as usual
    when the loader no longer needs them or the rank exits.

    Python handles signals only in the main thread of a process. In other threads, for example if ranks are
    threads, the guard handles no signals; use ``guard.request_stop()`` or the time limit. Blocks can be
    nested: a signal is a request to all of them, ``request_stop`` to one.

    Ranks: every rank of ``ctx``; no communication if the arguments are valid. Effect: sets signal handlers of
    this process.

    Args:
        ctx: The world whose ranks stop together.
        signals: The signals that request a stop; may be empty.
        time_limit: A timedelta or seconds, from the beginning of the block. After it, a stop is requested.

    Yields:
        The guard.

    Raises:
        ValueError: A signal doesn't exist or can't be handled, or ``time_limit`` isn't positive.
        TypeError: An argument is of another type.

    >>> with preemption(Context(), time_limit=timedelta(hours=1)) as guard:
    ...     before = guard.should_stop()
    ...     guard.request_stop()
    ...     before, guard.should_stop()
    (False, True)
    """
    with failing_together(ctx, "preemption"):
        numbers = _check_signals(signals)
        guard = PreemptionGuard(ctx, _seconds(time_limit))
    hold = Hold()
    handlers: dict[signal.Signals, _StopHandler] = {}
    try:
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
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
            elif signal.getsignal(number) is handler:  # otherwise the program replaced it, and restores it
                # None: the previous handler wasn't installed from Python, which can't reinstall it.
                signal.signal(number, handler.outer() or signal.SIG_DFL)
        hold.is_on.value = 0


def _check_signals(signals: Collection[int]) -> tuple[signal.Signals, ...]:
    if isinstance(cast("object", signals), int | str) or not all(
        isinstance(cast("object", number), int) for number in signals
    ):
        raise TypeError(f"preemption: signals must be a tuple of signals, got {signals!r}.")
    refused = {getattr(signal, name, None) for name in ("SIGKILL", "SIGSTOP")}
    for number in signals:
        if number not in signal.valid_signals() or number in refused:
            names = ", ".join(stop_signal.name for stop_signal in STOP_SIGNALS)
            raise ValueError(
                f"preemption: a process can't handle the signal {number!r}. Use {names}, or others of the "
                "module signal."
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
            f"preemption: time_limit must be more than 0 seconds, got {time_limit!r}. Omit it for no limit."
        )
    return float(seconds)
