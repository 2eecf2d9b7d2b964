"""Last words: what one rank leaves on the board, and what another one raises when it reads it."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from accelfn.context import (
    CallLog,
    MessageBoard,
    Unsettled,
    announce_end,
    as_error,
    publish,
    refuse_if_over,
    store_board,
    text_of,
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


@pytest.mark.parametrize("error", [*WORDS, *TABLES], ids=lambda error: type(error).__name__)
def test_what_all_ranks_raise_alike_arrives_as_it_was(error: Exception) -> None:
    there = heard(error)
    assert type(there) is type(error)
    assert str(there) == str(error)
    if isinstance(there, MismatchError):  # rows, callers, hint and counts
        assert vars(there) == vars(error)


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


def test_a_long_traceback_keeps_its_end() -> None:
    def deeper(depth: int) -> None:
        if depth:
            try:
                deeper(depth - 1)
            except OSError as error:
                raise OSError("x" * 500) from error
        else:
            raise OSError("the first")

    board = shared_board()
    with pytest.raises(OSError, match="xxx") as caught:
        deeper(60)
    publish(board, journal_at(1), 1, caught.value)
    there = news(board, journal_at(1), 0)
    assert isinstance(there, RemoteRankError)
    assert len(there.traceback) == 20_000
    assert there.traceback.endswith("x" * 500 + "\n")


class MuteError(ValueError):
    """An exception of a user's whose text fails."""

    def __str__(self) -> str:
        raise OSError("no text")


def test_an_exception_whose_text_can_not_be_had_arrives_by_its_name() -> None:
    there = heard(MuteError("x"))
    assert isinstance(there, RemoteRankError)
    assert there.cause == "MuteError"
    assert there.message == "<MuteError whose text can't be had: its __str__ raises OSError>"
    assert "in raised\n    raise error" in there.traceback


def test_of_a_message_that_is_too_long_for_the_store_the_beginning_arrives() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage]
    board = store_board(store)
    publish(board, journal_at(1), 1, OSError("\u2713" * 9_000_000))
    there = news(board, journal_at(1), 0)
    assert isinstance(there, RemoteRankError)
    assert there.message == "\u2713" * 100_000 + " ... (8900000 more characters)"


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


def test_a_text_is_given_as_it_is_where_it_can_be_had() -> None:
    assert text_of(KeyError("x")) == "'x'"
    assert text_of(ValueError("y" * 100_000)) == "y" * 100_000
    assert text_of(ValueError("y" * 100_001)) == "y" * 100_000 + " ... (1 more characters)"


# --- who is heard --------------------------------------------------------------------------------


def test_where_nothing_happened_there_is_no_news() -> None:
    assert news(shared_board(), journal_at(3), 0) is None
    assert news(MessageBoard(), journal_at(3), 0) is None


def test_of_several_that_fail_the_first_is_heard_by_all() -> None:
    board = shared_board()
    publish(board, journal_at(1), 2, OSError("first"))
    publish(board, journal_at(1), 1, OSError("second"))
    for rank in range(3):
        assert "rank 2 failed: OSError: first" in str(news(board, journal_at(5), rank))


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
            else "without a single operation across ranks"
        )
        assert str(found).startswith(
            f"operation {now}: rank 1 has ended its work {before}, while rank 0 waits for it "
            f"in call {now} at train.py:{now} in main."
        )


def test_a_rank_is_not_told_of_its_own_end() -> None:
    board = shared_board()
    announce_end(board, journal_at(1), 1)
    assert news(board, journal_at(2), 1) is None


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
    with pytest.raises(
        DistributedError, match=r"gather: no operation .* has told the others of its OSError: disk"
    ):
        refuse_if_over(call_log, "gather")
    call_log = journal_at(1)
    announce_end(MessageBoard(), call_log, 1)
    with pytest.raises(DistributedError, match=r"its context is closed.*Start a new context"):
        refuse_if_over(call_log, "gather")


def test_what_is_written_is_read_back_without_a_board() -> None:
    texts: list[str] = []

    def keep(key: str, text: str) -> str:
        assert key == "failure"
        texts.append(text)
        return text

    published: Any = OSError("disk")
    publish(MessageBoard(post_once=keep), journal_at(1), 3, published)
    assert str(as_error(texts[0])) == "rank 3 failed: OSError: disk"
