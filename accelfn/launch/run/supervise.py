"""The process that stays: it starts the command, hands signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import FrameType

from accelfn.launch.plan.record import LaunchPlan
from accelfn.launch.plan.torchrun import AGENT
from accelfn.launch.run.news import News, Word
from accelfn.launch.run.report import Failure, first_failure, format_report, read_failures, read_pids

__all__ = ("supervise",)

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
# Signals by which schedulers speak to the script; torchrun would die of them.
_TO_SCRIPTS = ("SIGUSR1", "SIGUSR2")
# How often to look which processes still run; when to say what is waited for; how long torchrun has to end
# after a signal where no process is left.
_LOOK_S = 1.0
_WAIT_S = 0.1
_SILENT_S = 10.0
_ALONE_S = 3.0
# How long processes have to end by themselves when another machine's have failed: most find out, and then say
# better what they waited for. How long a machine that has failed waits for what the others say of it.
_GRACE_S = 5.0
_ASK_S = 1.5


def supervise(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    *,
    num_processes: int | None = None,
    log_dir: str | None = None,
    quiet: bool = False,
    news: News | None = None,
) -> int:
    """Run a plan's command to its end. Effect: starts processes, hands signals on, prints a report.

    SIGINT, SIGTERM, SIGHUP (unless nohup has it ignored) and SIGQUIT go to the command, which has
    ``plan.patience_s`` to end; a second SIGINT ends the waiting. SIGUSR1 and SIGUSR2 go to the scripts. What
    is left after a failure or a signal is killed.

    Args:
        plan: What to start.
        environment: What it inherits; the plan's changes are laid over a copy.
        num_processes: Of the whole world, for the report.
        log_dir: Where torchrun keeps output, for the report.
        quiet: Whether to leave the report out.
        news: Of the other machines' launchers. Where one of them fails for good, so does this one, with its
            report and status.

    Returns:
        The exit status: the failed process's own, 128 and more for a signal. Where scripts answer a signal
        by leaving with a status of their own, all with the same, it is that one.

    Raises:
        OSError: The program can't be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    folder = tempfile.mkdtemp(prefix="accelfn-run-")
    try:
        Path(folder, "launcher").write_text(str(os.getpid()), encoding="utf-8")
        changes = {**dict(plan.env_changes), "ACCELFN_RUN_DIR": folder}
        if plan.way == "deepspeed":
            changes["DS_ENV_FILE"] = _write_deepspeed_variables(plan, environment, folder)
        caught: list[int] = []
        with _catching(caught) as child_of:
            # A session of its own: Ctrl-C in a terminal must reach the command once, and from here.
            child = subprocess.Popen(plan.argv, env={**environment, **changes}, start_new_session=True)
            child_of.append(child.pid)
            waiting = _Waiting(child, folder, plan, news)
            status = _wait(waiting, caught)
            stops = [number for number in caught if signal.Signals(number).name in _STOPS]
            if status != 0 or stops:
                _kill_left(folder)
        failures = read_failures(folder)
        if stops:
            chosen = {one.exitcode for one in failures if one.kind == "SystemExit"}
            status = (chosen.pop() if len(chosen) == 1 else None) or 128 + stops[0]
            if news is not None:
                news.tell("stopped", status=status)
            return status
        if status == 0 and waiting.reason is None:
            if news is not None:
                news.tell("done")
            return 0
        return _fail(waiting, status, failures, num_processes, _attempt_folder(log_dir), quiet=quiet)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fail(
    waiting: _Waiting,
    status: int,
    failures: tuple[Failure, ...],
    num_processes: int | None,
    logs: str | None,
    *,
    quiet: bool,
) -> int:
    """Exchange failures with the other machines, and report the first of all. Returns the status."""
    news, reason = waiting.news, waiting.reason
    if reason is not None:
        status = reason.status or 1
    if news is not None:
        news.tell("failed", status=_status_of(first_failure(failures), status), failures=failures)
        news.wait_for_ends(_ASK_S)
        failures = (*failures, *news.failures())
    first = first_failure(failures)
    if not quiet:
        restarts = _count_restarts(waiting.folder)
        report = format_report(failures, num_processes=num_processes, log_dir=logs, restarts=restarts)
        sys.stdout.flush()
        if report:
            print(report, file=sys.stderr)
        elif reason is None:
            print(f"accelfn launch: {waiting.plan.argv[0]} ended with status {status}.", file=sys.stderr)
    return _status_of(first, status)


