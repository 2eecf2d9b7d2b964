"""The seam over a real process group: threads with gloo, and processes that torch.distributed knows."""

import threading
import time
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from accelfn.context import CallLog, Context, MessageBoard, PeerMonitor, ReduceOp, process_group_collectives
from accelfn.context.process_group import (
    _is_done,  # pyright: ignore[reportPrivateUsage]
    _translate_errors,  # pyright: ignore[reportPrivateUsage]
    close_gloo_connections,
)
from accelfn.errors import CollectiveTimeoutError, DistributedError, MissingRankError
from accelfn.testing import Where, run_ranks


def numbers(tensor: torch.Tensor) -> list[Any]:
    return tensor.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def new_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """Make a group; on a rank outside of it, torch gives a number, which nobody may use as one."""
    group: Any = dist.new_group(ranks, backend="gloo")  # pyright: ignore[reportUnknownMemberType]
    return group


WORLDS: tuple[Where, ...] = ("memory", "gloo", "processes")


def every_collective(ctx: Context) -> list[Any]:
    """Call each collective once and return what came out, as plain numbers."""
    seam, rank, size = ctx.collectives, ctx.rank, ctx.num_processes
    outcome: list[Any] = []
    message = torch.arange(rank + 1, dtype=torch.uint8)
    rows = seam.all_gather_bytes(message)
    outcome.append([numbers(row[: other + 1]) for other, row in enumerate(rows)])
    outcome.append(numbers(seam.all_gather(torch.tensor([rank, 10 * rank]))))
    operations: tuple[ReduceOp, ...] = ("sum", "max", "min")
    for op in operations:
        buffer = torch.tensor([float(rank), -float(rank)])
        seam.all_reduce(buffer, op)
        outcome.append(numbers(buffer))
    outcome.append(numbers(seam.reduce_scatter(torch.arange(2.0 * size) + rank)))
    for source in range(size):
        buffer = torch.full((3,), float(rank))
        seam.broadcast(buffer, source)
        outcome.append(numbers(buffer))
        output = torch.empty(2)
        seam.scatter(output, torch.arange(2.0 * size) + source if rank == source else None, source)
        outcome.append(numbers(output))
    outcome.append(numbers(seam.all_to_all(torch.arange(2 * size) + 100 * rank)))
    # Rank r passes r + 1 bytes on, and the last one nothing.
    outgoing = torch.full((0 if rank == size - 1 else rank + 1,), rank, dtype=torch.uint8)
    incoming = torch.zeros(rank, dtype=torch.uint8)
    seam.permute(outgoing, incoming, min(rank + 1, size - 1), max(rank - 1, 0))
    outcome.append(numbers(incoming))
    seam.barrier()
    return outcome


def expected(rank: int, size: int) -> list[Any]:
    top = float(size - 1)
    total = float(sum(range(size)))
    outcome: list[Any] = [
        [list(range(other + 1)) for other in range(size)],
        [value for other in range(size) for value in (other, 10 * other)],
        [total, -total],
        [top, 0.0],
        [0.0, -top],
        [2.0 * rank * size + total, (2.0 * rank + 1) * size + total],
    ]
    for source in range(size):
        outcome += [[float(source)] * 3, [2.0 * rank + source, 2.0 * rank + 1 + source]]
    outcome.append([100 * other + 2 * rank + part for other in range(size) for part in range(2)])
    outcome.append([rank - 1] * rank)
    return outcome


@pytest.mark.parametrize("where", WORLDS)
@pytest.mark.parametrize("size", [1, 3])
def test_every_collective_gives_the_same_in_every_kind_of_world(where: Where, size: int) -> None:
    assert run_ranks(every_collective, size, on=where) == [expected(rank, size) for rank in range(size)]


def test_a_full_chunk_travels_whole() -> None:
    def exchange(ctx: Context) -> bool:
        message = torch.full((ctx.collectives.chunk,), ctx.rank + 1, dtype=torch.uint8)
        rows = ctx.collectives.all_gather_bytes(message)
        return all(bool((row == rank + 1).all()) for rank, row in enumerate(rows))

    assert run_ranks(exchange, 2, on="gloo") == [True, True]


