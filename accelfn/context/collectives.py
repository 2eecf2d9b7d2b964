"""The interface to the transport between ranks.

All communication goes through one frozen record of callables. The default is a world of one, so code that
communicates also runs in a single process; ``process_group.py`` implements the record with a torch process
group, and ``accelfn.testing`` with threads. Pytrees, packing and checks are built on top, in
``accelfn.comm``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from accelfn.context.call_log import CallLog
from accelfn.context.failure import MessageBoard
from accelfn.context.threads import Threads
from accelfn.context.world import GroupOwner
from accelfn.errors import NotAvailableError

ReduceOp = Literal["sum", "max", "min"]

MAX_CHUNK_BYTES = 1 << 14


def chunk_bytes(size: int, most: int = MAX_CHUNK_BYTES) -> int:
    """Return the number of bytes that each rank may send in one ``all_gather_bytes``.

    Small messages cost latency, not bandwidth: on loopback 64 bytes and 16 KiB take nearly the same time (64
    KiB take a quarter more), so small payloads are sent with the agreement. Larger worlds use smaller chunks,
    so that all chunks together stay near 1 MiB.

    >>> chunk_bytes(2), chunk_bytes(128), chunk_bytes(10_000)
    (16384, 8192, 1024)
    """
    return max(1024, min(most, (1 << 20) // size // 16 * 16))


def _keep(buffer: torch.Tensor, *others: object) -> torch.Tensor:
    del others
    return buffer


def _nothing(*arguments: object) -> None:
    del arguments


def _scatter_alone(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
    del source
    if buffer is not None:
        output.copy_(buffer)


def _permute_alone(outgoing: torch.Tensor, incoming: torch.Tensor, to: int, source: int) -> None:
    del to, source
    incoming.copy_(outgoing)


def _split_alone(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
    del timeout
    return tuple(Part(Collectives()) for _ in groups)


def _wait(work: dist.Work, device: torch.device) -> None:
    del device
    work.wait()


class StartedAllGather(NamedTuple):
    """An exchange in flight. Exactly one of its callables is called, before any other operation.

    Attributes:
        finish: Waits for the bytes of all ranks, and returns what ``Collectives.all_gather_bytes`` returns.
        abandon: Drops the exchange without waiting, on a rank that takes part in no further operation.
    """

    finish: Callable[[], tuple[torch.Tensor, ...]]
    abandon: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Communication as plain callables on flat tensors. The default is a world of one.

    Every rank calls the same callables in the same order. ``n`` is the length of a buffer, the same on every
    rank, and ``P`` the number of ranks. Buffers are 1-D and contiguous, and uint8 unless they are reduced.

    Attributes:
        all_gather_bytes: ``(m,)`` uint8 on the CPU, with any ``m <= chunk`` per rank -> one uint8 tensor per
            rank, in rank order, which starts with that rank's bytes (the remainder is undefined). The next
            exchange may overwrite them. Carries the agreement that precedes each operation.
        start_all_gather_bytes: The same without waiting, so that a rank can compute meanwhile; None if it
            isn't supported. It may be matched with ``all_gather_bytes`` on other ranks.
        all_gather: ``(n,)`` -> ``(P * n,)``, in rank order; fresh memory where ``P > 1``.
        all_reduce: Reduces the buffer in place.
        reduce_scatter: ``(P * n,)`` -> ``(n,)``: part ``r`` of the sum over all ranks, on rank ``r``.
        broadcast: Fills the buffer in place from the one of rank ``source``.
        scatter: Fills ``output`` ``(n,)`` with this rank's part of the ``buffer`` ``(P * n,)`` of rank
            ``source``, whose output may be a view of its part.
        all_to_all: ``(P * n,)`` -> ``(P * n,)``: part ``r`` goes to rank ``r``.
        permute: ``(outgoing, incoming, to, source)``: sends ``outgoing`` ``(n,)`` to rank ``to``, and fills
            ``incoming`` ``(m,)`` from rank ``source``, whose ``n`` is this rank's ``m``; uint8 on one device.
            A rank that sends or receives nothing passes an empty buffer.
        barrier: Returns when every rank has called it.
        finish: Waits for an operation that torch has started on the group, while watching for failures of
            other ranks; on an accelerator it only orders streams.
        translate_error: Turns an error of the backend that was raised outside of these callables, such as in
            a backward pass, into one that names the missing rank; returns other errors unchanged.
        split: ``(groups, timeout)``: returns each of ``groups`` (ascending ranks, including this one) as a
            world of its own. Every rank calls it, and the k-th groups of all ranks partition the world.
            torch's operations in such a group wait for at most ``timeout``.
        apart: Returns another group of the same ranks, for CPU tensors; None where ranks aren't processes.
            Every rank calls it, equally often. It isn't registered with torch, and ends with its last
            reference.
        lost_rank: Returns a rank whose process has ended, if that can be observed; None while there is none.
        threads: Starts threads, and waits for something other than ranks.
        chunk: Maximum number of bytes per rank in one ``all_gather_bytes``.
        board: Messages between ranks that don't wait for each other.
        call_log: The operations that this rank has called.
    """

    all_gather_bytes: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = lambda chunk: (chunk,)
    start_all_gather_bytes: Callable[[torch.Tensor], StartedAllGather] | None = None
    all_gather: Callable[[torch.Tensor], torch.Tensor] = _keep
    all_reduce: Callable[[torch.Tensor, ReduceOp], None] = _nothing
    reduce_scatter: Callable[[torch.Tensor], torch.Tensor] = _keep
    broadcast: Callable[[torch.Tensor, int], None] = _nothing
    scatter: Callable[[torch.Tensor, torch.Tensor | None, int], None] = _scatter_alone
    all_to_all: Callable[[torch.Tensor], torch.Tensor] = _keep
    permute: Callable[[torch.Tensor, torch.Tensor, int, int], None] = _permute_alone
    barrier: Callable[[], None] = _nothing
    finish: Callable[[dist.Work, torch.device], None] = _wait
    translate_error: Callable[[Exception], Exception] = lambda error: error
    split: Callable[[Sequence[Sequence[int]], timedelta], tuple[Part, ...]] = _split_alone
    apart: Callable[[], dist.ProcessGroup | None] = lambda: None
    lost_rank: Callable[[], int | None] = lambda: None
    threads: Threads = field(default_factory=Threads)
    chunk: int = MAX_CHUNK_BYTES
    board: MessageBoard = field(default_factory=MessageBoard)
    call_log: CallLog = field(default_factory=CallLog, compare=False)


