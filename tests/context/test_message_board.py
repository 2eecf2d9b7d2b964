"""The board over each kind of store that torch has, and over one whose host has ended."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore

from accelfn.context import MessageBoard, store_board

KEYS = st.text("abc/0123456789", min_size=1, max_size=8)
# No empty text: torch takes a value that is expected to be empty for a key that isn't there.
TEXTS = st.text(min_size=1, max_size=20)


def hash_stores(folder: Path) -> Callable[[], Any]:
    store = HashStore()
    return lambda: store


def file_stores(folder: Path) -> Callable[[], Any]:
    return lambda: FileStore(str(folder / "store"), -1)


def tcp_stores(folder: Path) -> Callable[[], Any]:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)


def prefixed_stores(folder: Path) -> Callable[[], Any]:
    store = HashStore()
    return lambda: PrefixStore("world/1", store)


STORES = (hash_stores, file_stores, tcp_stores, prefixed_stores)
on_each_store = pytest.mark.parametrize("stores", STORES, ids=lambda stores: stores.__name__)


@on_each_store
def test_what_one_rank_posts_another_one_reads(stores: Any, tmp_path: Path) -> None:
    store = stores(tmp_path)
    here, there = store_board(store()), store_board(store())
    assert there.read("at/0") is None
    here.post("at/0", "gather")
    assert (here.read("at/0"), there.read("at/0"), there.read("at/1")) == ("gather", "gather", None)
    there.post("at/0", "reduce \N{GREEK SMALL LETTER ALPHA}")
    assert here.read("at/0") == "reduce \N{GREEK SMALL LETTER ALPHA}"
    there.post("at/0", "")
    assert not here.read("at/0")


@on_each_store
def test_of_many_threads_that_post_once_the_first_wins(stores: Any, tmp_path: Path) -> None:
    store = stores(tmp_path)
    size, rounds = 4, 5
    start = threading.Barrier(size)
    stood: list[list[str]] = [[] for _ in range(size)]

    def work(rank: int) -> None:
        board = store_board(store())
        for number in range(rounds):
            start.wait(20)
            stood[rank].append(board.post_once(f"failure/{number}", f"rank {rank}"))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    board = store_board(store())
    assert stood == [[board.read(f"failure/{number}") for number in range(rounds)]] * size
    assert set(stood[0]) <= {f"rank {rank}" for rank in range(size)}


@given(st.lists(st.tuples(st.booleans(), KEYS, TEXTS), max_size=12), KEYS)
def test_a_board_is_a_dictionary(posts: list[tuple[bool, str, str]], unwritten: str) -> None:
    board, model = store_board(HashStore()), dict[str, str]()
    for once, key, text in posts:
        if once:
            assert board.post_once(key, text) == model.setdefault(key, text)
        else:
            board.post(key, text)
            model[key] = text
    assert {key: board.read(key) for key in model} == model
    assert board.read(unwritten) == model.get(unwritten)


def test_the_keys_of_a_board_are_apart_from_those_of_others() -> None:
    store = HashStore()
    store.set("failure", "of somebody else")
    board = store_board(store)
    assert board.read("failure") is None
    board.post("failure", "ours")
    assert store.get("failure") == b"of somebody else"


def test_a_board_that_is_closed_is_empty_and_lets_go_of_its_store() -> None:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = host.port
    board = store_board(host)
    board.post("a", "1")
    del host
    for _ in range(2):
        board.close()
        assert_is_empty(board)
    TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)  # the port is free again


def assert_is_empty(board: MessageBoard) -> None:
    board.post("a", "2")
    assert board.read("a") is None
    assert board.post_once("a", "3") == "3"
    assert board.read("a") is None


def test_the_board_of_a_world_of_one_keeps_nothing() -> None:
    assert_is_empty(MessageBoard())
    MessageBoard().close()
    assert MessageBoard() == MessageBoard()
    assert hash(MessageBoard()) == hash(MessageBoard())


HOST = """
import sys
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_board_whose_host_has_ended_is_as_if_it_were_not_there() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as host:
        assert host.stdout is not None
        port = int(host.stdout.readline())
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20))
        board = store_board(store)
        board.post("a", "1")
        assert board.read("a") == "1"
        host.kill()
        host.wait()
    assert_is_empty(board)
    board.close()
