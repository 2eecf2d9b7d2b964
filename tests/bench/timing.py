"""Time several ways of doing one thing in turn, so that what else the machine does hits all of them alike."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import accelfn as af

# torch.distributed's own functions are only partly typed.
plain: Any = dist

Times = Mapping[str, "Timing"]


class Timing(NamedTuple):
    """Seconds of one call."""

    best: float
    median: float

    def ms(self, digits: int = 3) -> str:
        return f"{self.median * 1e3:,.{digits}f} ({self.best * 1e3:,.{digits}f})"

    def s(self) -> str:
        return f"{self.median:.2f} ({self.best:.2f})"

    def over(self, other: Timing) -> str:
        """How many times as long it takes."""
        return f"{self.median / other.median:.2f} ({self.best / other.best:.2f})"


def timing_of(seconds: Iterable[float]) -> Timing:
    taken = list(seconds)
    return Timing(min(taken), statistics.median(taken))


def rounds_of(rounds: int) -> int:
    """Return how often to measure: a part of it where ``python -m tests.bench --quick`` asks for that."""
    return max(2, rounds // int(os.environ.get("BENCH_SHARE", "1")))


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
    for number in range(rounds_of(rounds) + 1):
        # Another one starts each time: whoever comes after a slow one may find cold caches.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(calls):
                ways[name]()
            if number:
                taken[name].append((time.perf_counter() - start) / calls)
    return {name: timing_of(times) for name, times in taken.items()}


def on_ranks(measure: Callable[[af.Context], object]) -> None:
    """Run ``measure`` on this rank, with one thread."""
    torch.set_num_threads(1)
    # The peer stays a world of one on the CPU unless it is told so by the environment.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with af.init_context(cpu=True) as ctx:
        measure(ctx)


def show(name: str, *lines: str) -> None:
    """Print a block of a page on the first rank, under its name, by which the main program finds it."""
    if os.environ.get("RANK", "0") == "0":
        print("\n".join([f"<!-- {name} -->", *lines, ""]), flush=True)


def show_table(name: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a Markdown table; columns that begin with ">" are aligned to the right."""
    rule = ("--:" if column.startswith(">") else "---" for column in columns)
    cells = [[column.removeprefix(">") for column in columns], rule, *rows]
    show(name, *(f"| {' | '.join(row)} |".replace("|  |", "| |") for row in cells))


def show_beside(name: str, rows: Mapping[str, Times], digits: int = 3) -> None:
    """Print the first time of each row beside the others, and how many times as long these take."""
    columns = ("what", "accelfn, median (best) ms", "beside", "its ms", "ratio of medians (bests)")
    found: list[Sequence[str]] = []
    for what, times in rows.items():
        ours, *others = times.items()
        found += [
            (what, ours[1].ms(digits), other, one.ms(digits), one.over(ours[1])) for other, one in others
        ]
    show_table(name, columns, found)


def show_against(name: str, times: Times, digits: int = 0) -> None:
    """Print times, and how many times as long as the first they are."""
    first, *_ = times.values()
    rows = ((what, one.ms(digits), "" if one is first else one.over(first)) for what, one in times.items())
    show_table(name, ("what", "median (best) ms", "over the first, medians (bests)"), rows)


def compiled() -> dict[str, str]:
    """Return the environment of a program whose modules are compiled once, as pip leaves installed ones."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def memory_of(field: str) -> int:
    """Read bytes of this process from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def growth_of(action: Callable[[], object]) -> int:
    """Return by how many bytes the process grows at most in an action."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_of("VmRSS")
    action()
    return memory_of("VmHWM") - before
