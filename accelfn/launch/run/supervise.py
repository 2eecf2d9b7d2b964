"""The process that stays: it starts the command, hands signals on, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from types import FrameType

from accelfn.launch.plan.record import LaunchPlan
from accelfn.launch.plan.torchrun import AGENT
from accelfn.launch.run.report import first_failure, format_report, read_failures, read_pids

__all__ = ("supervise",)

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
# Signals by which schedulers speak to the script; torchrun would die of them.
_TO_SCRIPTS = ("SIGUSR1", "SIGUSR2")
# How often to look which processes still run; when to say what is waited for; how long torchrun has to end
# after a signal where no process is left.
_LOOK_S = 1.0
_SILENT_S = 10.0
_ALONE_S = 3.0


def supervise(
    plan: LaunchPlan,
    environment: Mapping[str, str],
    *,
    num_processes: int | None = None,
    log_dir: str | None = None,
    quiet: bool = False,
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
        changes = {**dict(plan.env_changes), "ACCELFN_RUN_DIR": folder}
        if plan.way == "deepspeed":
            changes["DS_ENV_FILE"] = _write_deepspeed_variables(plan, environment, folder)
        caught: list[int] = []
        with _catching(caught) as child_of:
            # A session of its own: Ctrl-C in a terminal must reach the command once, and from here.
            child = subprocess.Popen(plan.argv, env={**environment, **changes}, start_new_session=True)
            child_of.append(child.pid)
            status = _wait(child, caught, folder, plan)
            stops = [number for number in caught if signal.Signals(number).name in _STOPS]
            if status != 0 or stops:
                _kill_left(folder)
        failures = read_failures(folder)
        if stops:
            chosen = {one.exitcode for one in failures if one.kind == "SystemExit"}
            status = chosen.pop() if len(chosen) == 1 else None
            return status or 128 + stops[0]
        if status == 0:
            return 0
        if not quiet:
            restarts = _count_restarts(folder)
            report = format_report(
                failures, num_processes=num_processes, log_dir=_attempt_folder(log_dir), restarts=restarts
            )
            sys.stdout.flush()
            print(report or f"accelfn launch: {plan.argv[0]} ended with status {status}.", file=sys.stderr)
        first = first_failure(failures)
        if first is not None and first.exitcode:
            return first.exitcode if first.exitcode > 0 else 128 - first.exitcode
        return status if status > 0 else 128 - status
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def _wait(child: subprocess.Popen[bytes], caught: list[int], folder: str, plan: LaunchPlan) -> int:
    """Wait for the command's end, and do what signals ask for meanwhile."""
    handled = 0
    give_up_s = float("inf")
    stopped_s: float | None = None  # when the first signal came to stop it
    ended_s: float | None = None  # when the processes of this machine were first seen to have ended
    has_told = False
    restarts = 0
    look_s = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(timeout=0.1)
        for number in caught[handled:]:
            handled += 1
            if signal.Signals(number).name in _TO_SCRIPTS:
                _send_each(read_pids(folder), number)
                continue
            if number == signal.SIGINT and give_up_s < float("inf"):
                give_up_s = 0.0  # the second Ctrl-C: now
                continue
            if number == signal.SIGINT and AGENT in plan.argv and not Path(folder, "agent.up").exists():
                number = signal.SIGTERM  # Python itself would answer with the traceback of an import
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)
            stopped_s = stopped_s or time.monotonic()
            give_up_s = min(give_up_s, stopped_s + plan.patience_s)
        now_s = time.monotonic()
        if AGENT in plan.argv and now_s > look_s:
            look_s = now_s + _LOOK_S
            pids = read_pids(folder)
            if _count_restarts(folder) > restarts:
                restarts = _count_restarts(folder)
                told = (
                    f"after a failure or a change of machines, all processes have started again ({restarts})"
                )
                print(f"accelfn launch: {told}.", file=sys.stderr)
            if len(pids) < plan.local_size or any(map(_is_alive, pids)):
                ended_s = None
            elif ended_s is None:
                ended_s = now_s
        if ended_s is not None and stopped_s is not None:
            # torchrun waits for other machines' processes, where no signal reaches it.
            give_up_s = min(give_up_s, max(ended_s, stopped_s) + _ALONE_S)
        elif ended_s is not None and not has_told and now_s > ended_s + _SILENT_S:
            has_told = True
            told = "the processes of this machine have ended; it waits for those of the others"
            print(f"accelfn launch: {told}.", file=sys.stderr)
        if time.monotonic() > give_up_s:
            _kill_left(folder)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            return child.wait()


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
