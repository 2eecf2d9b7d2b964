"""Run torchrun, report the first failure in the last lines, and leave no process behind.

``accelfn launch`` becomes this program. Its arguments are those of torchrun. After ``--elastic`` and a
heartbeat timeout, each process is replaced by itself (:mod:`accelfn.launch.elastic`). It imports accelfn only
for this, for several machines or after a failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from accelfn.launch.machines import Machines
    from accelfn.launch.report import Failure

# Signals that schedulers send to scripts. They are forwarded; torchrun would exit.
_FORWARDED = ("SIGUSR1", "SIGUSR2")
_POLL_S = 0.5
# Time for remaining processes to exit before they are killed: a tracker may upload its last values. Also the
# time for ranks to notice the failure of another machine, so that they report what they waited for.
_GRACE_S = 5.0
# After a signal, torchrun may wait for other machines this long without local processes.
_WAIT_ALONE_S = 3.0


def main(argv: Sequence[str]) -> int:
    """Run torchrun, and wait for it.

    Args:
        argv: torchrun's arguments, also after ``--elastic`` and a number.

    Returns:
        The exit status of the first failed process, 128 and more for a signal; 2 if machines differ. If all
        scripts answer a signal with the same exit status, that one.
    """
    sys.path.append(str(Path(__file__).parents[2]))  # accelfn, in case it isn't installed
    folder = os.environ["ACCELFN_RUN_DIR"] = tempfile.mkdtemp(prefix="accelfn-run-")
    guard_pid, guard = _start_guard(folder)
    try:
        return _Agent(folder).run(argv)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if guard_pid:
            os.write(guard, b"!")
            os.waitpid(guard_pid, 0)


class _Agent:
    """State of one launch on this machine.

    Attributes:
        stops: Signals that were received to stop the launch.
        reason: The message of another machine for which this one stops.
        failures: How processes of this machine failed.
        error: Why they could not be started.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.stops: list[int] = []
        self.reason: dict[str, Any] | None = None
        self.machines: Machines | None = None
        self.failures: tuple[Failure, ...] = ()
        self.error = ""
        self._num_processes = 0
        self._has_logs = False
        self._is_quiet = bool(os.environ.pop("ACCELFN_AGENT_QUIET", ""))
        # For a launcher in code, which reports failures itself.
        self._outcome_file = os.environ.pop("ACCELFN_AGENT_OUTCOME", "")
        self._caller = os.getppid()
        self._rendezvous = os.environ.pop("ACCELFN_AGENT_RENDEZVOUS", "")
        self._stop_timeout_s = 45.0
        self._is_elastic = False
        self._num_restarts, self._stopped_s, self._ended_s, self._reason_s = 0, 0.0, 0.0, 0.0
        self._is_done = threading.Event()

    def run(self, argv: Sequence[str]) -> int:
        wake, signalled = os.pipe()
        os.set_blocking(signalled, False)
        for number in _numbers(*_FORWARDED):
            signal.signal(number, lambda number, frame: None)
        # Python writes each signal to the pipe, even while the main thread is blocked.
        signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
        watcher = threading.Thread(target=self._watch, args=(wake,), daemon=True)
        self._is_elastic = argv[:1] == ["--elastic"]
        torchrun, options, handlers = self._load_torchrun(argv[2:] if self._is_elastic else argv)
        if self._rendezvous:
            from accelfn.errors import ConfigurationError
            from accelfn.launch.machines import join_machines

            try:
                self.machines = join_machines(**json.loads(self._rendezvous))
            except ConfigurationError as error:
                print(f"accelfn launch: error: {error}", file=sys.stderr)
                return 2
        watcher.start()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        status = self._run_processes(torchrun, options, argv)
        for number in _stop_signals():
            signal.signal(number, self._exit)  # torchrun's handlers would raise
        self._is_done.set()
        os.write(signalled, b"\0")  # wakes the watcher; no signal has this number
        watcher.join()
        return self._finish(status)

    def _load_torchrun(self, argv: Sequence[str]) -> tuple[Any, Any, dict[int, Any]]:
        """Import torchrun, and parse its arguments.

        Returns:
            The module, its options, and the handlers of the stop signals, which end this process until then.
        """
        # While torch is imported there is nothing to stop, and an interrupt would print a traceback.
        handlers = {number: signal.signal(number, self._exit) for number in _stop_signals()}
        has_cpp_level = "TORCH_CPP_LOG_LEVEL" in os.environ
        if "LOGLEVEL" not in os.environ:
            # The report replaces torchrun's log. torch's C++ code reads the variable when it is loaded.
            logging.disable(logging.ERROR)
            os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from torch.distributed import run as torchrun

        if not has_cpp_level:
            os.environ.pop("TORCH_CPP_LOG_LEVEL", None)  # not for the scripts
        options: Any = cast("Any", torchrun).parse_args(list(argv))
        self._has_logs = options.log_dir is not None
        options.log_dir = options.log_dir or os.path.join(self.folder, "torchrun")  # torchrun's isn't removed
        self._num_processes = int(options.nnodes.partition(":")[0]) * int(options.nproc_per_node)
        self._stop_timeout_s = (getattr(options, "shutdown_timeout", None) or 30) + 15.0
        # Ignored signals, such as SIGHUP under nohup, stay ignored.
        options.signals_to_handle = ",".join(signal.Signals(number).name for number in handlers)
        return torchrun, options, handlers

    def _run_processes(self, torchrun: Any, options: Any, argv: Sequence[str]) -> int:
        """Run the processes until they have ended. Return 0, 1 or 128 and more for a signal."""
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

        try:
            if not self._is_elastic:
                torchrun.run(options)
                return 0
            from accelfn.launch.elastic import run_slots

            os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = options.signals_to_handle  # as torchrun.run does
            _, program, arguments = torchrun.config_from_args(options)
            failures = run_slots(
                options,
                (program, *arguments),
                heartbeat_timeout_s=float(argv[1]),
                machines=self.machines,
                report=_print,
            )
            self.failures = failures or ()
            return 0 if failures is None else 1
        except ChildFailedError as error:
            from accelfn.launch.report import Failure

            attempt = self._count_restarts()
            self.failures = tuple(
                Failure(rank=rank, attempt=attempt, exitcode=child.exitcode, time_s=child.timestamp)
                for rank, child in error.failures.items()
            )
        except (KeyboardInterrupt, SignalException) as stop:
            return 128 + int(getattr(stop, "sigval", signal.SIGINT))
        except Exception as error:  # noqa: BLE001 -- reported at the end
            self.error = f"{type(error).__name__}: {error}"
        return 1

    def _finish(self, status: int) -> int:
        """Stop remaining processes, exchange failures with the other machines, and report the first one."""
        if self._outcome_file and os.getppid() != self._caller:  # nobody else removes its folder
            shutil.rmtree(Path(self._outcome_file).parent, ignore_errors=True)
            return status
        if self._outcome_file:
            exitcodes = {failure.rank: failure.exitcode for failure in self.failures}
            outcome = {"exitcodes": exitcodes, "error": self.error}
            Path(self._outcome_file).write_text(json.dumps(outcome), encoding="utf-8")
            return status
        if status == 0 and not self.stops and self.reason is None:
            if self.machines is not None:
                self.machines.report("done")
            return 0
        from accelfn.launch.report import Failure, first_failure, format_report, read_failures

        stop_processes(self.folder, _GRACE_S)
        failures = read_failures(self.folder, self.failures)
        if self.error:
            kind = "lost" if _started(self.folder) else "agent"
            failures = failures or (Failure(rank=None, text=self.error, kind=kind, exitcode=1),)
        if self.stops:
            statuses = {failure.exitcode for failure in failures if failure.kind == "SystemExit"}
            status = (statuses.pop() if len(statuses) == 1 else None) or 128 + self.stops[0]
            if self.machines is not None:
                self.machines.report("stopped", status=status)
            return status
        if self.reason is not None:
            status = int(self.reason["status"]) or 1
        if self.machines is not None:
            self.machines.report("failed", status=status, failures=failures)
            self.machines.wait_for_reports()
            failures = (*failures, *self.machines.failures())
        first = first_failure(failures)
        sys.stdout.flush()
        report = format_report(failures, num_processes=self._num_processes, has_logs=self._has_logs)
        if report and not self._is_quiet:
            print(report, file=sys.stderr)
        status = first.exitcode if first is not None and first.exitcode else status
        return status if status > 0 else 128 - status

    def _watch(self, wake: int) -> None:
        """Handle signals and the messages of other machines while the main thread runs the processes."""
        while not self._is_done.is_set():
            ready, _, _ = select.select([wake], (), (), _POLL_S)
            for number in (os.read(wake, 64) if ready else b"").replace(b"\0", b""):
                self._on_signal(number)
            now_s = time.monotonic()
            pids = _started(self.folder).values()
            self._ended_s = 0.0 if not pids or any(map(_is_alive, pids)) else self._ended_s or now_s
            if self._stopped_s:
                is_late = now_s > self._stopped_s + self._stop_timeout_s
                idle_s = now_s - max(self._stopped_s, self._ended_s) if self._ended_s else 0.0
                if is_late or idle_s > _WAIT_ALONE_S:
                    self._kill(self._finish(1))
            if self._outcome_file and os.getppid() != self._caller and not self.stops:
                os.kill(os.getpid(), signal.SIGTERM)  # the launcher in code was killed
            num_restarts = self._count_restarts()
            if num_restarts > self._num_restarts and not self._is_elastic:
                self._num_restarts = num_restarts
                _print(f"restarted all processes after a failure or a change of machines ({num_restarts})")
            if self.machines is not None:
                self._poll_machines(self.machines, now_s)

    def _on_signal(self, number: int) -> None:
        if number in _numbers(*_FORWARDED):
            _signal(_started(self.folder).values(), number)
        elif number in _stop_signals():
            if number == signal.SIGINT and self.stops:
                self._kill(128 + number)  # the second Ctrl-C doesn't wait
            if self.reason is None:
                self.stops.append(number)
            self._stopped_s = self._stopped_s or time.monotonic()

    def _poll_machines(self, machines: Machines, now_s: float) -> None:
        machines.poll()
        if self.stops or self._stopped_s:
            return
        if self.reason is None:
            reason = machines.stop_reason()
            # The host of the store may have finished normally, and this machine may be about to. In elastic
            # training the host waits for the others.
            may_finish = (self._ended_s and not self._is_elastic) or not machines.is_disconnected_for(
                _GRACE_S
            )
            if reason is None or ("sender" not in reason and may_finish):
                return
            self.reason, self._reason_s = reason, now_s
            _print(f"{reason['text']}; stopping the processes of this machine")
        if now_s > self._reason_s + _GRACE_S or self._ended_s:
            os.kill(os.getpid(), signal.SIGTERM)

    def _count_restarts(self) -> int:
        return max((attempt for _, attempt in _started(self.folder)), default=0)

    def _exit(self, number: int, frame: FrameType | None) -> NoReturn:
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(128 + number)

    def _kill(self, status: int) -> NoReturn:
        stop_processes(self.folder, 0.0)
        shutil.rmtree(self.folder, ignore_errors=True)
        os._exit(status)


