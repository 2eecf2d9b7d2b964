"""The pytest fixture ``ranks``: a world of ranks as an argument of a test.

::

    from accelfn.testing.plugin import ranks


    @pytest.mark.parametrize("ranks", ["memory", "processes"], indirect=True)
    def test_total(ranks: Ranks) -> None:
        assert ranks(lambda ctx: reduce(ctx, torch.ones(1)).item(), 2) == [2.0, 2.0]

Loaded as a plugin (``pytest -p accelfn.testing.plugin``), it adds the option ``--ranks-seed N``: worlds in
memory of this fixture follow ``Schedule(seed=N)``, and a test that fails says how to replay it.
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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--ranks-seed``."""
    parser.addoption(
        "--ranks-seed",
        type=int,
        default=None,
        help="let worlds in memory of the fixture 'ranks' follow accelfn's Schedule of this seed",
    )


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Return ``run_ranks`` on the kind of world that indirect parametrisation names, else in memory.

    With ``--ranks-seed N`` worlds in memory follow the schedule of that seed.
    """
    on: Where = getattr(request, "param", "memory")
    if on not in get_args(Where):
        raise ValueError(f"ranks: a world is one of {', '.join(get_args(Where))}; got {on!r}.")

    seed: int | None = request.config.getoption("--ranks-seed", default=None)
    schedule = Schedule(seed=seed) if seed is not None and on == "memory" else None
    return cast("Ranks", functools.partial(run_ranks, on=on, schedule=schedule))
