"""Exchange messages through shared memory between the processes of one machine, in chunks.

A message through sockets wakes four threads; here a rank writes its bytes and a sequence number, and polls
the numbers of the other ranks. Across machines, or without shared memory, sockets are used.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import platform
import secrets
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

if sys.platform != "win32":
    import fcntl

Exchange = Callable[[torch.Tensor], tuple[torch.Tensor, ...]]

# Each rank's sequence number has its own cache line.
_STRIDE = 64
# Two slots: a rank that begins exchange k + 1 has read all of k, so k + 2 may overwrite it.
_SLOTS = 2
_NONCE_BYTES = 32
_ANSWER_BYTES = 1024
# Interval between checks that the processes of late ranks are alive.
_CHECK_S = 0.02
# At first the thread only yields; later it sleeps, for an eighth of the time it has waited.
_YIELD_S = 0.0002
_MIN_SLEEP_S = 0.00005
_MAX_SLEEP_S = 0.001


class LostRanksError(Exception):
    """Processes have ended before they wrote their rows."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Store the ranks."""
        super().__init__(*ranks)
        self.ranks: tuple[int, ...] = tuple(ranks)


def share_rows(exchange: Exchange, rank: int, size: int, chunk: int) -> SharedRows | None:
    """Set up rows in shared memory; None, on all ranks alike, if a rank can't map it.

    Ranks: every rank; two exchanges.

    Args:
        exchange: Exchanges messages of up to 1,024 bytes until then.
        rank: This rank.
        size: Number of ranks.
        chunk: Bytes of a row, a multiple of 16.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    path, descriptor = "", -1
    if rank == 0 and _is_possible():
        with contextlib.suppress(OSError):
            folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # None: for temporary files
            descriptor, path = tempfile.mkstemp(prefix="accelfn-", dir=folder)
            _reserve(descriptor, _bytes(size, chunk))
            os.pwrite(descriptor, nonce, 0)
    try:
        message = json.dumps([path, nonce.hex()]).encode() if rank == 0 else b""
        if len(message) > _ANSWER_BYTES:  # the path is too long
            message = json.dumps(["", ""]).encode()
        received = exchange(_tensor(message.ljust(_ANSWER_BYTES)))[0][:_ANSWER_BYTES]
        path, nonce_text = json.loads(bytes(received.tolist()))  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
        if rank != 0 and path and _is_possible():
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDWR)
        rows = None
        if descriptor >= 0:
            with contextlib.suppress(OSError, ValueError):
                if os.pread(descriptor, _NONCE_BYTES, 0).hex() == nonce_text:
                    rows = SharedRows(descriptor, rank, size, chunk)
        answers = exchange(_tensor(bytes([rows is not None])))
        everyone = all(int(row[0]) for row in answers)
    finally:
        if rank == 0 and path:  # mappings stay valid, and no file is left behind by killed processes
            with contextlib.suppress(OSError):
                Path(path).unlink()
    if rows is None and descriptor >= 0:
        os.close(descriptor)
    return rows if everyone else None


def _is_possible() -> bool:
    # Other ranks must see a row's bytes before its number. Only these processors guarantee that without a
    # fence, which Python doesn't have.
    return sys.platform != "win32" and platform.machine().lower() in ("x86_64", "amd64")


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Allocate the file: too little memory raises here, instead of killing the process by SIGBUS later."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, num_bytes)
    else:
        os.ftruncate(descriptor, num_bytes)


def _bytes(size: int, chunk: int) -> int:
    return mmap.PAGESIZE + _SLOTS * size * (_STRIDE + chunk)


def _tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


class SharedRows:
    """Rows in shared memory, one per rank, with the sequence number of the exchange that wrote it."""

    def __init__(self, descriptor: int, rank: int, size: int, chunk: int) -> None:
        """Map the file, and hold a lock in it until this process ends.

        Args:
            descriptor: Of the file; closed by this object.
            rank: This rank.
            size: Number of ranks.
            chunk: Bytes of a row.

        Raises:
            OSError: The file system has no locks, or no space.
        """
        # The kernel releases the lock when the process ends, by which the other ranks detect it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        memory = mmap.mmap(descriptor, _bytes(size, chunk))
        begin = mmap.PAGESIZE + _SLOTS * size * _STRIDE
        self._numbers = memoryview(memory)[mmap.PAGESIZE : begin].cast("q")
        rows = torch.frombuffer(memory, dtype=torch.uint8, offset=begin).view(_SLOTS, size, chunk)
        self._rows = tuple(tuple(slot.unbind()) for slot in rows.unbind())
        self._descriptor = descriptor
        self._rank, self._size = rank, size
        self._number = 0
        self._late: list[int] = []
        weakref.finalize(self, os.close, descriptor)

    def write(self, message: torch.Tensor) -> None:
        """Begin an exchange by writing ``message``, at most as long as a row."""
        self._number += 1
        self._rows[self._number % _SLOTS][self._rank][: message.numel()] = message
        self._numbers[self._place(self._rank)] = self._number
        self._late = [rank for rank in range(self._size) if rank != self._rank]

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return the rows of all ranks after :meth:`wait`; they are valid until the next exchange."""
        return self._rows[self._number % _SLOTS]

    def wait(self, seconds: float) -> bool:
        """Wait for the rows of all ranks, at most ``seconds``; return whether they are complete.

        Raises:
            LostRanksError: A process has ended before it wrote its row.
        """
        if self._is_complete():
            return True
        start = time.monotonic()
        next_check, waited = _CHECK_S, 0.0
        while waited < seconds:
            time.sleep(0 if waited < _YIELD_S else min(_MAX_SLEEP_S, max(_MIN_SLEEP_S, waited / 8)))
            if self._is_complete():
                return True
            waited = time.monotonic() - start
            if waited >= next_check:
                lost = [rank for rank in self._late if self.has_ended(rank)]
                if lost and not self._is_complete():  # it may have written its row just before it ended
                    raise LostRanksError(lost)
                next_check = waited + _CHECK_S
        return False

    def _is_complete(self) -> bool:
        late = self._late
        while late and self._numbers[self._place(late[-1])] == self._number:
            late.pop()
        return not late

    def _place(self, rank: int) -> int:
        return (self._number % _SLOTS * self._size + rank) * _STRIDE // 8

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of another rank has ended, which releases its lock."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return True


