"""Exchange messages through memory that the processes of one machine share; large tensors piece by piece.

A message through sockets wakes four threads on its way; here a rank writes its bytes and a number, and looks
for the numbers of the others. On several machines, and where processes can't share memory, sockets remain.
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

# Numbers of different ranks lie on different cache lines.
_STRIDE = 64
# Two of each: a rank that begins with exchange k + 1 has read all of k, so k + 2 may overwrite it.
_SLOTS = 2
_NONCE_BYTES = 32
_ANSWER_BYTES = 1024
# Whoever is this late is asked for a sign of life, and is so again after as long.
_LOOK_S = 0.02
# The first looks come as soon as the scheduler lets them; then sleeping costs less than it delays.
_EAGER_S = 0.0002
_NAP_S = 0.00005
_LONGEST_NAP_S = 0.001


class LostRanksError(Exception):
    """Processes that have ended before they wrote their row."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Keep which."""
        several = len(ranks) > 1
        super().__init__(
            f"The process{'es' if several else ''} of rank{'s' if several else ''} "
            f"{', '.join(map(str, ranks))} {'have' if several else 'has'} ended."
        )
        self.ranks: tuple[int, ...] = tuple(ranks)


def share_rows(exchange: Exchange, rank: int, size: int, chunk: int) -> SharedRows | None:
    """Set up rows in shared memory, if all ranks can have it; all ranks come to the same answer.

    Ranks: every rank; two exchanges.

    Args:
        exchange: What carries messages of up to 1,024 bytes until then.
        rank: This rank.
        size: Number of ranks.
        chunk: Bytes of a row, a multiple of 16.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    path, descriptor = "", -1
    if rank == 0 and _is_possible():
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="accelfn-", dir=_folder())
            _reserve(descriptor, _bytes(size, chunk))
            os.pwrite(descriptor, nonce, 0)
    try:
        told = json.dumps([path, nonce.hex()]).encode() if rank == 0 else b""
        if len(told) > _ANSWER_BYTES:  # in a folder with a very long name
            told = json.dumps(["", ""]).encode()
        answer = bytes(_listed(exchange(_tensor(told.ljust(_ANSWER_BYTES)))[0][:_ANSWER_BYTES]))
        path, nonce_text = json.loads(answer)
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
        if rank == 0 and path:  # whoever has it open keeps it; nothing is left if they are killed
            with contextlib.suppress(OSError):
                Path(path).unlink()
    if rows is None and descriptor >= 0:
        os.close(descriptor)
    return rows if everyone else None


def _is_possible() -> bool:
    # The bytes of a row must be seen before its number is: promised by these processors, with no fence that
    # Python could ask for.
    return sys.platform != "win32" and platform.machine().lower() in ("x86_64", "amd64")


def _folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # in memory; else wherever files go


def _reserve(descriptor: int, number: int) -> None:
    """Make the file that long; where memory is short it fails here, and not later by a signal that kills."""
    if sys.platform == "linux":
        os.posix_fallocate(descriptor, 0, number)
    else:
        os.ftruncate(descriptor, number)


def _bytes(size: int, chunk: int) -> int:
    return mmap.PAGESIZE + _SLOTS * size * (_STRIDE + chunk)


def _tensor(message: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(message), dtype=torch.uint8)


def _listed(row: torch.Tensor) -> list[int]:
    return row.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


class SharedRows:
    """One row per rank that all processes see, and a number that says which exchange it belongs to."""

    def __init__(self, descriptor: int, rank: int, size: int, chunk: int) -> None:
        """Map the file, and hold a lock in it for as long as this process lives.

        Args:
            descriptor: Of the file; from now on this object's to close.
            rank: This rank.
            size: Number of ranks.
            chunk: Bytes of a row.

        Raises:
            OSError: The file system has no locks, or no room.
        """
        # The kernel releases it with the process, however that ends: how the others learn of it.
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
        """Begin an exchange: show ``message``, of any length up to that of a row, to the other ranks."""
        self._number += 1
        self._rows[self._number % _SLOTS][self._rank][: message.numel()] = message
        self._numbers[self._place(self._rank)] = self._number
        self._late = [rank for rank in range(self._size) if rank != self._rank]

    def read(self) -> tuple[torch.Tensor, ...]:
        """Return the rows of all ranks, once they have come; they stay until the next exchange."""
        return self._rows[self._number % _SLOTS]

    def wait(self, seconds: float) -> bool:
        """Wait for the rows of all ranks, at most so long; say whether they have come.

        Raises:
            LostRanksError: A process has ended instead of writing its row.
        """
        if self._have_come():
            return True
        start = time.monotonic()
        look, waited = _LOOK_S, 0.0
        while waited < seconds:
            time.sleep(0 if waited < _EAGER_S else min(_LONGEST_NAP_S, max(_NAP_S, waited / 8)))
            if self._have_come():
                return True
            waited = time.monotonic() - start
            if waited >= look:
                lost = [rank for rank in self._late if self.has_ended(rank)]
                if lost and not self._have_come():  # it may have written, and ended, in between
                    raise LostRanksError(lost)
                look = waited + _LOOK_S
        return False

    def _have_come(self) -> bool:
        late = self._late
        while late and self._numbers[self._place(late[-1])] == self._number:
            late.pop()
        return not late

    def _place(self, rank: int) -> int:
        return (self._number % _SLOTS * self._size + rank) * _STRIDE // 8

    def has_ended(self, rank: int) -> bool:
        """Return whether the process of another rank is gone: nobody holds its lock."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return True


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
