"""Messages between the agents of several machines, through torch's store at the rendezvous' own address.

Before anything starts they compare what must be equal. While processes run, each says how it ends, so that
the others end too and report the first failure of all. torchrun's rendezvous then uses the same server.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, cast

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] -- documented, but not exported

from accelfn.errors import ConfigurationError
from accelfn.launch.run.report import Failure

_POLL_S = 0.1
_CONNECT_S = 10.0
_ANSWER_S = 60.0
# When it takes longer than this, somebody may be looking at the terminal.
_QUIET_S = 4.0
# For those that come late to a clash, and for all to have read it.
_LATE_S = 1.5
# How long a machine may be silent, and how long one that has failed waits for what the others say of it.
_SILENT_S = 30.0
_ASK_S = 2.0
_MAX_FAILURES = 16


def join_machines(
    *,
    host: str,
    port: int,
    num_machines: int,
    machine_rank: int | None,
    compare: Sequence[tuple[str, str]],
    timeout_s: float,
    may_return: bool = False,
) -> Machines:
    """Meet the other machines, and compare. Effect: opens sockets; waits at most ``timeout_s``.

    Args:
        host: Address of machine 0.
        port: Its port.
        num_machines: How many take part.
        machine_rank: Which this one is; None if ranks are given out later.
        compare: Names and texts that must be equal.
        timeout_s: How long to wait for the others.
        may_return: Whether one that is stopped or lost can be replaced while the others wait.

    Raises:
        ConfigurationError: The address can't be resolved or reached, its port is in use, a machine didn't
            come, or the machines differ; every machine that has come raises the same.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"--main_process_ip {host} can't be resolved: {error.strerror or error}. Check the name, or give "
            "the address of machine 0."
        ) from None
    own = {
        "id": secrets.token_hex(8),
        "host": socket.gethostname(),
        "machine_rank": machine_rank,
        "values": dict(compare),
    }
    is_here = _is_here(addresses)
    until_s = time.monotonic() + timeout_s
    server = None
    with _saying(f"waiting for {num_machines} machines at {host}:{port} ..."):
        # The address of another machine may be that of another machine 0.
        if machine_rank == 0 or (machine_rank is None and is_here):
            with contextlib.suppress(RuntimeError):
                server = TCPStore(
                    host,
                    port,
                    None,
                    True,
                    timedelta(seconds=_CONNECT_S),
                    wait_for_workers=False,
                    multi_tenant=True,
                )
        store = server or _connect(host, port, until_s if machine_rank != 0 else 0.0)
        if store is None and machine_rank == 0:
            raise ConfigurationError(
                f"port {port} of this machine can't be used. If another launch or program has it, give a "
                "free one with --main_process_port, the same on every machine."
            )
        if store is None:
            raise ConfigurationError(
                f"machine 0 could not be reached at {host}:{port} within {timeout_s:g} seconds. Check "
                "--main_process_ip, --main_process_port and the firewall, and that accelfn launch runs there."
            )
        index = store.add("accelfn/came", 1) - 1
        store.set(f"accelfn/machine/{index}", json.dumps(own))
        if server is not None:
            server.set("accelfn/host", str(own["id"]))
            clash = _compare(server, num_machines, until_s, f"{host}:{port} within {timeout_s:g} seconds")
        else:
            clash = _read_verdict(store, until_s + _CONNECT_S)
    if clash:
        raise ConfigurationError(clash)
    return Machines(store, index, _name(own), num_machines, is_host=server is not None, may_return=may_return)


def _store(host: str, port: int, *, is_host: bool) -> TCPStore:
    wait = timedelta(seconds=_ANSWER_S)
    # Several tenants: torchrun's rendezvous, in this very process, then shares the server.
    return TCPStore(host, port, None, is_host, wait, wait_for_workers=False, multi_tenant=is_host)


