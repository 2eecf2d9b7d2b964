"""Messages between ranks outside the collectives, and how one rank's failure reaches the others by them.

A rank that has failed can't take part in a collective any more, and a rank that waits in one can't be told by
one. Both have the board: what is written there can be read by every rank at any time, and nobody waits.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed re-exports them untyped

from accelfn.context.call_log import CallLog
from accelfn.errors import (
    CollectiveTimeoutError,
    Disagreement,
    DistributedError,
    MismatchError,
    MissingRankError,
    RemoteRankError,
    UnevenDataError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBoard:
    """A board that the ranks of one world share. The default is that of a world of one: it keeps nothing.

    What can't be written or read (the board's host has ended) is as if it were not there.

    Attributes:
        post: ``(key, text)``: writes over what stands there.
        post_once: ``(key, text)``: writes unless another rank was first; returns what stands there.
        read: ``(key)``: what stands there, or None.
        close: Lets go of the connection; afterwards the board is empty.
    """

    post: Callable[[str, str], None] = lambda key, text: None
    post_once: Callable[[str, str], str] = lambda key, text: text
    read: Callable[[str], str | None] = lambda key: None
    close: Callable[[], None] = lambda: None


def store_board(store: Store) -> MessageBoard:
    """Use one of torch's key-value stores, which every world that torch starts has anyway."""
    held = [PrefixStore("accelfn/board", store)]  # emptied by close: the store may own a port

    def post(key: str, text: str) -> None:
        with contextlib.suppress(RuntimeError):
            for part in held:
                part.set(key, text)

    def post_once(key: str, text: str) -> str:
        with contextlib.suppress(RuntimeError):
            for part in held:
                return part.compare_set(key, "", text).decode()
        return text

    def read(key: str) -> str | None:
        with contextlib.suppress(RuntimeError):
            for part in held:
                return part.get(key).decode() if part.check([key]) else None
        return None

    return MessageBoard(post=post, post_once=post_once, read=read, close=held.clear)


def board_within(board: MessageBoard, world: MessageBoard, key: str) -> MessageBoard:
    """Return a board of some ranks of a world, where what the world says under ``key`` can be read too."""

    def read(name: str) -> str | None:
        said = board.read(name)
        return world.read(name) if not said and name == key else said

    return MessageBoard(post=board.post, post_once=board.post_once, read=read, close=board.close)


FAILURE = "failure"  # one key for all: the first rank that fails is the one whose error matters
_END = "end"
# A store takes eight mebibytes, and a character may take twelve bytes as JSON.
_TRACEBACK_CHARS = 20_000
_MESSAGE_CHARS = 100_000
_CELL_CHARS = 500
_MAX_ROWS = 200


class Departure(NamedTuple):
    """That a rank ended its work without an error."""

    rank: int
    number: int  # of the last operation it took part in
    operation: str
    site: str
    reductions: int  # of gradients


def publish(board: MessageBoard, call_log: CallLog, rank: int, error: BaseException, doing: str = "") -> None:
    """Post ``error`` for all ranks, before it travels up on this one; then no operation is possible.

    Of several ranks that fail, the first one's word stands. Ranks that wait in an operation raise it there
    within a second; those that don't, at their next one.

    Args:
        board: Of the world.
        call_log: Of this rank.
        rank: This rank.
        error: What was raised.
        doing: What it was raised in, if not in an operation across ranks.
    """
    if call_log.over:
        return
    call_log.over = f"this rank has told the others of its {type(error).__name__}: {text_of(error)}"
    call_log.abandon()
    if isinstance(error, RemoteRankError):
        return  # the rank that it names has posted it itself
    board.post_once(FAILURE, _written(rank, error, doing))


def announce_end(board: MessageBoard, call_log: CallLog, rank: int) -> None:
    """Announce that this rank takes part in no further operation."""
    if call_log.over:
        return
    with contextlib.suppress(Exception):  # whoever disagrees with an operation that nobody waits for
        call_log.settle()
    call_log.over = "its context is closed"
    entry = call_log.current
    board.post_once(_END, json.dumps([rank, entry.number, entry.operation, entry.site, call_log.reductions]))


