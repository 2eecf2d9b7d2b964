"""Launchers tell each other how they are: over loopback, through the one that hosts, and to nobody."""

import socket
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.launch.run.news import News, State, Word, format_word, host_news, join_news, parse_word
from accelfn.launch.run.report import Failure

FAILURE = Failure(rank=3, host="b", time_s=50.0, exitcode=7, kind="ValueError", text="no", elsewhere=True)


@contextmanager
def launchers(count: int) -> Generator[list[News]]:
    """Give a host and those who joined it, all of whom know each other."""
    host = host_news("machine 0 (a)", socket.AF_INET)
    port, token = host.where()
    others = [join_news(f"machine {n} (b)", "127.0.0.1", [port, token]) for n in range(1, count)]
    news = [host, *others]
    try:
        until(lambda: all(len(one.words) == count - 1 for one in news), *news)
        yield news
    finally:
        for one in news:
            one.close()


def until(holds: Callable[[], bool], *news: News) -> None:
    deadline_s = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline_s
        for one in news:
            one.listen(0.01)


def test_what_one_says_reaches_all() -> None:
    with launchers(4) as news:
        assert all(one.why_end(may_return=False) is None for one in news)
        for teller in news:
            teller.tell("failing", failures=[FAILURE])
            teller.tell("failed", status=7, failures=[FAILURE])
            others = [one for one in news if one is not teller]

            def have_heard(teller: News = teller, others: list[News] = others) -> bool:
                return all(one.words[teller.own.sender].state == "failed" for one in others)

            until(have_heard, *news)
            for other in others:
                word = other.words[teller.own.sender]
                assert (word.name, word.status) == (teller.own.name, 7)
                assert [(one.rank, one.text, one.elsewhere) for one in word.failures] == [(3, "no", True)]
        assert len(news[0].failures()) == 3


def test_who_joins_late_hears_what_was_said_before() -> None:
    with launchers(2) as (host, other):
        other.tell("failed", status=4)
        host.tell("failing")
        until(lambda: host.why_end(may_return=True) is not None, host)
        port, token = host.where()
        with closing(join_news("late", "127.0.0.1", [port, token])) as late:
            until(lambda: len(late.words) == 2, host, late)
            assert sorted(word.state for word in late.words.values()) == ["failed", "failing"]


ENDS: tuple[tuple[State, State], ...] = (
    ("running", "lost"),
    ("failing", "lost"),
    ("done", "done"),
    ("stopped", "stopped"),
)


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_goes_without_a_word_is_lost_and_one_that_has_said_it_is_not(who: int) -> None:
    for last, found in ENDS:
        with launchers(3) as news:
            gone = news.pop(who)
            if last != "running":
                gone.tell(last)
            gone.close()

            def have_heard(gone: News = gone, news: list[News] = news, found: str = found) -> bool:
                return all(one.words[gone.own.sender].state == found for one in news)

            until(have_heard, *news)
            for one in news:
                reason = one.why_end(may_return=False)
                assert (reason is None) == (found == "done")
                assert one.why_end(may_return=True) is None


def test_the_others_ends_are_waited_for_and_no_longer() -> None:
    with launchers(3) as (host, second, third):
        begin_s = time.monotonic()
        host.wait_for_ends(0.3)
        assert time.monotonic() - begin_s >= 0.3
        second.tell("done")
        third.tell("failed")
        host.wait_for_ends(1000)
        assert {word.state for word in host.words.values()} == {"done", "failed"}
    news = News("nobody else", "")
    assert news.is_alone
    news.tell("failed")
    news.wait_for_ends(1000)
    news.listen()


def test_a_host_that_cannot_be_reached_leaves_one_alone() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]  # bound, and nobody listens
        for where in ([port, "token"], None, [99999999, "token"], ["x", "token"]):
            assert join_news("a", "127.0.0.1", where).is_alone


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n", b"{}\n", b"[1]\n", b"1\n", b"\xff\n", b"[" * 20_000 + b"\n", b"\n"]
)
def test_strangers_change_nothing(said: bytes) -> None:
    with launchers(2) as (host, other):
        port, _ = host.where()
        forged = format_word(Word(sender="x", name="x", state="failed"), "another token", 0.0)
        for line in (said, forged, b""):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as door:
                door.sendall(line)
            host.listen(0.05)
            host.listen(0.05)
        assert list(host.words) == [other.own.sender]
        assert host.why_end(may_return=False) is None
        other.tell("stopped")
        until(lambda: host.why_end(may_return=False) is not None, host)


failures = st.builds(
    Failure,
    rank=st.none() | st.integers(0, 2**40),
    host=st.text(),
    time_s=st.integers(0, 2**40).map(float),
    exitcode=st.none() | st.integers(-64, 255),
    kind=st.text(),
    text=st.text(),
    frames=st.lists(st.tuples(st.text(), st.integers(), st.text(), st.text()), max_size=3).map(tuple),
    elsewhere=st.just(True),
)
states = st.sampled_from(("running", "failing", "failed", "stopped", "done", "lost"))
words = st.builds(
    Word,
    sender=st.text(),
    name=st.text(),
    state=states,
    status=st.integers(-300, 300),
    failures=st.lists(failures, max_size=3).map(tuple),
)


@given(words, st.integers(-(2**40), 2**40))
def test_words_come_through_and_times_by_the_clock_of_who_hears(word: Word, apart_s: int) -> None:
    line = format_word(word, "t", 1000.0)
    assert line.count(b"\n") == 1
    heard = parse_word(line, "t", 1000.0 + apart_s)
    assert heard is not None
    moved = [one.time_s + apart_s for one in word.failures]
    assert [one.time_s for one in heard.failures] == moved
    assert parse_word(line, "t", 1000.0) == word
    assert parse_word(line, "another", 1000.0) is None


@given(st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(repr).map(str.encode))
def test_what_is_no_word_is_none(line: bytes) -> None:
    assert parse_word(line, "t", 0.0) is None
