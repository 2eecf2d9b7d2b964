"""Ranks that find each other: who waits says for whom, and for how long."""

import re
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from accelfn.config import InitProcessGroupKwargs
from accelfn.context import Context, EnvironmentPlan, MessageBoard, init, init_context, rendezvous
from accelfn.errors import DistributedError
from accelfn.testing import run_ranks
from tests.context.test_init import free_port, launched


class Posting:
    """A standard error that posts what a rank writes."""

    def __init__(self, board: MessageBoard) -> None:
        self.board = board

    def write(self, text: str) -> None:
        if text.strip():
            self.board.post_once("said", text.strip())

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(
    ("first", "line"),
    [
        (0, r"accelfn: waiting for 1 of 2 ranks at 127\.0\.0\.1:{port} \.\.\."),
        (1, r"accelfn: waiting for rank 0 of 2 ranks at 127\.0\.0\.1:{port}, as rank 1 \.\.\."),
    ],
)
def test_a_rank_says_whom_it_waits_for_and_goes_on_when_they_come(first: int, line: str) -> None:
    port = free_port()

    def join(outer: Context) -> tuple[int, Any]:
        board = outer.collectives.board
        with launched(RANK=str(outer.rank), WORLD_SIZE="2", MASTER_PORT=port):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(rendezvous, "_QUIET_S", 0.1)
                if outer.rank == first:
                    patch.setattr(sys, "stderr", Posting(board))
                while outer.rank != first and not board.read("said"):
                    time.sleep(0.02)
                with init_context(cpu=True) as ctx:
                    return ctx.num_processes, board.read("said")

    for size, said in run_ranks(join, 2, "processes", timeout_s=60):
        assert size == 2
        assert re.fullmatch(line.format(port=port), said)


def test_where_the_address_was_guessed_the_limit_is_short_and_the_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendezvous, "_QUIET_S", 0.1)
    monkeypatch.setattr(init, "_DEFAULT_ADDRESS_TIMEOUT", timedelta(seconds=1))
    port = free_port()
    with launched(RANK="0", WORLD_SIZE="2", MASTER_PORT=port):
        with pytest.raises(DistributedError, match=r"1 of 2 ranks did not connect within 1 s\.") as caught:
            init_context(cpu=True)
    assert f"MASTER_ADDR is not set, so the address was 127.0.0.1:{port}. Set MASTER" in str(caught.value)
    # On a busy machine another line may come before it, while this process's own store starts.
    assert f"accelfn: waiting for 1 of 2 ranks at 127.0.0.1:{port} ...\n" in capsys.readouterr().err


def test_a_limit_that_was_asked_for_holds_and_an_address_that_was_given_is_not_doubted() -> None:
    handler = InitProcessGroupKwargs(timeout=timedelta(seconds=1))
    with launched(RANK="0", WORLD_SIZE="2", MASTER_PORT=free_port(), MASTER_ADDR="127.0.0.1"):
        with pytest.raises(DistributedError, match="did not connect within 1 s") as caught:
            init_context(cpu=True, kwargs_handlers=[handler])
    assert "MASTER_ADDR" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "address"),
    [("node0", "node0:7"), ("::1", "[::1]:7"), ("[::1]", "[::1]:7"), (None, "127.0.0.1:7")],
)
def test_the_address_of_the_world(host: str | None, address: str) -> None:
    place = EnvironmentPlan(launcher="env", master_addr=host, master_port=7)
    assert rendezvous.address_of(place) == f"tcp://{address}"


@pytest.mark.parametrize("port", [0, None])
def test_a_store_for_one_machine_is_reached_from_there_alone(port: int | None) -> None:
    store = rendezvous.serve_store("127.0.0.1", int(free_port()) if port is None else port)
    store.set("key", "value")
    client = TCPStore("127.0.0.1", store.port, None, False, wait_for_workers=False)
    assert client.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)  # another address of this machine
    with pytest.raises(RuntimeError):  # the port is in use
        rendezvous.serve_store("127.0.0.1", store.port)
    for_all = rendezvous.serve_store("0.0.0.0", 0)
    socket.create_connection(("127.0.0.2", for_all.port), timeout=5).close()


@pytest.mark.parametrize("host", ["localhost", "node0.example"])
def test_the_ranks_of_one_machine_meet_at_such_a_store(host: str) -> None:
    port = int(free_port())
    place = EnvironmentPlan(launcher="env", master_addr=host, master_port=port)
    store = rendezvous.join_store(place, timedelta(seconds=5), timedelta(seconds=5))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    store.set("key", "value")


def test_who_waits_long_for_others_to_connect_asks_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[float]()

    class Counted(PrefixStore):
        def check(self, keys: list[str]) -> bool:
            asked.append(time.monotonic())
            return super().check(keys)

    monkeypatch.setattr(rendezvous, "PrefixStore", Counted)
    place = EnvironmentPlan(
        launcher="env", rank=0, size=2, master_addr="127.0.0.1", master_port=int(free_port())
    )
    with pytest.raises(RuntimeError, match=r"1 of 2 ranks did not connect within 2 s"):
        rendezvous.join_store(place, timedelta(seconds=2), timedelta(seconds=2))
    assert sum(at > asked[0] + 1 for at in asked) < 15  # in the last of two seconds; at first hundreds
