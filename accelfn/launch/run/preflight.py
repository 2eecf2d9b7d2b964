"""Before anything is started on several machines: they meet, and compare what must be equal.

Machine 0 listens where torchrun will meet later; each other machine sends one line of JSON and gets one back.
Afterwards the launchers stay in touch, see ``news``.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.plan.record import LOOPBACK, Meeting
from accelfn.launch.run.news import News, host_news, join_news

__all__ = ("find_clash", "hold_meeting", "is_port_free")

_MAGIC = "accelfn-preflight-1"
_MAX_BYTES = 1 << 20
_RETRY_S = 0.2
# How often to look for another machine 0, how long to wait for its answer, and for those that come late.
_KNOCK_S = 1.0
_HOLDER_S = 4.0
_LATE_S = 1.0
# When it takes longer than this, somebody may be looking at the terminal.
_QUIET_S = 4.0


def hold_meeting(meeting: Meeting, versions: Mapping[str, str]) -> News:
    """Meet the other machines, and compare. Effect: opens sockets; waits at most ``meeting.timeout_s``.

    Args:
        meeting: Where, with how many, and what must be equal.
        versions: Versions of programs by name, which must be equal too.

    Returns:
        The connection to the other machines' launchers. Close it.

    Raises:
        ConfigurationError: The address can't be resolved or reached, its port is in use, a machine didn't
            come, or the machines differ; every machine that has come hears of it.
    """
    own = {
        "magic": _MAGIC,
        "id": secrets.token_hex(8),
        "host": socket.gethostname(),
        "machine_rank": meeting.machine_rank,
        "values": {**dict(meeting.compare), **versions},
    }
    try:
        addresses = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"--main_process_ip {meeting.host} can't be resolved: {error.strerror or error}. Check "
            "the name, or give the address of machine 0."
        ) from None
    with _telling(meeting):
        return _meet(meeting, own, addresses)


def _meet(meeting: Meeting, own: Mapping[str, Any], addresses: Sequence[tuple[Any, ...]]) -> News:
    """Listen for the other machines, or go to the one that does."""
    deadline_s = time.monotonic() + meeting.timeout_s
    is_here = _is_here(addresses)
    if meeting.machine_rank == 0:
        listener = _listen(meeting, addresses[0][0])
        if isinstance(listener, OSError):
            return _ask_holder(meeting, own, listener)
        with listener:
            # The address of another machine may be that of another machine 0.
            return _host(listener, meeting, own, deadline_s, knocks=not is_here)
    if meeting.machine_rank is None and is_here:
        # Ranks are given out later, and this machine has the address: who comes first listens.
        listener = _listen(meeting, addresses[0][0])
        if not isinstance(listener, OSError):
            with listener:
                return _host(listener, meeting, own, deadline_s)
    return _visit(meeting, own, deadline_s)


@contextlib.contextmanager
def _telling(meeting: Meeting) -> Generator[None]:
    """Return what is waited for if the block takes long."""
    whom = "machine 0" if meeting.machine_rank else f"the others of {meeting.num_machines} machines"
    told = f"accelfn launch: waiting for {whom} at {meeting.host}:{meeting.port} ..."
    timer = threading.Timer(_QUIET_S, print, (told,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def is_port_free(port: int) -> bool:
    """Return whether this machine can listen on a port. Effect: binds it for an instant."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As torch's store does: a port in TIME_WAIT after the last run is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _is_here(addresses: Iterable[tuple[Any, ...]]) -> bool:
    """Whether one of the addresses is this machine's: only then can a socket be bound to it."""
    for family, _, _, _, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            with contextlib.suppress(OSError):
                probe.bind((address[0], 0))
                return True
    return False


def _listen(meeting: Meeting, family: int) -> socket.socket | OSError:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", meeting.port))
        listener.listen(meeting.num_machines)
        listener.settimeout(1.0)
    except OSError as error:
        listener.close()
        return error
    return listener