def broadcast_chunks(exchange: Exchange, chunk: int, rank: int, buffer: torch.Tensor, source: int) -> None:
    """Fill ``buffer`` with that of rank ``source``.

    Ranks: every rank.

    Args:
        exchange: ``Collectives.all_gather_bytes``.
        chunk: Maximum number of bytes per rank in one exchange.
        rank: This rank.
        buffer: ``(n,)``, contiguous, on the CPU; the same ``n`` and dtype on every rank.
        source: The rank that sends.
    """
    data = buffer.view(torch.uint8)
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    for start in range(0, data.numel(), chunk):
        piece = data[start : start + chunk]
        rows = exchange(piece if rank == source else nothing)
        if rank != source:
            piece.copy_(rows[source][: piece.numel()])


def scatter_chunks(
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
        exchange: ``Collectives.all_gather_bytes``.
        chunk: Maximum number of bytes per rank in one exchange.
        rank: This rank.
        size: Number of ranks, at least 2.
        output: ``(n,)``, contiguous, on the CPU; the same ``n`` and dtype on every rank.
        buffer: ``(size * n,)`` on rank ``source``.
        source: The rank that sends.
    """
    received, nothing = output.view(torch.uint8), torch.empty(0, dtype=torch.uint8, device="cpu")
    receivers = [other for other in range(size) if other != source]
    length = chunk // len(receivers)  # bytes per receiver in one exchange
    parts = None if buffer is None or rank != source else buffer.view(torch.uint8).view(size, -1)
    for start in range(0, received.numel(), length):
        end = min(received.numel(), start + length)
        if parts is not None:
            pieces = [parts[other, start:end] for other in receivers]
            exchange(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
            continue
        offset = receivers.index(rank) * (end - start)
        received[start:end] = exchange(nothing)[source][offset : offset + end - start]
    if parts is not None and received.data_ptr() != parts[source].data_ptr():
        received.copy_(parts[source])
