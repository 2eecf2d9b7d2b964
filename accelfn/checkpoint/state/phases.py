"""How the ranks of a save tell each other where they are: by collectives, or beside them.

A save goes through phases, and each ends when every rank has said what came of it: bytes, or the exception
that stopped it. In a save that the caller waits for, they say it in an operation across ranks like any other.
In one that goes on in the background the collectives belong to the training loop, so ranks leave word on the
board and look there for the others'.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context, text_of
from accelfn.context.message_board import MessageBoard
from accelfn.errors import CollectiveTimeoutError, RemoteRankError

__all__ = ("BoardPhases", "CollectivePhases", "Phases")

_LOOK_S = 0.005


class Phases(Protocol):
    """What a save asks of the other ranks."""

    def gather(self, phase: str, said: str, error: Exception | None = None) -> list[str]:
        """End a phase: say what came of it and hear what came of it elsewhere.

        Raises:
            Exception: ``error`` itself, on the ranks that gave one.
            RemoteRankError: Another rank gave one.
        """
        ...


class CollectivePhases(NamedTuple):
    """Phases as operations across ranks. Every rank of ``ctx`` goes through the same ones."""

    ctx: Context
    operation: str

    def gather(self, phase: str, said: str, error: Exception | None = None) -> list[str]:
        """End a phase."""
        if self.ctx.num_processes == 1:
            if error is not None:
                raise error
            return [said]
        call = Call(self.operation, phase, takes_long=True)
        return [blob.decode() for blob in gather_bytes(self.ctx, call, said.encode(), error)]


class BoardPhases(NamedTuple):
    """Phases by word on the board, from any thread.

    Attributes:
        board: Of the world.
        rank: This rank.
        size: Of the world.
        operation: Named in errors.
        number: Tells this save from others of the world.
        patience_s: How long a rank waits for the others in a phase.
        is_hopeless: Says why no other rank can be waited for any more, or None.
    """

    board: MessageBoard
    rank: int
    size: int
    operation: str
    number: str
    patience_s: float
    is_hopeless: Callable[[], Exception | None]

    def gather(self, phase: str, said: str, error: Exception | None = None) -> list[str]:
        """End a phase."""
        if self.size == 1:
            if error is not None:
                raise error
            return [said]
        failed = None if error is None else [type(error).__name__, text_of(error)]
        # A key serves every save: it is only written over when all ranks have left the phase behind, which
        # they have said in a later one.
        self.board.post(self._key(phase, self.rank), json.dumps([self.number, failed, said]))
        # Every rank is heard before anything is raised: whoever raises may remove what others still write to.
        heard: list[tuple[list[str] | None, str]] = []
        try:
            heard += [
                (failed, said) if rank == self.rank else self._hear(phase, rank) for rank in range(self.size)
            ]
        except Exception:
            if error is None:
                raise
        if error is not None:
            raise error
        for rank, (failed, _) in enumerate(heard):
            if failed is not None:
                raise RemoteRankError(rank, failed[0], failed[1], self.operation)
        return [said for _, said in heard]

    def _key(self, phase: str, rank: int) -> str:
        return f"save/{phase}/{rank}"

    def _hear(self, phase: str, rank: int) -> tuple[list[str] | None, str]:
        """Wait for what a rank says of a phase: its error, or what came of it."""
        end = time.monotonic() + self.patience_s
        while True:
            text = self.board.read(self._key(phase, rank))
            number, failed, said = json.loads(text) if text else ("", None, "")
            if number == self.number:
                return failed, said
            reason = self.is_hopeless()
            if reason is not None:
                raise reason
            if time.monotonic() > end:
                raise CollectiveTimeoutError(
                    f"{self.operation}: rank {self.rank} has waited {self.patience_s:.0f} s for rank {rank} "
                    f"to end the phase {phase!r} of a save in the background. Look at what that rank does."
                )
            time.sleep(_LOOK_S)
