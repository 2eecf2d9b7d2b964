"""The agent around a command: statuses, signals, the report, and nothing left behind. Nothing loads torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from accelfn.checkpoint import EXIT_PREEMPTED
from accelfn.launch.plan.commands import AGENT
from accelfn.launch.run.report import Failure, first_failure, format_report, read_failures


def start(folder: Path, source: str, *, nohup: bool = False, **more: str) -> "subprocess.Popen[str]":
    code = f"import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_{'IGN' if nohup else 'DFL'}); "
    code += "signal.signal(signal.SIGINT, signal.default_int_handler); os.execv(sys.argv[1], sys.argv[1:])"
    agent = (sys.executable, AGENT, "--command", sys.executable, "-c", source)
    return subprocess.Popen(
        [sys.executable, "-c", code, *agent],
        cwd=folder,
        env={**os.environ, "SOURCE": source, **more},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@pytest.mark.parametrize(
    ("source", "status"),
    [("", 0), ("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_status_is_the_commands(source: str, status: int, tmp_path: Path) -> None:
    with start(tmp_path, source) as process:
        assert process.wait(30) == status


def test_a_launch_that_has_ended_does_not_wait_for_its_watcher() -> None:
    code = "import sys; from accelfn.launch.run import agent; agent._POLL_S = 600.0; "
    code += "sys.exit(agent.main(sys.argv[1:]))"
    command = (sys.executable, "-c", code, "--command", sys.executable, "-c", "")
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


# Writes as worker and agent do: rank 1 fails first, rank 0 echoes it.
PLAYS = """
import json, os, pathlib, sys
box = pathlib.Path(os.environ["ACCELFN_RUN_DIR"])
def said(name, **what): (box / name).write_text(json.dumps(what))
frames = [dict(file="/u/t.py", line=3, function="f", source="g()", own=True),
          dict(file="/lib/torch/x.py", line=9, function="g", source="h()", own=False)]
