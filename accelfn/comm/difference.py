"""Where the calls of several ranks differ, from what each of them said: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from accelfn.errors import Caller, Disagreement, MismatchError, UnevenDataError

__all__ = ("Said", "find_difference")

_MAX_ROWS = 20
_SHOWN = 200


class Said(NamedTuple):
    """What one rank said of its call."""

    operation: str
    site: str
    guard: str  # what its guard compares
    number: int
    text: str  # options, then what must be equal of the tree
    tag: str
    line: str  # the call's own, and the first one of its form
    place: str
    leaves: dict[str, str]  # kind of each leaf, by path
    passes: list[tuple[int, int, bool]]  # open ones, outermost first: what preceded it, batches, has it ended
    recent: list[tuple[int, str, str, str]]  # number, operation, site, chain of calls not compared yet
    # Axes along which ranks have one batch, the batch, and the kind of each leaf of it, by path.
    shared: tuple[str, int, dict[str, str]] | None = None


def find_difference(said: Sequence[Said]) -> MismatchError:
    """Find the first thing in which the calls of the ranks differ.

    Args:
        said: By rank.

    Returns:
        The error to raise: the same on every rank, since all were told the same.
    """
    operation = _most([one.operation for one in said])
    callers = [Caller(rank, one.operation, one.site) for rank, one in enumerate(said)]
    # Before all else: ranks that compare different things can't agree, whatever they call.
    if rows := _unequal([one.guard for one in said]):
        return MismatchError(
            operation, rows[:_MAX_ROWS], "Give all ranks the same guard, in init_context or replace.", callers
        )
    earlier = _first_difference(said)
    if earlier is not None:
        return earlier
    rows, hint = _rows(said)
    left_out = len(rows) - _MAX_ROWS
    if left_out > 0:
        hint = f"  ... and {left_out} more\n{hint}"
    rows = rows[:_MAX_ROWS]
    uneven = _uneven(said)
    if uneven is not None:
        counts, ended = uneven
        hint = (
            f"Batches taken so far are counted above; rank(s) {', '.join(map(str, ended))} had no more. Give "
            'all ranks equally many: even_batches=True, drop_last=True, or uneven="stop_first".'
        )
        return UnevenDataError(operation, rows, hint, callers, counts)
    return MismatchError(operation, rows, hint, callers)


def _uneven(said: Sequence[Said]) -> tuple[list[int], list[int]] | None:
    """Find a pass that all ranks are in and that some have ended; give batches by rank, and who has no more.

    Passes that only some ranks have begun, as in an evaluation on one of them, say nothing of the data.
    """
    for passes in reversed(list(zip(*(one.passes for one in said), strict=False))):
        numbers, counts, has_ended = zip(*passes, strict=True)
        if len(set(numbers)) == 1 and len(set(counts)) > 1 and any(has_ended):
            return list(counts), [rank for rank, ended in enumerate(has_ended) if ended]
    return None


def _rows(said: Sequence[Said]) -> tuple[list[Disagreement], str]:
    """Return what differs, from the coarse to the fine, and what to do about it."""
    hint = (
        "Every rank must call the same operation with the same options on a tree of the same structure, "
        "shapes and dtypes."
    )
    if rows := _unequal([one.operation for one in said], "a call of "):
        return rows, hint
    if rows := _unequal([f"call {one.number}" for one in said]):
        return rows, "A rank has left out a call, or made one too many. " + hint
    if rows := _unequal([one.place for one in said]):
        return rows, "The ranks are at different places in their data. " + hint
    paths = dict.fromkeys(path for one in said for path in one.leaves)
    rows = [
        row
        for path in paths
        for row in _unequal([one.leaves.get(path, "no such leaf") for one in said], path=path)
    ]
    # Options come before the structure; where all else is equal, the kinds of containers differ.
    rows = rows or _unequal([one.text.partition("\0")[0] for one in said])
    rows = rows or _unequal([one.text.rpartition("\0")[2] for one in said])
    if rows:
        return rows, hint
    shared = [one.shared for one in said if one.shared is not None]
    if len({one.tag for one in said}) == 1 and len(shared) == len(said) and (rows := _unlike(shared)):
        return rows, (
            f"Ranks along {shared[0][0]} work on one batch together, and must give the model the same. A "
            "prepared loader sees to it; elsewhere split data with "
            'split_between_processes(ctx.along("dp"), ...), and seed what is drawn alike on these ranks.'
        )
    if len({one.tag for one in said}) == 1:
        return [], (
            "They have differed since an earlier call that was not compared and is no longer remembered. "
            'With guard="full" each one is.'
        )
    return _unequal([one.line for one in said]), (
        "The calls have the same form but come from different lines, so one may have been left out, or two "
        'swapped. If they are meant to meet, give them one name: pass ctx.tagged("...") instead of ctx, on '
        "every rank."
    )


def _unlike(shared: Sequence[tuple[str, int, dict[str, str]]]) -> list[Disagreement]:
    """Return a row for each rank and leaf that isn't what most of those with the same batch have."""
    rows: list[Disagreement] = []
    for batch in dict.fromkeys(one[1] for one in shared):
        ranks = [rank for rank, one in enumerate(shared) if one[1] == batch]
        leaves = [shared[rank][2] for rank in ranks]
        for path in dict.fromkeys(path for one in leaves for path in one):
            found = _unequal([one.get(path, "no such leaf") for one in leaves], path=path)
            rows += [row._replace(rank=ranks[row.rank]) for row in found]
    return rows


def _first_difference(said: Sequence[Said]) -> MismatchError | None:
    """Find an earlier call that was counted but not compared, in which the ranks already differ."""
    by_rank = [{one[0]: one for one in rank.recent} for rank in said]
    now = min(one.number for one in said)
    for number in sorted(by_rank[0]):
        if not all(number in recent for recent in by_rank):
            continue
        calls = [recent[number] for recent in by_rank]
        if number == now or len({call[3] for call in calls}) == 1:
            continue
        rows = _unequal([f"{call[1]} at {call[2]}" for call in calls], f"call {number}: ")
        rows = rows or [Disagreement(0, "", "", f"call {number}: {calls[0][1]} at {calls[0][2]}")]
        callers = [Caller(rank, call[1], call[2]) for rank, call in enumerate(calls)]
        return MismatchError(
            _most([call[1] for call in calls]),
            rows,
            f"The ranks have differed since call {number}; it is found only now, because not every call is "
            'compared. With guard="full" it is.',
            callers,
        )
    return None


def _unequal(values: Sequence[str], before: str = "", path: str = "") -> list[Disagreement]:
    """Return a row for each rank that has not what most have."""
    expected = _most(values)
    return [
        Disagreement(rank, path, before + expected[:_SHOWN], before + value[:_SHOWN])
        for rank, value in enumerate(values)
        if value != expected
    ]


def _most(values: Sequence[str]) -> str:
    """Return the most common value; of equally common ones that of the lowest rank."""
    return Counter(values).most_common(1)[0][0]