def _compare(store: TCPStore, num_machines: int, until_s: float, where: str) -> str:
    """Wait for every machine, or for one that differs, and answer all of them."""
    machines: list[Mapping[str, Any]] = []
    clash = ""
    while True:
        come = range(len(machines), store.add("accelfn/came", 0))
        machines += [json.loads(store.get(f"accelfn/machine/{index}")) for index in come]
        clash = find_clash(machines)
        if clash or len(machines) >= num_machines:
            break
        if time.monotonic() > until_s:
            came = ", ".join(_name(one) for one in machines)
            clash = (
                f"{num_machines - len(machines)} of {num_machines} machines did not come to {where}; there "
                f"were: {came}. Start the same command on every machine, or wait longer with "
                "--preflight_timeout."
            )
            break
        time.sleep(_POLL_S)
    store.set("accelfn/verdict", clash)
    late_s = time.monotonic() + _LATE_S
    while clash and store.add("accelfn/read", 0) < num_machines - 1 and time.monotonic() < late_s:
        time.sleep(_POLL_S)
    return clash


def _read_verdict(store: TCPStore, until_s: float) -> str:
    try:
        while not store.check(["accelfn/verdict"]):
            if time.monotonic() > until_s:
                return "machine 0 did not answer in time. Look at its output."
            time.sleep(_POLL_S)
        clash = store.get("accelfn/verdict").decode()
        store.add("accelfn/read", 1)
    except RuntimeError as error:
        return f"machine 0 has gone while the machines met: {error}. Look at its output."
    return clash


