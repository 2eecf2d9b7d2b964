"""One rank's failure is every rank's error, with what it said; and the board on which it is said."""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from accelfn.comm import broadcast_object_list, failing_together, wait_for_everyone
from accelfn.context import Context, MessageBoard, store_board
from accelfn.context.failure import Loss, announce_loss, losses_from
from accelfn.errors import (
    Caller,
    ConfigurationError,
    Disagreement,
    MismatchError,
    MissingRankError,
    RemoteRankError,
    RemoteTraceback,
    UnevenDataError,
)
from accelfn.testing import run_ranks

MAX_SIZE = 8 << 20  # of a value in torch's store


def heard(error: BaseException, doing: str = "", on: Any = "memory") -> Any:
    """Let rank 1 fail, and give what rank 0 raises."""

    def work(ctx: Context) -> BaseException | None:
        try:
            if ctx.rank == 0:
                wait_for_everyone(ctx)
            with failing_together(ctx, doing) if doing else contextlib.nullcontext():
                raise error
        except Exception as caught:
            if ctx.rank == 0:
                seen.append(caught)
                return caught
            if on == "processes":  # its report would be raised, and not what rank 0 returns
                return None
            raise

    seen: list[Any] = []
    with contextlib.suppress(BaseException):
        seen = run_ranks(work, 2, on, timeout_s=20)
    return seen[0]


class MuteError(ValueError):
    """An exception of a user's whose text fails."""

    def __str__(self) -> str:
        raise OSError("no text")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("disk full"), "disk full"),
        (KeyError("x"), "'x'"),
        (SystemExit(3), "3"),
        (KeyboardInterrupt(), ""),
        (ConfigurationError("no such mode"), "no such mode"),
        (MuteError("x"), "<MuteError whose __str__ raises OSError>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_error_arrives_by_its_name_with_its_traceback(error: BaseException, message: str) -> None:
    there = heard(error)
    assert type(there) is RemoteRankError
    assert (there.rank, there.cause, there.message) == (1, type(error).__name__, message)
    assert str(there) == f"rank 1 failed: {type(error).__name__}: {message}"
    assert isinstance(there.__cause__, RemoteTraceback)
    assert "in work\n    raise error" in str(there.__cause__)


@given(st.text(), st.text(min_size=1, max_size=9))
def test_a_message_of_any_characters_arrives(message: str, doing: str) -> None:
    there = heard(ValueError(message + "\ud800"), doing)
    assert (there.message, there.operation) == (message + "\ud800", doing)


@given(
    st.lists(st.builds(Disagreement, st.integers(0, 9), st.text(), st.text(), st.text()), max_size=3),
    st.text(),
    st.lists(st.builds(Caller, st.integers(0, 9), st.text(), st.text()), max_size=3),
    st.lists(st.integers(0, 9), max_size=3) | st.none(),
)
def test_a_table_of_anything_arrives_whole(
    rows: Sequence[Disagreement], hint: str, callers: Sequence[Caller], counts: Sequence[int] | None
) -> None:
    made = MismatchError("gather", rows, hint, callers)
    if counts is not None:
        made = UnevenDataError("gather", rows, hint, callers, counts)
    there = heard(made, "comparing")
    assert (type(there), str(there)) == (type(made), str(made))
    assert (there.rows, there.hint, there.callers) == (made.rows, made.hint, made.callers)
    assert getattr(there, "counts", None) == getattr(made, "counts", None)


def test_of_a_table_that_is_too_long_for_the_store_the_beginning_arrives() -> None:
    rows = [Disagreement(number, "p" * 1000, "\u2713", "f" * 1000) for number in range(900)]
    there = heard(UnevenDataError("gather", rows, "h" * (MAX_SIZE + 1), (), (1, 2)), "comparing", "processes")
    assert (type(there), there.counts) == (UnevenDataError, (1, 2))
    assert [row.rank for row in there.rows] == list(range(200))
    cut = " ... (500 more characters)"
    assert there.rows[0] == Disagreement(0, "p" * 500 + cut, "\u2713", "f" * 500 + cut)
    assert there.hint.startswith("  ... and 700 more\nhhh")
    assert there.hint.endswith("more characters)")


# --- the board, in each of torch's stores ----------------------------------------------------------


def hash_stores(folder: Path) -> Callable[[], Any]:
    store = HashStore()
    return lambda: store


def file_stores(folder: Path) -> Callable[[], Any]:
    return lambda: FileStore(str(folder / "store"), -1)


def tcp_stores(folder: Path) -> Callable[[], Any]:
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)


@pytest.mark.parametrize("stores", [hash_stores, file_stores, tcp_stores])
def test_what_one_rank_posts_others_read_and_of_several_that_post_once_the_first_wins(
    stores: Any, tmp_path: Path
) -> None:
    store, size = stores(tmp_path), 4
    here, there = store_board(store()), store_board(store())
    assert there.read("at/0") is None
    for text in ("gather", "reduce \N{GREEK SMALL LETTER ALPHA}"):
        here.post("at/0", text)
        assert here.read("at/0") == text  # a TCPStore answers no post, and others may be faster
        assert (there.read("at/0"), there.read("at/1")) == (text, None)
    there.post("at/0", "")
    assert not there.read("at/0")
    assert not here.read("at/0")
    start, stood = threading.Barrier(size), list[str]()

    def work(rank: int) -> None:
        board = store_board(store())
        start.wait(20)
        stood.append(board.post_once("failure", f"rank {rank}"))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert stood == [here.read("failure")] * size
    assert stood[0] in {f"rank {rank}" for rank in range(size)}


def assert_is_empty(board: MessageBoard) -> None:
    board.post("a", "2")
    assert board.read("a") is None
    assert board.post_once("a", "3") == "3"
    assert board.read("a") is None


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


def test_a_board_whose_host_has_ended_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    def work(ctx: Context) -> None:
        host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ctx.rank == 0 else None
        port: Any = broadcast_object_list(ctx, [host and host.port])[0]
        if ctx.rank == 0:
            wait_for_everyone(ctx)
            os._exit(0)
        board = store_board(TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=20)))
        board.post("a", "1")
        assert board.read("a") == "1"
        wait_for_everyone(ctx)
        with pytest.raises(MissingRankError):
            wait_for_everyone(ctx)
        assert_is_empty(board)
        board.close()
        (tmp_path / "empty").touch()

    with pytest.raises(MissingRankError):
        run_ranks(work, 2, "processes", timeout_s=20)
    assert (tmp_path / "empty").exists()


def test_a_loss_is_announced_once_for_the_first_reason() -> None:
    board = store_board(HashStore())
    for name, why in (("0.0", "raised KeyError"), ("1.0", "was killed"), ("0.0", "ended with exit status 1")):
        announce_loss(board, Loss(name, why))
    assert losses_from(board, 0) == [Loss("0.0", "raised KeyError"), Loss("1.0", "was killed")]
