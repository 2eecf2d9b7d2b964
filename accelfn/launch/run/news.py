"""What the launchers of several machines tell each other while their processes run.

The one that hosted the meeting listens at a port of its own, which the meeting has told the others, and hands
on what each of them says: one line of JSON whenever its state changes. Nothing depends on it: where that port
can't be reached, a machine learns of the others' end when its processes wait for theirs, as with torchrun.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, cast

from accelfn.launch.run.report import Failure

__all__ = ("News", "State", "Word", "format_word", "host_news", "join_news", "parse_word")

State: TypeAlias = Literal["running", "failing", "failed", "stopped", "done", "lost"]

_STATES = ("running", "failing", "failed", "stopped", "done", "lost")
_ENDS = ("failed", "stopped", "done", "lost")
_MAX_BYTES = 1 << 20
_MAX_FAILURES = 16
_CONNECT_S = 3.0
_SEND_S = 1.0
# So that a firewall doesn't forget a connection over which nothing is said for days.
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 20), ("TCP_KEEPCNT", 6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """What one launcher has said last.

    Attributes:
        sender: Tells it from the others.
        name: Its machine, as people know it.
        state: ``"failing"`` where a process has failed and may be started again; of the last four, ``"lost"``
            is said by another one, where it has gone without a word.
        status: The exit status that it ends with.
        failures: Of its processes.
    """

    sender: str
    name: str
    state: State = "running"
    status: int = 0
    failures: tuple[Failure, ...] = ()


def format_word(word: Word, token: str, now_s: float) -> bytes:
    """Write a word as a line. Pure. Times become ages, since the clocks of machines differ."""
    failures = [{**asdict(one), "time_s": now_s - one.time_s} for one in word.failures[:_MAX_FAILURES]]
    return json.dumps({**asdict(word), "failures": failures, "token": token}).encode() + b"\n"


def parse_word(line: bytes, token: str, now_s: float) -> Word | None:
    """Read what :func:`format_word` wrote; None for anything else. Pure.

    >>> said = Word(sender="a", name="machine 1 (b)", state="failed", status=3)
    >>> parse_word(format_word(said, "secret", 5.0), "secret", 7.0) == said
    True
    >>> parse_word(b"GET / HTTP/1.1", "secret", 7.0)
    """
    try:
        found = cast("Mapping[str, Any]", json.loads(line))
        if found["token"] != token or found["state"] not in _STATES:
            return None
        return Word(
            sender=str(found["sender"]),
            name=str(found["name"]),
            state=found["state"],
            status=int(found["status"]),
            failures=tuple(_parse_failure(one, now_s) for one in found["failures"]),
        )
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _parse_failure(found: Mapping[str, Any], now_s: float) -> Failure:
    return Failure(
        rank=None if found["rank"] is None else int(found["rank"]),
        host=str(found["host"]),
        time_s=now_s - float(found["time_s"]),
        exitcode=None if found["exitcode"] is None else int(found["exitcode"]),
        kind=str(found["kind"]),
        text=str(found["text"]),
        frames=tuple(
            (str(f), int(line), str(where), str(source)) for f, line, where, source in found["frames"]
        ),
        elsewhere=True,
    )


def host_news(name: str, family: int) -> News:
    """Listen for the other launchers. Effect: opens a socket at any free port.

    Args:
        name: This machine's.
        family: Of the address at which the machines meet.

    Raises:
        OSError: There is no free port.
    """
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind(("", 0))
        listener.listen()
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return News(name, secrets.token_hex(16), listener=listener)


def join_news(name: str, host: str, where: object) -> News:
    """Connect to the launcher that hosts the news. Effect: opens a socket.

    Args:
        name: This machine's.
        host: Its address.
        where: What its :meth:`News.where` gave.

    Returns:
        News without anybody where it can't be reached: see ``is_alone``.
    """
    port, token = cast("list[Any]", where) if isinstance(where, list) else (0, "")
    try:
        door = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    except (OSError, ValueError, OverflowError):
        return News(name, str(token))
    return News(name, str(token), door=door)


class News:
    """The connections of one launcher to the others, and what came over them.

    Attributes:
        own: What this one has said last.
        words: What the others have said last, by sender.
    """

    def __init__(
        self,
        name: str,
        token: str,
        *,
        listener: socket.socket | None = None,
        door: socket.socket | None = None,
    ) -> None:
        self.own: Word = Word(sender=secrets.token_hex(8), name=name)
        self.words: dict[str, Word] = {}
        self._token = token
        self._listener = listener
        self._unread: dict[socket.socket, bytes] = {}
        self._senders: dict[socket.socket, str] = {}
        # select() would end at a thousand machines.
        self._selector = selectors.DefaultSelector()
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)
        if door is not None:
            self._let_in(door)

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to hear of, and nobody can come."""
        return self._listener is None and not self._unread

    def where(self) -> tuple[int, str]:
        """Return what another launcher needs besides the address: port and token."""
        assert self._listener is not None
        return self._listener.getsockname()[1], self._token

    def tell(self, state: State, *, status: int = 0, failures: Sequence[Failure] = ()) -> None:
        """Notify the others how this machine is. Effect: sends; waits for a second at most for each."""
        self.listen()  # who has come since is to hear it too
        self.own = replace(self.own, state=state, status=status, failures=tuple(failures))
        self._send(self.own)

    def listen(self, wait_s: float = 0.0) -> None:
        """Take in what has come. Effect: reads sockets, and hands on what others are to hear."""
        if self.is_alone:
            return
        for key, _ in self._selector.select(wait_s):
            one = cast("socket.socket", key.fileobj)
            if one is self._listener:
                with contextlib.suppress(OSError):
                    self._let_in(one.accept()[0])
            elif one in self._unread:
                self._read(one)

    def why_end(self, *, may_return: bool) -> Word | None:
        """Return the word of a machine without which the others can't go on.

        Args:
            may_return: Whether one that was stopped or lost can be replaced while the others wait.
        """
        reasons = ("failed",) if may_return else ("failed", "stopped", "lost")
        return next((word for word in self.words.values() if word.state in reasons), None)

    def wait_for_ends(self, at_most_s: float) -> None:
        """Listen until every other launcher has said how it ended, or for ``at_most_s``."""
        deadline_s = time.monotonic() + at_most_s
        while self._may_say_more() and (left_s := deadline_s - time.monotonic()) > 0:
            self.listen(left_s)

    def _may_say_more(self) -> bool:
        """Whether there is one who has more to say, or has come and said nothing yet."""
        has_more = any(word.state not in _ENDS for word in self.words.values())
        return bool(self._unread) and (has_more or len(self._senders) < len(self._unread))

    def failures(self) -> tuple[Failure, ...]:
        """Return the failures of processes on other machines."""
        return tuple(
            failure for word in self.words.values() for failure in word.failures if failure.rank is not None
        )

    def close(self) -> None:
        """Close the connections. Who hasn't said how it ended is lost for the others."""
        for one in (*self._unread, *([self._listener] if self._listener is not None else [])):
            one.close()
        self._selector.close()
        self._unread.clear()
        self._listener = None

    def _let_in(self, door: socket.socket) -> None:
        door.settimeout(_SEND_S)
        with contextlib.suppress(OSError):
            door.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                if hasattr(socket, option):
                    door.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._unread[door] = b""
        self._selector.register(door, selectors.EVENT_READ)
        for word in (self.own, *self.words.values()):
            self._send(word, only=door)

    def _send(
        self, word: Word, *, only: socket.socket | None = None, but: socket.socket | None = None
    ) -> None:
        line = format_word(word, self._token, time.time())
        for door in [only] if only is not None else list(self._unread):
            if door is not but:
                try:
                    door.sendall(line)
                except OSError:
                    self._drop(door)

    def _read(self, door: socket.socket) -> None:
        try:
            part = door.recv(65536)
        except TimeoutError:
            return
        except OSError:  # the network; whether that machine still works, nobody knows
            self._drop(door)
            return
        *lines, rest = (self._unread[door] + part).split(b"\n")
        for line in lines:
            word = parse_word(line, self._token, time.time())
            if word is None:  # another program
                self._drop(door)
                return
            self._senders.setdefault(door, word.sender)
            self._take(word, door)
        if not part:  # the system says this when a process ends
            sender = self._senders.get(door, "")
            self._drop(door)
            self._miss(sender)
        elif len(rest) > _MAX_BYTES:
            self._drop(door)
        elif door in self._unread:
            self._unread[door] = rest

    def _take(self, word: Word, door: socket.socket | None) -> None:
        self.words[word.sender] = word
        if self._listener is not None:
            self._send(word, but=door)

    def _miss(self, sender: str) -> None:
        word = self.words.get(sender)
        if word is not None and word.state not in _ENDS:
            self._take(replace(word, state="lost", status=1), None)

    def _drop(self, door: socket.socket) -> None:
        if door in self._unread:
            self._selector.unregister(door)
            del self._unread[door]
        self._senders.pop(door, None)
        door.close()
