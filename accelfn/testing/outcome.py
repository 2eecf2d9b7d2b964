"""From what became of each rank to one result, or one error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelfn.errors import CollectiveTimeoutError, MissingRankError, RemoteRankError

__all__ = ("Outcome", "conclude")


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
    return 1 if isinstance(error, CollectiveTimeoutError) else 0