def news(board: MessageBoard, call_log: CallLog, rank: int) -> Exception | None:
    """Check whether a rank has posted something that makes the current operation impossible."""
    text = board.read(FAILURE)
    if text:
        return as_error(text)
    text = board.read(_END)
    if text:
        departure = Departure(*json.loads(text))
        # Who left after this operation has done its part in it.
        came = departure.number > call_log.number or (
            departure.number == call_log.number
            and not (call_log.reducing and departure.reductions <= call_log.reductions)
        )
        if departure.rank != rank and not came:
            return explain_departure(departure, call_log, rank)
    return None


def explain_departure(departure: Departure, call_log: CallLog, rank: int) -> MissingRankError:
    """Return the error of a rank that waits for one that has ended."""
    now = call_log.current
    last = (
        f"after {departure.operation} at {departure.site}, call {departure.number}"
        if departure.number
        else "without a single operation across ranks"
    )
    return MissingRankError(
        f"{now.operation}: rank {departure.rank} has ended its work {last}, while rank {rank} waits for it "
        f"in call {now.number} at {now.site}. Every rank must call the same operations in the same order."
    )


def refuse_if_over(call_log: CallLog, operation: str) -> None:
    """Refuse an operation of a rank whose world has ended.

    Raises:
        DistributedError: It has ended.
    """
    if call_log.over:
        raise DistributedError(
            f"{operation}: no operation across ranks is possible any more: {call_log.over}. "
            "Start a new context."
        )


def as_error(text: str) -> Exception:
    """Return the error that a rank raises when it reads what :func:`publish` wrote."""
    word: Mapping[str, Any] = json.loads(text)
    match word["cause"]:
        case "MismatchError":
            return MismatchError(*word["details"])
        case "UnevenDataError":
            return UnevenDataError(*word["details"])
        case "MissingRankError":
            return MissingRankError(word["message"])
        case "CollectiveTimeoutError":
            return CollectiveTimeoutError(word["message"])
        case cause:
            return RemoteRankError(word["rank"], cause, word["message"], word["doing"], word["traceback"])


def _written(rank: int, error: BaseException, doing: str) -> str:
    details: list[object] = []
    if isinstance(error, MismatchError):
        hint = _cut(error.hint, _MESSAGE_CHARS)
        if len(error.rows) > _MAX_ROWS:
            hint = f"  ... and {len(error.rows) - _MAX_ROWS} more\n{hint}"
        details = [error.operation, [_short(row) for row in error.rows[:_MAX_ROWS]], hint, error.callers]
        if isinstance(error, UnevenDataError):
            details.append(error.counts)
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 -- of what the user's own exceptions do when they are shown
        lines = traceback.format_tb(error.__traceback__)
    return json.dumps(
        {
            "rank": rank,
            "cause": type(error).__name__,
            "message": text_of(error),
            "doing": doing,
            "traceback": "".join(lines)[-_TRACEBACK_CHARS:],
            "details": details,
        }
    )


def text_of(error: BaseException) -> str:
    """Return the message of any exception, one whose ``__str__`` fails too; cut where it is very long.

    >>> text_of(OSError("disk full"))
    'disk full'
    """
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 -- the user's own exception matters, not how it is shown
        name = type(error).__name__
        return f"<{name} whose text can't be had: its __str__ raises {type(failure).__name__}>"
    return _cut(text, _MESSAGE_CHARS)


def _cut(text: str, length: int) -> str:
    left_out = len(text) - length
    return text if left_out <= 0 else f"{text[:length]} ... ({left_out} more characters)"


def _short(row: Disagreement) -> Disagreement:
    return Disagreement(
        row.rank, _cut(row.path, _CELL_CHARS), _cut(row.expected, _CELL_CHARS), _cut(row.found, _CELL_CHARS)
    )
