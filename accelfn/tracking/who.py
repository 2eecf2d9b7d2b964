"""Which rank this is, for what works before there is a context."""

from __future__ import annotations

import os
from typing import NamedTuple

from accelfn.context import Context, detect_environment

__all__ = ("Who", "who_is")


class Who(NamedTuple):
    """A rank of a world."""

    rank: int
    size: int

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def who_is(ctx: Context | None) -> Who:
    """Return which rank this is: that of the context, or else what the launcher's variables say.

    Raises:
        EnvironmentPlanError: No context, and the variables contradict each other.

    >>> who_is(Context())
    Who(rank=0, size=1)
    """
    if ctx is not None:
        return Who(ctx.rank, ctx.num_processes)
    plan = detect_environment(os.environ)
    return Who(plan.rank, plan.size)
