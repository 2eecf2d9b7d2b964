"""Draw a plan of an epoch: ranks are rows, steps are columns, and padding is marked."""

from __future__ import annotations

from collections.abc import Sequence

from accelfn.data.plan import EpochPlan
from accelfn.svg import CHAR, GREY, rect_svg, text_svg, write_svg

__all__ = ("draw_plan", "draw_plan_svg")

# Longer runs of consecutive positions are written as first..last.
_MAX_LISTED = 4
_GAP, _NONE = "...", "-"

# Sizes in the drawing's units.
_ROW, _EDGE, _BETWEEN = 30, 10, 4
_BASE = 18  # of a line of text, below its top
_NEW, _PADDING = "#cfe3f7", "#f3c9a5"


def draw_plan(plan: EpochPlan, *, sharing: int = 1, max_steps: int = 12, max_ranks: int = 16) -> str:
    """Draw a plan as a table of text. Pure.

    A cell holds the positions that a rank reads in a step. Positions in brackets are padding, which has been
    read before. ``-`` marks a rank without a batch.

    Args:
        plan: From :func:`plan_epoch`.
        sharing: Number of ranks of the world that share each batch, and so are one rank of the plan.
        max_steps: Number of steps to show; if there are more, the first ones and the last.
        max_ranks: The same for ranks.

    Returns:
        Lines without a newline at the end.

    Raises:
        ValueError: ``max_steps`` or ``max_ranks`` is less than 2.

    >>> from accelfn.data.plan import plan_epoch
    >>> print(draw_plan(plan_epoch(11, 2, 2)))
            step 0  step 1  step 2
    rank 0  0 1     4 5     8 9
    rank 1  2 3     6 7     10 (0)
    """
    rows = [
        [name, *(f"{new} ({again})".lstrip() if again else new for new, again in cells)]
        for name, cells in _table(plan, sharing, max_steps, max_ranks)
    ]
    rows.insert(0, ["", *_steps(plan, max_steps)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join([*lines, *_notes(plan)])


def draw_plan_svg(plan: EpochPlan, *, sharing: int = 1, max_steps: int = 12, max_ranks: int = 16) -> str:
    """Draw the table of :func:`draw_plan` as an SVG image. Pure.

    Args:
        plan: As for :func:`draw_plan`.
        sharing: As for :func:`draw_plan`.
        max_steps: As for :func:`draw_plan`.
        max_ranks: As for :func:`draw_plan`.

    Returns:
        An SVG document.

    Raises:
        ValueError: ``max_steps`` or ``max_ranks`` is less than 2.

    >>> from accelfn.data.plan import plan_epoch
    >>> draw_plan_svg(plan_epoch(11, 2, 2)).count("<rect")  # the ground, six batches, and one of padding
    8
    """
    table = _table(plan, sharing, max_steps, max_ranks)
    heads = _steps(plan, max_steps)
    columns = [[cells[number] for _, cells in table] for number in range(len(heads))]
    names = max((len(name) for name, _ in table), default=0)
    lefts = [_EDGE + names * CHAR + 2 * _EDGE]
    for head, column in zip(heads, columns, strict=True):
        longest = max(len(head), *(len(f"{new} {again}".strip()) for new, again in column))
        lefts.append(lefts[-1] + longest * CHAR + 2 * _EDGE + 2 * _BETWEEN)
    notes = _notes(plan)
    width = max([lefts[-1] + _EDGE, *(len(note) * CHAR + 2 * _EDGE for note in notes)])
    height = 2 * _EDGE + _ROW * (1 + len(table) + len(notes))
    parts: list[str] = []
    for left, head in zip(lefts, heads, strict=False):
        parts.append(text_svg(left + _EDGE, _EDGE + _BASE, head, GREY))
    for row, (name, cells) in enumerate(table, 1):
        top = _EDGE + row * _ROW
        parts.append(text_svg(_EDGE, top + _BASE, name, GREY))
        for left, right, (new, again) in zip(lefts, lefts[1:], cells, strict=False):
            parts += _draw_cell(left, top, right - left - 2 * _BETWEEN, new, again)
    for row, note in enumerate(notes, 1 + len(table)):
        parts.append(text_svg(_EDGE, _EDGE + row * _ROW + _BASE, note, GREY))
    title = f"{plan.num_samples} samples in batches of {plan.rank_batch} on {plan.size} ranks"
    return write_svg(width, height, title, parts)


# The positions that a rank reads in a step, and those of its padding, as text.
_Cell = tuple[str, str]


def _table(plan: EpochPlan, sharing: int, max_steps: int, max_ranks: int) -> list[tuple[str, list[_Cell]]]:
    if max_steps < 2 or max_ranks < 2:
        raise ValueError(
            f"max_steps and max_ranks must be at least 2: got max_steps={max_steps}, max_ranks={max_ranks}."
        )
    steps = _select(plan.num_steps, max_steps)
    empty: list[_Cell] = [] if steps else [(_NONE, "")]
    rows: list[tuple[str, list[_Cell]]] = []
    for rank in _select(plan.size, max_ranks):
        if rank is None:
            rows.append((_GAP, [(_GAP, "")] * len(steps) or empty))
        else:
            cells = [(_GAP, "") if step is None else _read(plan, step, rank) for step in steps]
            name = f"rank {rank}" if sharing == 1 else f"ranks {rank * sharing}..{(rank + 1) * sharing - 1}"
            rows.append((name, cells or empty))
    return rows


def _read(plan: EpochPlan, step: int, rank: int) -> _Cell:
    positions = plan.positions(step, rank)
    valid = plan.batch_info(step, rank).own_valid or 0
    new, again = (" ".join(_runs(part)) for part in (positions[:valid], positions[valid:]))
    return new if positions else _NONE, again


def _select(number: int, most: int) -> list[int | None]:
    """Return the first numbers and the last, with None for the gap between them."""
    if number <= most:
        return list(range(number))
    return [*range(most - 1), None, number - 1]


def _steps(plan: EpochPlan, max_steps: int) -> list[str]:
    shown = _select(plan.num_steps, max_steps)
    return [_GAP if step is None else f"step {step}" for step in shown] or ["no step"]


def _notes(plan: EpochPlan) -> list[str]:
    done = plan.consumed(plan.num_steps - 1) if plan.num_steps else plan.start
    notes = (("read before", 0, plan.start), ("left out", done, plan.num_samples))
    return [f"{what}: {' '.join(_run(first, end))}" for what, first, end in notes if first < end]


def _runs(positions: Sequence[int]) -> list[str]:
    """List positions, and long runs as first..last.

    >>> _runs([7, 8, 9, 10, 11, 0, 1])
    ['7..11', '0', '1']
    """
    words: list[str] = []
    begin = 0
    for end in range(1, len(positions) + 1):
        if end < len(positions) and positions[end] == positions[end - 1] + 1:
            continue
        words += _run(positions[begin], positions[end - 1] + 1)
        begin = end
    return words


def _run(first: int, end: int) -> list[str]:
    if end - first > _MAX_LISTED:
        return [f"{first}..{end - 1}"]
    return list(map(str, range(first, end)))


def _draw_cell(left: int, top: int, width: int, new: str, again: str) -> list[str]:
    if new in (_GAP, _NONE):
        return [text_svg(left + _EDGE, top + _BASE, new, GREY)]
    cut = left if not new else left + _EDGE + len(new) * CHAR + CHAR // 2
    parts: list[str] = []
    if new:
        end = cut if again else left + width
        parts.append(rect_svg(left, top, end - left, _ROW - _BETWEEN, _NEW, radius=3))
        parts.append(text_svg(left + _EDGE, top + _BASE, new))
    if again:
        parts.append(rect_svg(cut, top, left + width - cut, _ROW - _BETWEEN, _PADDING, radius=3))
        parts.append(text_svg(cut + (CHAR // 2 if new else _EDGE), top + _BASE, again))
    return parts
