"""Ranks as threads of this process: their rendezvous and their collectives."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

import torch

from accelfn.context import (
    CallLog,
    Collectives,
    Context,
    MessageBoard,
    Part,
    ReduceOp,
    World,
    WorldIdentity,
    chunk_bytes,
    late_error,
    news,
    publish,
)
from accelfn.context.failure import FAILURE, board_within
from accelfn.context.world import numbers_among
from accelfn.errors import CollectiveTimeoutError, Disagreement, MismatchError, MissingRankError
from accelfn.testing.faults import RankDeath, announcing
from accelfn.testing.following import ScheduledTurns
from accelfn.testing.part import Outcome, taking_part
from accelfn.testing.turns import Turns


class Rendezvous:
    """A barrier of threads that exchanges values, checks calls and never hangs.

    One rank runs at a time (:class:`Turns`). A rank that fails doesn't block the others: what they raise is
    what ranks of processes raise, by the same board.

    Ranks along a mesh axis use a part of the rendezvous, numbered from 0, with the same turns.
    """

    def __init__(self, turns: Turns, members: Sequence[int], parent: Rendezvous | None = None) -> None:
        """Create the rendezvous of a world whose ranks take ``turns``, or of ``members`` of ``parent``."""
        self.turns = turns
        self.members: tuple[int, ...] = tuple(members)
        self._round = 0
        self._contributions: dict[int, tuple[str, Any]] = {}  # by rank: its call, and a value
        self._completed: list[tuple[str, Any]] = []
        self._parts: dict[tuple[int, tuple[int, ...]], Rendezvous] = {}
        notes: dict[str, str] = {}

        def post_once(key: str, text: str) -> str:
            with turns.lock:
                said = notes.setdefault(key, text)
                if key == FAILURE:
                    turns.wake(tuple(turns.waiting))
                    if parent is None:  # a rank that failed along an axis keeps running in the world
                        turns.fail(json.loads(text)["rank"])
                return said

        board = MessageBoard(post=notes.__setitem__, post_once=post_once, read=notes.get)
        self.board: MessageBoard = board if parent is None else board_within(board, parent.board)

    def part(self, number: int, members: Sequence[int]) -> Rendezvous:
        """Return the rendezvous of some ranks; the same object for the same ``number``."""
        with self.turns.lock:
            return self._parts.setdefault((number, tuple(members)), Rendezvous(self.turns, members, self))

    def meet(self, rank: int, call: str, value: Any, call_log: CallLog) -> list[Any]:
        """Contribute ``value``, wait for all ranks, and return every contribution in rank order.

        Raises:
            MismatchError: The ranks made different calls.
            RemoteRankError: A rank failed before its contribution.
            MissingRankError: A rank returned or died before its contribution.
            CollectiveTimeoutError: A rank did not arrive in time.
        """
        with self.turns.lock:
            self._check_absent(rank, call_log)
            number = self._round
            self._contributions[rank] = call, value
            is_complete = len(self._contributions) == len(self.members)
            if is_complete:
                # The next round can't complete before all ranks have read this one, so one slot is enough.
                self._completed = [self._contributions[one] for one in range(len(self.members))]
                self._contributions = {}
                self._round += 1
                self.turns.wake(self.members)
            else:
                self.turns.await_ranks(self.members[rank], call_log.patience_s)
        if not is_complete:
            self._wait(rank, number, call_log)
        calls = [call for call, _ in self._completed]
        expected = max(calls, key=calls.count)
        rows = [Disagreement(rank, "", expected, own) for rank, own in enumerate(calls) if own != expected]
        if rows:
            raise MismatchError(expected, rows)
        return [value for _, value in self._completed]

    def _wait(self, rank: int, number: int, call_log: CallLog) -> None:
        """Wait for the turn that comes when the round is complete or can't complete any more."""
        turns, member, patience_s = self.turns, self.members[rank], call_log.patience_s
        while True:
            is_in_time = turns.await_turn(member, patience_s)
            with turns.lock:
                is_woken = member not in turns.waiting
                turns.waiting.discard(member)
            if not is_woken:
                break
            if not is_in_time:  # woken just now: the turn follows
                turns.await_turn(member, math.inf)
            with turns.lock:
                if self._round != number:
                    return
                self._check_absent(rank, call_log)
                turns.await_ranks(member, patience_s)  # it was woken for what others wait for
        with turns.lock:
            missing = [one for one in range(len(self.members)) if one not in self._contributions]
            # If one of them has the turn, the others only wait for it.
            missing = [one for one in missing if self.members[one] == turns.running] or missing
        error = late_error(call_log, rank, patience_s, missing)
        call_log.await_watchdog()
        publish(self.board, call_log, rank, error)
        raise error

    def _check_absent(self, rank: int, call_log: CallLog) -> None:
        """Raise if a rank won't come."""
        error = news(self.board, call_log, rank)
        if error is not None:
            raise error
        gone = next((one for one, member in enumerate(self.members) if member in self.turns.left), None)
        if gone is not None:
            now = call_log.current
            raise MissingRankError(
                f"{now.operation}: rank {gone} {self.turns.left[self.members[gone]]} while rank {rank} waits "
                f"for it in call {now.number} at {now.site}. Every rank must call the same operations in the "
                "same order."
            )


T = TypeVar("T")

# Extra time for threads that compute; those that wait in a rendezvous notice a timeout at once.
_GRACE_S = 5.0


