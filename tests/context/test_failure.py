"""Last words: what one rank leaves on the board, and what another one raises when it reads it."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import FileStore, HashStore, TCPStore

from accelfn.context import (
    CallLog,
    MessageBoard,
    Unsettled,
    announce_end,
    publish,
    refuse_if_over,
    store_board,
)
from accelfn.context.failure import news
from accelfn.errors import (
    Caller,
    CollectiveTimeoutError,
    ConfigurationError,
    Disagreement,
    DistributedError,
    MismatchError,
    MissingRankError,
    NotAvailableError,
    RemoteRankError,
    RemoteTraceback,
    UnevenDataError,
)

ROWS = (Disagreement(1, "tree['x']", "(2,)", "(3,)"), Disagreement(3, "", "gather", "reduce"))
CALLERS = (Caller(0, "gather", "a.py:7 in main"), Caller(1, "reduce", "b.py:8 in main"))


def shared_board() -> MessageBoard:
    return store_board(HashStore())


def journal_at(number: int) -> CallLog:
    """Make the call log of a rank that has begun so many operations."""
    call_log = CallLog()
    for one in range(1, number + 1):
        call_log.begin(f"operation {one}", f"train.py:{one} in main", "", 1.0)
    return call_log


def raised(error: BaseException) -> BaseException:
    """Give the error a traceback."""
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001 -- it is the result
        return caught


def heard(error: BaseException, doing: str = "") -> Exception:
    """Let rank 1 publish, and rank 0 read."""
    board = shared_board()
    publish(board, journal_at(2), 1, raised(error), doing)
    found = news(board, journal_at(2), 0)
    assert found is not None
    return found


# --- round trips ---------------------------------------------------------------------------------

WORDS: tuple[MissingRankError | CollectiveTimeoutError, ...] = (
    MissingRankError("gather: rank 2 has ended"),
    CollectiveTimeoutError("gather: rank 2 did not come"),
)
TABLES: tuple[MismatchError, ...] = (
    MismatchError("gather", ROWS),
    MismatchError("gather", ROWS, "Look at rank 1.", CALLERS),
    MismatchError("gather", (), "Look at rank 1."),
    UnevenDataError("gather", ROWS, "Look at rank 1.", CALLERS, (3, 2)),
)


@pytest.mark.parametrize(
    "error",
    [
        OSError("disk full"),
        KeyError("x"),
        SystemExit(3),
        KeyboardInterrupt(),
        ConfigurationError("no such mode"),
        NotAvailableError("not yet"),
        DistributedError("closed"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_other_error_arrives_by_its_name_with_its_traceback(error: BaseException) -> None:
    there = heard(error, "saving")
    assert type(there) is RemoteRankError
    assert (there.rank, there.cause, there.message) == (1, type(error).__name__, str(error))
    assert there.operation == "saving"
    assert str(there) == f"rank 1 failed in saving: {type(error).__name__}: {error}"
    assert isinstance(there.__cause__, RemoteTraceback)
    assert "in raised\n    raise error" in str(there.__cause__)


@given(st.text(), st.text(max_size=9))
def test_a_message_of_any_characters_arrives(message: str, doing: str) -> None:
    there = heard(ValueError(message + "\ud800"), doing)
    assert isinstance(there, RemoteRankError)
    assert (there.message, there.operation) == (message + "\ud800", doing)


def disagreements() -> st.SearchStrategy[Sequence[Disagreement]]:
    return st.lists(st.builds(Disagreement, st.integers(0, 9), st.text(), st.text(), st.text()), max_size=3)


@given(
    disagreements(),
    st.text(),
    st.lists(st.builds(Caller, st.integers(0, 9), st.text(), st.text()), max_size=3),
    st.lists(st.integers(0, 9), max_size=3) | st.none(),
)
def test_a_table_of_anything_arrives_whole(
    rows: Sequence[Disagreement], hint: str, callers: Sequence[Caller], counts: Sequence[int] | None
) -> None:
    made: MismatchError
    if counts is None:
        made = MismatchError("gather", rows, hint, callers)
    else:
        made = UnevenDataError("gather", rows, hint, callers, counts)
    there = heard(made)
    assert type(there) is type(made)
    assert vars(there) == vars(made)
    assert str(there) == str(made)


class MuteError(ValueError):
    """An exception of a user's whose text fails."""

    def __str__(self) -> str:
        raise OSError("no text")


def test_an_exception_whose_text_can_not_be_had_arrives_by_its_name() -> None:
    there = heard(MuteError("x"))
    assert isinstance(there, RemoteRankError)
    assert there.cause == "MuteError"
    assert there.message == "<MuteError whose __str__ raises OSError>"
    assert "in raised\n    raise error" in there.traceback


