"""Faults on purpose: what becomes of one rank's calls, and of the ranks that meet them."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch

from accelfn.comm import Call, check_later, gather, reduce
from accelfn.config import ParallelismConfig
from accelfn.context import Context
from accelfn.errors import CollectiveTimeoutError, MismatchError, MissingRankError
from accelfn.testing import Fault, InjectedFaultError, Where, run_ranks
from accelfn.tree import listify
from tests.comm.seam import failure, same_mismatch

KINDS: tuple[Where, ...] = ("memory", "processes")
on_each_world = pytest.mark.parametrize("on", KINDS)


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


@pytest.mark.parametrize(("on", "at"), [("memory", 0), ("memory", 1), ("processes", 1)])
@pytest.mark.parametrize("kind", ["skip", "swap"])
@pytest.mark.parametrize("program", [three_operations, three_alike])
def test_a_call_too_few_or_in_the_wrong_order_is_an_error_on_every_rank(
    on: Where, kind: Literal["skip", "swap"], at: int, program: Callable[[Context], Any]
) -> None:
    fault = Fault(kind=kind, rank=1, at=at)
    error = same_mismatch(run_ranks(failure(program), 3, on, faults=[fault], timeout_s=20))
    assert {row.rank for row in error.rows} == {1}
    assert [caller.rank for caller in error.callers] == [0, 1, 2]


@on_each_world
def test_equal_calls_from_other_lines_are_told_apart_by_their_lines(on: Where) -> None:
    errors = run_ranks(
        failure(three_alike), 2, on, faults=[Fault(kind="swap", rank=1)], timeout_s=20, guard="full"
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


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("kind", ["skip", "swap"])
@pytest.mark.parametrize("program", [three_operations, three_alike])
def test_without_a_guard_nothing_is_found_and_nobody_waits_for_ever(
    kind: Literal["skip", "swap"], at: int, program: Callable[[Context], Any]
) -> None:
    fault = Fault(kind=kind, rank=1, at=at)
    right = run_ranks(program, 2)
    found: Any = None
    with contextlib.suppress(CollectiveTimeoutError, MissingRankError):
        found = run_ranks(program, 2, faults=[fault], guard="off", timeout_s=2)
    assert found != right


@on_each_world
def test_operations_along_an_axis_of_a_mesh_count_too(on: Where) -> None:
    def work(ctx: Context) -> None:
        gather(ctx, torch.ones(1))
        gather(ctx.along("dp_shard"), torch.ones(1))

    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    with pytest.raises(InjectedFaultError, match="rank 3 fails at its operation 1, gather"):
        run_ranks(work, 4, on, faults=[Fault(kind="raise", rank=3, at=1)], parallelism_config=mesh)


def test_a_kind_that_does_not_exist_is_refused_before_a_test_runs_without_a_fault() -> None:
    with pytest.raises(ValueError, match=r"Fault\.kind must be one of raise, .*, got 'skp'"):
        Fault(kind=cast("Any", "skp"), rank=0)
