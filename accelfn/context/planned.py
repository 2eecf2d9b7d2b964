"""A context of ranks that aren't there: what a mesh of any size would do is planned on one machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any, NoReturn, cast

from typing_extensions import Unpack

from accelfn.context.collectives import Collectives, Part
from accelfn.context.context import Context, with_mesh, with_window
from accelfn.context.options import ContextOptions, apply_options
from accelfn.context.world import World, WorldIdentity
from accelfn.errors import ConfigurationError, NotAvailableError

__all__ = ("plan_context",)


def plan_context(num_processes: int, **options: Unpack[ContextOptions]) -> Context:
    """Return the context that rank 0 of ``num_processes`` ranks would have, to plan with. Pure.

    It answers what is planned: :func:`accelfn.plan_model`, :func:`accelfn.plan_memory`, ``ctx.along(...)``,
    ``ctx.coordinate(...)``. Nothing is started and the environment isn't read, so there may be any number of
    ranks. What communicates raises an error.

    Ranks: local.

    Args:
        num_processes: Ranks to plan for.
        **options: Keyword arguments of :func:`accelfn.init_context`.

    Raises:
        ConfigurationError: ``num_processes`` is below 1, an option isn't valid, or the mesh doesn't fit the
            ranks.
        NotAvailableError: An option asks for what is not supported yet.
        TypeError: ``num_processes`` is no int, or an option is unknown or of the wrong type.

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
    base = Context(world=world, collectives=_absent())
    return with_mesh(with_window(apply_options(base, options), num_processes))


def _absent() -> Collectives:
    """Return collectives that refuse to communicate."""
    calls: dict[str, Any] = {one.name: _refuse for one in fields(Collectives) if callable(one.default)}
    del calls["while_blocked"], calls["translate_error"]  # of this rank alone
    calls["split"] = _split
    return Collectives(**calls)


def _split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
    del timeout
    return tuple(Part(_absent() if len(group) > 1 else Collectives()) for group in groups)


def _refuse(*args: object) -> NoReturn:
    del args
    raise NotAvailableError(
        "the ranks of this context aren't there: plan_context made it, to plan with. Use what init_context "
        "returns, in a program that accelfn launch starts."
    )
