"""What one rank of a test runs, and what comes of all of them."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from accelfn.context import Context, announce_end, publish, start_watchdog
from accelfn.errors import CollectiveTimeoutError, MissingRankError, RemoteRankError
from accelfn.testing.faults import RankDeath


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one rank.

    Attributes:
        value: What it returned.
        error: What it raised, or None.
        ended: Whether it came to an end at all.
        seen_to_die: Whether its process ended before it could say anything.
        stack: Where it was when it was ended, if that is known.
    """

    value: Any = None
    error: BaseException | None = None
    ended: bool = True
    seen_to_die: bool = False
    stack: str = ""


def conclude(outcomes: Sequence[Outcome], where: str) -> list[Any]:
    """Return the values in rank order, or raise the error that was the cause of the others.

    Args:
        outcomes: By rank.
        where: Kind of world, for the message.
    """
    errors = [(rank, one.error) for rank, one in enumerate(outcomes) if one.error is not None]
    if not errors:
        return [one.value for one in outcomes]
    rank, error = min(errors, key=lambda item: (_consequence(outcomes[item[0]], item[1]), item[0]))
    note = f"raised on rank {rank} of {len(outcomes)} ({where})"
    others = [f"rank {one} {type(it).__name__}" for one, it in errors if one != rank and outcomes[one].ended]
    if others:
        note += "; also failed: " + ", ".join(others)
    lingering = [f"rank {one}" for one, _ in errors if one != rank and not outcomes[one].ended]
    stacks = [one for one, _ in errors if one != rank and outcomes[one].stack]
    if lingering:
        note += "; did not end in time: " + ", ".join(lingering)
        note += "".join(f"\nrank {one} was here:\n{outcomes[one].stack}" for one in stacks)
    add_note = getattr(error, "add_note", None)  # Python 3.11 and later
    if add_note is not None:
        add_note(note)
    raise error


def _consequence(outcome: Outcome, error: BaseException) -> int:
    """Order errors by how likely they only follow from another rank's."""
    if outcome.seen_to_die:
        return 0
    if not outcome.ended:  # it has said nothing: what any other rank has said tells more
        return 4
    if isinstance(error, RemoteRankError):
        return 3
    if isinstance(error, MissingRankError):
        return 2
    lost_connection = "gloo/transport" in str(error)
    return int(lost_connection or isinstance(error, CollectiveTimeoutError))


@contextmanager
def taking_part(ctx: Context, *, whole_process: bool) -> Generator[None]:
    """Report to the other ranks how this one ends: by an exception, or for good.

    Args:
        ctx: Of this rank.
        whole_process: Whether the rank is a process, and not a thread.
    """
    board, call_log, rank = ctx.collectives.board, ctx.collectives.call_log, ctx.rank
    end_watch = start_watchdog(board, rank, whole_process=whole_process) if ctx.guard.watchdog else None

    def leave_mesh(*, announce: bool) -> None:
        if ctx.mesh is not None:
            ctx.mesh.leave(announce=announce)

    try:
        yield
        ctx.world.background.settle()
    except RankDeath:  # no rank is notified
        leave_mesh(announce=False)
        raise
    except BaseException as error:
        publish(board, call_log, rank, error)
        leave_mesh(announce=False)
        raise
    else:
        leave_mesh(announce=True)
        announce_end(board, call_log, rank)
    finally:
        if end_watch is not None:
            end_watch()
