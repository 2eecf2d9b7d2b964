"""Faults on purpose: let one rank raise, stall or die at its k-th collective."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, ParamSpec, TypeVar, get_args

import torch

from accelfn.context import Collectives
from accelfn.errors import AccelfnError

P = ParamSpec("P")
T = TypeVar("T")


class InjectedFaultError(AccelfnError, RuntimeError):
    """What a rank raises at the place where a :class:`Fault` of kind ``"raise"`` says so."""


class RankDeath(BaseException):
    """Ends a rank's thread as ``kill -9`` ends a process: no handler runs, no rank is notified."""


FaultKind = Literal["raise", "delay", "die", "skip", "swap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One rank fails at one of its collectives.

    Attributes:
        kind: ``"raise"`` an :class:`InjectedFaultError`; ``"delay"``; ``"die"`` as by ``kill -9``; ``"skip"``
            the call as if the program had left it out; ``"swap"`` it with the next one.
        rank: Whom it befalls.
        at: At which of the rank's calls of the :class:`~accelfn.context.Collectives` seam, from 0. Small
            trees need one call in all; larger ones one to agree, and then one for each buffer.
        seconds: Length of a delay.
    """

    kind: FaultKind
    rank: int
    at: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a kind that doesn't exist, which would be a test without a fault."""
        if self.kind not in get_args(FaultKind):
            raise ValueError(
                f"Fault.kind must be one of {', '.join(get_args(FaultKind))}, got {self.kind!r}."
            )


def inject(
    collectives: Collectives, rank: int, size: int, faults: Sequence[Fault], die: Callable[[], None]
) -> Collectives:
    """Wrap ``collectives`` so that the faults of ``rank`` happen.

    Args:
        collectives: What is wrapped.
        rank: Whose they are.
        size: Number of ranks.
        faults: Of all ranks; those of others are left out.
        die: How a rank of this world dies.
    """
    mine = tuple(fault for fault in faults if fault.rank == rank)
    if not mine:
        return collectives
    calls = itertools.count()
    left_out = False
    call_log = collectives.call_log
    postponed: list[tuple[int, Callable[[], object]]] = []  # with the number of the operation

    def wrap(function: Callable[P, T], unmade: Callable[P, T], *, opens: bool = False) -> Callable[P, T]:
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            nonlocal left_out
            number = next(calls)
            left_out = left_out and not opens  # what follows the exchange of an operation belongs to it
            # After the operation that came in between, but not during what it takes to explain a mismatch.
            while opens and postponed and call_log.number > postponed[0][0] + 1:
                postponed.pop(0)[1]()
            for fault in mine:
                if fault.at == number:
                    left_out = left_out or fault.kind in ("skip", "swap")
                    if fault.kind == "swap":
                        postponed.append((call_log.number, lambda: function(*args, **kwargs)))
                    _happen(fault, die)
            if left_out:
                return unmade(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper

    # What a call gives that isn't made: as if every rank had brought what this one has.
    def scatter_alone(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        del source
        if buffer is not None:
            output.copy_(buffer.view(size, -1)[rank])

    return replace(
        collectives,
        # A fault would slip past it: this rank waits in all_gather_bytes, where others start.
        start_all_gather_bytes=None,
        all_gather_bytes=wrap(collectives.all_gather_bytes, lambda message: (message,) * size, opens=True),
        all_gather=wrap(collectives.all_gather, lambda buffer: buffer.repeat(size)),
        all_reduce=wrap(collectives.all_reduce, lambda buffer, op: None),
        reduce_scatter=wrap(collectives.reduce_scatter, lambda buffer: buffer.view(size, -1)[rank] * size),
        broadcast=wrap(collectives.broadcast, lambda buffer, source: None),
        scatter=wrap(collectives.scatter, scatter_alone),
        all_to_all=wrap(collectives.all_to_all, lambda buffer: buffer),
        permute=wrap(collectives.permute, lambda outgoing, incoming, to, source: None),
        barrier=wrap(collectives.barrier, lambda: None),
    )


def _happen(fault: Fault, die: Callable[[], None]) -> None:
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "die":
        die()
    elif fault.kind == "raise":
        raise InjectedFaultError(f"injected fault: rank {fault.rank} raises at its collective {fault.at}.")