@pytest.mark.parametrize("counts", [None, (1, 2)])
def test_of_a_table_that_is_too_long_for_the_store_the_beginning_arrives(counts: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    board = store_board(store)
    rows = [Disagreement(one, "p" * 1000, "\u2713", "f" * 1000) for one in range(900)]
    long = "h" * 9_000_000
    made = (
        MismatchError("gather", rows, long)
        if counts is None
        else UnevenDataError("gather", rows, long, (), counts)
    )
    publish(board, journal_at(1), 1, made)
    there = news(board, journal_at(1), 0)
    assert isinstance(there, MismatchError)
    assert type(there) is type(made)
    assert getattr(there, "counts", None) == counts
    assert [row.rank for row in there.rows] == list(range(200))
    assert there.rows[0] == Disagreement(
        0, "p" * 500 + " ... (500 more characters)", "\u2713", "f" * 500 + " ... (500 more characters)"
    )
    assert there.hint.startswith("  ... and 700 more\nhhh")
    assert there.hint.endswith("h ... (8900000 more characters)")


# --- who is heard --------------------------------------------------------------------------------


def test_of_many_that_fail_at_once_all_hear_of_the_same() -> None:
    board, size = shared_board(), 4
    start = threading.Barrier(size)

    def work(rank: int) -> None:
        start.wait(20)
        publish(board, journal_at(1), rank, OSError(f"of rank {rank}"))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len({str(news(board, journal_at(1), rank)) for rank in range(size)}) == 1


def test_what_was_heard_of_another_rank_is_not_published_again() -> None:
    board, call_log = shared_board(), journal_at(1)
    publish(board, call_log, 1, RemoteRankError(2, "OSError", "disk"))
    assert news(board, journal_at(1), 0) is None
    assert call_log.over


def test_a_rank_has_one_last_word() -> None:
    board, call_log = shared_board(), journal_at(1)
    announce_end(board, call_log, 1)
    publish(board, call_log, 1, OSError("too late"))
    assert isinstance(news(board, journal_at(2), 0), MissingRankError)
    board, call_log = shared_board(), journal_at(1)
    publish(board, call_log, 1, OSError("disk"))
    announce_end(board, call_log, 1)
    assert board.read("end") is None


# --- leaving -------------------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(1, 4))
def test_who_left_after_the_current_call_has_done_its_part(last: int, now: int) -> None:
    board = shared_board()
    announce_end(board, journal_at(last), 1)
    found = news(board, journal_at(now), 0)
    assert (found is None) == (last >= now)
    if found is not None:
        assert isinstance(found, MissingRankError)
        before = (
            f"after operation {last} at train.py:{last} in main, call {last}"
            if last
            else "without any operation across ranks"
        )
        assert str(found).startswith(
            f"operation {now}: rank 1 has ended {before}, while rank 0 waits for it "
            f"in call {now} at train.py:{now} in main."
        )


def test_a_failure_is_worth_more_than_an_end() -> None:
    board = shared_board()
    announce_end(board, journal_at(1), 1)
    publish(board, journal_at(1), 2, OSError("disk"))
    assert isinstance(news(board, journal_at(2), 0), RemoteRankError)


# --- with an agreement open ----------------------------------------------------------------------


def opened(call_log: CallLog, told: list[str], error: Exception | None = None) -> CallLog:
    def settle() -> None:
        told.append("heard")
        if error is not None:
            raise error

    call_log.unsettled = Unsettled(settle, lambda: told.append("abandoned"))
    return call_log


@pytest.mark.parametrize("error", [OSError("disk"), RemoteRankError(2, "OSError", "disk"), SystemExit(3)])
def test_who_fails_hears_no_agreement_any_more(error: BaseException) -> None:
    told: list[str] = []
    call_log = opened(journal_at(1), told)
    publish(shared_board(), call_log, 1, error)
    publish(shared_board(), call_log, 1, error)
    assert told == ["abandoned"]
    assert call_log.unsettled is None


@pytest.mark.parametrize("error", [None, MismatchError("gather", ROWS), CollectiveTimeoutError("gather")])
def test_who_ends_takes_part_in_an_open_agreement_and_ends_all_the_same(error: Exception | None) -> None:
    told: list[str] = []
    board, call_log = shared_board(), opened(journal_at(3), told, error)
    announce_end(board, call_log, 1)
    announce_end(board, call_log, 1)
    assert told == ["heard"]
    assert board.read("end") == '[1, 3, "operation 3", "train.py:3 in main", 0]'
    assert isinstance(news(board, journal_at(4), 0), MissingRankError)


def test_what_ends_an_agreement_on_the_way_out_is_heard_by_all() -> None:
    board, call_log = shared_board(), journal_at(3)

    def settle() -> None:  # as a monitor does whose time is up
        publish(board, call_log, 1, late)
        raise late

    late = CollectiveTimeoutError("operation 3: rank 2 did not come")
    call_log.unsettled = Unsettled(settle, lambda: None)
    announce_end(board, call_log, 1)
    assert "rank 2 did not come" in str(news(board, journal_at(3), 0))


# --- afterwards ----------------------------------------------------------------------------------


def test_after_its_last_word_a_rank_is_refused_every_operation() -> None:
    call_log = journal_at(1)
    refuse_if_over(call_log, "gather")
    publish(MessageBoard(), call_log, 1, OSError("disk full"))
    with pytest.raises(DistributedError, match=r"gather: operations .* has failed with OSError: disk"):
        refuse_if_over(call_log, "gather")
    call_log = journal_at(1)
    announce_end(MessageBoard(), call_log, 1)
    with pytest.raises(DistributedError, match=r"its context is closed.*Start a new context"):
        refuse_if_over(call_log, "gather")


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


STORES = (hash_stores, file_stores, tcp_stores)
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