def test_control_messages_go_through_the_group_beside() -> None:
    def exchange(ctx: Context) -> tuple[bool, bool]:
        group = ctx.world.group
        assert group is not None
        beside = new_group()
        seam = process_group_collectives(group, ctx.rank, ctx.num_processes, control=beside)
        rows = seam.all_gather_bytes(torch.tensor([ctx.rank], dtype=torch.uint8))
        return [int(row[0]) for row in rows] == [0, 1], seam.chunk == ctx.collectives.chunk

    assert run_ranks(exchange, 2, on="processes") == [(True, True)] * 2


ROUNDS = 5


def message_of(rank: int, round_: int) -> torch.Tensor:
    return torch.full((8 * (rank + 1),), 16 * rank + round_, dtype=torch.uint8)


def is_complete(rows: tuple[torch.Tensor, ...], round_: int) -> bool:
    """Whether a row of each rank begins with what that rank has sent."""
    return all(
        numbers(row[: 8 * (rank + 1)]) == numbers(message_of(rank, round_)) for rank, row in enumerate(rows)
    )


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("goes_first", [True, False])
def test_an_exchange_that_is_started_early_meets_ranks_that_wait(
    size: int, early: int, goes_first: bool
) -> None:
    started = [threading.Event() for _ in range(ROUNDS)]

    def work(ctx: Context) -> list[bool]:
        seam, rows = ctx.collectives, list[bool]()
        assert seam.start_all_gather_bytes is not None
        for round_, event in enumerate(started):
            own = message_of(ctx.rank, round_)
            if ctx.rank == early:
                if not goes_first:
                    time.sleep(0.02)  # the others are in their exchange by now, as a rule
                exchange = seam.start_all_gather_bytes(own)
                event.set()
                rows.append(is_complete(exchange.finish(), round_))
            else:
                if goes_first:
                    assert event.wait(20)  # which would not come if a start waited for the others
                rows.append(is_complete(seam.all_gather_bytes(own), round_))
        return rows

    assert run_ranks(work, size, on="gloo", timeout_s=20) == [[True] * ROUNDS] * size


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("where", ["gloo", "processes"])
def test_all_ranks_may_start_and_finish_later(where: Where, num_nodes: int) -> None:
    def work(ctx: Context) -> list[bool]:
        seam, rows = ctx.collectives, list[bool]()
        assert seam.start_all_gather_bytes is not None
        for round_ in range(ROUNDS):
            exchange = seam.start_all_gather_bytes(message_of(ctx.rank, round_))
            time.sleep(0.005 * ((ctx.rank + round_) % 2))
            rows.append(is_complete(exchange.finish(), round_))
        return rows

    assert run_ranks(work, 4, on=where, num_nodes=num_nodes, timeout_s=20) == [[True] * ROUNDS] * 4


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("alone", [0, 1])
def test_an_exchange_that_is_let_go_does_not_hold_up_its_group(size: int, alone: int) -> None:
    def work(ctx: Context) -> str:
        start = ctx.collectives.start_all_gather_bytes
        assert start is not None
        if ctx.rank == alone:
            start(message_of(ctx.rank, 0)).abandon()
        return "done"

    before = time.monotonic()
    assert run_ranks(work, size, on="gloo", timeout_s=20) == ["done"] * size
    assert time.monotonic() - before < 15


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_groups_can_go_with_an_exchange_that_was_let_go(size: int, num_nodes: int) -> None:
    def work(ctx: Context) -> bool:
        seam = ctx.collectives
        assert seam.start_all_gather_bytes is not None
        if ctx.rank == 1:
            seam.start_all_gather_bytes(message_of(ctx.rank, 0)).abandon()
            dist.destroy_process_group()  # for which gloo would wait until the others come, or end
            seam.board.post("gone", "yes")
            return True
        end = time.monotonic() + 10
        while not seam.board.read("gone") and time.monotonic() < end:
            time.sleep(0.01)
        return bool(seam.board.read("gone"))

    assert run_ranks(work, size, on="processes", num_nodes=num_nodes, timeout_s=20) == [True] * size


