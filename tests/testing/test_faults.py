"""Faults on purpose: what becomes of one rank's calls, and of the ranks that meet them."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import Call, check_later, gather, reduce
from accelfn.context import CallLog, Collectives, Context, StartedAllGather
from accelfn.errors import CollectiveTimeoutError, MismatchError, MissingRankError
from accelfn.testing import Fault, InjectedFaultError, Where, run_ranks
from accelfn.testing.faults import inject
from accelfn.tree import listify

KINDS: tuple[Where, ...] = ("memory", "gloo", "processes")
on_each_world = pytest.mark.parametrize("on", KINDS)


def never() -> None:
    raise AssertionError("nobody was to die")


def call_all(collectives: Collectives, count: int) -> None:
    """Call the seam ``count`` times, another function each time."""
    row = torch.zeros(1, dtype=torch.uint8)
    calls = (
        lambda: collectives.all_gather_bytes(row),
        lambda: collectives.all_gather(row),
        lambda: collectives.all_reduce(row, "sum"),
        lambda: collectives.reduce_scatter(row),
        lambda: collectives.broadcast(row, 0),
        lambda: collectives.scatter(row, row, 0),
        lambda: collectives.all_to_all(row),
        lambda: collectives.permute(row, row, 0, 0),
        lambda: collectives.barrier(),
    )
    for number in range(count):
        calls[number % len(calls)]()


@given(st.integers(0, 10))
def test_the_kth_call_of_any_kind_raises(at: int) -> None:
    faulty = inject(Collectives(), 1, 2, [Fault(kind="raise", rank=1, at=at)], never)
    call_all(faulty, at)
    with pytest.raises(InjectedFaultError, match=f"rank 1 raises at its collective {at}"):
        faulty.barrier()
    call_all(faulty, 3)


def test_a_rank_with_faults_starts_no_exchange_past_them() -> None:
    def must_not(message: torch.Tensor) -> StartedAllGather:
        raise AssertionError("past the fault")

    seam = Collectives(start_all_gather_bytes=must_not)
    assert inject(seam, 0, 2, [Fault(kind="raise", rank=0)], never).start_all_gather_bytes is None
    assert inject(seam, 1, 2, [Fault(kind="raise", rank=0)], never).start_all_gather_bytes is must_not


def test_death_is_left_to_the_world() -> None:
    died: list[int] = []
    faults = [Fault(kind="die", rank=0, at=2)]
    faulty = inject(Collectives(chunk=99), 0, 1, faults, lambda: died.append(1))
    call_all(faulty, 2)
    assert died == []
    call_all(faulty, 2)
    assert died == [1]
    assert faulty.chunk == 99


# --- calls that are left out, or come in another order -------------------------------------------


class Recorded:
    """A seam of two ranks that only writes down what is called, and the call log that goes with it."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.call_log = CallLog()

        def note(name: str, result: Any = None) -> Any:
            def call(*args: Any) -> Any:
                self.calls.append(f"{name} {listify(args[0]) if args else ''}".strip())
                return result

            return call

        self.seam = Collectives(
            all_gather_bytes=note("all_gather_bytes", "met"),
            all_gather=note("all_gather", "met"),
            all_reduce=note("all_reduce"),
            broadcast=note("broadcast"),
            scatter=note("scatter"),
            all_to_all=note("all_to_all", "met"),
            barrier=note("barrier"),
            call_log=self.call_log,
        )

    def faulty(self, *faults: Fault) -> Collectives:
        return inject(self.seam, 0, 2, faults, never)

    def operation(self, seam: Collectives, number: int) -> Any:
        """Do as an operation does: note it, agree, move data."""
        self.call_log.begin(f"operation {number}", "", "", 1.0)
        met = seam.all_gather_bytes(torch.tensor([number], dtype=torch.uint8))
        seam.all_reduce(torch.tensor([10 * number]), "sum")
        return met


def test_a_skipped_operation_is_left_out_whole() -> None:
    world = Recorded()
    seam = world.faulty(Fault(kind="skip", rank=0, at=2))
    results = [world.operation(seam, number) for number in (1, 2, 3)]
    assert world.calls == [
        "all_gather_bytes [1]",
        "all_reduce [10]",
        "all_gather_bytes [3]",
        "all_reduce [30]",
    ]
    assert [results[0], results[2]] == ["met", "met"]
    assert listify(results[1]) == ([2], [2])  # as if both ranks had brought this


