"""``explore``: run a function under many schedules, and report the distinct outcomes."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast, overload

from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions, text_of
from accelfn.testing.ranks import ScheduledRun, run_schedule
from accelfn.testing.schedule import Schedule, without_random_names

T = TypeVar("T")
F = TypeVar("F")
_TEXT_CHARS = 200
_INJECTED = re.compile(r"injected fault: rank \d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOutcome(Generic[T]):
    """One of the outcomes that schedules lead to.

    Attributes:
        text: The results of the ranks, or the error that ``run_ranks`` would raise.
        count: Number of runs that ended so.
        seed: The first seed that led to it.
        plainest: The run of these with the fewest switches and faults.
    """

    text: str
    count: int
    seed: int
    plainest: ScheduledRun[T]

    @property
    def is_failure(self) -> bool:
        """Whether it is an error."""
        return self.plainest.error is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration(Generic[T]):
    """The report of :func:`explore`, which prints as a text.

    Attributes:
        world_size: Number of ranks.
        num_runs: Number of runs.
        outcomes: The distinct outcomes, the most frequent first.
    """

    world_size: int
    num_runs: int
    outcomes: tuple[FoundOutcome[T], ...]

    @property
    def failures(self) -> tuple[FoundOutcome[T], ...]:
        """The outcomes that are errors."""
        return tuple(one for one in self.outcomes if one.is_failure)

    def __str__(self) -> str:
        """Return the outcomes with their numbers of runs and first seeds, and tables.

        The table of an outcome is that of its plainest run. The most frequent one without an error has none.
        """
        lines = [f"{self.num_runs} runs of {self.world_size} ranks, distinct outcomes: {len(self.outcomes)}"]
        lines += [
            f"{one.count:6} runs, first with seed {one.seed}: {_short(one.text)}" for one in self.outcomes
        ]
        usual = next((one for one in self.outcomes if not one.is_failure), None)
        for one in self.outcomes:
            if one is not usual:
                run = one.plainest
                lines += ["", f"{_short(one.text)}", f"with schedule={run.given}:", run.trace.table()]
        return "\n".join(lines)


@overload
def explore(
    fn: Callable[[Context], T],
    world_size: int,
    *,
    budget: int | timedelta = 100,
    seed: int = 0,
    max_faults: int = 0,
    timeout_s: float | None = 30.0,
    num_nodes: int = 1,
    **options: Unpack[ContextOptions],
) -> Exploration[T]: ...
@overload
def explore(
    fn: Callable[[Context, F], T],
    world_size: int,
    *,
    setup: Callable[[], AbstractContextManager[F]],
    budget: int | timedelta = 100,
    seed: int = 0,
    max_faults: int = 0,
    timeout_s: float | None = 30.0,
    num_nodes: int = 1,
    **options: Unpack[ContextOptions],
) -> Exploration[T]: ...
def explore(
    fn: Callable[..., T],
    world_size: int,
    *,
    setup: Callable[[], AbstractContextManager[Any]] | None = None,
    budget: int | timedelta = 100,
    seed: int = 0,
    max_faults: int = 0,
    timeout_s: float | None = 30.0,
    num_nodes: int = 1,
    **options: Unpack[ContextOptions],
) -> Exploration[T]:
    """Run a function under one schedule after the other, and report the distinct outcomes.

    The k-th run follows ``Schedule(seed=seed + k)``. For a number of runs the report is always the same.

    Args:
        fn: Function to run on every rank, as for :func:`run_schedule`; with ``setup`` it gets its value too.
            It starts anew in each run, so it must not keep anything from one to the next.
        world_size: Number of ranks, at least 1.
        setup: Makes the context manager that is open during a run, such as ``tempfile.TemporaryDirectory``.
            What leaving it raises is the error of the run: it can check what the ranks left, also if they
            have failed.
        budget: Number of runs, at least 1; or the time after which no further one begins.
        seed: Of the first run.
        max_faults: Number of faults (an exception, a death, a delay) that a run may have.
        timeout_s: Limit of each run, by the clock; None: no limit.
        num_nodes: As for :func:`run_ranks`.
        **options: As for :func:`run_ranks`.

    Raises:
        ValueError: ``budget`` is neither a timedelta nor a number of runs of at least one.

    >>> from accelfn.comm import wait_for_everyone
    >>> def first(ctx, came):
    ...     came.append(ctx.rank)
    ...     wait_for_everyone(ctx)
    ...     return came[0]
    >>> report = explore(first, 2, setup=lambda: nullcontext([]), budget=20)
    >>> [(one.text, one.count, one.seed) for one in report.outcomes]
    [('(0, 0)', 19, 1), ('(1, 1)', 1, 0)]
    """

    def run_once(schedule: Schedule) -> ScheduledRun[T]:
        run: ScheduledRun[T] | None = None
        try:
            with (setup or nullcontext)() as value:
                arguments = () if setup is None else (value,)
                run = run_schedule(
                    lambda ctx: fn(ctx, *arguments),
                    world_size,
                    schedule,
                    timeout_s=timeout_s,
                    num_nodes=num_nodes,
                    **options,
                )
        except Exception as error:
            if run is None:
                raise
            run = replace(run, error=error)
        return run

    runs: dict[str, list[tuple[int, ScheduledRun[T]]]] = {}
    for number in _within(budget):
        run = run_once(Schedule(seed=seed + number, max_faults=max_faults))
        runs.setdefault(_describe(run), []).append((seed + number, run))
    found = [
        FoundOutcome(
            text=text,
            count=len(equal),
            seed=equal[0][0],
            plainest=min((run for _, run in equal), key=_size),
        )
        for text, equal in runs.items()
    ]
    return Exploration(
        world_size=world_size,
        num_runs=sum(one.count for one in found),
        outcomes=tuple(sorted(found, key=lambda one: -one.count)),
    )


def _within(budget: int | timedelta) -> Iterator[int]:
    """Count the runs of a budget; the first one always takes place."""
    if not isinstance(budget, timedelta):
        if not isinstance(cast("object", budget), int) or budget < 1:
            raise ValueError(f"explore: budget must be at least one run, or a timedelta, got {budget!r}.")
        yield from range(budget)
        return
    end = time.monotonic() + budget.total_seconds()
    for number in itertools.count():
        yield number
        if time.monotonic() >= end:
            return


def _size(run: ScheduledRun[Any]) -> tuple[int, int]:
    done = run.trace.schedule
    return len(done.switches) + len(done.faults), run.trace.num_hand_overs


def _describe(run: ScheduledRun[Any]) -> str:
    """Return what is equal for equal outcomes."""
    if run.error is None:
        return without_random_names(repr(run.results))
    text = text_of(run.error)
    injected = _INJECTED.search(text)  # one outcome, wherever the fault was
    return without_random_names(f"{type(run.error).__name__}: {injected[0] if injected else text}")


def _short(text: str) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= _TEXT_CHARS else f"{line[:_TEXT_CHARS]}..."
