"""Move large tensors by exchanges alone, piece by piece: through shared memory faster than through sockets.

A rank that begins with one round has read the one before, so while the receivers copy a piece, the source
already writes the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ("broadcast_in_rounds", "scatter_in_rounds")

Exchange = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]


def broadcast_in_rounds(exchange: Exchange, chunk: int, rank: int, buffer: torch.Tensor, source: int) -> None:
    """Fill ``buffer`` with that of rank ``source``.

    Ranks: every rank.

    Args:
        exchange: As in ``Collectives``.
        chunk: Bytes at most per rank in one exchange.
        rank: This rank.
        buffer: ``(n,)``, contiguous, on the CPU; the same ``n`` and dtype on every rank.
        source: Whose buffer it is.
    """
    data = buffer.view(torch.uint8)
    nothing = torch.empty(0, dtype=torch.uint8)
    for start in range(0, data.numel(), chunk):
        piece = data[start : start + chunk]
        rows = exchange(piece if rank == source else nothing)
        if rank != source:
            piece.copy_(rows[source][: piece.numel()])


def scatter_in_rounds(
    exchange: Exchange,
    chunk: int,
    rank: int,
    size: int,
    output: torch.Tensor,
    buffer: torch.Tensor | None,
    source: int,
) -> None:
    """Fill ``output`` with this rank's part of the buffer of rank ``source``.

    Ranks: every rank.

    Args:
        exchange: As in ``Collectives``.
        chunk: Bytes at most per rank in one exchange.
        rank: This rank.
        size: Number of ranks, at least 2.
        output: ``(n,)``, contiguous, on the CPU; the same ``n`` and dtype on every rank.
        buffer: ``(size * n,)`` on rank ``source``.
        source: Whose buffer it is; its own part isn't written to the others.
    """
    own, nothing = output.view(torch.uint8), torch.empty(0, dtype=torch.uint8)
    receivers = [other for other in range(size) if other != source]
    length = chunk // len(receivers)  # of the piece of each receiver in one round
    parts = None if buffer is None or rank != source else buffer.view(torch.uint8).view(size, -1)
    for start in range(0, own.numel(), length):
        end = min(own.numel(), start + length)
        if parts is not None:
            pieces = [parts[other, start:end] for other in receivers]
            exchange(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
            continue
        place = receivers.index(rank) * (end - start)
        own[start:end] = exchange(nothing)[source][place : place + end - start]
    if parts is not None and own.data_ptr() != parts[source].data_ptr():
        own.copy_(parts[source])
