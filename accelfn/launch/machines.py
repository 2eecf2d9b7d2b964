"""Communication between the agents of several machines, through a TCPStore at the address of the rendezvous.

Before the start, the machines compare their settings. Later, each machine reports how it ends, so that the
others stop too and report the first failure of all. torchrun's rendezvous shares the server.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, cast

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] -- documented, but not exported

from accelfn.errors import ConfigurationError
from accelfn.launch.report import Failure

_POLL_S = 0.1
_CONNECT_S = 10.0
_ANSWER_S = 60.0
# Print what the machines wait for after this time.
_PROGRESS_S = 4.0
# After a mismatch, wait this long for machines that start late, and until all have read it.
_LATE_S = 1.5
# After a failure, wait this long for the reports of other machines.
_REPORTS_S = 2.0
_MAX_FAILURES = 16


def join_machines(
    *,
    host: str,
    port: int,
    num_machines: int,
    machine_rank: int | None,
    compare: Sequence[tuple[str, str]],
    timeout_s: float,
    stops_on: Sequence[str] = ("failed", "stopped", "lost"),
    silent_s: float = 30.0,
) -> Machines:
    """Connect to the other machines, and compare settings. Effect: opens sockets.

    Args:
        host: Address of machine 0.
        port: Port of machine 0.
        num_machines: Number of machines.
        machine_rank: Rank of this machine; None if ranks are assigned later.
        compare: Names and values that must be equal on all machines.
        timeout_s: How long to wait for the other machines.
        stops_on: The ends of another machine for which this one must stop too.
        silent_s: A machine without a heartbeat for this time is lost.

    Raises:
        ConfigurationError: The address can't be resolved or reached, its port is in use, a machine is
            missing, or the machines differ. All machines raise the same error.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigurationError(
            f"can't resolve --main_process_ip {host}: {error.strerror or error}. Check the name, or pass the "
            "address of machine 0."
        ) from None
    this = {
        "host": socket.gethostname(),
        "machine_rank": machine_rank,
        "values": dict(compare),
    }
    is_local = any(_can_bind(family, str(address[0])) for family, _, _, _, address in addresses)
    until_s = time.monotonic() + timeout_s
    server = None
    with _progress(f"waiting for {num_machines} machines at {host}:{port} ..."):
        if machine_rank == 0 or (machine_rank is None and is_local):
            with contextlib.suppress(RuntimeError):
                server = _open_store(host, port, _CONNECT_S, is_host=True)
        # If the address belongs to another machine, a second machine 0 may run there.
        store = server or _connect(host, port, until_s if machine_rank != 0 else 0.0)
        if store is None and machine_rank == 0:
            raise ConfigurationError(
                f"can't use port {port} of this machine. If another launch or program uses it, pass a free "
                "one as --main_process_port, the same on every machine."
            )
        if store is None:
            raise ConfigurationError(
                f"machine 0 could not be reached at {host}:{port} within {timeout_s:g} seconds. Check "
                "--main_process_ip, --main_process_port and the firewall, and that accelfn launch runs there."
            )
        index = 0
        try:
            index = _append(store, "accelfn/machine", json.dumps({**this, "id": uuid.uuid4().hex}))
            if server is not None:
                where = f"{host}:{port} within {timeout_s:g} seconds"
                mismatch = _compare(server, num_machines, until_s, where)
            else:
                mismatch = _read_result(store, until_s + _CONNECT_S)
        except RuntimeError as error:
            mismatch = f"lost the connection to machine 0: {error}. See its output."
    if mismatch:
        raise ConfigurationError(mismatch)
    is_host = server is not None
    return Machines(store, index, this, num_machines, is_host, tuple(stops_on), silent_s)


def _open_store(host: str, port: int, timeout_s: float, *, is_host: bool) -> TCPStore:
    # multi_tenant: torchrun's rendezvous in this process shares the server.
    return TCPStore(
        *(host, port, None, is_host, timedelta(seconds=timeout_s)),
        wait_for_workers=False,
        multi_tenant=is_host,
    )


def _append(store: TCPStore, name: str, text: str, first: int = 0) -> int:
    """Write a text, which no other launcher writes, to the first free place of a list; return its number.

    In one operation: a launcher may be killed at any time.
    """
    number = first
    while store.compare_set(f"{name}/{number}", "", text).decode() != text:
        number += 1
    return number


