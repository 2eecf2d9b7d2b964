"""Wait for other ranks while watching for failures, and print where every rank is before giving up."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from accelfn.context.call_log import CallLog, Entry
from accelfn.context.failure import MessageBoard, news, publish
from accelfn.errors import Caller, CollectiveTimeoutError, Disagreement, MismatchError, MissingRankError

_WATCH_S = 0.5
_ANSWERS_S = 2.5


def start_watchdog(board: MessageBoard, rank: int, *, whole_process: bool) -> Callable[[], None]:
    """Start a thread that writes this rank's Python stacks on the board when another rank asks for them.

    Ranks: local; call it on the thread that is the rank.

    Args:
        board: Of the world.
        rank: This rank.
        whole_process: Show all threads of the process; otherwise, where ranks are threads, the calling one.

    Returns:
        Ends the thread.
    """
    done = threading.Event()
    shown = None if whole_process else threading.get_ident()
    board.post(f"watched/{rank}", "yes")
    thread = threading.Thread(
        target=_watch, args=(board, rank, shown, done), name="accelfn watchdog", daemon=True
    )
    thread.start()

    def stop() -> None:
        done.set()
        thread.join(_WATCH_S)

    return stop


def print_all_stacks(board: MessageBoard, rank: int, size: int) -> None:
    """Ask every watched rank for its stacks and print them on stderr; nothing where no rank is watched.

    Of several ranks that ask, the first one prints.
    """
    watched = [one for one in range(size) if board.read(f"watched/{one}")]
    if not watched or board.post_once("stacks", str(rank)) != str(rank):
        return
    stacks: dict[int, str] = {}
    end = time.monotonic() + _ANSWERS_S
    while len(stacks) < len(watched) and time.monotonic() < end:
        for one in watched:
            text = board.read(f"stacks/{one}")
            if text:
                stacks[one] = text
        time.sleep(_WATCH_S / 10)
    parts = [
        f"--- rank {one} ---\n{stacks.get(one, 'did not answer: it is stopped, or its process has ended')}"
        for one in watched
    ]
    title = "accelfn: an operation across ranks is given up. Where each rank is:"
    print("\n".join([title, *parts]), file=sys.stderr, flush=True)


def _watch(board: MessageBoard, rank: int, shown: int | None, done: threading.Event) -> None:
    while not done.wait(_WATCH_S):
        if board.read("stacks"):
            board.post(f"stacks/{rank}", _stacks(shown))
            return


def _stacks(shown: int | None) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage] -- documented
        if ident != own and shown in (None, ident)
    )


# How long a rank waits without a look around. Whoever waits longer has time for it.
_POLL_S = 0.2
# Others that wait answer within two looks; then it is clear who doesn't.
_ROLL_CALL_S = 0.6
_JOIN_S = 1.0
_LAST_SENDS_S = 0.5
# More than a watchdog's answer takes.
_LAST_WORDS_S = 5.0


class _Position(NamedTuple):
    """Where a rank waits."""

    number: int
    operation: str
    site: str
    chain: str  # in hexadecimal digits
    reductions: int  # of gradients, that it has been through


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMonitor:
    """What a rank needs to wait well.

    Attributes:
        board: Of the world.
        call_log: Of this rank: says how long to wait, and for what.
        rank: This rank.
        size: Number of ranks.
        has_ended: Whether the process of another rank is gone, where that can be seen.
    """

    board: MessageBoard
    call_log: CallLog
    rank: int
    size: int
    has_ended: Callable[[int], bool] = lambda rank: False

    def wait(self, arrived: Callable[[float], bool]) -> None:
        """Wait until ``arrived`` says so.

        Args:
            arrived: Waits at most so many seconds, and says whether the waiting is over.

        Raises:
            Exception: What another rank posted.
            MismatchError: Another rank waits elsewhere, so that neither will come.
            CollectiveTimeoutError: The time of the current operation is up.
        """
        start = time.monotonic()
        patience_s = self.call_log.patience_s
        if arrived(min(_POLL_S, patience_s)):
            return
        with self._looking() as seen:
            while True:
                if seen.error is not None:
                    raise seen.error
                left_s = start + patience_s - time.monotonic()
                if left_s <= 0:
                    break
                if arrived(min(_POLL_S, left_s)):
                    return
            missing = [rank for rank in self._others() if not self._has_come(seen, rank)]
            error = late_error(self.call_log, self.rank, patience_s, missing, seen.positions)
            _within(_LAST_WORDS_S, lambda: print_all_stacks(self.board, self.rank, self.size))
            _within(_LAST_WORDS_S, lambda: publish(self.board, self.call_log, self.rank, error))
            raise error

    def explain_loss(self, text: str, lost: Sequence[int] = ()) -> Exception:
        """Find out why a connection to another rank has gone: by its own word, or by who doesn't answer.

        Args:
            text: What the backend said.
            lost: The ranks it lost, where it knows them.
        """
        told: list[Exception | None] = []
        _within(_LAST_WORDS_S, lambda: told.append(news(self.board, self.call_log, self.rank)))
        for word in told:
            if word is not None:
                return word
        silent = list(lost)
        if not lost:
            silent, seen = self._call_the_roll()
            if seen.error is not None:
                return seen.error
        now = self.call_log.current
        error = MissingRankError(
            f"{now.operation}: rank {self.rank} lost its connection to {_ranks(silent)} in call {now.number} "
            f"at {now.site}: it has ended, was killed, or its machine can't be reached. Look at its output "
            f"first. {text}"
        )
        _within(_LAST_WORDS_S, lambda: publish(self.board, self.call_log, self.rank, error))
        return error

    def explain_delay(self, text: str) -> Exception:
        """Find out which ranks a backend has waited for too long: those that don't wait here too."""
        silent, seen = self._call_the_roll()
        late = late_error(self.call_log, self.rank, self.call_log.patience_s, silent, seen.positions)
        return seen.error or CollectiveTimeoutError(f"{late}\n{text}")

    def _call_the_roll(self) -> tuple[list[int], _Seen]:
        """Return the ranks that aren't seen to wait, the last of which isn't asked; and what was seen."""
        silent = self._others()
        with self._looking() as seen:
            end = time.monotonic() + _ROLL_CALL_S
            while seen.error is None and len(silent) > 1 and time.monotonic() < end:
                time.sleep(_POLL_S / 4)
                silent = [rank for rank in silent if rank not in seen.positions]
        return silent, seen

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _has_come(self, seen: _Seen, rank: int) -> bool:
        position = seen.positions.get(rank)
        return position is not None and position.number >= self.call_log.number

    @contextmanager
    def _looking(self) -> Generator[_Seen]:
        """Look at the board in a thread of its own: one that doesn't answer must not keep this rank here."""
        seen = _Seen()
        thread = threading.Thread(target=self._look, args=(seen,), name="accelfn monitor", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            seen.done.set()
            # A thread that comes back from the backend while the interpreter ends would abort the process.
            thread.join(_JOIN_S)

    def _look(self, seen: _Seen) -> None:
        now = self.call_log.current
        own = _Position(now.number, now.operation, now.site, now.chain.hex(), self.call_log.reductions)
        self.board.post(f"at/{self.rank}", json.dumps(own))
        # One neighbour at a look, so that the board bears any number of ranks.
        others = [(self.rank + step) % self.size for step in range(1, self.size)]
        looks = 0
        ended: list[int] = []
        since = time.monotonic()
        while not seen.done.is_set():
            seen.error = news(self.board, self.call_log, self.rank)
            for neighbour in {others[(looks + step) % len(others)] for step in range(8)}:
                text = self.board.read(f"at/{neighbour}")
                if not text:
                    seen.positions.pop(neighbour, None)
                    continue
                seen.positions[neighbour] = position = _Position(*json.loads(text))
                entry = self.call_log.find(position.number)
                if seen.error is None and entry is not None and entry.chain.hex() != position.chain:
                    seen.error = self._disagreement(entry, neighbour, position)
                elif seen.error is None and self._has_passed(own, position):
                    seen.error = self._disagreement(now, neighbour, position)
            gone = [rank for rank in others if self.has_ended(rank)]
            # What it has sent before may still be on its way.
            if seen.error is None and gone and gone == ended and time.monotonic() - since > _LAST_SENDS_S:
                text = f"The process of rank {gone[0]} has ended."
                seen.error = self.explain_loss(text, gone)
            if gone != ended:
                ended, since = gone, time.monotonic()
            looks += 8
            seen.done.wait(_POLL_S)
        self.board.post(f"at/{self.rank}", "")

    def _has_passed(self, own: _Position, other: _Position) -> bool:
        """Return whether another rank has skipped the reduction of gradients in which this one waits."""
        if not self.call_log.reducing:
            return False
        return other.number > own.number and other.reductions <= own.reductions

    def _disagreement(self, entry: Entry, neighbour: int, position: _Position) -> Exception:
        """Report two ranks that wait in different operations; all ranks raise what was said first."""
        own = f"call {entry.number}: {entry.operation} at {entry.site}"
        if self.call_log.reducing:
            own = f"the backward pass of {own}"
        error = MismatchError(
            entry.operation,
            [
                Disagreement(
                    neighbour,
                    "",
                    own,
                    f"call {position.number}: {position.operation} at {position.site}",
                )
            ],
            "Every rank must call the same operations in the same order.",
            sorted(
                [
                    Caller(self.rank, entry.operation, entry.site),
                    Caller(neighbour, position.operation, position.site),
                ]
            ),
        )
        publish(self.board, self.call_log, self.rank, error)
        return news(self.board, self.call_log, self.rank) or error


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Do what needs the board, and go on without it where the board doesn't answer."""
    thread = threading.Thread(target=action, name="accelfn last words", daemon=True)
    thread.start()
    thread.join(seconds)


class _Seen:
    """What the thread of a monitor has found so far."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.error: Exception | None = None
        self.positions: dict[int, _Position] = {}
        self.done = threading.Event()


def late_error(
    call_log: CallLog,
    rank: int,
    waited_s: float,
    missing: Sequence[int],
    positions: Mapping[int, _Position] | None = None,
) -> CollectiveTimeoutError:
    """Return the error of a rank that has waited too long.

    Args:
        call_log: Of the rank that waited.
        rank: Which rank that is.
        waited_s: How long it did.
        missing: Ranks that have not come.
        positions: Where other ranks were seen to wait.
    """
    now = call_log.current
    before = call_log.find(call_log.number - 1)
    first = (
        f"{now.operation}: rank {rank} waited {waited_s:g} s in call {now.number} at {now.site} for "
        f"{_ranks(missing)}, which did not come."
    )
    lines = [first]
    for one in list(missing)[:8]:
        position = (positions or {}).get(one)
        if position is not None:
            lines.append(
                f"  rank {one} waits in call {position.number}, {position.operation} at {position.site}"
            )
        elif before is None:
            lines.append(f"  rank {one} has called no operation across ranks yet")
        else:
            lines.append(
                f"  rank {one} was last seen in call {before.number}, {before.operation} at {before.site}"
            )
    if before is not None and before.operation == "forward" and set(missing) - set(positions or ()):
        lines.append(
            "A rank that was last seen in a forward pass may be in its backward pass, waiting for ranks that "
            "have left theirs out."
        )
    lines.append(
        "Every rank must call the same operations in the same order. If a rank only needs longer, raise "
        "Guard(timeout=...); Guard(watchdog=True) prints where each rank is."
    )
    return CollectiveTimeoutError("\n".join(lines))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks)) or '?'}"
