"""``accelfn test``, as a user runs it."""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from accelfn.launch.main import main
from accelfn.launch.self_test import CHECK_NAMES, read, self_test_command
from tests.launch.processes import finish, is_alive, run, start, wait_for

TWO = ("test", "--cpu", "--num_processes=2")


def only(*names: str) -> list[str]:
    return [part for name in names for part in ("--only", name)]


def test_the_configuration_file_and_other_flags_go_to_the_launch() -> None:
    options = read(["--config_file", "two.yaml", "--folder=shared", "--num_processes", "2", *only("mesh")])
    assert self_test_command(options, options.launch_flags, "results")[1:] == (
        *("-m", "accelfn", "launch", "--config_file", "two.yaml", "--num_processes", "2"),
        *("-m", "accelfn.launch.self_test_rank", "--report", "results", "--timeout", "120"),
        *("--folder", str(Path.cwd() / "shared"), "--only", "mesh"),
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
    lines = stdout.splitlines()
    assert lines[0] == "accelfn test"
    assert tuple(line[11:].split("  ")[0] for line in lines[1:-1]) == CHECK_NAMES
    assert any(re.fullmatch(r"  pass     mesh .* s  dp_shard 2", line) for line in lines)
    assert lines[-1].startswith(f"{len(CHECK_NAMES)} of {len(CHECK_NAMES)} checks passed in ")


@pytest.mark.slow
def test_a_rank_that_dies_fails_its_current_check(tmp_path: Path) -> None:
    status, stdout, _ = run(tmp_path, *TWO, "--fault=death", "--json", *only("collectives", "mesh"))
    reported = json.loads(stdout)
    assert (status, reported["passed"], reported["status"] != 0) == (1, False, True)
    first, second = ((one["name"], one["verdict"]) for one in reported["checks"])
    # Which of the two depends on whether the other rank has come to say so before it is ended.
    assert first in (("collectives", "FAIL"), ("collectives", "cut off"))
    assert second == ("mesh", "not run")


@pytest.mark.slow
def test_ranks_that_cannot_join_report_the_reason(tmp_path: Path) -> None:
    status, stdout, stderr = run(tmp_path, *TWO, *only("mesh"), GLOO_SOCKET_IFNAME="nosuch0")
    assert status == 1
    assert "  FAIL     joining of rank " in stdout
    assert "Unable to find address for: nosuch0" in stdout
    assert "  not run  mesh" in stdout
    assert "torch/distributed/elastic" not in stderr  # what torchrun has to say of it
    assert stderr.splitlines()[-1] == "accelfn test: the launch ended with status 1."


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_ended(tmp_path: Path) -> None:
    status, stdout, _ = run(tmp_path, *TWO, "--fault=hang", "--timeout=10", *only("collectives", "mesh"))
    assert status == 1
    assert "CollectiveTimeoutError" in stdout
    assert "0 of 2 checks passed" in stdout
    assert "the ranks could not reconnect" in stdout


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