common = dict(attempt=0, host="a", frames=frames, status=1)
said("failed.0.0.json", rank=0, kind="RemoteRankError", text="of rank 1", time_s=1.0, **common)
said("failed.1.0.json", rank=1, kind="SystemExit", text="", time_s=2.0, **common)
said("agent.json", failures=[dict(rank=1, local_rank=1, exitcode=5, pid=1, time_s=2.0)])
sys.exit(1)
"""


@pytest.mark.parametrize("quiet", ["", "1"])
def test_the_last_lines_are_the_first_failure(quiet: str, tmp_path: Path) -> None:
    process = start(tmp_path, PLAYS, ACCELFN_AGENT_QUIET=quiet)
    _, stderr = process.communicate(timeout=30)
    report = [
        "accelfn launch: rank 1 failed on a, with exit status 5:",
        "    /u/t.py:3 in f: g()",
        "  failed later: rank 0",
        "  logs: above; use --log_dir DIR --tee 3 to keep one per rank",
    ]
    assert (process.returncode, stderr.splitlines()) == (5, [] if quiet else report)


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    (tmp_path / "started.0.0.json").write_text(json.dumps({"rank": 0, "attempt": 0, "host": "b", "pid": 1}))
    ended = {"rank": 0, "local_rank": 0, "exitcode": -9, "pid": 1, "time_s": 3.0}
    (tmp_path / "agent.json").write_text(json.dumps({"failures": [ended]}))
    output = format_report(read_failures(str(tmp_path)), num_processes=1, log_dir=None)
    assert output.splitlines()[0] == (
        "accelfn launch: rank 0 of 1 failed on b, killed by SIGKILL (possibly out of memory)."
    )


def test_those_that_were_stopped_have_not_failed_and_those_that_raised_have() -> None:
    first = Failure(rank=3, exitcode=1, kind="ValueError", text="no", time_s=1.0)
    failures = (
        Failure(rank=2, exitcode=-15, kind="RuntimeError", text="closed", time_s=2.0),
        Failure(rank=0, exitcode=-15, time_s=0.5),
        Failure(rank=1, exitcode=-9, time_s=30.0),
        first,
        Failure(rank=None, kind="lost", text="gone"),
    )
    assert first_failure(failures) is first
    assert "  failed later: rank 2" in format_report(failures, num_processes=4, log_dir=None).splitlines()


def test_ranks_that_were_asked_to_stop_have_not_failed() -> None:
    common: dict[str, Any] = {"exitcode": EXIT_PREEMPTED, "kind": "SystemExit", "text": "75", "time_s": 2.0}
    stopped = [Failure(rank=rank, **common) for rank in (0, 1)]
    report = format_report(stopped, num_processes=2, log_dir="logs")
    assert report == "accelfn launch: all ranks stopped for preemption, with exit status 75."
    failed = Failure(rank=2, exitcode=1, kind="ValueError", text="no", time_s=1.0)
    assert "rank 2 of 3 failed" in format_report([*stopped, failed], num_processes=3, log_dir=None)


def test_long_errors_are_cut() -> None:
    frames = tuple(("f.py", line, "f", "") for line in range(9))
    failure = Failure(rank=0, exitcode=1, text="\n".join("abcdefghij"), frames=frames)
    lines = format_report([failure], num_processes=None, log_dir="logs").splitlines()
    assert "  ... (5 more lines)" in lines
    assert "    ... (4 frames)" in lines
    assert lines[-1] == "  logs: logs"
    assert len(lines) <= 14
    assert first_failure([]) is None


@pytest.mark.parametrize(
    ("other", "log_dir", "has_frames"),
    [
        ("RemoteRankError", None, False),
        ("KeyError", None, True),  # several tracebacks are above: which of them counts?
        ("RemoteRankError", "logs", True),
    ],
)
def test_frames_are_shown_once(other: str, log_dir: str | None, has_frames: bool) -> None:
    first = Failure(
        rank=1, exitcode=1, kind="ValueError", text="ValueError: no", frames=(("f.py", 3, "f", ""),)
    )
    failures = [first, Failure(rank=0, exitcode=1, kind=other, text="x", time_s=1.0)]
    reported = format_report(failures, num_processes=2, log_dir=log_dir)
    assert ("f.py:3" in reported) is has_frames


def test_torchrun_that_never_started_its_processes(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text(
        json.dumps({"error": "RendezvousTimeoutError: too late", "time_s": 1})
    )
    output = format_report(read_failures(str(tmp_path)), num_processes=2, log_dir=None)
    assert output == "accelfn launch: the processes could not be started:\n  RendezvousTimeoutError: too late"


def test_a_rank_that_failed_and_was_stopped_then_has_its_own_status(tmp_path: Path) -> None:
    """While it was ending, another rank's end came first, and torchrun stopped all."""
    reported = {"rank": 1, "attempt": 0, "host": "b", "kind": "ValueError", "text": "ValueError: no"}
    (tmp_path / "failed.1.0.json").write_text(
        json.dumps({**reported, "status": 1, "time_s": 1.0, "frames": []})
    )
    ended = [{"rank": rank, "exitcode": code, "time_s": 2.0} for rank, code in ((0, 1), (1, -15))]
    (tmp_path / "agent.json").write_text(json.dumps({"failures": ended}))
    first = first_failure(read_failures(str(tmp_path)))
    assert first is not None
    assert (first.rank, first.exitcode) == (1, 1)


def test_a_machine_reports_a_lost_connection(tmp_path: Path) -> None:
    (tmp_path / "started.0.0.json").write_text(json.dumps({"rank": 0, "attempt": 0, "host": "b", "pid": 1}))
    (tmp_path / "agent.json").write_text(json.dumps({"error": "RendezvousConnectionError: no", "time_s": 1}))
    output = format_report(read_failures(str(tmp_path)), num_processes=2, log_dir=None)
    assert output.splitlines() == [
        "accelfn launch: this machine lost the connection to the others, and stopped its processes:",
        "  RendezvousConnectionError: no",
        "  see the report on the machine that failed first",
    ]


