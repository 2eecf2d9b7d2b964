import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import (
    gather_object,
    local_main_process_first,
    main_process_first,
    on_last_process,
    on_local_main_process,
    on_local_process,
    on_main_process,
    on_process,
    print_once,
    wait_for_everyone,
)
from accelfn.context import Context
from accelfn.errors import MismatchError, RemoteRankError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import worlds

FIRST: tuple[Callable[[Context], AbstractContextManager[None]], ...] = (
    main_process_first,
    local_main_process_first,
)


@given(worlds(), st.integers(1, 2), st.booleans())
def test_the_first_ranks_pass_before_the_others(size: int, num_nodes: int, debug: bool) -> None:
    order: list[tuple[int, int]] = []
    lock = threading.Lock()

    def work(ctx: Context) -> None:
        for turn, first in enumerate(FIRST):
            with first(ctx):
                with lock:
                    order.append((turn, ctx.rank))
            wait_for_everyone(ctx)

    run_ranks(work, size * num_nodes, num_nodes=num_nodes, debug=debug)
    for turn, leaders in enumerate(({0}, {node * size for node in range(num_nodes)})):
        ranks = [rank for number, rank in order if number == turn]
        assert sorted(ranks) == list(range(size * num_nodes))
        assert set(ranks[: len(leaders)]) == leaders


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("first", FIRST)
def test_a_failure_of_the_first_reaches_those_that_wait(
    first: Callable[[Context], AbstractContextManager[None]], debug: bool
) -> None:
    entered: list[int] = []

    def work(ctx: Context) -> Any:
        try:
            with first(ctx):
                entered.append(ctx.rank)
                raise OSError("no space left")
        except Exception as error:  # noqa: BLE001 -- it is the result
            return error

    here, *others = run_ranks(work, 3, debug=debug, timeout_s=10)
    assert type(here) is OSError
    assert entered == [0]
    assert all(isinstance(error, RemoteRankError) and error.message == "no space left" for error in others)


@given(worlds(), st.integers(1, 3), st.data())
def test_functions_run_on_the_chosen_ranks_alone(size: int, num_nodes: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size * num_nodes - 1))
    local = data.draw(st.integers(0, size - 1))

    def work(ctx: Context) -> Any:
        def own(addend: int) -> int:
            """Add."""
            return ctx.rank + addend

        chosen = (
            on_main_process(ctx),
            on_local_main_process(ctx),
            on_last_process(ctx),
            on_process(ctx, index),
            on_local_process(ctx, local),
        )
        made = [decorate(own) for decorate in chosen]
        assert [(one.__name__, one.__doc__) for one in made] == [("own", "Add.")] * 5
        return [one(1) for one in made]

    total = size * num_nodes
    for rank, found in enumerate(run_ranks(work, total, num_nodes=num_nodes)):
        runs = (rank == 0, rank % size == 0, rank == total - 1, rank == index, rank % size == local)
        assert found == [rank + 1 if one else None for one in runs]


def test_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"on_process: index must be a rank in 0..0, got 1"):
        on_process(Context(), 1)
    with pytest.raises(ValueError, match=r"on_local_process: index must be a local rank in 0..1, got -1"):
        run_ranks(lambda ctx: on_local_process(ctx, -1), 4, num_nodes=2)


def test_print_once_prints_once_per_node(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda ctx: print_once(ctx, "rank", ctx.rank, sep="-", end=";"), 4, num_nodes=2)
    assert sorted(capsys.readouterr().out.split(";")) == ["", "rank-0", "rank-2"]


def test_waiting_for_ranks_that_do_something_else_is_an_error() -> None:
    with pytest.raises(
        MismatchError, match=r"\n  2 .*  a call of wait_for_everyone  a call of gather_object\n"
    ):
        run_ranks(lambda ctx: wait_for_everyone(ctx) if ctx.rank == 2 else gather_object(ctx, 1), 3)
