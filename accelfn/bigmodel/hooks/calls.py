"""Calls of modules that are running, and what hooks remember of them."""

from __future__ import annotations

import inspect
import threading
from types import FrameType
from typing import Any, Generic, TypeVar

from torch import nn

__all__ = ("CallStack", "is_running")

T = TypeVar("T")


class CallStack(Generic[T]):
    """Values of the forwards that are running, the innermost last; each thread has its own.

    Copies and pickles are empty: a copy isn't running.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def depth(self) -> int:
        """Number of forwards that have begun on this thread and not ended."""
        return len(self._values())

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


def is_running(module: nn.Module, times: int) -> bool:
    """Whether this thread is within ``times`` calls of ``module`` at this moment, or more."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and times:
        name = frame.f_code.co_name
        if name.startswith("torch_dynamo_resume"):  # compiled code doesn't show whom it runs
            return True
        times -= name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return not times