def _ask_holder(meeting: Meeting, own: Mapping[str, Any], error: OSError) -> News:
    """Ask who holds the port: a launch that hears of this one so, and tells what it clashes with, or not.

    Raises:
        ConfigurationError: It clashes with this one, or is another program.
    """
    with contextlib.suppress(OSError), _knock(LOOPBACK, meeting.port, own) as door:
        door.settimeout(_HOLDER_S)
        heard = _receive(door)
        if heard and heard.get("magic") == _MAGIC:
            if heard.get("clash"):
                raise ConfigurationError(str(heard["clash"]))
            # Ranks are given out, and it has held the meeting.
            return join_news(_name(own), LOOPBACK, heard.get("news"))
    raise ConfigurationError(
        f"port {meeting.port} of this machine can't be used: {error.strerror or error}. If another launch or "
        "program has it, give a free one with --main_process_port, the same on every machine."
    ) from None


def _knock(host: str, port: int, own: Mapping[str, Any]) -> socket.socket:
    door = socket.create_connection((host, port), timeout=_KNOCK_S)
    try:
        _send(door, own)
    except OSError:
        door.close()
        raise
    return door


def _host(
    listener: socket.socket,
    meeting: Meeting,
    own: Mapping[str, Any],
    deadline_s: float,
    *,
    knocks: bool = False,
) -> News:
    """Listen until every machine has come or one differs, then tell all of them.

    Args:
        listener: Where they come.
        meeting: How many, and until when.
        own: What this machine has to say.
        deadline_s: When to give up.
        knocks: Whether to look meanwhile if another machine listens at the address.
    """
    told: list[Mapping[str, Any]] = [own]
    doors: list[socket.socket] = []
    asked: socket.socket | None = None
    next_knock_s = time.monotonic() + _RETRY_S
    clash: str | None = None
    was_told = False  # by another machine 0, to which the others go
    try:
        while len(told) < meeting.num_machines and clash is None:
            if knocks and asked is None and time.monotonic() > next_knock_s:
                next_knock_s = time.monotonic() + _KNOCK_S
                with contextlib.suppress(OSError):
                    asked = _knock(meeting.host, meeting.port, own)
            waits_s = deadline_s - time.monotonic()
            if waits_s <= 0:
                clash = _say_missing(told, meeting)
                break
            watched = [listener] if asked is None else [listener, asked]
            ready, _, _ = select.select(watched, (), (), min(waits_s, _KNOCK_S) if knocks else waits_s)
            if asked is not None and asked in ready:
                heard = _receive(asked)
                asked.close()
                asked = None
                if heard and heard.get("magic") == _MAGIC:  # else it was this machine itself, or has gone
                    if not heard.get("clash"):
                        # Ranks are given out, and the other one has held the meeting.
                        return join_news(_name(own), meeting.host, heard.get("news"))
                    clash, was_told = str(heard["clash"]), True
            if listener in ready:
                clash = _let_in(listener, own, told, doors, deadline_s) or clash
        # Those that are still to come would look for this machine until their time is over.
        late_s = min(deadline_s, time.monotonic() + (0.0 if was_told else _LATE_S))
        while clash and not _have_come(told, meeting) and (waits_s := late_s - time.monotonic()) > 0:
            if select.select([listener], (), (), waits_s)[0]:
                clash = _let_in(listener, own, told, doors, late_s) or clash
        news = None if clash is not None else host_news(_name(own), listener.family)
        for door in doors:
            with contextlib.suppress(OSError):
                where = None if news is None else news.where()
                _send(door, {"magic": _MAGIC, "clash": clash, "news": where})
    finally:
        for door in (*doors, *([asked] if asked is not None else [])):
            door.close()
    if news is None:
        raise ConfigurationError(str(clash))
    return news


def _let_in(
    listener: socket.socket,
    own: Mapping[str, Any],
    told: list[Mapping[str, Any]],
    doors: list[socket.socket],
    deadline_s: float,
) -> str | None:
    """Receive one that comes; return what it clashes with."""
    try:
        door, _ = listener.accept()
    except OSError:
        return None  # it has gone again
    door.settimeout(max(0.01, min(5.0, deadline_s - time.monotonic())))
    heard = _receive(door)
    if heard is None or heard.get("magic") != _MAGIC or heard.get("id") == own["id"]:
        door.close()  # a scanner, a program that looks for something else, or this machine itself
        return None
    doors.append(door)
    told.append(heard)
    return find_clash(told)