def _start_guard(folder: str) -> tuple[int, int]:
    """Fork a process that stops the ranks if this process is killed.

    Returns:
        Its process ID, and the pipe that stops it; zeros if the system can't fork.
    """
    if not hasattr(os, "fork"):
        return 0, 0
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(reads)
        return pid, writes
    with contextlib.suppress(BaseException):
        os.close(writes)
        os.setsid()
        devnull = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(devnull, number)
        if not os.read(reads, 1):
            time.sleep(0.2)  # until a process that was just being started has its variables
            stop_processes(folder, _GRACE_S)
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def stop_processes(folder: str, grace_s: float) -> None:
    """Stop all processes of a run: SIGTERM, then SIGKILL after ``grace_s`` seconds.

    On Linux these are all processes with the variable of the run, elsewhere those that workers recorded.
    """
    until_s = time.monotonic() + grace_s
    told: set[int] = set()
    while grace_s and (pids := _running_pids(folder)):
        _signal(pids - told, signal.SIGTERM)
        told |= pids
        if time.monotonic() >= until_s:
            break
        time.sleep(0.05)
    killed: set[int] = set()
    while pids := _running_pids(folder) - killed:  # those that they started meanwhile too
        _signal(pids, getattr(signal, "SIGKILL", signal.SIGTERM))
        killed |= pids


def _running_pids(folder: str) -> set[int]:
    pids = set(_started(folder).values())
    if sys.platform == "linux":
        variable = f"ACCELFN_RUN_DIR={folder}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if variable in path.read_bytes().split(b"\0"):
                    pids.add(int(path.parent.name))
    return set(filter(_is_alive, pids - {os.getpid()}))


def _started(folder: str) -> dict[tuple[int, int], int]:
    """Return the process ID of each rank and attempt."""
    names = [path.name.split(".") for path in Path(folder).glob("started.*[0-9]")]
    return {(int(rank), int(attempt)): int(pid) for _, rank, attempt, pid in names}


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    with contextlib.suppress(OSError, IndexError):
        # A zombie has ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _numbers(*names: str) -> list[int]:
    return [int(getattr(signal, name)) for name in names if hasattr(signal, name)]


def _stop_signals() -> list[int]:
    numbers = _numbers("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]


def _print(message: str) -> None:
    print(f"accelfn launch: {message}.", file=sys.stderr)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this directory, in which torch must not search modules
    sys.exit(main(sys.argv[1:]))