def run_in_memory(
    fn: Callable[[Context], T],
    turns: Turns,
    configure: Callable[[Context], Context],
    timeout_s: float | None,
    num_nodes: int,
) -> list[Outcome]:
    """Run ``fn`` on threads that take ``turns`` and exchange tensors in memory; return their outcomes."""
    size = turns.size
    rendezvous = Rendezvous(turns, range(size))
    outcomes: list[Outcome | None] = [None] * size

    def work(rank: int) -> None:
        how = "returned"
        try:
            turns.enter(rank)
            world = memory_world(rank, size, num_nodes)
            collectives = memory_collectives(rendezvous, rank)
            collectives = announcing(collectives, rank, size, turns.reach_of(rank))
            ctx = configure(Context(world=world, collectives=collectives))
            with taking_part(ctx):
                outcomes[rank] = Outcome(value=fn(ctx))
        except RankDeath:
            how = "died"
            outcomes[rank] = Outcome()
        except BaseException as raised:  # noqa: BLE001 -- SystemExit and KeyboardInterrupt of one rank are its outcome too
            how = f"failed with {type(raised).__name__}"
            outcomes[rank] = Outcome(error=raised)
        finally:
            turns.leave(rank, how)

    threads = [
        threading.Thread(target=work, args=(rank,), name=f"rank {rank} of {size}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    turns.open()
    deadline = None if timeout_s is None else time.monotonic() + timeout_s + _GRACE_S
    for thread in threads:
        thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
    ended = [one or _timed_out(rank, timeout_s) for rank, one in enumerate(outcomes)]
    if isinstance(turns, ScheduledTurns):
        turns.join(deadline)
        running = turns.running_rank()
        ended = [replace(one, waits=running not in (None, rank)) for rank, one in enumerate(ended)]
    return ended


def _timed_out(rank: int, timeout_s: float | None) -> Outcome:
    return Outcome(
        error=CollectiveTimeoutError(
            f"rank {rank} did not end within {timeout_s} s, and is not waiting in a collective. "
            "Pass run_ranks a longer timeout_s, or look for an endless loop."
        ),
        ended=False,
    )


def memory_world(rank: int, size: int, num_nodes: int = 1, backend: str = "memory") -> World:
    """Describe rank ``rank`` of a world of threads, laid out as ``num_nodes`` equal nodes."""
    if size < 1 or num_nodes < 1 or size % num_nodes:
        raise ValueError(
            f"run_ranks: num_nodes must divide world_size, got world_size={size}, num_nodes={num_nodes}."
        )
    nodes = [one * num_nodes // size for one in range(size)]
    return World(**numbers_among(rank, nodes), backend=backend, identity=WorldIdentity())


def memory_collectives(rendezvous: Rendezvous, rank: int) -> Collectives:
    """Implement the collectives of a rank by meetings of threads.

    Buffers that the caller keeps using are read between two meetings, so that no rank returns before all have
    read them.
    """
    size, call_log = len(rendezvous.members), CallLog()
    threads = rendezvous.turns.threads(rendezvous.members[rank])

    def meet(call: str, value: Any, read: Callable[[list[Any]], Any]) -> Any:
        result = read(rendezvous.meet(rank, call, value, call_log))
        rendezvous.meet(rank, f"the end of {call.partition(' ')[0]}", None, call_log)
        return result

    def own(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [part.view(size, -1)[rank] for part in parts]

    def total(parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(parts).sum(0, dtype=parts[0].dtype)

    def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Messages are never modified, so one meeting is enough.
        return tuple(rendezvous.meet(rank, "all_gather_bytes", message, call_log))

    def all_gather(buffer: torch.Tensor) -> torch.Tensor:
        return meet("all_gather", buffer, torch.cat)

    def all_reduce(buffer: torch.Tensor, op: ReduceOp) -> None:
        def reduced(parts: list[torch.Tensor]) -> torch.Tensor:
            if op == "sum":
                return total(parts)
            return torch.stack(parts).amax(0) if op == "max" else torch.stack(parts).amin(0)

        buffer.copy_(meet(f"all_reduce {op}", buffer, reduced))

    def reduce_scatter(buffer: torch.Tensor) -> torch.Tensor:
        return meet("reduce_scatter", buffer, lambda parts: total(own(parts)))

    def broadcast(buffer: torch.Tensor, source: int) -> None:
        meet(f"broadcast from {source}", buffer, lambda parts: rank == source or buffer.copy_(parts[source]))

    def scatter(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        meet(f"scatter from {source}", buffer, lambda parts: output.copy_(own([parts[source]])[0]))

    def all_to_all(buffer: torch.Tensor) -> torch.Tensor:
        return meet("all_to_all", buffer, lambda parts: torch.cat(own(parts)))

    def permute(outgoing: torch.Tensor, incoming: torch.Tensor, to: int, source: int) -> None:
        del to
        meet("permute", outgoing, lambda parts: incoming.numel() and incoming.copy_(parts[source]))

    def barrier() -> None:
        rendezvous.meet(rank, "barrier", None, call_log)

    numbers = itertools.count()

    def split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
        del timeout
        places = [rendezvous.part(next(numbers), members) for members in groups]
        return tuple(
            Part(
                memory_collectives(place, place.members.index(rank))
                if len(place.members) > 1
                else Collectives(threads=threads)
            )
            for place in places
        )

    return Collectives(
        all_gather_bytes=all_gather_bytes,
        all_gather=all_gather,
        all_reduce=all_reduce,
        reduce_scatter=reduce_scatter,
        broadcast=broadcast,
        scatter=scatter,
        all_to_all=all_to_all,
        permute=permute,
        barrier=barrier,
        split=split,
        chunk=chunk_bytes(size),
        threads=threads,
        board=rendezvous.board,
        call_log=call_log,
    )
