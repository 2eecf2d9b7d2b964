"""Messages between ranks outside the collectives, by which one rank's failure reaches the others.

A rank that has failed can't take part in collectives, and a rank that waits in one can't receive another. The
board is a key-value store that every rank can read at any time without waiting.
"""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed re-exports them untyped

from accelfn.context.call_log import CallLog, Position
from accelfn.errors import (
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    MissingRankError,
    RemoteRankError,
    UnevenDataError,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageBoard:
    """A board that the ranks of one world share. The default, for a world of one, stores nothing.

    If the board can't be reached (its host has ended), writes are lost and reads return None.

    Attributes:
        post: ``(key, text)``: writes a text, replacing an earlier one.
        post_once: ``(key, text)``: writes a text unless there is one; returns the stored text.
        read: ``(key)``: returns the stored text, or None.
        close: Closes the connection; afterwards the board is empty.
    """

    post: Callable[[str, str], None] = lambda key, text: None
    post_once: Callable[[str, str], str] = lambda key, text: text
    read: Callable[[str], str | None] = lambda key: None
    close: Callable[[], None] = lambda: None


def store_board(store: Store) -> MessageBoard:
    """Return a board in one of torch's key-value stores."""
    held = [PrefixStore("accelfn/board", store)]  # cleared by close, since the store may own a port

    def ask(request: Callable[[Store], T], otherwise: T) -> T:
        with contextlib.suppress(RuntimeError):
            for part in held:
                return request(part)
        return otherwise

    def read(key: str) -> str | None:
        # One request, which writes nothing.
        text = ask(lambda part: part.compare_set(key, _NOTHING, _NOTHING).decode(), _NOTHING)
        return None if text == _NOTHING else text

    return MessageBoard(
        post=lambda key, text: ask(lambda part: part.set(key, text), None),
        post_once=lambda key, text: ask(lambda part: part.compare_set(key, "", text).decode(), text),
        read=read,
        close=held.clear,
    )


def board_within(board: MessageBoard, world: MessageBoard) -> MessageBoard:
    """Return the board of some ranks of a world, which also has the news and the failure of the world's."""

    def post(key: str, text: str) -> None:
        (world if key == NEWS else board).post(key, text)

    def read(key: str) -> str | None:
        text = None if key == NEWS else board.read(key)
        return world.read(key) if not text and key in (NEWS, FAILURE) else text

    return MessageBoard(post=post, post_once=board.post_once, read=read, close=board.close)


FAILURE = "failure"  # one key for all ranks: only the first error is stored
NEWS = "news"  # written after a failure or an end, of some ranks too: without it there is none to read
_END = "end"
_NOTHING = "\0"  # no text on a board
# A store's limit is 8 MiB, and a character may take twelve bytes as JSON.
_TRACEBACK_CHARS = 20_000
_MESSAGE_CHARS = 100_000
_CELL_CHARS = 500
_MAX_ROWS = 200


def publish(board: MessageBoard, call_log: CallLog, rank: int, error: BaseException, doing: str = "") -> None:
    """Post ``error`` for all ranks; afterwards no operation is possible.

    If several ranks fail, the first error is kept. Ranks that wait in an operation raise it there within a
    second, and other ranks at their next operation.

    Args:
        board: Of the world.
        call_log: Of this rank.
        rank: This rank.
        error: The exception.
        doing: What raised it, if not an operation across ranks.
    """
    if call_log.over:
        return
    call_log.over = f"this rank has failed with {type(error).__name__}: {text_of(error)}"
    call_log.abandon()
    if isinstance(error, RemoteRankError):
        return  # posted by the rank that it names
    post_failure(board, rank, error, doing)


def post_failure(board: MessageBoard, rank: int, error: BaseException, doing: str = "") -> None:
    """Post ``error`` for all ranks, also on behalf of a rank that can't.

    Args:
        board: Of the world.
        rank: The rank that has failed.
        error: The exception.
        doing: As of :func:`publish`.
    """
    board.post_once(FAILURE, _serialize(rank, error, doing))
    board.post(NEWS, "yes")


def note_failure(call_log: CallLog, rank: int, error: Exception, doing: str) -> None:
    """Note an exception, which the program may handle: if the rank then ends, other ranks raise it.

    Args:
        call_log: Of this rank.
        rank: This rank.
        error: The exception. Those that name other ranks are posted elsewhere.
        doing: What raised it.
    """
    if not isinstance(error, DistributedError):
        call_log.failure = _serialize(rank, error, doing)


def announce_end(board: MessageBoard, call_log: CallLog, rank: int) -> None:
    """Announce that this rank takes part in no further operation."""
    if call_log.over:
        return
    with contextlib.suppress(Exception):  # a mismatch in an operation whose result isn't needed any more
        call_log.settle()
    call_log.over = "its context is closed"
    # With what it failed with before, if its program handled that.
    board.post_once(_END, json.dumps([call_log.position(rank), call_log.failure]))
    board.post(NEWS, "yes")


def news(board: MessageBoard, call_log: CallLog, rank: int) -> Exception | None:
    """Return the error that makes the current operation impossible: a rank has posted it, or has ended."""
    text = board.read(FAILURE)
    if text:
        return as_error(text)
    text = board.read(_END)
    if not text:
        return None
    numbers, failure = json.loads(text)
    ended, entry = Position(*numbers), call_log.current
    # A rank that left after this operation has taken part in it.
    took_part = (ended.number, not call_log.awaits(ended)) >= (call_log.number, True)
    if ended.rank == rank or took_part:
        return None
    if failure:
        return as_error(failure)
    last = (
        f"after {ended.operation} at {ended.site}, call {ended.number}"
        if ended.number
        else "without any operation across ranks"
    )
    return MissingRankError(
        f"{entry.operation}: rank {ended.rank} has ended {last}, while rank {rank} waits for it in call "
        f"{entry.number} at {entry.site}. Every rank must call the same operations in the same order."
    )


def as_error(text: str) -> Exception:
    """Return the error that a rank raises when it reads what :func:`publish` posted."""
    message: Mapping[str, Any] = json.loads(text)
    match message["cause"]:
        case "MismatchError":
            return MismatchError(*message["details"])
        case "UnevenDataError":
            return UnevenDataError(*message["details"])
        case "MissingRankError":
            return MissingRankError(message["message"])
        case "CollectiveTimeoutError":
            return CollectiveTimeoutError(message["message"])
        case cause:
            return RemoteRankError(
                message["rank"], cause, message["message"], message["doing"], message["traceback"]
            )


def _serialize(rank: int, error: BaseException, doing: str) -> str:
    details: list[object] = []
    if isinstance(error, MismatchError):
        hint = _truncate(error.hint, _MESSAGE_CHARS)
        if len(error.rows) > _MAX_ROWS:
            hint = f"  ... and {len(error.rows) - _MAX_ROWS} more\n{hint}"
        details = [
            error.operation,
            [
                (row.rank, *(_truncate(text, _CELL_CHARS) for text in row[1:]))
                for row in error.rows[:_MAX_ROWS]
            ],
            hint,
            error.callers,
        ]
        if isinstance(error, UnevenDataError):
            details.append(error.counts)
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except Exception:  # noqa: BLE001 -- a user's exception may fail to format
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
    """Return the message of any exception, even if its ``__str__`` fails; very long ones are truncated.

    >>> text_of(OSError("disk full"))
    'disk full'
    """
    try:
        text = str(error)
    except Exception as failure:  # noqa: BLE001 -- a user's exception may fail to format
        return f"<{type(error).__name__} whose __str__ raises {type(failure).__name__}>"
    return _truncate(text, _MESSAGE_CHARS)


def _truncate(text: str, length: int) -> str:
    excess = len(text) - length
    return text if excess <= 0 else f"{text[:length]} ... ({excess} more characters)"


# --- processes that are lost, in a launch that outlives them ---------------------------------------


class Loss(NamedTuple):
    """A process that has ended, and why."""

    name: str
    why: str


def announce_loss(board: MessageBoard, loss: Loss) -> None:
    """Post that a process has ended, or is about to: once, for the first reason that is given."""
    why = board.post_once(f"why/{loss.name}", loss.why)
    append_text(board, "lost", json.dumps(loss._replace(why=why)))


def losses_from(board: MessageBoard, first: int) -> list[Loss]:
    """Return the losses that were posted, from number ``first`` on."""
    return [Loss(*json.loads(text)) for text in list_texts(board, "lost", first)]


def append_text(board: MessageBoard, name: str, text: str) -> None:
    """Append a text to a list on the board, unless it is there."""
    number = 0
    while board.post_once(f"{name}/{number}", text) != text:
        number += 1


def list_texts(board: MessageBoard, name: str, first: int) -> list[str]:
    """Return the texts of a list on the board, from number ``first`` on."""
    texts: list[str] = []
    while (text := board.read(f"{name}/{first + len(texts)}")) is not None:
        texts.append(text)
    return texts
