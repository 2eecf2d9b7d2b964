"""torchrun, but for what it says at the end: that goes to the report, which has the last word.

This file is started by its path, takes torchrun's own arguments, and imports nothing of accelfn.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

__all__ = ("main",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun. Effect: starts processes and waits for them.

    Args:
        argv: torchrun's arguments; this process's own if None.

    Returns:
        The exit status: 0, 1 if a process failed, 128 and more after a signal.
    """
    folder = os.environ.get("ACCELFN_RUN_DIR", "")
    has_report = os.path.isdir(folder)
    try:
        if has_report:
            _end_with_launcher(folder)
        return _run(argv, folder, has_report)
    finally:
        if has_report and _is_orphan(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _run(argv: Sequence[str] | None, folder: str, has_report: bool) -> int:
    # Until torch has loaded, there is nothing to end; the traceback of an interrupt would be one of imports.
    previous = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM)}
    logs_cpp = "TORCH_CPP_LOG_LEVEL" in os.environ
    if has_report and "LOGLEVEL" not in os.environ:  # with that, somebody wants to see torchrun's log
        # What goes wrong is in the report. torch's C++ part reads the variable when it loads.
        logging.disable(logging.ERROR)
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    if not logs_cpp:
        os.environ.pop("TORCH_CPP_LOG_LEVEL", None)  # the scripts are to have their own
    parse_args = cast("Callable[[list[str] | None], Any]", torchrun.parse_args)  # pyright: ignore[reportUnknownMemberType]
    run = cast("Callable[[Any], None]", torchrun.run)  # pyright: ignore[reportUnknownMemberType]
    try:
        options = parse_args(None if argv is None else list(argv))
        if has_report and options.log_dir is None:
            options.log_dir = os.path.join(folder, "torchrun")  # else it leaves a folder behind
        for number, handler in previous.items():
            signal.signal(number, handler)
        if has_report:
            Path(folder, "agent.up").touch()  # from now on an interrupt can be told it
        run(options)
    except ChildFailedError as error:
        if not has_report:
            raise
        failures = [
            {
                "rank": rank,
                "local_rank": failure.local_rank,
                "exitcode": failure.exitcode,
                "pid": failure.pid,
                "host": socket.gethostname(),
                "time_s": failure.timestamp,
            }
            for rank, failure in error.failures.items()
        ]
        _tell(folder, {"failures": failures})
        return 1
    except KeyboardInterrupt:  # before it has handlers of its own
        return 130
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except Exception as error:
        if not has_report:
            raise
        _tell(folder, {"error": f"{type(error).__name__}: {error}", "time_s": time.time()})
        return 1
    return 0


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    folder = os.environ.get("ACCELFN_RUN_DIR", "")
    if _is_orphan(folder):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(128 + number)


def _end_with_launcher(folder: str) -> None:
    """Have the system send SIGTERM if the launcher is killed, so that the processes end with it."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGTERM))
    if _is_orphan(folder):  # it was killed before
        _leave(signal.SIGTERM, None)


def _is_orphan(folder: str) -> bool:
    """Whether the launcher, which wrote its number into the folder, is gone."""
    try:
        return os.getppid() != int(Path(folder, "launcher").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False


def _tell(folder: str, said: dict[str, object]) -> None:
    Path(folder, "agent.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # this file's folder, in which torch has nothing to look for
    sys.exit(main())
