"""Wait for other ranks while watching for failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from accelfn.context.call_log import CallLog, Entry, Position
from accelfn.context.failure import NEWS, MessageBoard, news, publish
from accelfn.errors import Caller, CollectiveTimeoutError, Disagreement, MismatchError, MissingRankError

# A rank that waits longer than this starts to monitor its peers.
_POLL_S = 0.2
# Who has waited for a second asks the board less and less often, since all ranks of a world ask one server:
# at last for news each second, and then and now where two other ranks wait.
_NEWS_S = 1.0
_PLACES_S = 8.0
_PLACES_AT_FIRST = 8
# Waiting peers answer within two polls, so after this time the other ranks are known to be missing.
_ROLL_CALL_S = 0.6
_JOIN_S = 1.0
_LAST_SENDS_S = 0.5
_BOARD_S = 5.0


_ADVICE_ON_UNITS = (
    " Ranks gather units together: call a unit on every rank equally often, and where a rank doesn't use its "
    "output, add 0 * output.sum() to the loss."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMonitor:
    """Waits for other ranks, and raises when it is clear that one of them won't come.

    Attributes:
        board: Of the world.
        call_log: Of this rank: the current operation and its timeout.
        rank: This rank.
        size: Number of ranks.
        has_ended: Returns whether the process of another rank has ended, if that is observable.
    """

    board: MessageBoard
    call_log: CallLog
    rank: int
    size: int
    has_ended: Callable[[int], bool] = lambda rank: False

    def wait(self, arrived: Callable[[float], bool]) -> None:
        """Wait until ``arrived`` returns True.

        Args:
            arrived: Waits at most that many seconds, and returns whether the wait is over.

        Raises:
            Exception: The error that another rank posted.
            MismatchError: Another rank waits in a different operation.
            CollectiveTimeoutError: The current operation has timed out.
        """
        start = time.monotonic()
        patience_s = self.call_log.patience_s
        if arrived(min(_POLL_S, patience_s)):
            return
        with self._observing() as state:
            while True:
                if state.error is not None:
                    raise state.error
                left_s = start + patience_s - time.monotonic()
                if left_s <= 0:
                    break
                if arrived(min(_POLL_S, left_s)):
                    return
            _run_within(_BOARD_S, lambda: [self._look_at(rank, state) for rank in self._peers()])
            arrivals = {rank for rank, at in state.positions.items() if at.number >= self.call_log.number}
            missing = [rank for rank in self._peers() if rank not in arrivals]
            error = late_error(self.call_log, self.rank, patience_s, missing, state.positions)
            self.call_log.await_watchdog()
            _run_within(_BOARD_S, lambda: publish(self.board, self.call_log, self.rank, error))
            raise error

    def explain_loss(self, text: str = "", lost: Sequence[int] = ()) -> Exception:
        """Return the error for a lost connection: what the lost rank posted, or which ranks don't answer.

        Args:
            text: The backend's error.
            lost: The ranks whose processes have ended, if that is observed.
        """
        posted: list[Exception | None] = []
        _run_within(_BOARD_S, lambda: posted.append(news(self.board, self.call_log, self.rank)))
        for error in posted:
            if error is not None:
                return error
        missing = list(lost)
        if lost:
            process, have = ("processes", "have") if len(lost) > 1 else ("process", "has")
            text = f"The {process} of {_ranks(lost)} {have} ended."
        else:
            missing, state = self._roll_call()
            if state.error is not None:
                return state.error
        entry = self.call_log.current
        error = MissingRankError(
            f"{entry.operation}: rank {self.rank} lost its connection to {_ranks(missing)} in call "
            f"{entry.number} at {entry.site}: it has ended, was killed, or its machine can't be reached. "
            f"Look at its output first. {text}"
        )
        _run_within(_BOARD_S, lambda: publish(self.board, self.call_log, self.rank, error))
        return error

    def explain_delay(self, text: str) -> Exception:
        """Return the error for a backend's timeout, which names the ranks that don't wait here too."""
        missing, state = self._roll_call()
        late = late_error(self.call_log, self.rank, self.call_log.patience_s, missing, state.positions)
        return state.error or CollectiveTimeoutError(f"{late}\n{text}")

    def _roll_call(self) -> tuple[list[int], _Observed]:
        """Return the ranks that don't wait, at least one, and what was observed."""
        missing = self._peers()
        with self._observing() as state:
            end = time.monotonic() + _ROLL_CALL_S
            while state.error is None and len(missing) > 1 and time.monotonic() < end:
                time.sleep(_POLL_S / 4)
                missing = [rank for rank in missing if rank not in state.positions]
        return missing, state

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _look_at(self, peer: int, state: _Observed) -> Position | None:
        """Read where another rank waits, if it does."""
        text = self.board.read(f"at/{peer}")
        if not text:
            state.positions.pop(peer, None)
            return None
        state.positions[peer] = position = Position(*json.loads(text))
        return position

    @contextmanager
    def _observing(self) -> Generator[_Observed]:
        """Observe the board in a thread, so that a board that doesn't answer can't block this rank."""
        state = _Observed()
        thread = threading.Thread(target=self._observe, args=(state,), name="accelfn monitor", daemon=True)
        thread.start()
        try:
            yield state
        finally:
            state.done.set()
            # A thread that returns from the backend while the interpreter ends would abort the process.
            thread.join(_JOIN_S)

    def _observe(self, state: _Observed) -> None:
        own, entry = self.call_log.position(self.rank), self.call_log.current
        self.board.post(f"at/{self.rank}", json.dumps(own))
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        first = 0
        ended: list[int] = []
        start = since = time.monotonic()
        places_at = start  # when to look where other ranks wait
        while not state.done.is_set():
            waited_s = time.monotonic() - start
            state.error = news(self.board, self.call_log, self.rank) if self.board.read(NEWS) else None
            looked_at: set[int] = set()
            if peers and start + waited_s >= places_at:
                number = _PLACES_AT_FIRST if waited_s < 5 * _POLL_S else 1
                # The next rank always: so each is looked at by another one, however many there are.
                looked_at = {peers[0], *[peers[(first + step) % len(peers)] for step in range(number)]}
                first += number
                places_at = start + waited_s + min(max(_POLL_S, waited_s / 4), _PLACES_S)
            for peer in looked_at:
                position = self._look_at(peer, state)
                if position is None:
                    continue
                same_call = self.call_log.find(position.number)
                if state.error is None and same_call is not None and same_call.chain.hex() != position.chain:
                    state.error = self._mismatch(same_call, peer, position)
                # It has skipped the reduction or gathering in which this one waits.
                elif state.error is None and position.number > own.number and self.call_log.awaits(position):
                    state.error = self._mismatch(entry, peer, position)
            ended_now = [rank for rank in peers if self.has_ended(rank)]
            # Their last messages may still be in flight.
            if state.error is None and ended_now and ended_now == ended:
                if time.monotonic() - since > _LAST_SENDS_S:
                    state.error = self.explain_loss(lost=ended_now)
            elif ended_now != ended:
                ended, since = ended_now, time.monotonic()
            state.done.wait(min(max(_POLL_S, waited_s / 4), _NEWS_S))
        if not self.call_log.over:  # else it has waited in vain, and others ask who did
            self.board.post(f"at/{self.rank}", "")

    def _mismatch(self, entry: Entry, peer: int, position: Position) -> Exception:
        """Publish a mismatch of two ranks; return the error that was published first by any rank."""
        expected = f"{self.call_log.inside} call {entry.number}: {entry.operation} at {entry.site}".lstrip()
        error = MismatchError(
            entry.operation,
            [Disagreement(peer, "", expected, str(position))],
            "Every rank must call the same operations in the same order."
            + (_ADVICE_ON_UNITS if self.call_log.inside else ""),
            sorted(
                [
                    Caller(self.rank, entry.operation, entry.site),
                    Caller(peer, position.operation, position.site),
                ]
            ),
        )
        publish(self.board, self.call_log, self.rank, error)
        return news(self.board, self.call_log, self.rank) or error