def _have_come(told: Sequence[Mapping[str, Any]], meeting: Meeting) -> bool:
    """Whether each machine has come, however often."""
    ranks = [one["machine_rank"] for one in told]
    return len(set(ranks) - {None}) + ranks.count(None) >= meeting.num_machines


def _say_missing(told: list[Mapping[str, Any]], meeting: Meeting) -> str:
    came = ", ".join(_name(one) for one in told)
    missing = meeting.num_machines - len(told)
    return (
        f"{missing} of {meeting.num_machines} machines did not come to {meeting.host}:{meeting.port} within "
        f"{meeting.timeout_s:g} seconds; there were: {came}. Start the same command on every "
        "machine, or wait longer with --preflight_timeout."
    )


def find_clash(told: Iterable[Mapping[str, Any]]) -> str | None:
    """Return what the machines differ in, or that two have one rank; None if all is well. Pure.

    >>> one = {"host": "a", "machine_rank": 0, "values": {"num_machines": "2"}}
    >>> find_clash([one, {"host": "b", "machine_rank": 1, "values": {"num_machines": "3"}}])
    'the machines differ in num_machines: 2 on machine 0 (a), 3 on machine 1 (b). Make them equal.'
    """
    machines = list(told)
    for index, one in enumerate(machines):
        for other in machines[:index]:
            if one["machine_rank"] is not None and one["machine_rank"] == other["machine_rank"]:
                return (
                    f"two machines have --machine_rank {one['machine_rank']}: {other['host']} and "
                    f"{one['host']}. Give each its own."
                )
    names = list(dict.fromkeys(name for one in machines for name in one["values"]))
    clashes: list[str] = []
    for name in names:
        values = [(one["values"].get(name, "the default"), _name(one)) for one in machines]
        if len({value for value, _ in values}) > 1:
            clashes.append(f"{name}: " + ", ".join(f"{value} on {where}" for value, where in values))
    return f"the machines differ in {'; in '.join(clashes)}. Make them equal." if clashes else None


def _name(one: Mapping[str, Any]) -> str:
    rank = one["machine_rank"]
    return str(one["host"]) if rank is None else f"machine {rank} ({one['host']})"


def _visit(meeting: Meeting, own: Mapping[str, Any], deadline_s: float) -> News:
    """Connect to machine 0, which may not be there yet, and hear what it says."""
    last: object = "nobody answered"
    while (left_s := deadline_s - time.monotonic()) > 0:
        try:
            door = socket.create_connection((meeting.host, meeting.port), timeout=left_s)
        except OSError as error:
            last = error.strerror or error
            time.sleep(min(_RETRY_S, left_s))
            continue
        with door:
            door.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                _send(door, own)
                heard = _receive(door)
            except OSError:
                heard = None
        if heard is None:
            last = "it closed the connection; another program may have the port"
            time.sleep(min(_RETRY_S, left_s))
            continue
        if heard.get("magic") != _MAGIC:
            raise ConfigurationError(
                f"another program answers at {meeting.host}:{meeting.port}. Give a free port of machine "
                "0 with --main_process_port, the same on every machine."
            )
        if heard.get("clash"):
            raise ConfigurationError(str(heard["clash"]))
        return join_news(_name(own), meeting.host, heard.get("news"))
    raise ConfigurationError(
        f"machine 0 could not be reached at {meeting.host}:{meeting.port} within "
        f"{meeting.timeout_s:g} seconds: {last}. Check --main_process_ip, --main_process_port and the "
        "firewall, and that accelfn launch runs there."
    )


def _send(door: socket.socket, said: Mapping[str, Any]) -> None:
    door.sendall(json.dumps(said).encode() + b"\n")


def _receive(door: socket.socket) -> Mapping[str, Any] | None:
    """Read one line of JSON; None if it is something else or the other side hangs up."""
    heard = b""
    try:
        while not heard.endswith(b"\n") and len(heard) < _MAX_BYTES:
            part = door.recv(65536)
            if not part:
                return None
            heard += part
    except OSError:
        return None
    try:
        said = json.loads(heard)
    except ValueError:
        return {}
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}
