"""The seam between accelfn and whatever carries bytes between ranks.

Everything that crosses ranks goes through one frozen record of callables. The default is a world of one, so
code that communicates also runs in a single process; ``process_group.py`` fills the record from a torch
process group, and ``accelfn.testing`` fills it from threads. Pytrees, packing and checks are built on top, in
``accelfn.comm``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from accelfn.context.call_log import CallLog
from accelfn.context.failure import MessageBoard
from accelfn.context.world import GroupOwner

ReduceOp = Literal["sum", "max", "min"]

MAX_CHUNK_BYTES = 1 << 14


def chunk_bytes(size: int, most: int = MAX_CHUNK_BYTES) -> int:
    """Bytes that each rank contributes to one ``all_gather_bytes`` in a world of ``size`` ranks.

    Small messages cost latency, not bytes: on loopback 64 bytes and 16 KiB take nearly the same time (64 KiB
    take a quarter more), so whatever fits travels with the agreement. Larger worlds get smaller chunks, so
    that all of them together stay near 1 MiB.

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


def _finish_blindly(work: dist.Work, device: torch.device) -> None:
    del device
    work.wait()


class StartedAllGather(NamedTuple):
    """An exchange whose bytes are on their way. Exactly one of the two is called, before any other call.

    Attributes:
        finish: Waits for the bytes of all ranks, and gives what ``Collectives.all_gather_bytes`` gives.
        abandon: Lets go of them without waiting; for a rank that takes part in nothing more.
    """

    finish: Callable[[], tuple[torch.Tensor, ...]]
    abandon: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """Communication as plain callables on flat tensors. The default is a world of one.

    Every rank calls the same callables in the same order. ``n`` is the length of a buffer, the same on every
    rank, and ``P`` the number of ranks. A buffer is 1-D and contiguous, of dtype uint8 wherever bytes are
    only moved.

    Attributes:
        all_gather_bytes: ``(m,)`` uint8 on the CPU, ``m <= chunk`` and free per rank -> one uint8 tensor per
            rank, in rank order, each of which starts with that rank's bytes (what follows is undefined). They
            may be overwritten by the next exchange. Carries the agreement that precedes each operation.
        start_all_gather_bytes: The same in two parts, so that a rank can compute meanwhile; None where the
            only way is to wait. A rank that starts an exchange meets one that waits in ``all_gather_bytes``.
        all_gather: ``(n,)`` -> ``(P * n,)``, in rank order; fresh memory where ``P > 1``.
        all_reduce: Reduces the buffer in place.
        reduce_scatter: ``(P * n,)`` -> ``(n,)``: part ``r`` of the sum over all ranks, on rank ``r``.
        broadcast: Fills the buffer in place from the one of rank ``source``.
        scatter: Fills ``output`` ``(n,)`` with this rank's part of ``buffer`` ``(P * n,)``, which rank
            ``source`` gives; that rank's output may be its own part of it.
        all_to_all: ``(P * n,)`` -> ``(P * n,)``: part ``r`` goes to rank ``r``.
        permute: ``(outgoing, incoming, to, source)``: sends ``outgoing`` ``(n,)`` to rank ``to``, and fills
            ``incoming`` ``(m,)`` with what rank ``source`` sends here, whose ``n`` is this rank's ``m``;
            uint8 on one device. A rank that sends or gets nothing has an empty buffer.
        barrier: Returns when every rank has called it.
        finish: Waits for an operation that torch has started on the group, with an eye on the other ranks; on
            an accelerator it only orders streams.
        translate_error: What a backend raised outside of these callables, such as in a backward pass -> the
            error that says which rank is missing and why; anything else as it is.
        split: ``(groups, timeout)``: for each of ``groups``, ranks of which this rank is one, ascending:
            those ranks as a world of their own. All ranks of the world come here together, and the k-th
            groups of all ranks share the world out. What torch waits for in such a group, it waits for at
            most ``timeout``.
        while_blocked: Return a ``with`` block in which this rank waits for something else than other ranks,
            such as a thread of its own: ranks that are threads and run in turn let each other run meanwhile.
        chunk: Bytes at most per rank in one ``all_gather_bytes``.
        board: Where ranks post messages for each other without waiting.
        call_log: What this rank has called so far.
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
    finish: Callable[[dist.Work, torch.device], None] = _finish_blindly
    translate_error: Callable[[Exception], Exception] = lambda error: error
    split: Callable[[Sequence[Sequence[int]], timedelta], tuple[Part, ...]] = _split_alone
    while_blocked: Callable[[], AbstractContextManager[None]] = nullcontext
    chunk: int = MAX_CHUNK_BYTES
    board: MessageBoard = field(default_factory=MessageBoard)
    call_log: CallLog = field(default_factory=CallLog, compare=False)


class Part(NamedTuple):
    """Some ranks of a world, as a world of their own.

    Attributes:
        collectives: How they reach each other. An error that a rank posts for the whole world
            arrives here too; one that happens here stays here.
        group: Leads to torch's process group, which torch keeps; None where it knows none.
        keeper: Keeps a group that torch doesn't know.
    """

    collectives: Collectives
    group: weakref.ref[dist.ProcessGroup] | None = None
    keeper: GroupOwner | None = None