# Ignores what it is told, and has a child in a session of its own, as torchrun's workers are.
STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda n, f: open("told", "a").write(f"{n} "))
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, "-c", os.environ["SOURCE"], "child"], start_new_session=True)
pathlib.Path(f"{len(sys.argv)}.pid").write_text(str(os.getpid()))
time.sleep(60)
time.sleep(60)
"""


def wait_for(path: Path, process: "subprocess.Popen[str]") -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def is_alive(pid: int) -> bool:
    # Whoever adopts the child has to reap it.
    return Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their variables on Linux only")
def test_a_second_interrupt_kills_whatever_is_left(tmp_path: Path) -> None:
    process = start(tmp_path, STUBBORN)
    try:
        pids = [int(wait_for(tmp_path / f"{n}.pid", process)) for n in (1, 2)]
        process.send_signal(signal.SIGINT)
        wait_for(tmp_path / "told", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "told").read_text() == f"{int(signal.SIGINT)} "
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


UPLOADING = """
import os, pathlib, signal, subprocess, sys, time
def finish(number, frame):
    time.sleep(0.5)
    pathlib.Path("uploaded").touch()
    sys.exit()
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, "-c", os.environ["SOURCE"], "child"], start_new_session=True)
    while not pathlib.Path("up").exists():
        time.sleep(0.02)
    sys.exit(3)
signal.signal(signal.SIGTERM, finish)
pathlib.Path("up").touch()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their variables on Linux only")
def test_what_is_left_after_a_failure_may_finish_before_it_is_killed(tmp_path: Path) -> None:
    process = start(tmp_path, UPLOADING)
    try:
        assert process.wait(timeout=30) == 3
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "uploaded").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_are_handed_on_and_named_in_the_status(number: signal.Signals, tmp_path: Path) -> None:
    source = f"""
import pathlib, signal, sys, time
signal.signal({int(number)}, lambda n, f: sys.exit(0))
pathlib.Path("up").write_text("1")
time.sleep(60)
"""
    process = start(tmp_path, source)
    try:
        wait_for(tmp_path / "up", process)
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
    finally:
        process.kill()
        process.communicate()


def test_a_launch_by_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    source = """
import pathlib, time
pathlib.Path("up").write_text("1")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""
    process = start(tmp_path, source, nohup=True)
    try:
        wait_for(tmp_path / "up", process)
        process.send_signal(signal.SIGHUP)
        time.sleep(0.3)  # more than one look of the supervisor
        (tmp_path / "go").touch()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


def test_scripts_may_answer_a_signal_with_a_status_of_their_own(tmp_path: Path) -> None:
    source = """
import json, os, pathlib, signal, sys, time
box = pathlib.Path(os.environ["ACCELFN_RUN_DIR"])
common = dict(attempt=0, host="a", frames=[], text="", kind="SystemExit", time_s=1.0, status=75)
def leave(number, frame):
    for rank in (0, 1):
        (box / f"failed.{rank}.0.json").write_text(json.dumps(dict(rank=rank, **common)))
    sys.exit(143)
signal.signal(signal.SIGTERM, leave)
pathlib.Path("up").write_text("1")
time.sleep(60)
"""
    process = start(tmp_path, source)
    try:
        wait_for(tmp_path / "up", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 75
    finally:
        process.kill()
        process.communicate()


def test_a_schedulers_signal_reaches_the_scripts(tmp_path: Path) -> None:
    source = """
import json, os, pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda n, f: sys.exit(0))
box = pathlib.Path(os.environ["ACCELFN_RUN_DIR"])
(box / "started.0.0.json").write_text(json.dumps(dict(rank=0, attempt=0, host="a", pid=os.getpid())))
pathlib.Path("up").write_text("1")
time.sleep(60)
"""
    process = start(tmp_path, source)
    try:
        wait_for(tmp_path / "up", process)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their variables on Linux only")
def test_a_killed_agent_leaves_no_process_behind(tmp_path: Path) -> None:
    process = start(tmp_path, STUBBORN, TMPDIR=str(tmp_path))
    pids = [int(wait_for(tmp_path / f"{n}.pid", process)) for n in (1, 2)]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)) or [*tmp_path.glob("accelfn-run-*")]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
