"""Faults on purpose: let one rank raise, stall or die at its k-th collective."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypeVar

from accelfn.context import Collectives
from accelfn.errors import AccelfnError

__all__ = ("Fault", "InjectedFaultError", "RankDeath", "inject")

P = ParamSpec("P")
T = TypeVar("T")


class InjectedFaultError(AccelfnError, RuntimeError):
    """What a rank raises at the place where a :class:`Fault` of kind ``"raise"`` says so."""


class RankDeath(BaseException):
    """Ends a rank's thread as ``kill -9`` ends a process: no handler runs, nobody is told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One rank fails at one of its collectives.

    Attributes:
        kind: ``"raise"`` an :class:`InjectedFaultError`, ``"delay"``, or ``"die"``.
        rank: Whom it befalls.
        at: At which of the rank's calls of the :class:`~accelfn.context.Collectives` seam, from 0.
        seconds: Length of a delay.
    """

    kind: Literal["raise", "delay", "die"]
    rank: int
    at: int = 0
    seconds: float = 0.0


def inject(
    collectives: Collectives, rank: int, faults: Sequence[Fault], die: Callable[[], None]
) -> Collectives:
    """Wrap ``collectives`` so that the faults of ``rank`` happen.

    Args:
        collectives: What is wrapped.
        rank: Whose they are.
        faults: Of all ranks; those of others are left out.
        die: How a rank of this world dies.
    """
    mine = tuple(fault for fault in faults if fault.rank == rank)
    if not mine:
        return collectives
    calls = itertools.count()

    def wrap(function: Callable[P, T]) -> Callable[P, T]:
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            number = next(calls)
            for fault in mine:
                if fault.at == number:
                    _happen(fault, die)
            return function(*args, **kwargs)

        return wrapper

    return Collectives(
        exchange=wrap(collectives.exchange),
        all_gather=wrap(collectives.all_gather),
        all_reduce=wrap(collectives.all_reduce),
        broadcast=wrap(collectives.broadcast),
        scatter=wrap(collectives.scatter),
        all_to_all=wrap(collectives.all_to_all),
        barrier=wrap(collectives.barrier),
        chunk=collectives.chunk,
    )


def _happen(fault: Fault, die: Callable[[], None]) -> None:
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "die":
        die()
    else:
        raise InjectedFaultError(f"injected fault: rank {fault.rank} raises at its collective {fault.at}.")
