"""``run_ranks``: run a function on every rank of a world."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Generic, Literal, TypeVar, cast

from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions, configure, with_mesh
from accelfn.testing.faults import Fault, InjectedFaultError
from accelfn.testing.following import ScheduledTurns
from accelfn.testing.part import conclude
from accelfn.testing.processes import run_on_processes
from accelfn.testing.schedule import Schedule, Trace
from accelfn.testing.threads import run_in_memory
from accelfn.testing.turns import Turns

T = TypeVar("T")
Where = Literal["memory", "processes"]
# How much of the table the note of an error shows.
_NOTED_STEPS = 40


def run_ranks(
    fn: Callable[[Context], T],
    world_size: int,
    on: Where = "memory",
    *,
    timeout_s: float | None = 30.0,
    faults: Sequence[Fault] = (),
    num_nodes: int = 1,
    schedule: Schedule | None = None,
    **options: Unpack[ContextOptions],
) -> list[T]:
    """Run ``fn(ctx)`` once per rank of a world, and return the results in rank order.

    Kinds of world:

    - ``"memory"``: threads of this process that exchange tensors in memory. Cheap (hundreds of worlds in a
      property test), and breakpoints work in ``fn``.
    - ``"processes"``: forked processes with an initialised torch.distributed, for DDP, FSDP2 and DTensor.
      Results must be picklable. Not on Windows.

    ``ACCELFN_*`` environment variables are ignored. Pass ``debug=True`` or ``guard=`` instead.

    All ranks are on the CPU. In memory each rank has its own state of torch's and Python's global random
    generators, copied from the current state, which is unchanged afterwards, and all share NumPy's.

    Args:
        fn: Function to run on every rank.
        world_size: Number of ranks, at least 1.
        on: Kind of world.
        timeout_s: How long a rank waits in an operation for the others, unless ``guard`` has less; None: no
            timeout (for a debugger). A rank that computes instead is given 5 seconds more.
        faults: Faults to inject, with a schedule beside its own.
        num_nodes: Number of nodes of equal size that the ranks are distributed over.
        schedule: Who runs next, and which faults happen, in memory only; None: a rank runs until it waits,
            then the next one in rank order. With a schedule ``timeout_s`` is the limit of the whole run, and
            all other times are counted, not measured.
        **options: Keyword arguments of :func:`accelfn.init_context`, for every rank's context.

    Raises:
        Exception: The exception of a rank; of several, the one that caused the others, with a note that names
            its rank. On processes its traceback is the ``__cause__``.
        MissingRankError: A rank returned or died while others waited for it.
        CollectiveTimeoutError: A rank did not arrive at a collective in time.
        ValueError: Unknown ``on``, ``num_nodes`` doesn't divide ``world_size``, or a schedule for another
            kind of world.

    >>> run_ranks(lambda ctx: (ctx.rank, ctx.num_processes), 2)
    [(0, 2), (1, 2)]
    """
    if schedule is not None:
        if on != "memory":
            raise ValueError(
                f'run_ranks: only ranks in memory (on="memory") follow a schedule, got on={on!r}.'
            )
        run = run_schedule(
            fn, world_size, schedule, timeout_s=timeout_s, faults=faults, num_nodes=num_nodes, **options
        )
        return run.values()
    _check("run_ranks", world_size, faults)
    configured = _configuration(options, timeout_s)
    if on == "memory":
        turns = Turns(world_size, faults)
        return conclude(run_in_memory(fn, turns, configured, timeout_s, num_nodes), "memory")
    if on == "processes":
        return run_on_processes(fn, world_size, configured, timeout_s, faults, num_nodes)
    raise ValueError(f'run_ranks: on must be "memory" or "processes", got {on!r}.')


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRun(Generic[T]):
    """A run that followed a schedule.

    Attributes:
        results: What each rank returned, by rank; None for a rank that died or failed.
        errors: What each rank raised, by rank.
        error: The error that caused the others, which ``run_ranks`` raises; None if no rank failed.
        given: The schedule that the run followed.
        trace: Who did what.
    """

    results: tuple[T | None, ...]
    errors: tuple[BaseException | None, ...]
    error: BaseException | None
    given: Schedule
    trace: Trace

    def values(self) -> list[T]:
        """Return the results in rank order.

        Raises:
            BaseException: ``error``, with a note (Python 3.11 and later) that says how to replay the run, and
                shows the end of its table.
        """
        if self.error is None:
            return cast("list[T]", list(self.results))
        add_note = getattr(self.error, "add_note", None)
        if add_note is not None:
            table = textwrap.indent(self.trace.table(last=_NOTED_STEPS), "  ")
            add_note(f"To replay this run: schedule={self.given}\n{table}")
        raise self.error


def run_schedule(
    fn: Callable[[Context], T],
    world_size: int,
    schedule: Schedule,
    *,
    timeout_s: float | None = 30.0,
    faults: Sequence[Fault] = (),
    num_nodes: int = 1,
    **options: Unpack[ContextOptions],
) -> ScheduledRun[T]:
    """Run ``fn(ctx)`` once per rank of a world in memory, as a schedule says, and return what happened.

    Args:
        fn: Function to run on every rank. What it does between operations isn't interrupted. Threads that it
            starts itself aren't part of the schedule, unless ``ctx.collectives.threads.start`` starts them.
        world_size: Number of ranks, at least 1.
        schedule: Who runs next, and which faults happen.
        timeout_s: Limit of the whole run, by the clock, plus 5 seconds; None: no limit.
        faults: Faults to inject, beside those of the schedule.
        num_nodes: As for :func:`run_ranks`.
        **options: As for :func:`run_ranks`.

    Returns:
        The results, the errors and the trace; errors of ranks aren't raised.

    Raises:
        TypeError: ``schedule`` isn't a schedule.
        ValueError: A fault names a rank that isn't there, or ``num_nodes`` doesn't divide ``world_size``.

    >>> from accelfn.comm import wait_for_everyone
    >>> from accelfn.testing import Switch
    >>> run = run_schedule(wait_for_everyone, 2, Schedule(switches=(Switch(0),)))
    >>> [(step.thread, step.operation) for step in run.trace.steps][:2]  # rank 1 comes first
    [('rank 1', 'wait_for_everyone'), ('rank 0', 'wait_for_everyone')]
    """
    if not isinstance(cast("object", schedule), Schedule):
        raise TypeError(
            f"run_schedule: schedule must be a Schedule, such as Schedule(seed=7), got {schedule!r}."
        )
    given = replace(schedule, faults=(*schedule.faults, *faults))
    _check("run_schedule", world_size, given.faults)
    configured = _configuration(options, timeout_s)
    turns = ScheduledTurns(world_size, given)
    outcomes = run_in_memory(fn, turns, configured, timeout_s, num_nodes)
    error: BaseException | None = None
    try:
        conclude(outcomes, "memory")
    except BaseException as caused:  # noqa: BLE001 -- it is the result
        error = caused
    return ScheduledRun(
        results=tuple(one.value for one in outcomes),
        errors=tuple(one.error for one in outcomes),
        error=error,
        given=given,
        trace=turns.trace(),
    )


def scheduling_point(ctx: Context, operation: str) -> None:
    """Announce something that other ranks can notice, such as writing a file: another thread may run first.

    Collectives and operations on checkpoints announce themselves. Without a schedule this does nothing.

    Ranks: local.

    Args:
        ctx: The world.
        operation: How the trace calls it.

    Raises:
        InjectedFaultError: The schedule has a fault here.
    """
    reach = ctx.collectives.threads.reach
    if reach is not None:
        reach(operation, InjectedFaultError)


def _check(function: str, world_size: int, faults: Sequence[Fault]) -> None:
    if not isinstance(cast("object", world_size), int):
        raise TypeError(
            f"{function}: world_size must be a whole number, got {world_size!r}. Write {function}(fn, 2)."
        )
    if world_size < 1:
        raise ValueError(f"{function}: world_size must be at least 1, got {world_size}.")
    for fault in faults:
        if not 0 <= fault.rank < world_size:
            raise ValueError(
                f"{function}: a fault names rank {fault.rank}, which isn't in a world of {world_size}."
            )


def _configuration(options: ContextOptions, timeout_s: float | None) -> Callable[[Context], Context]:
    """Return the function that configures the context of each rank."""

    def configured(ctx: Context) -> Context:
        made = configure(ctx, options)
        longest = timedelta(days=3650) if timeout_s is None else timedelta(seconds=timeout_s)
        limits = (longest, longest)
        if timeout_s is not None and options.get("guard") is not None:
            limits = (min(made.guard.timeout_s, timeout_s), min(made.guard.long_timeout_s, timeout_s))
        guard = replace(made.guard, timeout=limits[0], long_timeout=limits[1])
        return with_mesh(replace(made, guard=guard))

    return configured
