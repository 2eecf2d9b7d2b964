"""Faults: one rank raises, stalls or dies at one of its operations, or leaves it out, or swaps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from accelfn.context import Collectives, MakeError, Part
from accelfn.errors import AccelfnError


class InjectedFaultError(AccelfnError, RuntimeError):
    """Raised by a :class:`Fault` of kind ``"raise"``."""


class RankDeath(BaseException):
    """Ends a rank's thread as ``kill -9`` ends a process: nothing is reported to other ranks."""


FaultKind = Literal["raise", "delay", "die", "skip", "swap"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
# Announces an operation, by its name and its line in the program; returns the kind of the fault there.
Reach = Callable[[str, str], FaultKind | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one rank at one of its operations.

    A fault that can't be at its operation, such as ``"skip"`` at one on a file, or a second one at the same,
    comes at the next at which it can. One that its rank doesn't reach does nothing. Those of a schedule that
    happened are listed in ``run_schedule(...).trace.schedule.faults``, where a test can see them.

    Attributes:
        kind: ``"raise"`` an :class:`InjectedFaultError`, at an operation on a file an ``OSError``;
            ``"delay"``; ``"die"`` as by ``kill -9``: in all threads of the rank, whose locks of directories
            are released; ``"skip"`` the call of a collective; ``"swap"`` it with the next one.
        rank: The rank that fails.
        at: Index of the rank's operation, from 0. Operations are its calls of
            :class:`~accelfn.context.Collectives`, also along axes of a mesh: small trees need one call;
            larger ones one to agree and one for each buffer. With a schedule they are all that the trace
            lists, also those on files and those of the rank's background threads.
        seconds: Length of a delay.
    """

    kind: FaultKind
    rank: int
    at: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check the kind."""
        if self.kind not in KINDS:
            raise ValueError(f"Fault.kind must be one of {', '.join(KINDS)}, got {self.kind!r}.")


def happen(
    fault: Fault,
    operation: str,
    make_error: MakeError,
    die: Callable[[], None],
    wait: Callable[[float], object],
) -> FaultKind:
    """Raise, die or wait; return the kind, since whoever calls a collective skips or swaps it."""
    if fault.kind == "raise":
        raise make_error(f"injected fault: rank {fault.rank} fails at its operation {fault.at}, {operation}")
    if fault.kind == "die":
        die()
    elif fault.kind == "delay":
        wait(fault.seconds)
    return fault.kind


class RankFaults:
    """Counts the operations of a rank, and says which fault happens at each."""

    def __init__(self, rank: int, faults: Sequence[Fault]) -> None:
        """Take the faults of ``rank`` out of those of all ranks."""
        self._left = [fault for fault in faults if fault.rank == rank]
        self._count = 0

    def next(self, kinds: Collection[str] = KINDS) -> tuple[int, Fault | None]:
        """Return the number of the next operation, and the fault that happens at it.

        Args:
            kinds: What can happen there.
        """
        at, self._count = self._count, self._count + 1
        for fault in self._left:
            if fault.at <= at and fault.kind in kinds:
                self._left.remove(fault)
                return at, replace(fault, at=at)
        return at, None


def reach_without_schedule(rank: int, faults: Sequence[Fault], die: Callable[[], None]) -> Reach | None:
    """Return how a rank announces its collectives where no schedule is followed; None if it has no faults.

    Args:
        rank: This rank.
        faults: Faults of all ranks.
        die: Kills a rank of this kind of world.
    """
    own = RankFaults(rank, faults)

    def reach(operation: str, site: str) -> FaultKind | None:
        del site
        fault = own.next()[1]
        return fault and happen(fault, operation, InjectedFaultError, die, time.sleep)

    return reach if any(fault.rank == rank for fault in faults) else None


# The calls, with what a trace says of each beside its name, by its last argument.
_PLAIN = ("all_gather_bytes", "all_gather", "reduce_scatter", "all_to_all", "permute", "barrier")
_CALLS = MappingProxyType(
    {**dict.fromkeys(_PLAIN, ""), "all_reduce": " {}", "broadcast": " from {}", "scatter": " from {}"}
)


def announcing(collectives: Collectives, rank: int, size: int, reach: Reach | None) -> Collectives:
    """Return ``collectives`` that announce each call before they make it, also in parts of the world.

    Args:
        collectives: Collectives to wrap; unchanged without ``reach``.
        rank: This rank among them.
        size: Number of ranks.
        reach: Announces an operation, and returns whether to skip or to swap it.
    """
    if reach is None:
        return collectives
    call_log = collectives.call_log
    skipping = False
    postponed: list[tuple[int, Callable[[], object]]] = []  # with the number of the operation

    # A skipped call returns as if every rank had contributed this rank's data.
    def scatter_alone(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        del source
        if buffer is not None:
            output.copy_(buffer.view(size, -1)[rank])

    alone = Collectives(
        all_gather_bytes=lambda message: (message,) * size,
        all_gather=lambda buffer: buffer.repeat(size),
        reduce_scatter=lambda buffer: buffer.view(size, -1)[rank] * size,
        scatter=scatter_alone,
        permute=lambda outgoing, incoming, to, source: None,
    )

    def wrap(name: str) -> Callable[..., Any]:
        function: Callable[..., Any] = getattr(collectives, name)
        skipped: Callable[..., Any] = getattr(alone, name)
        starts_operation = name == "all_gather_bytes"

        def wrapper(*args: Any) -> Any:
            nonlocal skipping
            entry = call_log.current
            skipping = skipping and not starts_operation  # later calls belong to the same operation
            # After the operation in between, but not while a mismatch is being explained.
            while starts_operation and postponed and entry.number > postponed[0][0] + 1:
                postponed.pop(0)[1]()
            call = name + _CALLS[name].format(*args[-1:])
            # The bytes that are gathered first are those of the agreement.
            detail = "" if starts_operation else f": {call}"
            kind = reach(entry.operation + detail if entry.operation else call, entry.site)
            skipping = skipping or kind in ("skip", "swap")
            if kind == "swap":
                postponed.append((entry.number, lambda: function(*args)))
            return (skipped if skipping else function)(*args)

        return wrapper

    def of_part(part: Part, members: Sequence[int]) -> Part:
        if len(members) == 1:
            return part
        within = announcing(part.collectives, list(members).index(rank), len(members), reach)
        return part._replace(collectives=within)

    def split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
        return tuple(map(of_part, collectives.split(groups, timeout), groups))

    # Only whole exchanges are announced, not started ones.
    return replace(
        collectives, start_all_gather_bytes=None, split=split, **{name: wrap(name) for name in _CALLS}
    )
