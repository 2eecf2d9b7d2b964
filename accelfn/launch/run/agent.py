"""torchrun, with another end: the last lines name what failed first, and no process is left behind.

This file is started by its path in the place of ``accelfn launch``, takes torchrun's own arguments (or, after
``--command``, another program that starts workers), and imports accelfn only where several machines meet or
something has failed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from accelfn.launch.run.machines import Machines

# Signals by which schedulers speak to the script; torchrun would die of them.
_TO_SCRIPTS = ("SIGUSR1", "SIGUSR2")
_LOOK_S = 0.5
# How long what is left has to end before it is killed: a tracker's uploader may have to send what came last.
# So long, too, have ranks to find out that another machine's have failed: they then say what they waited for.
_GRACE_S = 5.0
# How long torchrun has to end after a signal where no process is left: it waits for the other machines'.
_ALONE_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Run torchrun or another command. Effect: starts processes and waits for them.

    Args:
        argv: torchrun's arguments, or ``--command`` and a command.

    Returns:
        The exit status: the failed process's own, 128 and more for a signal; 2 where machines differ. Where
        scripts answer a signal by leaving with one status of their own, it is that one.
    """
    sys.path.append(str(Path(__file__).parents[3]))  # where accelfn lies, should the script's folders not say
    # A launcher in code gives a folder, and makes its own report.
    given = os.environ.pop("ACCELFN_AGENT_DIR", "")
    folder = given or tempfile.mkdtemp(prefix="accelfn-run-")
    os.environ["ACCELFN_RUN_DIR"] = folder
    agent = _Agent(folder, has_caller=bool(given))
    try:
        return agent.run(argv)
    finally:
        if not given or os.getppid() != agent.caller:  # it has gone
            shutil.rmtree(folder, ignore_errors=True)
        agent.dismiss_guard()