def test_a_swapped_operation_comes_after_the_next_one() -> None:
    world = Recorded()
    seam = world.faulty(Fault(kind="swap", rank=0, at=2))
    for number in (1, 2, 3, 4):
        world.operation(seam, number)
    assert world.calls == [
        *("all_gather_bytes [1]", "all_reduce [10]"),
        *("all_gather_bytes [3]", "all_reduce [30]"),
        *("all_gather_bytes [2]",),
        *("all_gather_bytes [4]", "all_reduce [40]"),
    ]


def three_operations(ctx: Context) -> Any:
    own = torch.tensor([float(ctx.rank + 1)])
    first = gather(ctx, own)
    second = reduce(ctx, own)
    third = gather(ctx, own + 10)
    return listify((first, second, third))


def three_alike(ctx: Context) -> Any:
    first = gather(ctx, torch.tensor([ctx.rank]))
    second = gather(ctx, torch.tensor([ctx.rank + 10]))
    third = gather(ctx, torch.tensor([ctx.rank + 20]))
    return listify((first, second, third))


def each_error(program: Callable[[Context], Any]) -> Callable[[Context], Any]:
    def caught(ctx: Context) -> Any:
        try:
            return program(ctx)
        except Exception as error:  # noqa: BLE001 -- it is the result
            return error

    return caught


@on_each_world
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", ["skip", "swap"])
@pytest.mark.parametrize("program", [three_operations, three_alike])
def test_a_call_too_few_or_in_the_wrong_order_is_an_error_on_every_rank(
    on: Where, kind: Literal["skip", "swap"], at: int, program: Callable[[Context], Any]
) -> None:
    fault = Fault(kind=kind, rank=1, at=at)
    errors = run_ranks(each_error(program), 3, on, faults=[fault], timeout_s=20)
    assert [type(error) for error in errors] == [MismatchError] * 3
    assert len({str(error) for error in errors}) == 1
    assert {row.rank for row in errors[0].rows} == {1}
    assert [caller.rank for caller in errors[0].callers] == [0, 1, 2]


@on_each_world
def test_equal_calls_from_other_lines_are_told_apart_by_their_lines(on: Where) -> None:
    errors = run_ranks(
        each_error(three_alike), 2, on, faults=[Fault(kind="swap", rank=1)], timeout_s=20, guard="full"
    )
    start = three_alike.__code__.co_firstlineno
    here, there = (f"test_faults.py:{start + line} in three_alike" for line in (1, 2))
    assert [caller.site for caller in errors[0].callers] == [here, there]
    assert here in str(errors[1])
    assert there in str(errors[1])


@on_each_world
@pytest.mark.parametrize(
    ("kind", "expected"),
    [("raise", "RemoteRankError"), ("die", "MissingRankError"), ("skip", "MismatchError")],
)
def test_a_fault_happens_where_other_ranks_go_on_meanwhile(
    on: Where, kind: Literal["raise", "die", "skip"], expected: str, tmp_path: Path
) -> None:
    def work(ctx: Context) -> None:
        try:
            check_later(ctx, Call("forward"))
            gather(ctx, torch.tensor([ctx.rank]))
        except Exception as error:
            (tmp_path / str(ctx.rank)).write_text(type(error).__name__)
            raise

    faults = [Fault(kind=kind, rank=1)]
    with pytest.raises((InjectedFaultError, MissingRankError, MismatchError)):
        run_ranks(work, 2, on, faults=faults, timeout_s=20)
    assert (tmp_path / "0").read_text() == expected
    ends = {"raise": "InjectedFaultError", "skip": "MismatchError"}
    assert not (tmp_path / "1").exists() if kind == "die" else (tmp_path / "1").read_text() == ends[kind]


@pytest.mark.parametrize("on", ["memory", "gloo"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", ["skip", "swap"])
@pytest.mark.parametrize("program", [three_operations, three_alike])
def test_without_a_guard_nothing_is_found_and_nobody_waits_for_ever(
    on: Where, kind: Literal["skip", "swap"], at: int, program: Callable[[Context], Any]
) -> None:
    fault = Fault(kind=kind, rank=1, at=at)
    right = run_ranks(program, 2, on)
    found: Any = None
    with contextlib.suppress(CollectiveTimeoutError, MissingRankError):
        found = run_ranks(program, 2, on, faults=[fault], guard="off", timeout_s=2)
    assert found != right


def test_a_kind_that_does_not_exist_is_refused_before_a_test_runs_without_a_fault() -> None:
    with pytest.raises(ValueError, match=r"Fault\.kind must be one of raise, .*, got 'skp'"):
        Fault(kind=cast("Any", "skp"), rank=0)