def _status_of(failure: Failure | None, otherwise: int) -> int:
    code = failure.exitcode if failure is not None and failure.exitcode else otherwise
    return code if code > 0 else 128 - code


@contextlib.contextmanager
def _catching(caught: list[int]) -> Generator[list[int]]:
    """Note signals and hand them on while the command runs."""
    child_of: list[int] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    numbers = [getattr(signal, name) for name in (*_STOPS, *_TO_SCRIPTS) if hasattr(signal, name)]
    previous = {
        number: signal.signal(number, hand_on)
        for number in numbers
        # Started by nohup, it is to outlive the terminal.
        if signal.Signals(number).name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield child_of
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Waiting:
    """What waiting for the command's end has come to.

    Attributes:
        give_up_s: When the command is killed.
        stopped_s: When the first signal came to stop it.
        ended_s: When the processes of this machine were first seen to have ended.
        restarts: How often all of them have started again.
        reason: Why another machine makes this one end.
        reason_s: When that was heard.
    """

    def __init__(
        self, child: subprocess.Popen[bytes], folder: str, plan: LaunchPlan, news: News | None
    ) -> None:
        self.child, self.folder, self.plan, self.news = child, folder, plan, news
        self.has_agent = AGENT in plan.argv
        self.give_up_s = math.inf
        self.stopped_s: float | None = None
        self.ended_s: float | None = None
        self.restarts = 0
        self.reason: Word | None = None
        self.reason_s = math.inf
        self._gone: set[str] = set()
        self._has_told = False
        self._look_s = 0.0

    def hand_on(self, number: int) -> None:
        """Do what a signal asks for."""
        if signal.Signals(number).name in _TO_SCRIPTS:
            _send_each(read_pids(self.folder), number)
            return
        if number == signal.SIGINT and self.stopped_s is not None:
            self.give_up_s = 0.0  # the second Ctrl-C: now
            return
        if number == signal.SIGINT and self.has_agent and not Path(self.folder, "agent.up").exists():
            number = signal.SIGTERM  # Python itself would answer with the traceback of an import
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(number)
        self.stopped_s = self.stopped_s or time.monotonic()
        self.give_up_s = min(self.give_up_s, self.stopped_s + self.plan.patience_s)

    def hear(self, now_s: float) -> None:
        """End this machine's processes if another machine's have failed for good."""
        if self.news is None or self.stopped_s is not None:
            return
        self.news.listen()
        if self.reason is None:
            meeting = self.plan.meeting
            # Processes that have ended can't begin again with another machine's.
            may_return = meeting is not None and meeting.may_return and self.ended_s is None
            self.reason = self.news.why_end(may_return=may_return)
            if self.reason is None:
                self._say_who_is_gone(self.news)
                return
            self.reason_s = now_s
            _say(f"{_explain(self.reason)}; the processes of this machine end too")
        if now_s > self.reason_s + _GRACE_S or self.ended_s is not None:
            self.hand_on(signal.SIGTERM)

    def look(self, now_s: float) -> None:
        """See, now and then, what torchrun's processes do, and say what it doesn't."""
        if not self.has_agent or now_s < self._look_s:
            return
        self._look_s = now_s + _LOOK_S
        restarts = _count_restarts(self.folder)
        if restarts > self.restarts:
            self.restarts = restarts
            _say(f"after a failure or a change of machines, all processes have started again ({restarts})")
        self._tell_failures()
        pids = read_pids(self.folder)
        if len(pids) < self.plan.local_size or any(map(_is_alive, pids)):
            self.ended_s = None
            return
        self.ended_s = self.ended_s or now_s
        if self.stopped_s is not None:
            # torchrun waits for other machines' processes, where no signal reaches it.
            self.give_up_s = min(self.give_up_s, max(self.ended_s, self.stopped_s) + _ALONE_S)
        elif not self._has_told and now_s > self.ended_s + _SILENT_S:
            self._has_told = True
            _say("the processes of this machine have ended; it waits for those of the others")

    def _say_who_is_gone(self, news: News) -> None:
        for word in news.words.values():
            if word.state in ("stopped", "lost") and word.sender not in self._gone:
                self._gone.add(word.sender)
                _say(f"{_explain(word)}; another launch, with --no_preflight, may take its place")

    def _tell_failures(self) -> None:
        """Notify the other machines what has failed here, long before torchrun has ended the rest."""
        if self.news is not None:
            failures = read_failures(self.folder)
            if [one.rank for one in failures] != [one.rank for one in self.news.own.failures]:
                self.news.tell("failing" if failures else "running", failures=failures)


def _explain(word: Word) -> str:
    if word.state == "failed":
        why = next((f": {one.text}" for one in word.failures if one.rank is None), "")
        return f"{word.name} has failed{why}"
    if word.state == "stopped":
        return f"the launch on {word.name} was stopped"
    return f"the launcher on {word.name} was killed, or its machine has gone"


def _wait(waiting: _Waiting, caught: list[int]) -> int:
    """Wait for the command's end, and do what signals and other machines ask for meanwhile."""
    child, folder = waiting.child, waiting.folder
    handled = 0
    with _watching(child) as wait_a_little:
        while True:
            wait_a_little()
            status = child.poll()
            if status is not None:
                return status
            for number in caught[handled:]:
                handled += 1
                waiting.hand_on(number)
            waiting.look(time.monotonic())
            waiting.hear(time.monotonic())
            if time.monotonic() > waiting.give_up_s:
                _kill_left(folder)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                return child.wait()


@contextlib.contextmanager
def _watching(child: subprocess.Popen[bytes]) -> Generator[Callable[[], object]]:
    """Return a function that waits for a tenth of a second, on Linux no longer than the process runs."""
    try:
        watched = os.pidfd_open(child.pid) if sys.platform == "linux" else -1
    except OSError:  # an old kernel, or a sandbox
        watched = -1
    if watched < 0:
        yield lambda: time.sleep(_WAIT_S)
        return
    try:
        yield lambda: select.select([watched], (), (), _WAIT_S)
    finally:
        os.close(watched)


def _say(told: str) -> None:
    print(f"accelfn launch: {told}.", file=sys.stderr)


def _count_restarts(folder: str) -> int:
    return max((int(path.name.split(".")[2]) for path in Path(folder).glob("started.*.json")), default=0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with contextlib.suppress(OSError, IndexError):
        # One that has ended and that nobody has asked for its status yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _send_each(pids: tuple[int, ...], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _kill_left(folder: str) -> None:
    """Kill every process of this run: on Linux all that have its variable, elsewhere those that said so."""
    mark = f"ACCELFN_RUN_DIR={folder}".encode()
    found: set[int] = set()
    if sys.platform == "linux":
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.add(int(path.parent.name))
    else:
        found.update(read_pids(folder))
    _send_each(tuple(found - {os.getpid()}), signal.SIGKILL)


def _attempt_folder(log_dir: str | None) -> str | None:
    """Name the newest folder of logs: torchrun makes one for each run."""
    if log_dir is None:
        return None
    runs = sorted(Path(log_dir).glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    return str(runs[-1]) if runs else log_dir


def _write_deepspeed_variables(plan: LaunchPlan, environment: Mapping[str, str], folder: str) -> str:
    """Write the file by which DeepSpeed hands variables to other machines: the user's, and the plan's."""
    lines: list[str] = []
    given = Path(environment.get("DS_ENV_FILE") or ".deepspeed_env")
    with contextlib.suppress(OSError):
        lines = given.read_text(encoding="utf-8").splitlines()
    for name, value in plan.env_changes:
        if value and not any(sign in value for sign in ";\n<> "):
            lines.append(f"{name}={value}")
        else:
            print(f"accelfn launch: warning: DeepSpeed can't hand on {name}={value!r}.", file=sys.stderr)
    # The script's own modules have to be found on the other machines too.
    paths = [path for path in (environment.get("PYTHONPATH"), os.getcwd()) if path]
    lines.append(f"PYTHONPATH={os.pathsep.join(paths)}")
    path = Path(folder, "deepspeed_env")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
