"""The seam over a real process group, beside that of ranks in memory."""

import time
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import accelfn as af
from accelfn.context import CallLog, Context, MessageBoard, PeerMonitor
from accelfn.context.process_group import (
    _translate_errors,  # pyright: ignore[reportPrivateUsage]
    close_gloo_connections,
)
from accelfn.errors import CollectiveTimeoutError, DistributedError, MissingRankError
from accelfn.testing import run_ranks


def message_of(rank: int, number: int) -> torch.Tensor:
    return torch.full((8 * (rank + 1),), 16 * rank + number, dtype=torch.uint8)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_all_ranks_may_start_and_finish_later(num_nodes: int) -> None:
    def work(ctx: Context) -> list[bool]:
        seam, rows = ctx.collectives, list[bool]()
        assert seam.start_all_gather_bytes is not None
        for number in range(5):
            exchange = seam.start_all_gather_bytes(message_of(ctx.rank, number))
            time.sleep(0.005 * ((ctx.rank + number) % 2))
            received = exchange.finish()
            sent = [message_of(rank, number) for rank in range(4)]
            rows.append(
                all(torch.equal(row[: len(own)], own) for row, own in zip(received, sent, strict=True))
            )
        return rows

    assert run_ranks(work, 4, "processes", num_nodes=num_nodes, timeout_s=20) == [[True] * 5] * 4


@pytest.mark.parametrize(("size", "num_nodes"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_groups_can_go_with_an_exchange_that_was_let_go(size: int, num_nodes: int) -> None:
    def work(ctx: Context) -> bool:
        seam = ctx.collectives
        assert seam.start_all_gather_bytes is not None
        if ctx.rank == 1:
            seam.start_all_gather_bytes(message_of(ctx.rank, 0)).abandon()
            dist.destroy_process_group()  # for which gloo would wait until the others come, or end
            seam.board.post("gone", "yes")
        end = time.monotonic() + 10
        while not seam.board.read("gone") and time.monotonic() < end:
            time.sleep(0.01)
        return bool(seam.board.read("gone"))

    assert run_ranks(work, size, "processes", num_nodes=num_nodes, timeout_s=20) == [True] * size


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
    for error in (RuntimeError("shape mismatch"), ValueError("timeout")):  # others pass as they are
        with pytest.raises(type(error)) as other, _translate_errors("all_reduce", monitor()):
            raise error
        assert other.value is error


@pytest.mark.parametrize(
    "text", ["no answer: timeout", "the peer review is missing", "Connection to the data"]
)
def test_what_a_program_says_in_backward_stays_its_own_error(text: str) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            return inputs[0].clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError(text)

    def work(ctx: Context) -> None:
        model = af.prepare_model(ctx, torch.nn.Linear(2, 1))
        output: Any = model(torch.ones(1, 2)).sum()
        af.backward(ctx, cast("Any", Fails).apply(output) if ctx.rank == 0 else output, af.init_scaler(ctx))

    with pytest.raises(RuntimeError, match=text) as caught:
        run_ranks(work, 2, "processes", timeout_s=20)
    assert type(caught.value) is RuntimeError


def test_a_group_that_is_closed_says_so_and_is_not_kept_alive() -> None:
    def close(ctx: Context) -> tuple[bool, str]:
        dist.destroy_process_group()
        with pytest.raises(DistributedError, match="is closed") as caught:
            ctx.collectives.barrier()
        return ctx.world.group is None, str(caught.value)

    said = "all_gather_bytes: the process group of this context is closed. Create a new context with init_"
    for gone, text in run_ranks(close, 2, "processes"):
        assert gone
        assert text.startswith(said)


def test_a_rank_that_closes_its_connections_and_keeps_its_groups_ends_the_operations_of_others() -> None:
    def run(ctx: Context) -> None:
        board = ctx.collectives.board
        group: Any = dist.new_group()  # pyright: ignore[reportUnknownMemberType]
        received = torch.zeros(1)
        if ctx.rank == 0:
            close_gloo_connections([ctx.world.group, None])
            end = time.monotonic() + 20
            while board.read("ended") is None:
                assert time.monotonic() < end, "the other rank still waits"
                time.sleep(0.01)
            dist.send(torch.ones(1), group_dst=1, group=group)
        else:
            with pytest.raises(RuntimeError, match="gloo"):
                dist.recv(received, group_src=0)
            board.post("ended", "yes")
            dist.recv(received, group_src=0, group=group)  # which is the program's own
            assert received == 1

    run_ranks(run, 2, on="processes")
