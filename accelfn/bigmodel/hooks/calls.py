"""What a hook remembers between the beginning and the end of one forward."""

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
        self._local = threading.local()

    def push(self, value: T) -> None:
        """Remember ``value`` for the forward that begins."""
        self._values().append(value)

    def pop(self) -> T | None:
        """Give the value of the forward that ends; None if none has begun on this thread."""
        values = self._values()
        return values.pop() if values else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (CallStack, ())

    def _values(self) -> list[T]:
        found: list[T] | None = getattr(self._local, "values", None)
        if found is None:
            found = self._local.values = []
        return found