class _Agent:
    """One run.

    Attributes:
        stops: Signals that came to stop it.
        reason: What another machine reported that makes this one end.
    """

    def __init__(self, folder: str, *, has_caller: bool) -> None:
        self.folder, self.has_caller = folder, has_caller
        self.caller = os.getppid()
        self.stops: list[int] = []
        self.reason: dict[str, Any] | None = None
        self.machines: Machines | None = None
        self.child: subprocess.Popen[bytes] | None = None
        self.num_processes: int | None = None
        self.log_dir: str | None = None
        self._is_quiet = bool(os.environ.pop("ACCELFN_AGENT_QUIET", ""))
        self._rendezvous = os.environ.pop("ACCELFN_AGENT_RENDEZVOUS", "")
        self._patience_s = 45.0
        self._restarts, self._stopped_s, self._ended_s, self._reason_s = 0, 0.0, 0.0, 0.0
        self._is_over = threading.Event()
        self._guard_pid, self._guard = _start_guard(folder, owner=self.caller if has_caller else 0)

    def run(self, argv: Sequence[str]) -> int:
        wake, signalled = os.pipe()
        os.set_blocking(signalled, False)
        for name in _TO_SCRIPTS:
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), lambda number, frame: None)
        # The C part of Python writes each signal there, whatever the main thread waits for.
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(wake,), daemon=True)
        try:
            if argv[:1] == ["--command"]:
                watcher.start()
                status = self._run_command(argv[1:])
            else:
                status = self._run_torchrun(argv, watcher)
        except _MachinesError as error:
            print(f"accelfn launch: error: {error}", file=sys.stderr)
            return 2
        for number in _stop_signals():
            signal.signal(number, self._leave)  # torchrun's would raise
        self._is_over.set()
        watcher.join()
        return status if self.has_caller else self._conclude(status)

    def _run_command(self, command: Sequence[str]) -> int:
        # A session of its own: Ctrl-C in a terminal must reach the command once, and from here.
        child = self.child = subprocess.Popen(command, start_new_session=True)
        handed: list[int] = []

        def hand_on(number: int, frame: FrameType | None) -> None:
            if not handed or number != signal.SIGINT:  # the second Ctrl-C is this process's own
                handed.append(number)
                child.send_signal(number)

        for number in _stop_signals():
            signal.signal(number, hand_on)
        status = child.wait()
        return 128 - status if status < 0 else status

    def _run_torchrun(self, argv: Sequence[str], watcher: threading.Thread) -> int:
        # Until torch has loaded there is nothing to end, and an interrupt would print a traceback of imports.
        previous = {number: signal.signal(number, self._leave) for number in _stop_signals()}
        logs_cpp = "TORCH_CPP_LOG_LEVEL" in os.environ
        if "LOGLEVEL" not in os.environ:  # with that, somebody wants to see torchrun's log
            # What goes wrong is in the report. torch's C++ part reads the variable when it loads.
            logging.disable(logging.ERROR)
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        if not logs_cpp:
            os.environ.pop("TORCH_CPP_LOG_LEVEL", None)  # the scripts are to have their own
        options = cast("Any", torchrun).parse_args(list(argv))
        self.log_dir = options.log_dir
        if options.log_dir is None:
            options.log_dir = os.path.join(self.folder, "torchrun")  # else it leaves a folder behind
        self.num_processes = int(options.nnodes.partition(":")[0]) * int(options.nproc_per_node)
        self._patience_s = (getattr(options, "shutdown_timeout", None) or 30) + 15.0
        # Started by nohup, it is to outlive the terminal.
        options.signals_to_handle = ",".join(signal.Signals(number).name for number in previous)
        if self._rendezvous:
            self._join_machines()
        watcher.start()
        for number, handler in previous.items():
            signal.signal(number, handler)
        try:
            cast("Callable[[Any], None]", torchrun.run)(options)  # pyright: ignore[reportUnknownMemberType]
        except ChildFailedError as error:
            failures = [
                {
                    "rank": rank,
                    "exitcode": one.exitcode,
                    "host": socket.gethostname(),
                    "time_s": one.timestamp,
                }
                for rank, one in error.failures.items()
            ]
            self._write({"failures": failures})
            return 1
        except (KeyboardInterrupt, SignalException) as stop:
            return 128 + int(getattr(stop, "sigval", signal.SIGINT))
        except Exception as error:  # noqa: BLE001 -- it goes to the report
            self._write({"error": f"{type(error).__name__}: {error}", "time_s": time.time()})
            return 1
        return 0

    def _join_machines(self) -> None:
        from accelfn.errors import ConfigurationError
        from accelfn.launch.run.machines import join_machines

        try:
            self.machines = join_machines(**json.loads(self._rendezvous))
        except ConfigurationError as error:
            raise _MachinesError(error) from None

    def _write(self, outcome: dict[str, object]) -> None:
        Path(self.folder, "agent.json").write_text(json.dumps(outcome), encoding="utf-8")

    def _leave(self, number: int, frame: FrameType | None) -> NoReturn:
        if not self.has_caller:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(128 + number)

    def _conclude(self, status: int) -> int:
        """End what is left, exchange failures with the other machines, and report the first of all."""
        from accelfn.launch.run.report import first_failure, format_report, read_failures

        if status or self.stops:
            end_left(self.folder, _GRACE_S)
        failures = read_failures(self.folder) if status or self.stops else ()
        if self.stops:
            chosen = {one.exitcode for one in failures if one.kind == "SystemExit"}
            status = (chosen.pop() if len(chosen) == 1 else None) or 128 + self.stops[0]
            if self.machines is not None:
                self.machines.tell("stopped", status=status)
            return status
        if status == 0 and self.reason is None:
            if self.machines is not None:
                self.machines.tell("done")
            return 0
        if self.reason is not None:
            status = int(self.reason["status"]) or 1
        if self.machines is not None:
            self.machines.tell("failed", status=status, failures=failures)
            self.machines.wait_for_ends()
            failures = (*failures, *self.machines.failures())
        first = first_failure(failures)
        if not self._is_quiet:
            report = format_report(
                failures,
                num_processes=self.num_processes,
                log_dir=_attempt_folder(self.log_dir),
                restarts=self._count_restarts(),
            )
            sys.stdout.flush()
            if report:
                print(report, file=sys.stderr)
        status = first.exitcode if first is not None and first.exitcode else status
        return status if status > 0 else 128 - status

    def _watch(self, wake: int) -> None:
        """Do what signals and other machines ask for, beside torchrun, which only waits."""
        while not self._is_over.is_set():
            ready, _, _ = select.select([wake], (), (), _LOOK_S)
            for number in os.read(wake, 64) if ready else b"":
                self._on_signal(number)
            now_s = time.monotonic()
            pids = _started(self.folder)
            self._ended_s = 0.0 if not pids or any(map(_is_alive, pids)) else self._ended_s or now_s
            if self._stopped_s:
                since_s = now_s - max(self._stopped_s, self._ended_s)
                if now_s > self._stopped_s + self._patience_s or (
                    self._ended_s and since_s > _ALONE_S and self.child is None
                ):
                    self._end_now(1 if self.has_caller else self._conclude(1))
            if self.has_caller and os.getppid() != self.caller and not self.stops:
                os.kill(os.getpid(), signal.SIGTERM)
            restarts = self._count_restarts()
            if restarts > self._restarts:
                self._restarts = restarts
                _print(
                    f"after a failure or a change of machines, all processes have started again ({restarts})"
                )
            if self.machines is not None:
                self._look_at_machines(self.machines, now_s)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if name in _TO_SCRIPTS:
            for pid in _started(self.folder):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        elif number in _stop_signals():
            if number == signal.SIGINT and self.stops:
                self._end_now(128 + number)  # the second Ctrl-C: now
            if self.reason is None:
                self.stops.append(number)
            self._stopped_s = self._stopped_s or time.monotonic()

    def _look_at_machines(self, machines: Machines, now_s: float) -> None:
        machines.look()
        if self.stops or self._stopped_s:
            return
        if self.reason is None:
            reason = machines.reason()
            # Where the one that hosts the store has gone, it may just have ended, as this one is about to.
            is_ending = self._ended_s or not machines.is_cut_off_for(_GRACE_S)
            if reason is None or ("who" not in reason and is_ending):
                return
            self.reason, self._reason_s = reason, now_s
            _print(f"{self.reason['text']}; the processes of this machine end too")
        if now_s > self._reason_s + _GRACE_S or self._ended_s:
            os.kill(os.getpid(), signal.SIGTERM)

    def _end_now(self, status: int) -> NoReturn:
        end_left(self.folder, 0.0)
        if self.child is not None:
            self.child.kill()
        if not self.has_caller:
            shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(status)

    def _count_restarts(self) -> int:
        names = (path.name for path in Path(self.folder).glob("started.*.json"))
        return max((int(name.split(".")[2]) for name in names), default=0)

    def dismiss_guard(self) -> None:
        """End the guard: nothing is left for it to do. Waits for it."""
        if self._guard >= 0:
            os.write(self._guard, b"!")
            os.close(self._guard)
            os.waitpid(self._guard_pid, 0)