def _run_within(seconds: float, action: Callable[[], object]) -> None:
    """Run an action that uses the board; give up after ``seconds`` if the board doesn't answer."""
    thread = threading.Thread(target=action, name="accelfn board access", daemon=True)
    thread.start()
    thread.join(seconds)


class _Observed:
    """What a monitor's thread has observed so far."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.positions: dict[int, Position] = {}
        self.done = threading.Event()


def late_error(
    call_log: CallLog,
    rank: int,
    waited_s: float,
    missing: Sequence[int],
    positions: Mapping[int, Position] | None = None,
) -> CollectiveTimeoutError:
    """Return the error of a rank whose operation has timed out.

    Args:
        call_log: Of the rank that waited.
        rank: The rank that waited.
        waited_s: How long it waited.
        missing: Ranks that did not arrive.
        positions: Where other ranks were seen to wait.
    """
    current = call_log.current
    previous = call_log.find(call_log.number - 1)
    first_line = (
        f"{current.operation}: rank {rank} waited {waited_s:g} s in call {current.number} at {current.site} "
        f"for {_ranks(missing)}, which did not arrive."
    )
    lines = [first_line]
    for peer in list(missing)[:8]:
        position = (positions or {}).get(peer)
        if position is not None:
            lines.append(
                f"  rank {peer} waits in call {position.number}, {position.operation} at {position.site}"
            )
        elif previous is None:
            lines.append(f"  rank {peer} has called no operation across ranks yet")
        else:
            lines.append(
                f"  rank {peer} was last seen in call {previous.number}, {previous.operation} at "
                f"{previous.site}"
            )
    if previous is not None and previous.operation == "forward" and set(missing) - set(positions or ()):
        lines.append(
            "A rank that was last seen in a forward pass may be in its backward pass, waiting for ranks that "
            "skip theirs."
        )
    lines.append(
        "Every rank must call the same operations in the same order. If a rank only needs longer, raise "
        "Guard(timeout=...); Guard(watchdog=True) prints the stacks of each rank."
    )
    return CollectiveTimeoutError("\n".join(lines))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks)) or '?'}"