def _compare(store: TCPStore, num_machines: int, until_s: float, where: str) -> str:
    """Wait for all machines or a mismatch, and send the result to all. Return the mismatch, or ""."""
    machines: list[Mapping[str, Any]] = []
    while True:
        while store.check([key := f"accelfn/machine/{len(machines)}"]):
            machines.append(json.loads(store.get(key)))
        mismatch = find_mismatch(machines)
        if mismatch or len(machines) >= num_machines:
            break
        if time.monotonic() > until_s:
            present = ", ".join(_name(machine) for machine in machines)
            mismatch = (
                f"{num_machines - len(machines)} of {num_machines} machines did not connect to {where}; "
                f"connected: {present}. Start the same command on every machine, or increase "
                "--preflight_timeout."
            )
            break
        time.sleep(_POLL_S)
    store.set("accelfn/result", mismatch)
    late_s = time.monotonic() + _LATE_S
    while mismatch and store.add("accelfn/read", 0) < num_machines - 1 and time.monotonic() < late_s:
        time.sleep(_POLL_S)
    return mismatch


def _read_result(store: TCPStore, until_s: float) -> str:
    while not store.check(["accelfn/result"]):
        if time.monotonic() > until_s:
            return "machine 0 did not answer in time. See its output."
        time.sleep(_POLL_S)
    mismatch = store.get("accelfn/result").decode()
    store.add("accelfn/read", 1)
    return mismatch


def _connect(host: str, port: int, until_s: float) -> TCPStore | None:
    """Connect to the store, which its machine may not have started yet."""
    while True:
        opened: list[TCPStore] = []

        def open_store(opened: list[TCPStore] = opened) -> None:
            with contextlib.suppress(RuntimeError):
                opened.append(_open_store(host, port, _ANSWER_S, is_host=False))

        # In a thread: TCPStore waits without end for a server that accepts and doesn't answer.
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), timeout=_CONNECT_S).close()
            thread = threading.Thread(target=open_store, daemon=True)
            thread.start()
            thread.join(_CONNECT_S)
        if opened:
            return opened[0]
        if time.monotonic() > until_s:
            return None
        time.sleep(_POLL_S)


