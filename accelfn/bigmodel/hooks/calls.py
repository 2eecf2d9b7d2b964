"""What hooks remember of the calls that are running."""

from __future__ import annotations

import threading
from typing import Any, Generic, TypeVar

__all__ = ("CallStack",)

T = TypeVar("T")


class CallStack(Generic[T]):
    """Values of the forwards that are running, the innermost last; each thread has its own.

    Copies and pickles are empty: a copy isn't running.
    """

    def __init__(self) -> None:
        self._local = _Local()

    @property
    def values(self) -> list[T]:
        """This thread's: one for each forward that has begun and not ended."""
        return self._local.values

    def pop(self) -> T | None:
        """Take the value of the forward that ends; None if none has begun."""
        values = self._local.values
        return values.pop() if values else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (CallStack, ())


class _Local(threading.local):
    def __init__(self) -> None:
        self.values: list[Any] = []
