"""Machines meet on loopback, and a clash is named on all of them."""

import re
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch.plan import Meeting
from accelfn.launch.run import preflight
from accelfn.launch.run.preflight import hold_meeting, is_port_free

Address = tuple[int, int, int, str, tuple[str, int]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def meeting_of(rank: int | None, num_machines: int = 2, **changes: object) -> Meeting:
    base = Meeting(
        host="127.0.0.1",
        port=0,
        num_machines=num_machines,
        machine_rank=rank,
        compare=(("num_machines", str(num_machines)), ("mixed_precision", "bf16")),
        timeout_s=20.0,
    )
    return replace(base, **changes)


def meet(*meetings: Meeting, versions: tuple[str, ...] = ()) -> list[str]:
    """Hold a meeting with one thread a machine; give what each of them was told."""
    port = free_port()

    def attend(index: int) -> str:
        version = versions[index] if versions else "1"
        try:
            hold_meeting(replace(meetings[index], port=port), {"the version of accelfn": version}).close()
        except ConfigurationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(attend, range(len(meetings))))


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0), (2, 0, 1), (None, None), (0, None)], ids=str)
def test_equal_machines_go_on(ranks: tuple[int | None, ...]) -> None:
    assert meet(*(meeting_of(rank, len(ranks)) for rank in ranks)) == [""] * len(ranks)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            meeting_of(1, compare=(("num_machines", "3"), ("mixed_precision", "bf16"))),
            "the machines differ in num_machines: 2 on machine 0 (",
        ),
        (meeting_of(1, compare=(("num_machines", "2"),)), "mixed_precision: bf16 on machine 0 ("),
    ],
)
def test_a_difference_is_named_on_every_machine(second: Meeting, message: str) -> None:
    told = meet(meeting_of(0), second)
    assert all(message in one for one in told)
    assert told[0] == told[1]


def test_versions_are_compared_and_ranks_must_differ() -> None:
    told = meet(meeting_of(0), meeting_of(1), versions=("1", "2"))
    assert all("differ in the version of accelfn: 1 on machine 0" in one for one in told)
    told = meet(meeting_of(0, 3), meeting_of(1, 3), meeting_of(1, 3, timeout_s=5.0))
    assert all("two machines have --machine_rank 1" in one for one in told)


def test_two_machines_0_are_both_told_and_so_is_who_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    port, found = free_port(), threading.Event()
    find = preflight.find_clash

    def find_clash(told: list[Mapping[str, Any]]) -> str | None:
        clash = find(told)
        if clash:
            found.set()
        return clash

    monkeypatch.setattr(preflight, "find_clash", find_clash)
    monkeypatch.setattr(preflight, "_LATE_S", 20.0)

    def attend(rank: int) -> str:
        assert rank == 0 or found.wait(20)
        try:
            hold_meeting(meeting_of(rank, port=port), {}).close()
        except ConfigurationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(attend, (0, 0, 1)))
    assert re.match(r"two machines have --machine_rank 0: .* and .*\. Give each its own", told[0])
    assert set(told) == {told[0]}


def test_a_machine_0_away_from_the_address_is_told_of_the_one_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, elsewhere = free_port(), free_port()
    # Away: on a machine of its own, where the port is free, and which doesn't have the address.
    listen = preflight._listen  # pyright: ignore[reportPrivateUsage]

    def attend(is_here: bool) -> str:
        try:
            hold_meeting(meeting_of(0, port=port, host="127.0.0.1" if is_here else "localhost"), {}).close()
        except ConfigurationError as error:
            return str(error)
        return ""

    def listen_there(meeting: Meeting, family: int) -> socket.socket | OSError:
        return listen(meeting if meeting.host == "127.0.0.1" else replace(meeting, port=elsewhere), family)

    def resolved(host: str, *_: object, **__: object) -> list[Address]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, host, ("127.0.0.1", port))]

    def has_address(addresses: list[Address]) -> bool:
        return addresses[0][3] == "127.0.0.1"

    monkeypatch.setattr(preflight, "_listen", listen_there)
    monkeypatch.setattr(preflight, "_is_here", has_address)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with ThreadPoolExecutor(2) as pool:
        told = list(pool.map(attend, (False, True)))
    assert told[0].startswith("two machines have --machine_rank 0: ")
    assert told[0] == told[1]


def test_a_machine_0_behind_another_address_meets_itself_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_never_here(addresses: object) -> bool:
        return False

    monkeypatch.setattr(preflight, "_is_here", is_never_here)
    monkeypatch.setattr(preflight, "_RETRY_S", 0.0)
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        host = pool.submit(hold_meeting, meeting_of(0, port=port), {})
        time.sleep(0.5)  # it has knocked at its own door by now, which changes nothing if not
        hold_meeting(meeting_of(1, port=port), {}).close()
        host.result().close()


@pytest.mark.parametrize(("rank", "whom"), [(1, "machine 0"), (0, "the others of 2 machines")])
def test_what_is_waited_for_is_told(
    rank: int, whom: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "_QUIET_S", 0.1)
    port = free_port()
    with pytest.raises(ConfigurationError):
        hold_meeting(meeting_of(rank, port=port, timeout_s=2.0), {})
    assert capsys.readouterr().err == f"accelfn launch: waiting for {whom} at 127.0.0.1:{port} ...\n"


def test_waiting_ends() -> None:
    (told,) = meet(meeting_of(0, timeout_s=0.3))
    assert re.match(
        r"1 of 2 machines did not come to 127.0.0.1:\d+ within 0.3 seconds; there were: mach", told
    )
    (told,) = meet(meeting_of(1, timeout_s=0.5))
    assert re.match(
        r"machine 0 could not be reached at 127.0.0.1:\d+ within 0.5 seconds: Connection ref", told
    )


def test_a_name_that_does_not_exist() -> None:
    (told,) = meet(meeting_of(1, host="no-such-host.invalid"))
    assert "--main_process_ip no-such-host.invalid can't be resolved" in told


def test_another_program_on_the_port() -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        assert not is_port_free(port)

        def answer() -> None:
            door, _ = listener.accept()
            with door:
                door.recv(4096)
                door.sendall(b"SSH-2.0-OpenSSH_9.2\n")

        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(answer)  # machine 0 asks who it is
            with pytest.raises(ConfigurationError, match=f"port {port} of this machine can't be used"):
                hold_meeting(meeting_of(0, port=port), {})
            answered.result()
            answered = pool.submit(answer)
            with pytest.raises(ConfigurationError, match=r"another program answers at 127\.0\.0\.1"):
                hold_meeting(meeting_of(1, port=port), {})
            answered.result()
    assert is_port_free(free_port())


def test_a_scanner_does_not_disturb() -> None:
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        host = pool.submit(hold_meeting, meeting_of(0, port=port), {})
        for said in (b"", b"GET / HTTP/1.1\r\n\n", b"[1]\n"):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=5) as door:
                        door.sendall(said)
                    break
                except ConnectionRefusedError:
                    assert not host.done()
        hold_meeting(meeting_of(1, port=port), {}).close()
        host.result().close()
