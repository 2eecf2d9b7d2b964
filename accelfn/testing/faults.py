"""Injected faults: one rank raises, stalls or dies at its k-th collective."""

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
    """Raised by a :class:`Fault` of kind ``"raise"``."""


class RankDeath(BaseException):
    """Ends a rank's thread as ``kill -9`` ends a process: nothing is reported to other ranks."""


FaultKind = Literal["raise", "delay", "die", "skip", "swap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one rank at one of its collectives.

    One that its rank doesn't reach does nothing. Those of a :class:`Schedule` that happened are listed in
    ``run_schedule(...).trace.schedule.faults``, where a test can see them.

    Attributes:
        kind: ``"raise"`` an :class:`InjectedFaultError`; ``"delay"``; ``"die"`` as by ``kill -9``; ``"skip"``
            the call; ``"swap"`` it with the next one.
        rank: The rank that fails.
        at: Index of the rank's call of :class:`~accelfn.context.Collectives`, from 0. Small trees need one
            call; larger ones one to agree and one for each buffer.
        seconds: Length of a delay.
    """

    kind: FaultKind
    rank: int
    at: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check the kind."""
        if self.kind not in get_args(FaultKind):
            raise ValueError(
                f"Fault.kind must be one of {', '.join(get_args(FaultKind))}, got {self.kind!r}."
            )


def inject(
    collectives: Collectives, rank: int, size: int, faults: Sequence[Fault], die: Callable[[], None]
) -> Collectives:
    """Return ``collectives`` with the faults of ``rank`` injected.

    Args:
        collectives: Collectives to wrap.
        rank: This rank.
        size: Number of ranks.
        faults: Faults of all ranks.
        die: Kills a rank of this kind of world.
    """
    own_faults = tuple(fault for fault in faults if fault.rank == rank)
    if not own_faults:
        return collectives
    calls = itertools.count()
    skipping = False
    call_log = collectives.call_log
    postponed: list[tuple[int, Callable[[], object]]] = []  # with the number of the operation

    def wrap(
        function: Callable[P, T], skipped: Callable[P, T], *, starts_operation: bool = False
    ) -> Callable[P, T]:
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            nonlocal skipping
            number = next(calls)
            skipping = skipping and not starts_operation  # later calls belong to the same operation
            # After the operation in between, but not while a mismatch is being explained.
            while starts_operation and postponed and call_log.number > postponed[0][0] + 1:
                postponed.pop(0)[1]()
            for fault in own_faults:
                if fault.at == number:
                    skipping = skipping or fault.kind in ("skip", "swap")
                    if fault.kind == "swap":
                        postponed.append((call_log.number, lambda: function(*args, **kwargs)))
                    _apply(fault, die)
            if skipping:
                return skipped(*args, **kwargs)
            return function(*args, **kwargs)

        return wrapper

    # A skipped call returns as if every rank had contributed this rank's data.
    def scatter_alone(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        del source
        if buffer is not None:
            output.copy_(buffer.view(size, -1)[rank])

    return replace(
        collectives,
        # Faults are counted in all_gather_bytes only.
        start_all_gather_bytes=None,
        all_gather_bytes=wrap(
            collectives.all_gather_bytes, lambda message: (message,) * size, starts_operation=True
        ),
        all_gather=wrap(collectives.all_gather, lambda buffer: buffer.repeat(size)),
        all_reduce=wrap(collectives.all_reduce, lambda buffer, op: None),
        reduce_scatter=wrap(collectives.reduce_scatter, lambda buffer: buffer.view(size, -1)[rank] * size),
        broadcast=wrap(collectives.broadcast, lambda buffer, source: None),
        scatter=wrap(collectives.scatter, scatter_alone),
        all_to_all=wrap(collectives.all_to_all, lambda buffer: buffer),
        permute=wrap(collectives.permute, lambda outgoing, incoming, to, source: None),
        barrier=wrap(collectives.barrier, lambda: None),
    )


def _apply(fault: Fault, die: Callable[[], None]) -> None:
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "die":
        die()
    elif fault.kind == "raise":
        raise InjectedFaultError(f"injected fault: rank {fault.rank} raises at its collective {fault.at}.")
