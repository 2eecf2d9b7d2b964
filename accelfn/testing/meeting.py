"""Where ranks that are threads of one process meet: a barrier that hands over what each one brought."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

from accelfn.errors import (
    CollectiveTimeoutError,
    Disagreement,
    MismatchError,
    MissingRankError,
    RemoteRankError,
)

__all__ = ("Meeting",)


class Brought(NamedTuple):
    """What one rank brings to a meeting."""

    call: tuple[object, ...]  # what it is doing; must be equal on every rank
    value: Any


class Left(NamedTuple):
    """Why a rank comes to no meeting any more."""

    how: str  # "returned", "died" or "raised"
    error: BaseException | None


class Meeting:
    """A barrier of ``size`` threads that exchanges values, checks calls and never hangs.

    Not part of the public interface: the one mutable object of a world in memory.
    """

    def __init__(self, size: int, timeout_s: float | None) -> None:
        """Open the meeting for ``size`` ranks; None waits for ever (for a debugger)."""
        self._size = size
        self._timeout_s = timeout_s
        self._condition = threading.Condition()
        self._round = 0
        self._brought: dict[int, Brought] = {}
        self._last: list[Brought] = []
        self._left: dict[int, Left] = {}

    def meet(self, rank: int, call: tuple[object, ...], value: Any) -> list[Any]:
        """Bring ``value``, wait for all ranks, and return what each one brought, in rank order.

        Raises:
            MismatchError: The ranks brought different calls.
            RemoteRankError: A rank raised instead of coming.
            MissingRankError: A rank returned or died instead of coming.
            CollectiveTimeoutError: A rank did not come in time.
        """
        with self._condition:
            number = self._round
            self._brought[rank] = Brought(call, value)
            if len(self._brought) == self._size:
                # Nobody can finish the next round before all have read this one, so one slot is enough.
                self._last = [self._brought[one] for one in range(self._size)]
                self._brought = {}
                self._round += 1
                self._condition.notify_all()
            else:
                self._wait(rank, number, call)
            met = self._last
        expected = met[0].call
        if any(one.call != expected for one in met):
            raise _mismatch(met)
        return [one.value for one in met]

    def leave(self, rank: int, how: str, error: BaseException | None = None) -> None:
        """Say that ``rank`` comes to no meeting any more."""
        with self._condition:
            self._left[rank] = Left(how, error)
            self._condition.notify_all()

    def _wait(self, rank: int, number: int, call: tuple[object, ...]) -> None:
        deadline = None if self._timeout_s is None else time.monotonic() + self._timeout_s
        while self._round == number:
            gone = next((one for one in sorted(self._left) if one not in self._brought), None)
            if gone is not None:
                raise _absent(gone, self._left[gone], rank, call)
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                missing = [one for one in range(self._size) if one not in self._brought]
                raise CollectiveTimeoutError(
                    f"rank {rank} waited {self._timeout_s:g} s in {_name(call)} for rank(s) {missing}, "
                    "which did not come. Every rank must call the same operations in the same order."
                )
            self._condition.wait(left_s)


def _absent(gone: int, left: Left, rank: int, call: tuple[object, ...]) -> Exception:
    if left.error is not None:
        return RemoteRankError(gone, type(left.error).__name__, str(left.error))
    return MissingRankError(
        f"rank {gone} {left.how} while rank {rank} waits for it in {_name(call)}. "
        "Every rank must call the same operations in the same order."
    )


def _mismatch(met: list[Brought]) -> MismatchError:
    calls = [" ".join(str(part) for part in one.call) for one in met]
    expected = max(calls, key=calls.count)
    rows = tuple(
        Disagreement(rank, "", expected, call) for rank, call in enumerate(calls) if call != expected
    )
    return MismatchError(_name(met[0].call), rows)


def _name(call: tuple[object, ...]) -> str:
    return str(call[0])
