"""What a rank made of an operation, as a value that tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

__all__ = ("Seen", "look")


class Seen(NamedTuple):
    """What one rank made of it: what it got, or which error."""

    error: str
    text: str


def look(action: Callable[[], object]) -> Seen:
    """Carry out ``action``, and say what came of it."""
    try:
        return Seen("", repr(action()))
    except Exception as error:  # noqa: BLE001 -- which one it is, is what the test is about
        return Seen(type(error).__name__, str(error))
