"""``run_ranks``: a function on a whole world of ranks, in one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Literal, TypeVar

from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions, configure, with_mesh
from accelfn.testing.faults import Fault
from accelfn.testing.processes import run_on_processes
from accelfn.testing.threads import run_on_gloo_threads, run_on_memory

T = TypeVar("T")
Where = Literal["memory", "gloo", "processes"]


def run_ranks(
    fn: Callable[[Context], T],
    world_size: int,
    on: Where = "memory",
    *,
    timeout_s: float | None = 30.0,
    faults: Sequence[Fault] = (),
    num_nodes: int = 1,
    **options: Unpack[ContextOptions],
) -> list[T]:
    """Run ``fn(ctx)`` once per rank of a world, and return what each rank returned, in rank order.

    The same function runs on all three kinds of world:

    - ``"memory"``: threads of this process that hand each other tensors. Cheap (hundreds of worlds in a
      property test), and a breakpoint in ``fn`` stops in it.
    - ``"gloo"``: the same threads, each with its own real gloo process group.
    - ``"processes"``: forked processes with an initialised torch.distributed, for what needs it: DDP, FSDP2,
      DTensor. What ``fn`` returns must be picklable. Not on Windows.

    The environment isn't read: no ``ACCELFN_*`` variable changes what a test does. Pass ``debug=True`` or
    ``guard=`` instead.

    All ranks are on the CPU. In memory each rank has torch's and Python's global random generators for
    itself: they begin as they are here, and stay here as they were. Gloo threads, which run all at once,
    share them, so a function that draws numbers there should use a generator of its own. All threads share
    NumPy's.

    Args:
        fn: What every rank runs.
        world_size: Number of ranks, at least 1.
        on: Kind of world.
        timeout_s: How long a rank waits in an operation for the others, unless ``guard`` asks for less; None:
            for ever (for a debugger).
        faults: What goes wrong, at which collective of which rank.
        num_nodes: Lay the ranks out as this many equal nodes.
        **options: Keyword arguments of :func:`accelfn.init_context`, for every rank's context.

    Raises:
        Exception: What a rank raised: of several, the one that was the cause of the others, with a note that
            names its rank. On processes its traceback is the error's cause.
        MissingRankError: A rank returned or died while others waited for it.
        CollectiveTimeoutError: A rank did not come to a collective in time.
        ValueError: Unknown ``on``, or a world that can't be laid out.

    >>> run_ranks(lambda ctx: (ctx.rank, ctx.num_processes), 2)
    [(0, 2), (1, 2)]
    """
    if world_size < 1:
        raise ValueError(f"run_ranks: world_size must be at least 1, got {world_size}.")
    for fault in faults:
        if not 0 <= fault.rank < world_size:
            raise ValueError(
                f"run_ranks: a fault names rank {fault.rank}, which isn't in a world of {world_size}."
            )

    def configured(ctx: Context) -> Context:
        made = configure(ctx, options)
        longest = timedelta(days=3650) if timeout_s is None else timedelta(seconds=timeout_s)
        guard = made.guard
        if timeout_s is None or options.get("guard") is None:
            guard = replace(guard, timeout=longest, long_timeout=longest)
        else:
            guard = replace(
                guard,
                timeout=min(guard.timeout_s, timeout_s),
                long_timeout=min(guard.long_timeout_s, timeout_s),
            )
        return with_mesh(replace(made, guard=guard))

    if on == "memory":
        return run_on_memory(fn, world_size, configured, timeout_s, faults, num_nodes)
    if on == "gloo":
        return run_on_gloo_threads(fn, world_size, configured, timeout_s, faults, num_nodes)
    if on == "processes":
        return run_on_processes(fn, world_size, configured, timeout_s, faults, num_nodes)
    raise ValueError(f'run_ranks: on must be "memory", "gloo" or "processes", got {on!r}.')