def _connect(host: str, port: int, until_s: float) -> TCPStore | None:
    """Connect to the machine that hosts the store, which may not be there yet."""
    while True:
        found: list[TCPStore] = []

        def open_store(found: list[TCPStore] = found) -> None:
            with contextlib.suppress(RuntimeError):
                found.append(_store(host, port, is_host=False))

        # Neither an interrupt nor its timeout ends the store's own waiting for a server that is mute.
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            thread = threading.Thread(target=open_store, daemon=True)
            thread.start()
            thread.join(_CONNECT_S)
        if found:
            return found[0]
        if time.monotonic() > until_s:
            return None
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _saying(what: str) -> Generator[None]:
    """Print what is waited for if the block takes long."""
    message = f"accelfn launch: {what}"
    timer = threading.Timer(_QUIET_S, print, (message,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _is_here(addresses: Iterable[tuple[Any, ...]]) -> bool:
    """Whether one of the addresses is this machine's: only then can a socket be bound to it."""
    for family, _, _, _, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind((address[0], 0))
            return True
    return False


def find_clash(machines: Sequence[Mapping[str, Any]]) -> str:
    """Return what the machines differ in, or that two have one rank; empty if all is well. Pure.

    >>> one = {"host": "a", "machine_rank": 0, "values": {"num_machines": "2"}}
    >>> find_clash([one, {"host": "b", "machine_rank": 1, "values": {"num_machines": "3"}}])
    'the machines differ in num_machines: 2 on machine 0 (a), 3 on machine 1 (b). Make them equal.'
    """
    machines = sorted(machines, key=lambda one: one["machine_rank"] or 0)
    for index, one in enumerate(machines):
        for other in machines[:index]:
            if one["machine_rank"] is not None and one["machine_rank"] == other["machine_rank"]:
                return (
                    f"two machines have --machine_rank {one['machine_rank']}: {other['host']} and "
                    f"{one['host']}. Give each its own."
                )
    clashes: list[str] = []
    for name in dict.fromkeys(name for one in machines for name in one["values"]):
        values = [(one["values"].get(name, "the default"), _name(one)) for one in machines]
        if len({value for value, _ in values}) > 1:
            clashes.append(f"{name}: " + ", ".join(f"{value} on {where}" for value, where in values))
    return f"the machines differ in {'; in '.join(clashes)}. Make them equal." if clashes else ""


def _name(one: Mapping[str, Any]) -> str:
    rank = one["machine_rank"]
    return str(one["host"]) if rank is None else f"machine {rank} ({one['host']})"


class Machines:
    """The other machines of a launch: the last message of each, by number."""

    def __init__(
        self, store: TCPStore, index: int, name: str, count: int, *, is_host: bool, may_return: bool
    ) -> None:
        self._store, self._index, self._name, self._count = store, index, name, count
        self._is_host, self._may_return = is_host, may_return
        self._read = 0
        self._messages: dict[int, dict[str, Any]] = {}
        self._beats: dict[int, tuple[int, float]] = {}
        self._cut_off_s = 0.0

    def tell(self, state: str, *, status: int = 0, failures: Sequence[Failure] = ()) -> None:
        """Notify the others how this machine has ended: ``"failed"``, ``"stopped"`` or ``"done"``."""
        now_s = time.time()  # times become ages: the clocks of machines differ
        ages = [{**asdict(one), "time_s": now_s - one.time_s} for one in failures[:_MAX_FAILURES]]
        self._post(
            {"who": self._index, "name": self._name, "state": state, "status": status, "failures": ages}
        )

    def _post(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the machine that hosts the store has gone
            number = self._store.add("accelfn/messages", 1)
            self._store.set(f"accelfn/message/{number}", json.dumps(message))

    def look(self) -> None:
        """Read new messages of the others, and send a heartbeat. Effect: uses the network."""
        try:
            self._store.add(f"accelfn/beat/{self._index}", 1)
            self._cut_off_s = 0.0
            for number in range(self._read + 1, self._store.add("accelfn/messages", 0) + 1):
                message = json.loads(self._store.get(f"accelfn/message/{number}"))
                self._read = number
                if message["who"] != self._index:
                    self._messages[message["who"]] = {**message, "received_s": time.time()}
            if self._is_host:
                self._miss()
        except RuntimeError:
            self._cut_off_s = self._cut_off_s or time.monotonic()

    def _miss(self) -> None:
        """Post a message for a machine without a heartbeat: its agent was killed, or it has gone."""
        now_s = time.monotonic()
        for other in {*range(self._count)} - {self._index, *self._messages}:
            beat = self._store.add(f"accelfn/beat/{other}", 0)
            last, since_s = self._beats.get(other, (-1, now_s))
            self._beats[other] = (beat, since_s if beat == last else now_s)
            if now_s - self._beats[other][1] > _SILENT_S:
                name = _name(json.loads(self._store.get(f"accelfn/machine/{other}")))
                self._post({"who": other, "name": name, "state": "lost", "status": 1, "failures": []})

    def reason(self) -> dict[str, Any] | None:
        """Return the message of a machine without which the others can't go on, and a ``text`` of it."""
        if self._cut_off_s and not self._messages:
            return {
                "status": 1,
                "text": "the machine that hosts the rendezvous has gone, or its agent was killed",
            }
        ends = ("failed",) if self._may_return else ("failed", "stopped", "lost")
        message = next((message for message in self._messages.values() if message["state"] in ends), None)
        if message is None:
            return None
        why = next((f": {one['text']}" for one in message["failures"] if one["rank"] is None), "")
        texts = {
            "failed": f"{message['name']} has failed{why}",
            "stopped": f"the launch on {message['name']} was stopped",
            "lost": f"the launcher on {message['name']} was killed, or its machine has gone",
        }
        return {**message, "text": texts[message["state"]]}

    def is_cut_off_for(self, seconds: float) -> bool:
        """Return whether the store has been out of reach for so long."""
        return bool(self._cut_off_s) and time.monotonic() > self._cut_off_s + seconds

    def wait_for_ends(self) -> None:
        """Wait a moment for the others to post how they ended, and to read how this one did."""
        until_s = time.monotonic() + _ASK_S
        while not self._cut_off_s and time.monotonic() < until_s:
            self.look()
            if len(self._messages) == self._count - 1 and not self._is_host:
                return
            time.sleep(_POLL_S)

    def failures(self) -> tuple[Failure, ...]:
        """Return the failures of processes on other machines."""
        found: list[Failure] = []
        for message in self._messages.values():
            for one in cast("list[dict[str, Any]]", message["failures"]):
                one["time_s"] = message["received_s"] - one["time_s"]
                one["frames"] = tuple(tuple(frame) for frame in one["frames"])
                one["elsewhere"] = True
                found.append(Failure(**one))
        return tuple(one for one in found if one.rank is not None)