class _MachinesError(Exception):
    """The machines could not meet, or differ."""


def _start_guard(folder: str, *, owner: int) -> tuple[int, int]:
    """Start a process that outlives this one, and ends what this one leaves if it is killed.

    Returns:
        Its id, and a descriptor whose end it waits for; -1 where a system can't fork.
    """
    if not hasattr(os, "fork"):
        return -1, -1
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reads)
        return pid, writes
    with contextlib.suppress(BaseException):
        os.close(writes)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        if not os.read(reads, 1):
            end_left(folder, _GRACE_S)
            if not owner or not _is_alive(owner):  # which reads the reports in it
                shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def end_left(folder: str, grace_s: float) -> None:
    """End the processes of a run: on Linux all that have its variable, elsewhere those that wrote so.

    Effect: asks them to end, and kills those that still run after ``grace_s`` seconds.
    """
    left = set(_started(folder))
    if sys.platform == "linux":
        mark = f"ACCELFN_RUN_DIR={folder}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    left.add(int(path.parent.name))
    left -= {os.getpid()}
    until_s = time.monotonic() + grace_s
    for number in ((signal.SIGTERM,) if grace_s else ()) + (getattr(signal, "SIGKILL", signal.SIGTERM),):
        for pid in filter(_is_alive, left):
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        while any(map(_is_alive, left)) and time.monotonic() < until_s:
            time.sleep(0.05)


def _started(folder: str) -> list[int]:
    found: list[int] = []
    for path in Path(folder).glob("started.*.json"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(json.loads(path.read_text(encoding="utf-8"))["pid"]))
    return found


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with contextlib.suppress(OSError, IndexError):
        # One that has ended and that nobody has asked for its status yet.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _stop_signals() -> list[int]:
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    numbers = [int(getattr(signal, name)) for name in names if hasattr(signal, name)]
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _attempt_folder(log_dir: str | None) -> str | None:
    """Name the newest folder of logs: torchrun makes one for each run."""
    if log_dir is None:
        return None
    runs = sorted(Path(log_dir).glob("*/attempt_*"), key=lambda path: path.stat().st_mtime)
    return str(runs[-1]) if runs else log_dir


def _print(message: str) -> None:
    print(f"accelfn launch: {message}.", file=sys.stderr)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder, in which torch has nothing to look for
    sys.exit(main(sys.argv[1:]))