@contextlib.contextmanager
def _progress(message: str) -> Generator[None]:
    """Print a message if the block takes long."""
    text = f"accelfn launch: {message}"
    timer = threading.Timer(_PROGRESS_S, print, (text,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _can_bind(family: int, address: str) -> bool:
    """Return whether an address belongs to this machine."""
    with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
        probe.bind((address, 0))
        return True
    return False


def find_mismatch(machines: Sequence[Mapping[str, Any]]) -> str:
    """Describe how the settings of machines differ, or that two have the same rank; "" if all is well. Pure.

    >>> one = {"host": "a", "machine_rank": 0, "values": {"num_machines": "2"}}
    >>> find_mismatch([one, {"host": "b", "machine_rank": 1, "values": {"num_machines": "3"}}])
    'the machines differ in num_machines: 2 on machine 0 (a), 3 on machine 1 (b). Make them equal.'
    """
    machines = sorted(machines, key=lambda machine: machine["machine_rank"] or 0)
    for index, machine in enumerate(machines):
        for other in machines[:index]:
            if machine["machine_rank"] is not None and machine["machine_rank"] == other["machine_rank"]:
                return (
                    f"two machines have --machine_rank {machine['machine_rank']}: {other['host']} and "
                    f"{machine['host']}. Pass different ranks."
                )
    differences: list[str] = []
    for name in dict.fromkeys(name for machine in machines for name in machine["values"]):
        values = [(machine["values"].get(name, "the default"), _name(machine)) for machine in machines]
        if len({value for value, _ in values}) > 1:
            differences.append(f"{name}: " + ", ".join(f"{value} on {where}" for value, where in values))
    return f"the machines differ in {'; in '.join(differences)}. Make them equal." if differences else ""


def _name(machine: Mapping[str, Any]) -> str:
    rank = machine["machine_rank"]
    return str(machine["host"]) if rank is None else f"machine {rank} ({machine['host']})"


@dataclass(slots=True)
class Machines:
    """The other machines of a launch, with the last message of each.

    Attributes:
        store: The store that all machines share.
    """

    store: TCPStore
    _index: int
    _this: Mapping[str, Any]
    _count: int
    _is_host: bool
    _stops_on: tuple[str, ...]
    _silent_s: float
    _num_read: int = 0
    _messages: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    _heartbeats: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    _disconnected_s: float = 0.0

    def report(self, state: str, *, status: int = 0, failures: Sequence[Failure] = ()) -> None:
        """Report to the others how this machine ended: ``"failed"``, ``"stopped"`` or ``"done"``."""
        now_s = time.time()  # sent as ages, because the clocks of machines differ
        ages = [{**asdict(failure), "time_s": now_s - failure.time_s} for failure in failures[:_MAX_FAILURES]]
        self._post(self._index, self._this, {"state": state, "status": status, "failures": ages})

    def _post(self, sender: int, machine: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        sent = {"sender": sender, "machine_rank": machine["machine_rank"], "name": _name(machine), **message}
        with contextlib.suppress(RuntimeError):  # the host of the store has ended
            _append(self.store, "accelfn/message", json.dumps(sent), self._num_read)

    def poll(self) -> None:
        """Read new messages, and send a heartbeat."""
        try:
            self.store.add(f"accelfn/heartbeat/{self._index}", 1)
            self._disconnected_s = 0.0
            while self.store.check([key := f"accelfn/message/{self._num_read}"]):
                message = json.loads(self.store.get(key))
                self._num_read += 1
                if message["sender"] != self._index:
                    self._messages[message["sender"]] = {**message, "received_s": time.time()}
            if self._is_host:
                self._report_lost()
        except RuntimeError:
            self._disconnected_s = self._disconnected_s or time.monotonic()

    def _report_lost(self) -> None:
        """Post a message for each machine without a heartbeat: its agent was killed, or it is down."""
        now_s = time.monotonic()
        for other in {*range(self._count)} - {self._index, *self._messages}:
            count = self.store.add(f"accelfn/heartbeat/{other}", 0)
            last, since_s = self._heartbeats.get(other, (-1, now_s))
            self._heartbeats[other] = (count, since_s if count == last else now_s)
            if now_s - self._heartbeats[other][1] > self._silent_s:
                machine = json.loads(self.store.get(f"accelfn/machine/{other}"))
                self._post(other, machine, {"state": "lost", "status": 1, "failures": []})

    def stop_reason(self) -> dict[str, Any] | None:
        """Return the message for which this machine must stop, with a description in ``text``, or None."""
        # Unless some end stops this machine, the host of the store doesn't end before the others.
        if self._disconnected_s and not (self._messages and self._stops_on):
            return {
                "status": 1,
                "text": "the machine that hosts the rendezvous is down, or its agent was killed",
            }
        message = next((each for each in self._messages.values() if each["state"] in self._stops_on), None)
        if message is None:
            return None
        cause = next((f": {each['text']}" for each in message["failures"] if each["rank"] is None), "")
        texts = {
            "failed": f"{message['name']} has failed{cause}",
            "stopped": f"the launch on {message['name']} was stopped",
            "lost": f"the launcher on {message['name']} was killed, or the machine is down",
        }
        return {**message, "text": texts[message["state"]]}

    def lost(self) -> dict[int, str]:
        """Return rank and name of each machine without a heartbeat."""
        messages = [message for message in [*self._messages.values()] if message["state"] == "lost"]
        return {int(message["machine_rank"]): str(message["name"]) for message in messages}

    def is_disconnected_for(self, seconds: float) -> bool:
        """Return whether the store has been unreachable for this time."""
        return bool(self._disconnected_s) and time.monotonic() > self._disconnected_s + seconds

    def wait_for_reports(self) -> None:
        """Wait briefly for the reports of the others, and until they have read that of this machine."""
        until_s = time.monotonic() + _REPORTS_S
        while not self._disconnected_s and time.monotonic() < until_s:
            self.poll()
            if len(self._messages) == self._count - 1 and not self._is_host:
                return
            time.sleep(_POLL_S)

    def failures(self) -> tuple[Failure, ...]:
        """Return the failures of processes on other machines."""
        failures: list[Failure] = []
        for message in self._messages.values():
            for failure in (Failure(**fields) for fields in message["failures"]):
                frames = tuple(tuple(frame) for frame in cast("Any", failure.frames))  # lists in JSON
                time_s = message["received_s"] - failure.time_s
                failures.append(replace(failure, frames=frames, time_s=time_s, elsewhere=True))
        return tuple(failure for failure in failures if failure.rank is not None)
