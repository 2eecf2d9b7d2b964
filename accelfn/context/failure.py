"""One rank's exception becomes every rank's: how it is written down, left on the board, and raised again."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Mapping
from typing import Any, NamedTuple

from accelfn.context.board import Board
from accelfn.context.journal import Journal
from accelfn.errors import (
    CollectiveTimeoutError,
    DistributedError,
    MismatchError,
    MissingRankError,
    RemoteRankError,
    UnevenDataError,
)

__all__ = ("Departure", "announce_end", "as_error", "explain_departure", "news", "publish", "refuse_if_over")

_FAILURE = "failure"  # one key for all: the first rank that fails is the one whose error matters
_END = "end"
_TRACEBACK_CHARS = 20_000


class Departure(NamedTuple):
    """That a rank ended its work without an error."""

    rank: int
    number: int  # of the last operation it took part in
    operation: str
    site: str
    reductions: int  # of gradients


def publish(board: Board, journal: Journal, rank: int, error: BaseException, doing: str = "") -> None:
    """Leave word of ``error`` for all ranks, before it travels up on this one; then no operation is possible.

    Of several ranks that fail, the first one's word stands. Ranks that wait in an operation raise it there
    within a second; those that don't, at their next one.

    Args:
        board: Of the world.
        journal: Of this rank.
        rank: This rank.
        error: What was raised.
        doing: What it was raised in, if not in an operation across ranks.
    """
    if journal.over:
        return
    journal.over = f"this rank has told the others of its {type(error).__name__}: {error}"
    journal.abandon()
    if isinstance(error, RemoteRankError):
        return  # the rank that it names has left word itself
    board.post_once(_FAILURE, _written(rank, error, doing))


def announce_end(board: Board, journal: Journal, rank: int) -> None:
    """Leave word that this rank takes part in nothing more."""
    if journal.over:
        return
    with contextlib.suppress(Exception):  # whoever disagrees with an operation that nobody waits for
        journal.settle()
    journal.over = "its context is closed"
    entry = journal.current
    board.post_once(_END, json.dumps([rank, entry.number, entry.operation, entry.site, journal.reductions]))


def news(board: Board, journal: Journal, rank: int) -> Exception | None:
    """Look whether a rank has left word of something that makes the current operation impossible."""
    text = board.read(_FAILURE)
    if text:
        return as_error(text)
    text = board.read(_END)
    if text:
        departure = Departure(*json.loads(text))
        # Who left after this operation has done its part in it.
        came = departure.number > journal.number or (
            departure.number == journal.number
            and not (journal.reducing and departure.reductions <= journal.reductions)
        )
        if departure.rank != rank and not came:
            return explain_departure(departure, journal, rank)
    return None


def explain_departure(departure: Departure, journal: Journal, rank: int) -> MissingRankError:
    """Make the error of a rank that waits for one that has ended."""
    now = journal.current
    last = (
        f"after {departure.operation} at {departure.site}, call {departure.number}"
        if departure.number
        else "without a single operation across ranks"
    )
    return MissingRankError(
        f"{now.operation}: rank {departure.rank} has ended its work {last}, while rank {rank} waits for it "
        f"in call {now.number} at {now.site}. Every rank must call the same operations in the same order."
    )


def refuse_if_over(journal: Journal, operation: str) -> None:
    """Refuse an operation of a rank whose world has ended.

    Raises:
        DistributedError: It has ended.
    """
    if journal.over:
        raise DistributedError(
            f"{operation}: no operation across ranks is possible any more: {journal.over}. "
            "Start a new context."
        )


def as_error(text: str) -> Exception:
    """Make the error that a rank raises when it reads what :func:`publish` wrote."""
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
        details = [error.operation, error.rows, error.hint, error.callers]
        if isinstance(error, UnevenDataError):
            details.append(error.counts)
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return json.dumps(
        {
            "rank": rank,
            "cause": type(error).__name__,
            "message": str(error),
            "doing": doing,
            "traceback": "".join(lines)[-_TRACEBACK_CHARS:],
            "details": details,
        }
    )
