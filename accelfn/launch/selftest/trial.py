"""What a check is given, and what has become of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from accelfn.context import Context

__all__ = ("Check", "Trial", "demand")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a check is given.

    Attributes:
        ctx: The configured context.
        fault: What is to go wrong on the last rank, or "".
        folder: A directory for files, which is removed afterwards; "": one of the system's.
    """

    ctx: Context
    fault: str = ""
    folder: str = ""

    def spoils(self, fault: str) -> bool:
        """Whether this rank is the one on which ``fault`` is to happen."""
        return self.fault == fault and self.ctx.rank == self.ctx.num_processes - 1


class Check(NamedTuple):
    """One check.

    Attributes:
        name: In the table.
        run: Every rank calls it. It returns what there is to remark, or raises.
    """

    name: str
    run: Callable[[Trial], str]


def demand(condition: bool, message: str) -> None:
    """Fail the check unless ``condition`` holds.

    Raises:
        AssertionError: With ``message``. Unlike ``assert``, under ``python -O`` too.
    """
    if not condition:
        raise AssertionError(message)