def monitor() -> PeerMonitor:
    """Stand for rank 3 of 4, in the first operation of its program."""
    call_log = CallLog()
    call_log.begin("gather", "train.py:7 in main", "", 1.0)
    return PeerMonitor(board=MessageBoard(), call_log=call_log, rank=3, size=4)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("[gloo] Timed out waiting 2000ms for recv operation to complete", CollectiveTimeoutError),
        ("Watchdog caught collective operation timeout: WorkNCCL(...)", CollectiveTimeoutError),
        ("[gloo] Connection closed by peer [127.0.0.1]:4711", MissingRankError),
        ("Connection reset by peer", MissingRankError),
    ],
)
def test_what_a_backend_says_of_a_late_or_lost_peer(text: str, kind: type[DistributedError]) -> None:
    with pytest.raises(kind, match="rank 3") as caught, _translate_errors("all_reduce", monitor()):
        raise RuntimeError(text)
    assert "gather: rank 3" in str(caught.value)
    assert "ranks 0, 1, 2" in str(caught.value)  # who isn't seen to wait, by numbers
    assert "call 1 at train.py:7 in main" in str(caught.value)
    assert text in str(caught.value)
    assert str(caught.value.__cause__) == text


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), ValueError("timeout")])
def test_other_errors_pass_as_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, _translate_errors("all_reduce", monitor()):
        raise error
    assert caught.value is error


@given(st.floats(0, 1) | st.floats(0, 0.002))
def test_a_wait_is_never_cut_to_none_which_torch_takes_for_no_limit(seconds: float) -> None:
    asked: list[timedelta] = []

    class Work:
        def wait(self, timeout: timedelta) -> None:
            asked.append(timeout)
            raise RuntimeError("Operation timed out!")

    assert not _is_done(cast("Any", Work()), seconds)
    assert asked[0] >= timedelta(milliseconds=1)
    assert asked[0] % timedelta(milliseconds=1) == timedelta(0)
    assert 0 <= asked[0].total_seconds() - seconds <= 0.0011 or seconds < 1e-6


@pytest.mark.parametrize("where", ["gloo", "processes"])
def test_a_rank_that_does_not_come_is_an_error_in_bounded_time(where: Where) -> None:
    def one_waits(ctx: Context) -> None:
        if ctx.rank == 0:
            ctx.collectives.barrier()

    with pytest.raises((CollectiveTimeoutError, MissingRankError), match="rank 0"):
        run_ranks(one_waits, 2, on=where, timeout_s=3.0)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_an_empty_buffer_can_be_sent(op: ReduceOp) -> None:
    def empty(ctx: Context) -> int:
        buffer = torch.empty(0)
        ctx.collectives.all_reduce(buffer, op)
        ctx.collectives.broadcast(buffer, 1)
        return ctx.collectives.all_gather(buffer).numel()

    assert run_ranks(empty, 2, on="gloo") == [0, 0]


def test_a_subgroup_counts_its_own_ranks() -> None:
    def within(ctx: Context) -> list[Any] | None:
        group = new_group([1, 2])
        if ctx.rank == 0:
            return None
        rank = dist.get_rank(group)
        seam = process_group_collectives(group, rank, 2)
        gathered = numbers(seam.all_gather(torch.tensor([ctx.rank])))
        buffer = torch.tensor([ctx.rank])
        seam.broadcast(buffer, 0)
        return [rank, gathered, numbers(buffer)]

    assert run_ranks(within, 3, on="processes") == [None, [0, [1, 2], [1]], [1, [1, 2], [1]]]


def test_a_group_that_is_closed_says_so_and_is_not_kept_alive() -> None:
    def close(ctx: Context) -> tuple[bool, str]:
        dist.destroy_process_group()
        with pytest.raises(DistributedError, match="is closed") as caught:
            ctx.collectives.barrier()
        return ctx.world.group is None, str(caught.value)

    said = (
        "all_gather_bytes: the process group of this context is closed. Create a new context with "
        "init_context."
    )
    gone = (True, said)
    assert run_ranks(close, 2, "processes") == [gone, gone]


def test_a_rank_that_closes_its_connections_and_keeps_its_groups_ends_the_operations_of_others() -> None:
    def run(ctx: Context) -> None:
        board, group = ctx.collectives.board, new_group()
        if ctx.rank == 0:
            close_gloo_connections()
            end = time.monotonic() + 20
            while board.read("ended") is None:
                assert time.monotonic() < end, "the other rank still waits"
                time.sleep(0.01)
        else:
            for one in (dist.group.WORLD, group):
                with pytest.raises(RuntimeError, match="gloo"):
                    dist.recv(torch.empty(1), group_src=0, group=one)
            board.post("ended", "yes")

    run_ranks(run, 2, on="processes")
