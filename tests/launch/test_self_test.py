"""``accelfn test``, as a user runs it."""

import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from accelfn.launch.main import main
from accelfn.launch.self_test import CHECK_NAMES, launch_arguments, read
from tests.launch.processes import finish, is_alive, run, start, wait_for

TWO = ("test", "--cpu", "--num_processes=2")


def only(*names: str) -> list[str]:
    return [part for name in names for part in ("--only", name)]


def test_the_configuration_file_and_other_flags_go_to_the_launch() -> None:
    flags = ("--config_file", "two.yaml", "--num_processes", "2")
    assert launch_arguments(read([*flags, "--folder=shared", *only("mesh")])) == (
        *(*flags, "-m", "accelfn.launch.self_test_rank", "--timeout", "120"),
        *("--folder", "shared", "--only", "mesh"),
    )


@pytest.mark.parametrize(
    "argv", [("--cpu", "noop.py"), ("noop.py",), ("-m", "noop"), ("--cpu", "--", "noop.py")]
)
def test_a_script_is_refused(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["test", *argv]) == 2
    assert "accelfn test: error: accelfn test takes no script, got 'noop" in capsys.readouterr().err


@pytest.mark.slow
def test_everything_passes_here_in_the_configured_mesh(tmp_path: Path) -> None:
    status, stdout, stderr = run(tmp_path, *TWO, "--use_fsdp")
    assert status == 0, stdout + stderr
    title, *lines, last = stdout.splitlines()
    assert title == "accelfn test: 2 process(es) on 1 node(s), cpu"
    assert tuple(line[11:].split("  ")[0] for line in lines) == CHECK_NAMES
    assert any(re.fullmatch(r"  pass     mesh .* s  dp_shard 2", line) for line in lines)
    assert last == f"{len(CHECK_NAMES)} of {len(CHECK_NAMES)} checks passed"


@pytest.mark.slow
def test_what_ends_a_rank_is_named(tmp_path: Path) -> None:
    two = only("collectives", "mesh")
    status, stdout, stderr = run(tmp_path, *TWO, "--fault=death", *two)
    assert (status, "rank 1 of 2 failed" in stderr, "killed by SIGKILL" in stderr) == (137, True, True)
    assert "  pass " not in stdout
    status, stdout, _ = run(tmp_path, *TWO, "--fault=hang", "--timeout=10", *two)
    for text in ("CollectiveTimeoutError", "not run  mesh", "could not reconnect", "0 of 2 checks passed"):
        assert text in stdout
    assert status == 1
    status, stdout, stderr = run(tmp_path, *TWO, *only("mesh"), GLOO_SOCKET_IFNAME="nosuch0")
    assert (status, stdout, "Traceback" in stderr) == (1, "", False)
    assert "can't be set up: DistributedError: rank 1 could not join its world of 2" in stderr
    assert "Unable to find address for: nosuch0" in stderr


def ranks_of(folder: Path) -> list[int]:
    """Find the ranks that were told to use a folder."""
    found: list[int] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        # The launcher has the same words, behind its own.
        if str(folder).encode() in words and words[1:4:2] != [b"-m", b"launch"] and b"-u" in words[:2]:
            found.append(int(process.name))
    return found


@pytest.fixture
def hanging(tmp_path: Path) -> Callable[[], "Popen[str]"]:
    return lambda: start(tmp_path, *TWO, "--folder", str(tmp_path), "--fault=hang", *only("collectives"))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_the_ranks_too(
    number: signal.Signals, hanging: Callable[[], "Popen[str]"], tmp_path: Path
) -> None:
    process = hanging()
    try:
        wait_for(lambda: len(ranks_of(tmp_path)) == 2 or process.poll() is not None)
        pids = ranks_of(tmp_path)
        assert len(pids) == 2
        os.kill(process.pid, number)
        killed = number == signal.SIGKILL
        assert process.wait(60) == (-number if killed else 128 + number)
        wait_for(lambda: not any(map(is_alive, pids)))
    finally:
        process.kill()
        finish(process)
