"""Before anything is started on several machines: they meet, and compare what must be equal.

Machine 0 listens where torchrun will meet later; each other machine sends one line of JSON and gets one back.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.plan.record import Meeting

__all__ = ("find_clash", "hold_meeting", "is_port_free")

_MAGIC = "accelfn-preflight-1"
_MAX_BYTES = 1 << 20
_RETRY_S = 0.2


def hold_meeting(meeting: Meeting, versions: Mapping[str, str]) -> None:
    """Meet the other machines, and compare. Effect: opens sockets; waits at most ``meeting.timeout_s``.

    Args:
        meeting: Where, with how many, and what must be equal.
        versions: Versions of programs by name, which must be equal too.

    Raises:
        ConfigurationError: The address can't be resolved or reached, its port is in use, a machine didn't
            come, or the machines differ; every machine that has come hears of it.
    """
    own = {
        "magic": _MAGIC,
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
    deadline_s = time.monotonic() + meeting.timeout_s
    if meeting.machine_rank == 0:
        with _listen(meeting, addresses[0][0]) as listener:
            _host(listener, meeting, own, deadline_s)
        return
    if meeting.machine_rank is None and _is_here(addresses):
        # Ranks are given out later, and this machine has the address: who comes first listens.
        with contextlib.suppress(ConfigurationError):
            with _listen(meeting, addresses[0][0]) as listener:
                _host(listener, meeting, own, deadline_s)
            return
    _visit(meeting, own, deadline_s)


def is_port_free(port: int) -> bool:
    """Say whether this machine can listen on a port. Effect: binds it for an instant."""
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


def _listen(meeting: Meeting, family: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", meeting.port))
        listener.listen(meeting.num_machines)
    except OSError as error:
        listener.close()
        raise ConfigurationError(
            f"port {meeting.port} of this machine can't be used: {error.strerror or error}. Give a "
            "free one with --main_process_port, the same on every machine."
        ) from None
    return listener


def _host(listener: socket.socket, meeting: Meeting, own: Mapping[str, Any], deadline_s: float) -> None:
    """Listen until every machine has come or one differs, then tell all of them."""
    told: list[Mapping[str, Any]] = [own]
    doors: list[socket.socket] = []
    clash: str | None = None
    try:
        while len(told) < meeting.num_machines and clash is None:
            listener.settimeout(max(0.01, deadline_s - time.monotonic()))
            try:
                door, _ = listener.accept()
            except TimeoutError:
                clash = _say_missing(told, meeting)
                break
            door.settimeout(max(0.01, min(5.0, deadline_s - time.monotonic())))
            heard = _receive(door)
            if heard is None or heard.get("magic") != _MAGIC:
                door.close()  # a scanner, or a program that looks for something else
                continue
            doors.append(door)
            told.append(heard)
            clash = find_clash(told)
        for door in doors:
            with contextlib.suppress(OSError):
                _send(door, {"magic": _MAGIC, "clash": clash})
    finally:
        for door in doors:
            door.close()
    if clash is not None:
        raise ConfigurationError(clash)


def _say_missing(told: list[Mapping[str, Any]], meeting: Meeting) -> str:
    came = ", ".join(_name(one) for one in told)
    missing = meeting.num_machines - len(told)
    return (
        f"{missing} of {meeting.num_machines} machines did not come to {meeting.host}:{meeting.port} within "
        f"{meeting.timeout_s:g} seconds; there were: {came}. Start the same command on every "
        "machine, or wait longer with --preflight_timeout."
    )


def find_clash(told: Iterable[Mapping[str, Any]]) -> str | None:
    """Say what the machines differ in, or that two have one rank; None if all is well. Pure.

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


def _visit(meeting: Meeting, own: Mapping[str, Any], deadline_s: float) -> None:
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
        return
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
