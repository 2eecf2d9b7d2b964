"""The process that stays: exit statuses, signals, and nothing left behind. Nothing here loads torch."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelfn.launch.plan import LaunchPlan
from accelfn.launch.plan.torchrun import AGENT
from accelfn.launch.run.report import Failure, first_failure, format_report, read_failures
from accelfn.launch.run.supervise import supervise

ROOT = Path(__file__).parents[3]

SUPERVISOR = """
import os, signal, sys
if hasattr(signal, "SIGHUP"):  # the tests themselves may have been started by nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN if "NOHUP" in os.environ else signal.SIG_DFL)
from accelfn.launch.plan import LaunchPlan
from accelfn.launch.run.supervise import supervise
sys.exit(supervise(LaunchPlan(way="torchrun", argv=tuple(sys.argv[1:])), os.environ))
"""


def plan_of(source: str) -> LaunchPlan:
    return LaunchPlan(way="torchrun", argv=(sys.executable, "-c", source))


@pytest.mark.parametrize(
    ("source", "status"),
    [
        ("", 0),
        ("import sys; sys.exit(7)", 7),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_status_is_the_commands(source: str, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert supervise(plan_of(source), os.environ) == status
    assert signal.getsignal(signal.SIGTERM) is before
    assert ("ended with status" in capfd.readouterr().err) == (status != 0)


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


def test_the_last_lines_are_the_first_failure(capfd: pytest.CaptureFixture[str]) -> None:
    assert supervise(plan_of(PLAYS), os.environ, num_processes=2) == 5
    assert capfd.readouterr().err.splitlines() == [
        "accelfn launch: rank 1 of 2 failed on a, with exit status 5:",
        "    /u/t.py:3 in f: g()",
        "  then: rank 0",
        "  logs: above; --log_dir DIR --tee 3 keeps those of each rank",
    ]
    assert supervise(plan_of(PLAYS), os.environ, quiet=True) == 5
    assert capfd.readouterr().err == ""


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    (tmp_path / "started.0.0.json").write_text(json.dumps({"rank": 0, "attempt": 0, "host": "b", "pid": 1}))
    ended = {"rank": 0, "local_rank": 0, "exitcode": -9, "pid": 1, "time_s": 3.0}
    (tmp_path / "agent.json").write_text(json.dumps({"failures": [ended]}))
    said = format_report(read_failures(str(tmp_path)), num_processes=1, log_dir=None)
    assert said.splitlines()[0] == (
        "accelfn launch: rank 0 of 1 failed on b, killed by SIGKILL (the system may have run out of memory)."
    )


def test_long_errors_are_cut() -> None:
    frames = tuple(("f.py", line, "f", "") for line in range(9))
    failure = Failure(rank=0, exitcode=1, text="\n".join("abcdefghij"), frames=frames)
    lines = format_report([failure], num_processes=None, log_dir="logs").splitlines()
    assert "  ... (5 more lines)" in lines
    assert "    ... (4 frames)" in lines
    assert lines[-1] == "  logs: logs"
    assert len(lines) <= 14
    assert first_failure([]) is None


def test_torchrun_that_never_started_its_processes(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text(
        json.dumps({"error": "RendezvousTimeoutError: too late", "time_s": 1})
    )
    said = format_report(read_failures(str(tmp_path)), num_processes=2, log_dir=None)
    assert said == "accelfn launch: the processes could not be started:\n  RendezvousTimeoutError: too late"


def test_a_machine_that_has_lost_the_others_says_so(tmp_path: Path) -> None:
    (tmp_path / "started.0.0.json").write_text(json.dumps({"rank": 0, "attempt": 0, "host": "b", "pid": 1}))
    (tmp_path / "agent.json").write_text(json.dumps({"error": "RendezvousConnectionError: no", "time_s": 1}))
    said = format_report(read_failures(str(tmp_path)), num_processes=2, log_dir=None)
    assert said.splitlines() == [
        "accelfn launch: this machine has lost the others, and its processes were ended:",
        "  RendezvousConnectionError: no",
        "  why, stands in the report of the machine that ended first",
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


def start(folder: Path, source: str, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SOURCE": source}
    argv = [sys.executable, "-c", SUPERVISOR, sys.executable, "-c", source, *arguments]
    return subprocess.Popen(
        argv, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def wait_for(path: Path, process: "subprocess.Popen[str]") -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


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
    for pid in pids:
        deadline = time.monotonic() + 10  # whoever adopted the child has to reap it
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline
            time.sleep(0.02)


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


def test_a_launch_by_nohup_outlives_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOHUP", "1")
    source = """
import pathlib, time
pathlib.Path("up").write_text("1")
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""
    process = start(tmp_path, source)
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


def test_torchrun_alone_at_the_exit_does_not_use_up_the_patience(tmp_path: Path) -> None:
    # Its process has ended, and it waits for other machines where it hears of no signal.
    source = """
import json, os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
box = pathlib.Path(os.environ["ACCELFN_RUN_DIR"])
script = subprocess.Popen([sys.executable, "-c", ""])
(box / "started.0.0.json").write_text(json.dumps(dict(rank=0, attempt=0, host="a", pid=script.pid)))
pathlib.Path("up").write_text("1")
time.sleep(600)
"""
    process = start(tmp_path, source, AGENT)
    try:
        wait_for(tmp_path / "up", process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=40) == 128 + signal.SIGTERM  # of 45 seconds that it would have
    finally:
        process.kill()
        process.communicate()


def test_processes_that_have_started_again_are_told_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    source = """
import json, os, pathlib, sys, time
box = pathlib.Path(os.environ["ACCELFN_RUN_DIR"])
for attempt in (0, 1):
    said = dict(rank=0, attempt=attempt, host="a", pid=os.getpid())
    (box / f"started.0.{attempt}.json").write_text(json.dumps(said))
time.sleep(0.5)
"""
    monkeypatch.setattr("accelfn.launch.run.supervise._LOOK_S", 0.0)
    assert supervise(LaunchPlan(way="torchrun", argv=(*plan_of(source).argv, AGENT)), os.environ) == 0
    assert "all processes have started again (1)" in capfd.readouterr().err


def test_an_interrupt_before_torchrun_is_up_is_no_traceback(tmp_path: Path) -> None:
    source = "import pathlib, time; pathlib.Path('up').write_text('1'); time.sleep(60)"
    process = start(tmp_path, source, AGENT)
    try:
        wait_for(tmp_path / "up", process)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
        assert (process.returncode, stderr) == (130, "")
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
