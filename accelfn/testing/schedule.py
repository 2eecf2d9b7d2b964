"""Schedules: which thread of a world in memory runs next, and which faults happen, as a value.

A world that follows a schedule runs one thread at a time: a rank, or a background thread that accelfn has
started for it. Before each operation that other ranks can notice (a collective, an operation on a file of a
checkpoint, the start of a thread), and wherever a thread waits or ends, there is a choice of who runs next.
By default the same thread goes on as long as it can, then the next one in order. A schedule lists the choices
that differ, so that the empty schedule is the plainest run, and a shorter schedule a plainer one.

Time is counted, not measured: a timeout or a delay is over as soon as nothing else can run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, cast

from accelfn.testing.faults import Fault

# Random parts of names: of the files of a save, of temporary directories, and addresses.
_RANDOM = re.compile(
    r"(?<![0-9a-z])[0-9a-f]{8}(?![0-9a-z])|(?<=tmp)[a-z0-9_]{8}(?![a-z0-9_])|(?<=0x)[0-9a-f]{6,}"
)


class Switch(NamedTuple):
    """A choice that differs from the default.

    Attributes:
        choice: Its number among the choices of the run, from 0. Only moments at which several threads can run
            are counted.
        to: Who runs instead: 1 for the next thread that can, in the order of ranks, 2 for the one after it,
            and so on; the order begins again at its end.
    """

    choice: int
    to: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Who runs next in a world in memory, and which faults happen. Equal schedules give equal runs.

    Attributes:
        seed: Draws switches, and up to ``max_faults`` faults, beside those that are listed; None: only those.
        switches: Choices that differ from the default, in order.
        faults: Faults; those that happened are listed in the schedule of the :class:`Trace`.
        max_faults: The number of faults that the seed may draw.

    Raises:
        ValueError: The seed isn't an integer, or a number is negative.

    >>> Schedule(seed=7)
    Schedule(seed=7)
    >>> Schedule(switches=(Switch(3),), faults=(Fault(kind="die", rank=1, at=4),)).switches
    (Switch(choice=3, to=1),)
    """

    seed: int | None = None
    switches: tuple[Switch, ...] = ()
    faults: tuple[Fault, ...] = ()
    max_faults: int = 0

    def __post_init__(self) -> None:
        """Check the seed and the numbers."""
        if not isinstance(cast("object", self.seed), int | None):
            raise ValueError(f"Schedule: seed must be an integer or None, got {self.seed!r}.")
        if self.max_faults < 0 or any(switch.choice < 0 or switch.to < 1 for switch in self.switches):
            raise ValueError(
                f"Schedule: max_faults and choices must be at least 0, each Switch.to at least 1, got {self}."
            )

    def __repr__(self) -> str:
        """Return a call that makes this schedule, without what has its default."""
        given = [
            f"{item.name}={value!r}"
            for item in fields(self)
            if (value := getattr(self, item.name)) != item.default
        ]
        return f"Schedule({', '.join(given)})"


class Step(NamedTuple):
    """One operation of a run.

    Attributes:
        thread: Such as ``"rank 1"``, or ``"rank 1 save"``.
        rank: Whose thread it is.
        at: Number among the operations of the rank, from 0, by which a fault names it; None for the end.
        operation: What it is.
        site: The line of the user's program; of a background thread the one that started it.
        is_switched: Whether this thread runs here because the schedule differs from the default.
        fault: The kind of the fault that happens here, or "".
    """

    thread: str
    rank: int
    at: int | None
    operation: str
    site: str
    is_switched: bool = False
    fault: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What happened in a run.

    Attributes:
        steps: All operations, in the order in which they began.
        schedule: Replays the run: lists what the schedule of the run listed and drew, without a seed.
        num_choices: Number of choices that there were.
    """

    steps: tuple[Step, ...] = ()
    schedule: Schedule = Schedule()
    num_choices: int = 0

    @property
    def num_hand_overs(self) -> int:
        """How often another thread ran than before."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return sum(before.thread != after.thread for before, after in pairs)

    def table(self, last: int | None = None) -> str:
        """Return who did what, one operation a line.

        ``>`` marks where the schedule differs from the default, and ``!`` a fault.

        Args:
            last: The number of lines, from the end; None for all.
        """
        left_out = 0 if last is None else max(0, len(self.steps) - last)
        shown = self.steps[left_out:]
        rows = [("", "thread", "at", "operation", "line of the program"), *_rows(shown)]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(
                (*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4])
            ).rstrip()
            for row in rows
        ]
        if left_out:
            lines.insert(1, f"   ... {left_out} operations before")
        return "\n".join(lines)


def _rows(steps: Sequence[Step]) -> list[tuple[str, str, str, str, str]]:
    rows: list[tuple[str, str, str, str, str]] = []
    before = ""
    for step in steps:
        mark = (">" if step.is_switched else " ") + ("!" if step.fault else " ")
        operation = f"{step.operation} ({step.fault})" if step.fault else step.operation
        at = "" if step.at is None else str(step.at)
        rows.append((mark, "" if step.thread == before else step.thread, at, operation, step.site))
        before = step.thread
    return rows


def without_random_names(text: str) -> str:
    """Return a text without what differs between equal runs. Pure.

    >>> without_random_names("rename manifest-0a1b2c3d.json to manifest.json")
    'rename manifest-*.json to manifest.json'
    """
    return _RANDOM.sub("*", text)
