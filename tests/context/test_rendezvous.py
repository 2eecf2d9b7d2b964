"""Ranks that find each other: who waits says for whom, and for how long."""

import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta

import pytest

from accelfn.context import EnvironmentPlan, init, init_context, rendezvous
from accelfn.context.config import InitProcessGroupKwargs
from accelfn.errors import DistributedError
from tests.context.test_init import free_port, plain_environment

PROGRAM = (
    "import accelfn as af\nwith af.init_context(cpu=True) as ctx:\n    print(ctx.rank, ctx.num_processes)"
)


def started(variables: Mapping[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env={**plain_environment(), "WORLD_SIZE": "2", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("first", "line"),
    [
        ("0", r"accelfn: waiting for 1 of 2 ranks at 127\.0\.0\.1:{port} \.\.\."),
        ("1", r"accelfn: waiting for rank 0 of 2 ranks at 127\.0\.0\.1:{port}, as rank 1 \.\.\."),
    ],
)
def test_a_rank_says_whom_it_waits_for_and_goes_on_when_they_come(first: str, line: str) -> None:
    port = free_port()
    running = [started({"RANK": first, "MASTER_PORT": port})]
    # A watchdog ends what would wait for ever; the line itself is waited for as long as it takes.
    watchdog = threading.Timer(120, running[0].kill)
    watchdog.start()
    try:
        stderr = running[0].stderr
        assert stderr is not None
        assert any(re.fullmatch(line.format(port=port), read.strip()) for read in iter(stderr.readline, ""))
        running.append(started({"RANK": str(1 - int(first)), "MASTER_PORT": port}))
        found = [process.communicate(timeout=120)[0].strip() for process in running]
    finally:
        watchdog.cancel()
        for process in running:
            process.kill()
            process.communicate()
    assert found == [f"{first} 2", f"{1 - int(first)} 2"]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this process rank 0 of 2, whose other rank never comes."""
    port = free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setattr(rendezvous, "_QUIET_S", 0.1)
    return port


def test_where_the_address_was_guessed_the_limit_is_short_and_the_variables_are_named(
    alone: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(init, "_DEFAULT_ADDRESS_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(DistributedError) as caught:
        init_context(cpu=True)
    assert "1 of 2 ranks did not connect within 1 s." in str(caught.value)
    assert f"MASTER_ADDR is not set, so the address was 127.0.0.1:{alone}. Set MASTER_ADDR" in str(
        caught.value
    )
    # On a busy machine another line may come before it, while this process's own store starts.
    assert f"accelfn: waiting for 1 of 2 ranks at 127.0.0.1:{alone} ...\n" in capsys.readouterr().err


def test_a_limit_that_was_asked_for_holds_and_an_address_that_was_given_is_not_doubted(
    alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del alone
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(DistributedError, match="did not connect within 2 s") as caught:
        init_context(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=2))])
    assert "MASTER_ADDR" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("node0", "tcp://node0:7"),
        ("::1", "tcp://[::1]:7"),
        ("[::1]", "tcp://[::1]:7"),
        (None, "tcp://127.0.0.1:7"),
    ],
)
def test_the_address_of_the_world(host: str | None, address: str) -> None:
    place = EnvironmentPlan(launcher="env", master_addr=host, master_port=7)
    assert rendezvous.address_of(place) == address
