import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.context import Context
from accelfn.errors import DistributedError, MismatchError, RemoteRankError
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import worlds
from tests.comm.seam import failure

FIRST: tuple[Callable[[Context], AbstractContextManager[None]], ...] = (
    af.main_process_first,
    af.comm.local_main_process_first,
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
            af.wait_for_everyone(ctx)

    run_ranks(work, size * num_nodes, num_nodes=num_nodes, debug=debug)
    for turn, leaders in enumerate(({0}, {node * size for node in range(num_nodes)})):
        ranks = [rank for number, rank in order if number == turn]
        assert sorted(ranks) == list(range(size * num_nodes))
        assert set(ranks[: len(leaders)]) == leaders


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_the_first_of_all_and_the_first_of_each_node_may_go_before_together(num_nodes: int) -> None:
    entered: list[int] = []

    def work(ctx: Context) -> None:
        with af.main_process_first(ctx), af.comm.local_main_process_first(ctx):
            entered.append(ctx.rank)

    run_ranks(work, 2 * num_nodes, num_nodes=num_nodes, timeout_s=10)
    assert entered[:num_nodes] == [0, 2][:num_nodes]
    assert sorted(entered) == list(range(2 * num_nodes))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("first", FIRST)
def test_a_failure_of_the_first_reaches_those_that_wait(
    first: Callable[[Context], AbstractContextManager[None]], debug: bool
) -> None:
    entered: list[int] = []

    def work(ctx: Context) -> None:
        with first(ctx):
            entered.append(ctx.rank)
            raise OSError("no space left")

    here, *others = run_ranks(failure(work), 3, debug=debug, timeout_s=10)
    assert type(here) is OSError
    assert entered == [0]
    assert all(isinstance(error, RemoteRankError) and error.message == "no space left" for error in others)


def test_print_once_prints_once_per_node(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(lambda ctx: af.print_once(ctx, "rank", ctx.rank, sep="-", end=";"), 4, num_nodes=2)
    assert sorted(capsys.readouterr().out.split(";")) == ["", "rank-0", "rank-2"]


def test_waiting_for_ranks_that_do_something_else_is_an_error() -> None:
    with pytest.raises(MismatchError, match=r"\n  2 .*  a call of wait_for_everyone  a call of gather_obj"):
        run_ranks(lambda ctx: af.wait_for_everyone(ctx) if ctx.rank == 2 else af.gather_object(ctx, 1), 3)


# --- functions on some ranks ----------------------------------------------------------------------


@given(worlds(max_size=4), st.integers(1, 2), st.booleans(), st.data())
def test_functions_run_on_the_chosen_ranks_and_every_rank_may_get_what_they_return(
    size: int, num_nodes: int, share: Any, data: st.DataObject
) -> None:
    total = size * num_nodes
    index = data.draw(st.integers(0, total - 1))
    local = data.draw(st.integers(0, size - 1))
    runs: list[tuple[int, int]] = []

    def work(ctx: Context) -> Any:
        def own(number: int) -> dict[str, Any]:
            """Say who ran."""
            runs.append((number, ctx.rank))
            return {"ran": ctx.rank}

        chosen = (
            *(af.on_main_process(ctx, share=share), af.comm.on_local_main_process(ctx, share=share)),
            *(af.comm.on_last_process(ctx, share=share), af.comm.on_process(ctx, index, share=share)),
            af.comm.on_local_process(ctx, local, share=share),
        )
        made = [decorate(own) for decorate in chosen]
        assert {(function.__name__, function.__doc__) for function in made} == {("own", "Say who ran.")}
        returned = [function(number) for number, function in enumerate(made)]
        return [value and value["ran"] for value in returned]

    results = run_ranks(work, total, num_nodes=num_nodes)
    for rank, found in enumerate(results):
        first = rank // size * size  # of this rank's node
        runners = [0, first, total - 1, index, first + local]
        assert found == [ran if share or ran == rank else None for ran in runners]
    whole = {(number, ran) for found in results for number, ran in enumerate(found) if ran is not None}
    assert sorted(runs) == sorted(whole)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_shared_function_that_fails_is_every_ranks_error(on: Where) -> None:
    def read_file() -> str:
        raise OSError("no such file")

    work = failure(lambda ctx: af.on_main_process(ctx, share=True)(read_file)())
    here, *others = run_ranks(work, 3, on, timeout_s=20)
    assert (type(here), str(here)) == (OSError, "no such file")
    said = "rank 0 failed in on_main_process (read_file): OSError: no such file"
    assert [(type(error), str(error)) for error in others] == [(RemoteRankError, said)] * 2


def test_sharing_another_function_is_a_mismatch() -> None:
    def first() -> int:
        return 1

    def second() -> int:
        return 2

    with pytest.raises(MismatchError, match=r"second .*first"):
        run_ranks(lambda ctx: af.on_main_process(ctx, share=True)(second if ctx.rank == 2 else first)(), 3)


# --- failing together ----------------------------------------------------------------------------


def test_the_others_hear_of_a_failure_before_the_rank_has_ended() -> None:
    told = threading.Semaphore(0)

    def work(ctx: Context) -> Any:
        try:
            if ctx.rank == 1:
                with af.failing_together(ctx, "reading the data"):
                    raise OSError("no such file")
            af.wait_for_everyone(ctx)
        except Exception as error:  # noqa: BLE001 -- it is the result
            for _ in range(2):  # the rank that failed lingers until both others have raised
                if ctx.rank == 1:
                    assert told.acquire(timeout=20)
            told.release()
            return error

    here, there, other = run_ranks(work, 3, timeout_s=30)
    assert type(there) is OSError
    for error in (here, other):
        assert isinstance(error, RemoteRankError)
        assert (error.rank, error.cause, error.operation) == (1, "OSError", "reading the data")
        assert str(error) == "rank 1 failed in reading the data: OSError: no such file"


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_remote_error_shows_the_traceback_of_the_other_rank(on: Where) -> None:
    def fails_here() -> None:
        raise OSError("no such file")

    def work(ctx: Context) -> Any:
        try:
            if ctx.rank == 1:
                with af.failing_together(ctx, "reading the data"):
                    fails_here()
            af.wait_for_everyone(ctx)
        except Exception as error:  # noqa: BLE001 -- it is the result
            return type(error).__name__, repr(error.__cause__), str(error.__cause__)

    (here, cause, shown), (there, *_) = run_ranks(work, 2, on, timeout_s=30)
    assert (here, there) == ("RemoteRankError", "OSError")
    assert cause.startswith("RemoteTraceback(")
    assert "in fails_here\n" in shown
    assert 'raise OSError("no such file")' in shown


def test_after_it_has_told_of_its_failure_a_rank_cannot_go_on() -> None:
    def work(ctx: Context) -> Any:
        try:
            with af.failing_together(ctx, "reading"):
                if ctx.rank == 1:
                    raise OSError("disk")
        except OSError:
            pass
        try:
            af.wait_for_everyone(ctx)
        except DistributedError as error:
            return str(error)

    here, there = run_ranks(work, 2, timeout_s=20)
    assert here == "rank 1 failed in reading: OSError: disk"
    assert there.startswith("wait_for_everyone: operations across ranks are no longer possible")


def triggered(ctx: Context, who: list[bool]) -> list[bool]:
    state = af.comm.set_trigger(af.comm.TriggerState()) if who[ctx.rank] else af.comm.TriggerState()
    state, first = af.comm.check_trigger(ctx, state)
    state, second = af.comm.check_trigger(ctx, state)
    return [first, second, state.is_set]


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
def test_all_ranks_see_what_any_rank_has_set(who: list[bool], debug: bool) -> None:
    found = run_ranks(lambda ctx: triggered(ctx, who), len(who), debug=debug)
    assert found == [[any(who), False, False]] * len(who)


def test_processes_see_it_too() -> None:
    assert run_ranks(lambda ctx: triggered(ctx, [False, True]), 2, "processes") == [[True, False, False]] * 2


def test_setting_changes_nothing_but_the_new_state() -> None:
    state = af.comm.TriggerState()
    assert af.comm.set_trigger(af.comm.set_trigger(state)).is_set
    assert not state.is_set
