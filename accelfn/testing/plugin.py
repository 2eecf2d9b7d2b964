"""The pytest fixture ``ranks``: a world of ranks as an argument of a test.

::

    from accelfn.testing.plugin import ranks


    @pytest.mark.parametrize("ranks", ["memory", "gloo", "processes"], indirect=True)
    def test_total(ranks: Ranks) -> None:
        assert ranks(lambda ctx: reduce(ctx, torch.ones(1)).item(), 2) == [2.0, 2.0]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast, get_args

from typing_extensions import Unpack

from accelfn.context import Context, ContextOptions
from accelfn.errors import MissingExtraError
from accelfn.testing.faults import Fault
from accelfn.testing.ranks import Where, run_ranks
from accelfn.testing.schedule import Schedule

try:
    import pytest
except ImportError as _error:
    raise MissingExtraError(
        "accelfn.testing.plugin needs pytest. Install it: pip install 'accelfn[testing]'"
    ) from _error

T = TypeVar("T")


class Ranks(Protocol):
    """What the fixture gives: :func:`~accelfn.testing.run_ranks` on one kind of world."""

    def __call__(
        self,
        fn: Callable[[Context], T],
        world_size: int,
        *,
        timeout_s: float | None = 30.0,
        faults: Sequence[Fault] = (),
        num_nodes: int = 1,
        schedule: Schedule | None = None,
        **options: Unpack[ContextOptions],
    ) -> list[T]:
        """Run ``fn(ctx)`` once per rank, and return what each rank returned, in rank order."""
        ...


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Return ``run_ranks`` on the kind of world that indirect parametrisation names, else in memory."""
    on: Where = getattr(request, "param", "memory")
    if on not in get_args(Where):
        raise ValueError(f"ranks: a world is one of {', '.join(get_args(Where))}; got {on!r}.")

    return cast("Ranks", functools.partial(run_ranks, on=on))
