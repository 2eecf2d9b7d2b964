"""Machines meet on loopback, a clash is named on all of them, and each hears how the others end."""

import re
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch.machines import Machines, join_machines
from accelfn.launch.report import Failure
from tests.launch.processes import free_port


def meet(
    *ranks: int | None, then: Callable[[int, Machines], object] | None = None, **given: Any
) -> list[Any]:
    """Have one thread a machine join; return what each was told, or what ``then`` returned."""
    values: dict[int, tuple[str, str]] = given.pop("values", {})
    world = {"host": "127.0.0.1", "port": int(free_port()), "num_machines": len(ranks), "timeout_s": 20.0}
    changes: Any = {**world, **given}

    def attend(index: int) -> object:
        compare = [("num_machines", "2"), values.get(index, ("mixed_precision", "bf16"))]
        try:
            joined = join_machines(machine_rank=ranks[index], compare=compare, **changes)
        except ConfigurationError as error:
            return str(error)
        return then(index, joined) if then else joined

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(attend, range(len(ranks))))


@pytest.mark.parametrize("ranks", [(2, 0, 1), (None, None), (0, None)], ids=str)
def test_equal_machines_go_on(ranks: tuple[int | None, ...]) -> None:
    assert all(isinstance(one, Machines) for one in meet(*ranks))


@pytest.mark.parametrize(
    ("ranks", "values", "message"),
    [
        ((0, 1), {1: ("mixed_precision", "no")}, "differ in mixed_precision: bf16 on machine 0 ("),
        ((0, 1), {1: ("debug", "true")}, "debug: the default on machine 0 ("),
        ((0, 1, 1), {}, "two machines have --machine_rank 1: "),
        ((0, 0), {}, "two machines have --machine_rank 0: "),
    ],
    ids=str,
)
def test_a_difference_is_named_on_every_machine(ranks: Any, values: Any, message: str) -> None:
    reported = meet(*ranks, values=values)
    assert all(message in one for one in reported), reported
    assert len(set(reported)) == 1


@pytest.mark.parametrize(
    ("ranks", "changes", "message"),
    [
        ((0,), {"num_machines": 2}, "1 of 2 machines did not connect to 127.0.0.1:.*connected: machine 0"),
        ((1,), {"num_machines": 2}, "machine 0 could not be reached at 127.0.0.1:.*Check --main_process_ip"),
        ((1,), {"host": "no.such.host.invalid"}, "can't resolve --main_process_ip no.such.host.invalid"),
    ],
    ids=str,
)
def test_missing_machines_are_an_error(ranks: Any, changes: Any, message: str) -> None:
    (reported,) = meet(*ranks, timeout_s=0.5, **changes)
    assert re.search(message, reported), reported


FAILED = Failure(
    rank=3, host="b", exitcode=7, kind="ValueError", text="ValueError: no", frames=(("f", 1, "g", ""),)
)


@pytest.mark.parametrize(
    ("state", "stops_on"), [("failed", ["failed"]), ("stopped", ["stopped"]), ("done", [])]
)
def test_each_machine_reads_how_the_others_end(state: str, stops_on: list[str]) -> None:
    def act(index: int, joined: Machines) -> tuple[Any, tuple[Failure, ...]]:
        if index == 1:
            joined.report(state, status=7, failures=[FAILED] if state == "failed" else ())
        joined.wait_for_reports()
        return joined.stop_reason(), joined.failures()

    (reason, failures), _ = meet(0, 1, then=act, stops_on=stops_on)
    if state == "done":
        assert reason is None
    else:
        assert reason["status"] == 7
        assert ("has failed" if state == "failed" else "was stopped") in reason["text"]
    assert [(one.rank, one.text, one.frames, one.elsewhere) for one in failures] == (
        [(3, "ValueError: no", (("f", 1, "g", ""),), True)] if state == "failed" else []
    )


def test_a_machine_without_heartbeat_is_lost() -> None:
    def act(index: int, joined: Machines) -> Any:
        joined.store.set_timeout(timedelta(seconds=1))
        until_s = time.monotonic() + 20
        while index == 0 and joined.stop_reason() is None and time.monotonic() < until_s:
            joined.poll()
            time.sleep(0.05)
        return joined.stop_reason(), joined.lost()

    (reason, lost), _ = meet(0, 1, then=act, silent_s=0.5)
    assert reason["text"].startswith(
        f"the launcher on machine 1 ({socket.gethostname()}) was killed, or the "
    )
    assert lost == {1: f"machine 1 ({socket.gethostname()})"}
