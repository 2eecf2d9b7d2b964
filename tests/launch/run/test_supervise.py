"""The process that stays: exit statuses, signals, and nothing left behind. Nothing here loads torch."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from accelfn.launch.plan import LaunchPlan, Meeting
from accelfn.launch.plan.torchrun import AGENT
from accelfn.launch.run import supervise as module
from accelfn.launch.run.news import News, State, host_news, join_news
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
    assert "  then: rank 2" in format_report(failures, num_processes=4, log_dir=None).splitlines()


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
    told = format_report(failures, num_processes=2, log_dir=log_dir)
    assert ("f.py:3" in told) is has_frames


def test_torchrun_that_never_started_its_processes(tmp_path: Path) -> None:
    (tmp_path / "agent.json").write_text(
        json.dumps({"error": "RendezvousTimeoutError: too late", "time_s": 1})
    )
    said = format_report(read_failures(str(tmp_path)), num_processes=2, log_dir=None)
    assert said == "accelfn launch: the processes could not be started:\n  RendezvousTimeoutError: too late"


def test_a_rank_that_failed_and_was_stopped_then_has_its_own_status(tmp_path: Path) -> None:
    """While it was ending, another rank's end came first, and torchrun stopped all."""
    told = {"rank": 1, "attempt": 0, "host": "b", "kind": "ValueError", "text": "ValueError: no"}
    (tmp_path / "failed.1.0.json").write_text(json.dumps({**told, "status": 1, "time_s": 1.0, "frames": []}))
    ended = [{"rank": rank, "exitcode": code, "time_s": 2.0} for rank, code in ((0, 1), (1, -15))]
    (tmp_path / "agent.json").write_text(json.dumps({"failures": ended}))
    first = first_failure(read_failures(str(tmp_path)))
    assert first is not None
    assert (first.rank, first.exitcode) == (1, 1)


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


# --- other machines ------------------------------------------------------------------------------


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Generator[tuple[News, News]]:
    """Give the news of this machine and those of another one, which know each other."""
    monkeypatch.setattr(module, "_GRACE_S", 0.2)
    with closing(host_news("machine 0 (a)", socket.AF_INET)) as own:
        with closing(join_news("machine 1 (b)", "127.0.0.1", list(own.where()))) as other:
            yield own, other


AWAY = Failure(rank=3, host="b", time_s=time.time(), exitcode=7, text="ValueError: no")
SLEEPS = "import time; time.sleep(600)"


@pytest.mark.parametrize(
    ("state", "status", "line"),
    [
        ("failed", 7, "machine 1 (b) has failed; the processes of this machine end too."),
        ("stopped", 143, "the launch on machine 1 (b) was stopped; the processes of this machine end too."),
    ],
)
def test_what_ends_another_machine_ends_this_one(
    state: State, status: int, line: str, pair: tuple[News, News], capfd: pytest.CaptureFixture[str]
) -> None:
    own, other = pair
    other.tell(state, status=status, failures=[AWAY] if state == "failed" else [])
    assert supervise(plan_of(SLEEPS), os.environ, num_processes=4, news=own) == status
    said = capfd.readouterr().err.splitlines()
    assert said[0] == f"accelfn launch: {line}"
    report = ["accelfn launch: rank 3 of 4 failed on b, with exit status 7:", "  ValueError: no"]
    assert said[1:] == ([*report, "  logs: on b"] if state == "failed" else [])
    other.listen(5)
    assert [(word.state, word.status) for word in other.words.values()] == [("failed", status)]


def test_a_machine_that_could_not_start_is_told_of_with_its_reason(
    pair: tuple[News, News], capfd: pytest.CaptureFixture[str]
) -> None:
    own, other = pair
    other.tell("failed", status=1, failures=[Failure(rank=None, kind="agent", text="no port")])
    assert supervise(plan_of(SLEEPS), os.environ, news=own) == 1
    assert capfd.readouterr().err == (
        "accelfn launch: machine 1 (b) has failed: no port; the processes of this machine end too.\n"
    )


def test_one_that_may_be_replaced_is_not_the_end(
    pair: tuple[News, News], capfd: pytest.CaptureFixture[str]
) -> None:
    own, other = pair
    other.tell("stopped", status=143)
    meeting = Meeting(
        host="h", port=1, num_machines=2, machine_rank=0, compare=(), timeout_s=1.0, may_return=True
    )
    plan = replace(plan_of("import time; time.sleep(1)"), meeting=meeting)
    assert supervise(plan, os.environ, news=own) == 0
    assert capfd.readouterr().err == (
        "accelfn launch: the launch on machine 1 (b) was stopped; another launch, with --no_preflight, may "
        "take its place.\n"
    )
    other.listen(5)
    assert [word.state for word in other.words.values()] == ["done"]


def test_one_that_may_be_replaced_is_the_end_of_processes_that_have_ended(
    pair: tuple[News, News], capfd: pytest.CaptureFixture[str]
) -> None:
    own, other = pair
    other.tell("stopped", status=143)
    source = """
import json, os, pathlib, subprocess, sys, time
box = pathlib.Path(os.environ["ACCELFN_RUN_DIR"])
script = subprocess.Popen([sys.executable, "-c", ""])
(box / "started.0.0.json").write_text(json.dumps(dict(rank=0, attempt=0, host="a", pid=script.pid)))
time.sleep(600)
"""
    meeting = Meeting(
        host="h", port=1, num_machines=2, machine_rank=0, compare=(), timeout_s=1.0, may_return=True
    )
    plan = LaunchPlan(way="torchrun", argv=(sys.executable, "-c", source, AGENT), meeting=meeting)
    assert supervise(plan, os.environ, news=own) == 143
    line = "accelfn launch: the launch on machine 1 (b) was stopped; the processes of this machine end too."
    assert capfd.readouterr().err.splitlines()[-1] == line


def test_an_own_echo_is_reported_as_what_came_first_elsewhere(
    pair: tuple[News, News], capfd: pytest.CaptureFixture[str]
) -> None:
    own, other = pair
    echo = PLAYS.replace("time_s=2.0", "time_s=time.time()").replace("import json", "import time, json")

    def fail_later() -> None:
        deadline_s = time.monotonic() + 20
        while not any(word.state == "failed" for word in other.words.values()):
            assert time.monotonic() < deadline_s
            other.listen(0.05)
        other.tell("failed", status=7, failures=[replace(AWAY, time_s=1.5)])

    thread = threading.Thread(target=fail_later)
    thread.start()
    assert supervise(plan_of(echo), os.environ, num_processes=4, news=own) == 7
    thread.join()
    assert capfd.readouterr().err.splitlines() == [
        "accelfn launch: rank 3 of 4 failed on b, with exit status 7:",
        "  ValueError: no",
        "  then: rank 0, 1",
        "  logs: on b",
    ]


@pytest.mark.parametrize(("source", "state", "status"), [("", "done", 0), ("exit(3)", "failed", 3)])
def test_others_hear_how_this_machine_has_ended(
    source: str, state: State, status: int, pair: tuple[News, News]
) -> None:
    own, other = pair
    assert supervise(plan_of(source), os.environ, news=own, quiet=True) == status
    own.close()
    other.listen(5)
    other.listen(5)
    assert [(word.state, word.status) for word in other.words.values()] == [(state, status)]
