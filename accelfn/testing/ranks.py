"""``run_ranks``: run a function on every rank of a world."""

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
    """Run ``fn(ctx)`` once per rank of a world, and return the results in rank order.

    Kinds of world:

    - ``"memory"``: threads of this process that exchange tensors in memory. Cheap (hundreds of worlds in a
      property test), and breakpoints work in ``fn``.
    - ``"gloo"``: threads, each with its own gloo process group.
    - ``"processes"``: forked processes with an initialised torch.distributed, for DDP, FSDP2 and DTensor.
      Results must be picklable. Not on Windows.

    ``ACCELFN_*`` environment variables are ignored. Pass ``debug=True`` or ``guard=`` instead.

    All ranks are on the CPU. In memory each rank has its own state of torch's and Python's global random
    generators, copied from the current state, which is unchanged afterwards. Gloo threads share these
    generators and run concurrently, so a function that draws numbers there should use its own generator.
    All threads share NumPy's generator.

    Args:
        fn: Function to run on every rank.
        world_size: Number of ranks, at least 1.
        on: Kind of world.
        timeout_s: How long a rank waits in an operation for the others, unless ``guard`` has less; None: no
            timeout (for a debugger).
        faults: Faults to inject.
        num_nodes: Number of nodes of equal size that the ranks are distributed over.
        **options: Keyword arguments of :func:`accelfn.init_context`, for every rank's context.

    Raises:
        Exception: The exception of a rank; of several, the one that caused the others, with a note that names
            its rank. On processes its traceback is the ``__cause__``.
        MissingRankError: A rank returned or died while others waited for it.
        CollectiveTimeoutError: A rank did not arrive at a collective in time.
        ValueError: Unknown ``on``, or ``num_nodes`` doesn't divide ``world_size``.

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