def refusing(why: str) -> Collectives:
    """Return the communication of a context that has none, which raises :class:`NotAvailableError`."""

    def refuse(*arguments: object) -> NoReturn:
        del arguments
        raise NotAvailableError(why)

    calls: dict[str, Any] = {item.name: refuse for item in fields(Collectives) if callable(item.default)}
    for name in ("translate_error", "lost_rank"):  # which don't communicate
        del calls[name]
    return Collectives(**calls)


def disconnected(size: int) -> Collectives:
    """Return the communication of a pickled context of ``size`` ranks: refused if there are others."""
    if size == 1:
        return Collectives()
    return refusing(
        "this context is a copy that was pickled, such as for a worker of a loader: it has the rank and the "
        "number of ranks, but no connection to the other ranks. Communicate in the process of the rank, and "
        "pass on what you get."
    )


class Part(NamedTuple):
    """Some ranks of a world, as a world of their own.

    Attributes:
        collectives: Communication among them. An error that a rank posts to the whole world is raised here
            too; an error in this part stays in it.
        group: Weak reference to torch's process group; None if none is registered with torch.
        group_owner: Keeps a group that isn't registered with torch.
    """

    collectives: Collectives
    group: weakref.ref[dist.ProcessGroup] | None = None
    group_owner: GroupOwner | None = None
