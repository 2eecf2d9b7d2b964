"""Time several ways of doing one thing in turn, so that what else the machine does hits all of them alike."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ("Row", "Timing", "compare", "compiled", "print_table")


def compiled() -> dict[str, str]:
    """Return the environment of a program whose modules are compiled once, as pip leaves installed ones."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Timing(NamedTuple):
    """Seconds of one call."""

    best: float
    median: float


class Row(NamedTuple):
    """One line of the table: what was done, and how long each way took."""

    name: str
    ours: Timing
    others: Mapping[str, Timing]


def compare(
    ways: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    calls: int = 5,
    before: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Call each way in turn, ``rounds`` times, ``calls`` calls a time.

    Args:
        ways: What to call, by name.
        rounds: How often each way gets its turn; one more comes first and isn't counted.
        calls: Calls in one turn.
        before: Called before each turn, such as a barrier.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        # Another one starts each time: whoever comes after a slow one may find cold caches.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(calls):
                ways[name]()
            if number:
                taken[name].append((time.perf_counter() - start) / calls)
    return {name: Timing(min(times), statistics.median(times)) for name, times in taken.items()}


def print_table(rows: list[Row]) -> None:
    """Print a Markdown table: times in milliseconds, and how many times as long the others take."""
    print("| what | accelfn, median (best) ms | beside | median (best) ms | ratio of medians (bests) |")
    print("| --- | --- | --- | --- | --- |")
    for row in rows:
        for name, other in row.others.items():
            print(
                f"| {row.name} | {_ms(row.ours)} | {name} | {_ms(other)} "
                f"| {other.median / row.ours.median:.2f} ({other.best / row.ours.best:.2f}) |"
            )


def _ms(timing: Timing) -> str:
    return f"{timing.median * 1e3:.3f} ({timing.best * 1e3:.3f})"
