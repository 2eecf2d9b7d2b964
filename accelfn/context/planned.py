"""A context of ranks that don't exist, for planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import cast

from typing_extensions import Unpack

from accelfn.context.collectives import Collectives, Part, refusing
from accelfn.context.context import Context, with_mesh, with_window
from accelfn.context.options import ContextOptions, apply_options
from accelfn.context.world import World, WorldIdentity
from accelfn.errors import ConfigurationError


def plan_context(num_processes: int, **options: Unpack[ContextOptions]) -> Context:
    """Return the context that rank 0 of ``num_processes`` ranks would have, for planning. Pure.

    Use it with :func:`accelfn.plan_model`, :func:`accelfn.plan_memory`, ``ctx.along(...)`` and
    ``ctx.coordinate(...)``. Nothing is started and the environment isn't read, so the number of ranks isn't
    limited. Functions that communicate raise an error.

    Ranks: local.

    Args:
        num_processes: Number of ranks to plan for.
        **options: Keyword arguments of :func:`accelfn.init_context`.

    Raises:
        ConfigurationError: ``num_processes`` is below 1, an option isn't valid, or the mesh doesn't fit the
            ranks.
        NotAvailableError: An option isn't supported yet.
        TypeError: ``num_processes`` isn't an int, or an option is unknown or of the wrong type.

    >>> from accelfn import FullyShardedDataParallelPlugin
    >>> ctx = plan_context(10_000, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    >>> ctx.axis_size("dp_shard"), ctx.along("tp").num_processes
    (10000, 1)
    """
    if not isinstance(cast("object", num_processes), int) or isinstance(num_processes, bool):
        raise TypeError(f"plan_context: num_processes must be an int, got {num_processes!r}.")
    if num_processes < 1:
        raise ConfigurationError(f"plan_context: num_processes must be at least 1, got {num_processes}.")
    world = World(size=num_processes, local_size=num_processes, identity=WorldIdentity())
    base = Context(world=world, collectives=_unavailable_collectives())
    return with_mesh(with_window(apply_options(base, options), num_processes))


def _unavailable_collectives() -> Collectives:
    """Return collectives that raise instead of communicating, also along axes."""

    def split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
        del timeout
        return tuple(Part(unavailable if len(group) > 1 else Collectives()) for group in groups)

    unavailable = replace(
        refusing(
            "this context is from plan_context, whose ranks don't exist, so it can't communicate. Use the "
            "context of init_context in a program that accelfn launch starts."
        ),
        split=split,
    )
    return unavailable
